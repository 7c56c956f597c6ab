"""Equivalence check of every adapted model at load: packed and paged forwards must match transformers' own logits.

Shapes: T tokens, H query heads, G key-value heads, r = H / G, S tokens seen, d channels, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from miles.core.media import Images
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.fused.lm_head import compute_logits
from miles.models.hf_adapter.attention import (
    NAME,
    BackendBinding,
    UnsupportedModelError,
    attach_binding,
    probe_attention,
    set_attention,
)
from miles.models.hf_adapter.decoder import HfDecoder
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.hf_adapter.vision import convert_arrays
from miles.models.layers.attention_backend import AttentionInputs, AttentionParams, RecurrentState
from miles.models.spec import LayerSpec
from miles.models.vision.inputs import build_vision_inputs

_LENGTHS = (19, 1, 26)
# Steps: sequence -> tokens read in this step; after the first, mostly single tokens.
_STEPS = ({0: 3, 2: 4}, *({0: 1, 2: 1}, {2: 1, 0: 1}) * 4, {2: 1}, {0: 3, 2: 5})


def wrap_verified(module: Any, spec: HfAdapterSpec) -> HfDecoder:
    """Wrap the module as an HfDecoder; raises UnsupportedModelError if the module does something we cannot do, or if
    its logits differ.
    """
    try:
        return _verify(module.eval(), spec)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:  # from inside the module
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UnsupportedModelError(f"running it on packed tokens fails ({type(error).__name__}: {reason}).") from error


def _verify(module: Any, spec: HfAdapterSpec) -> HfDecoder:
    _check_head(module)
    binding = BackendBinding()
    attach_binding(module, binding)
    config: Mapping[str, Any] = module.config.get_text_config().to_dict()
    layers = probe_attention(module, binding, positions=spec.max_positions, chunk=config.get("attention_chunk_size"))
    spec = replace(spec, layers=tuple(LayerSpec(mixer=mixer, ffn=spec.layers[0].ffn) for mixer in layers))
    sequences = _tokens(spec, module.device)
    theirs = _own_logits(module, sequences)
    tolerance = _Tolerance(exact=module.dtype in (torch.float32, torch.float64))
    spec = _with_logit_transform(HfDecoder(module, spec, binding), sequences[0], theirs[0], config, tolerance)
    decoder = HfDecoder(module, spec, binding)
    after = len(sequences[0])  # nothing can leak into the first
    tolerance.check("sequences packed side by side", _packed_logits(decoder, sequences)[after:], torch.cat(theirs[1:]))
    tolerance.check("sequences read piece by piece", *_stepwise_logits(decoder, sequences, theirs))
    return decoder


def verify_images(decoder: HfDecoder, tokens_T: Tensor, images: Images) -> None:
    """Raise an UnsupportedModelError unless a prompt with images, packed behind others, has the module's own logits."""
    module, device = decoder.module, decoder.head().device
    arrays = [placed.image for placed in images]
    set_attention(module, "eager")
    try:
        with torch.no_grad():
            given = convert_arrays(arrays, module, module.forward, module.base_model.forward)
            theirs_TV = module(input_ids=tokens_T[None], use_cache=False, **given).logits[0].float()
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:  # from inside the module
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UnsupportedModelError(f"its own forward fails on an image ({type(error).__name__}: {reason}).") from error
    finally:
        set_attention(module, NAME)
    text_T = _tokens(decoder.spec, device)[0]
    lengths = [len(text_T), len(tokens_T)]
    positions_T = torch.cat([torch.arange(n, device=device) for n in lengths])
    vision = build_vision_inputs(decoder.spec, [(lengths[0], tokens_T.cpu().numpy(), images)], device)
    with torch.no_grad():
        attention = VarlenAttentionBackend(lengths, device)
        hidden_TD = decoder(torch.cat((text_T, tokens_T)), positions_T, attention, vision=vision)
        softcap = decoder.spec.logit_softcap
        ours_TV = compute_logits(hidden_TD[lengths[0] :], decoder.head(), softcap, numerics=decoder.numerics)
    tolerance = _Tolerance(exact=module.dtype in (torch.float32, torch.float64))
    off = tolerance.relative_error(ours_TV, theirs_TV)
    if not off <= tolerance.limit:
        raise UnsupportedModelError(
            f"prompts with images get other logits than from the module itself (relative error {off:.1e}): it has "
            "positions, masks or features of its own for images. Without its preprocessor_config.json it runs on text."
        )


