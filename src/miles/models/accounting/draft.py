"""Memory of a draft model for speculative decoding: weights, optimizer state, activations, from its spec. No torch."""

from __future__ import annotations

from math import prod

from miles.models.accounting.activations import layer_bytes
from miles.models.accounting.params import BYTES, moment_bytes
from miles.models.checkpoint.param_slices import param_shape
from miles.models.draft.param_map import build_draft_map
from miles.models.draft.spec import DraftSpec
from miles.models.spec import AttentionSpec, MlaSpec

_MASTER_BYTES = 4
# Logits of a chunk: of draft and policy, the policy's distribution, and the gradient.
_LOGITS = {False: 1 << 24, True: 1 << 27}
_LOGIT_COPIES = 4
# Attention scores of a chunk in steps after the first: the scores, their softmax, and the gradient.
_SCORES = 1 << 26
_SCORE_COPIES = 3


def list_draft_sizes(spec: DraftSpec) -> list[int]:
    """Return the number of values of each parameter."""
    return [prod(param_shape(tuple(slices))) for slices in build_draft_map(spec).values()]


def draft_weight_bytes(spec: DraftSpec, dtype: str) -> int:
    """Compute the size of the weights of a draft, without the policy's embedding and head."""
    return sum(list_draft_sizes(spec)) * BYTES[dtype]


def draft_optimizer_bytes(spec: DraftSpec, dtype: str, moments: str) -> int:
    """Compute the size of Adam's state: two moments, and float32 master weights for low-precision weights."""
    sizes = list_draft_sizes(spec)
    masters = _MASTER_BYTES * sum(sizes) if BYTES[dtype] < 4 else 0
    return sum(2 * moment_bytes(size, moments) for size in sizes) + masters


def draft_activation_bytes(
    spec: DraftSpec, tokens: int, steps: int, *, longest: int, dtype: str, fused: bool, gathered: bool
) -> int:
    """Compute the peak of training ``steps`` steps on a micro-batch, beside the policy's activations.

    The features, for each step what its layer saves, the input of the head and the hidden state, and one chunk of
    logits and of attention scores. ``longest`` is the longest sequence. The policy's embedding and head are
    ``gathered`` where tensor-parallel ranks have parts of them.
    """
    decoder, size = spec.decoder, BYTES[dtype]
    width = decoder.hidden_size
    saved = spec.feature_size * size
    for step in range(steps):
        layer = layer_bytes(decoder, spec.layer_of_step(step), size=size, fused=fused)
        saved += round(layer) + 6 * width * size  # both norms and their concatenation, head input, hidden state
    rows = min(tokens, max(1, _LOGITS[fused] // decoder.vocab_size))
    logits = rows * decoder.vocab_size * 4 * _LOGIT_COPIES
    mixer = decoder.layers[-1].mixer
    heads = mixer.num_heads if isinstance(mixer, AttentionSpec | MlaSpec) else 1
    scores = min(_SCORES, longest * longest * heads) * 4 * _SCORE_COPIES if steps > 1 else 0
    shared = 2 * decoder.vocab_size * width * size if gathered else 0
    return tokens * saved + max(logits, scores) + shared