@dataclass(frozen=True, slots=True)
class _Tolerance:
    """How far logits may differ, relative to the largest.

    In low precision a token may be routed to other experts, so the median of the tokens is compared instead of the
    maximum.
    """

    exact: bool

    @property
    def limit(self) -> float:
        return 1e-4 if self.exact else 5e-2

    def relative_error(self, ours_TV: Tensor, theirs_TV: Tensor) -> float:
        off_T = (ours_TV.float() - theirs_TV).abs().amax(-1) / theirs_TV.abs().max()
        if not bool(off_T.isfinite().all()):
            return math.inf
        return float(off_T.max() if self.exact else off_T.median())

    def check(self, case: str, ours_TV: Tensor, theirs_TV: Tensor) -> None:
        off = self.relative_error(ours_TV, theirs_TV)
        if not off <= self.limit:
            raise UnsupportedModelError(
                f"{case} get other logits than alone and in one piece (relative error {off:.1e}): "
                "tokens interact by more than attention, such as a recurrence or a convolution."
            )


def _check_head(module: Any) -> None:
    head = module.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedModelError("it has no linear output head.")
    if head.bias is not None:
        raise UnsupportedModelError("its output head has a bias, which is not supported.")
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter is not head.weight:
            names.setdefault(id(parameter), []).append(name)
    shared = next((each for each in names.values() if len(each) > 1), None)
    if shared is not None:
        raise UnsupportedModelError(f"{' and '.join(shared[:2])} are one parameter.")


def _tokens(spec: HfAdapterSpec, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(spec.vocab_size, (n,), generator=generator).to(device) for n in _LENGTHS]


@torch.no_grad()
def _own_logits(module: Any, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Compute the logits of each sequence alone, with transformers' eager attention."""
    set_attention(module, "eager")
    try:
        return [module(input_ids=tokens_T[None], use_cache=False).logits[0].float() for tokens_T in sequences]
    finally:
        set_attention(module, NAME)


def _with_logit_transform(
    decoder: HfDecoder, tokens_T: Tensor, theirs_TV: Tensor, config: Mapping[str, Any], tolerance: _Tolerance
) -> HfAdapterSpec:
    """Return the spec with what lies between hidden states and logits: a scale and a soft-cap that the config names."""
    numbers = {float(v) for v in config.values() if isinstance(v, int | float) and not isinstance(v, bool) and v > 0}
    softcap = config.get("final_logit_softcapping")
    positions_T = torch.arange(len(tokens_T), device=tokens_T.device)
    with torch.no_grad():
        hidden_TD = decoder(tokens_T, positions_T, _ReferenceKVCache(reads=[(0, len(tokens_T))]))
        raw_TV = compute_logits(hidden_TD, decoder.head(), numerics=decoder.numerics)
    best, smallest = decoder.spec, math.inf
    for scale in (1.0, *sorted(numbers | {1 / number for number in numbers})):
        for softcap_value in (None, float(softcap)) if softcap else (None,):
            logits_TV = (
                raw_TV * scale if softcap_value is None else softcap_value * torch.tanh(raw_TV * scale / softcap_value)
            )
            off = tolerance.relative_error(logits_TV, theirs_TV)
            if off < smallest:
                best, smallest = replace(decoder.spec, hidden_scale=scale, logit_softcap=softcap_value), off
        if scale == 1.0 and smallest <= tolerance.limit:
            break
    if smallest <= tolerance.limit:
        return best
    raise UnsupportedModelError(
        "its logits are not hidden states times its head, up to a scale and a soft-cap from its config "
        f"(relative error {smallest:.1e})."
    )


@torch.no_grad()
def _packed_logits(decoder: HfDecoder, sequences: Sequence[Tensor]) -> Tensor:
    """Compute the logits of packed sequences, as the trainer does."""
    lengths = [len(tokens_T) for tokens_T in sequences]
    device = sequences[0].device
    positions_T = torch.cat([torch.arange(n, device=device) for n in lengths])
    hidden_TD = decoder(torch.cat(list(sequences)), positions_T, VarlenAttentionBackend(lengths, device))
    return compute_logits(hidden_TD, decoder.head(), decoder.spec.logit_softcap, numerics=decoder.numerics)


@torch.no_grad()
def _stepwise_logits(
    decoder: HfDecoder, sequences: Sequence[Tensor], theirs: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Compute the logits of two sequences read in steps, as the engine does, except the first step's; and the expected
    ones.
    """
    kv_cache = _ReferenceKVCache()
    shown = []
    expected = []
    ends = {0: 0, 2: 0}
    for step in _STEPS:
        kv_cache.reads = list(step.items())
        parts = {number: slice(ends[number], ends[number] + count) for number, count in step.items()}
        tokens_T = torch.cat([sequences[number][part] for number, part in parts.items()])
        positions_T = torch.cat([torch.arange(p.start, p.stop, device=tokens_T.device) for p in parts.values()])
        hidden_TD, softcap = decoder(tokens_T, positions_T, kv_cache), decoder.spec.logit_softcap
        shown.append(compute_logits(hidden_TD, decoder.head(), softcap, numerics=decoder.numerics))
        expected += [theirs[number][part] for number, part in parts.items()]
        ends |= {number: part.stop for number, part in parts.items()}
    return torch.cat(shown[1:]), torch.cat(expected[len(_STEPS[0]) :])


@dataclass(slots=True)
class _ReferenceKVCache:
    """A reference attention backend that caches keys and values of numbered sequences. ``reads`` says which sequence
    brings how many tokens.
    """

    reads: list[tuple[int, int]] = field(default_factory=list)
    latent: bool = False
    _cached: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        q_THd, k_TGd, v_TGe, params, sinks_H, _ = inputs
        counts = [count for _, count in self.reads]
        outs: list[Tensor] = []
        for (number, _), q, k, v in zip(
            self.reads, q_THd.split(counts), k_TGd.split(counts), v_TGe.split(counts), strict=True
        ):
            if (layer, number) in self._cached:
                before = self._cached[layer, number]
                k, v = torch.cat((before[0], k)), torch.cat((before[1], v))
            self._cached[layer, number] = (k, v)
            outs.append(_attention(q, k, v, params, sinks_H))
        return torch.cat(outs)

    def recurrent_state(self, layer: int) -> RecurrentState:
        raise AssertionError("adapted models have no recurrent layers")


def _attention(q_THd: Tensor, k_SGd: Tensor, v_SGe: Tensor, params: AttentionParams, sinks_H: Tensor | None) -> Tensor:
    """Reference attention of the last T of S tokens."""
    kv_heads = k_SGd.shape[1]
    q_TGrd = q_THd.float().unflatten(1, (kv_heads, -1))
    scores_GrTS = torch.einsum("tgrd,sgd->grts", q_TGrd, k_SGd.float()) * params.scale
    if params.softcap is not None:
        scores_GrTS = params.softcap * torch.tanh(scores_GrTS / params.softcap)
    at_S = torch.arange(len(k_SGd), device=q_THd.device)
    at_T = at_S[-len(q_THd) :, None]
    visible_TS = at_S <= at_T
    if params.window is not None:
        visible_TS &= at_S > at_T - params.window
    if params.chunk is not None:
        visible_TS &= at_S // params.chunk == at_T // params.chunk
    scores_GrTS = scores_GrTS.masked_fill(~visible_TS, -math.inf)
    if sinks_H is not None:
        sinks_GrT1 = sinks_H.float().view(kv_heads, -1, 1, 1).expand(*scores_GrTS.shape[:3], 1)
        scores_GrTS = torch.cat((scores_GrTS, sinks_GrT1), -1)
    weights_GrTS = scores_GrTS.softmax(-1)[..., : len(k_SGd)]
    out_TGre = torch.einsum("grts,sge->tgre", weights_GrTS, v_SGe.float())
    return out_TGre.flatten(1, 2).to(v_SGe.dtype)
