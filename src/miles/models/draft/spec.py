"""DraftSpec: every architecture parameter of a draft model for speculative decoding. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from miles.models.families.base import MtpLayout
from miles.models.families.registry import find_family
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LayerSpec,
    MambaSpec,
    MlaSpec,
    MlpSpec,
    RopeSpec,
)

__all__ = [
    "DRAFT_PREFIX",
    "DraftSpec",
    "build_eagle_spec",
    "build_mtp_spec",
    "choose_capture_layers",
    "find_mtp_layout",
]

DRAFT_PREFIX = "draft."
"""Prefix of the names of a draft head's parameters among the weights of a policy."""

# Sizes of an EAGLE-3 layer where the policy's own attention or MLP is not of the plain kind.
_HEAD_DIM = 128
_QUERIES_PER_KEY = 8
_MLP_MULTIPLE = 256
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """One draft model.

    ``decoder`` describes the draft's own layers as a decoder of these layers: its KV cache is laid out as that of any
    decoder of this spec, layer numbers starting at 0. ``capture_layers`` are the policy's layers whose output is a
    feature; if there are none, the feature is the policy's hidden state after the final norm. ``mtp`` is how a
    checkpoint stores the layers of an MTP draft, and ``first_number`` the number of the first of them there.
    ``draft_vocab_size`` is the size of a reduced vocabulary with a head of its own; None is the policy's vocabulary
    and head.
    """

    kind: Literal["mtp", "eagle3"]
    decoder: DecoderSpec
    capture_layers: tuple[int, ...] = ()
    mtp: MtpLayout | None = None
    first_number: int = 0
    draft_vocab_size: int | None = None

    @property
    def num_layers(self) -> int:
        """How many layers with a KV cache of their own the draft has."""
        return self.decoder.num_layers

    @property
    def feature_size(self) -> int:
        """The width of the features that step 0 reads."""
        return self.decoder.hidden_size * max(1, len(self.capture_layers))

    def layer_of_step(self, step: int) -> int:
        """The layer that step ``step`` (from 0) runs: one after the other, and the last one from then on."""
        return min(step, self.num_layers - 1)


# -- multi-token prediction -----------------------------------------------------------------


def find_mtp_layout(policy: DecoderSpec) -> MtpLayout | None:
    """Return how checkpoints of a family store MTP layers that can be computed here; None if there are none."""
    return None if isinstance(policy, HfAdapterSpec) else find_family(policy.family).mtp


def build_mtp_spec(policy: DecoderSpec, layout: MtpLayout, count: int = 1) -> DraftSpec:
    """Build the spec of ``count`` MTP layers: the policy's last layer, with its last mixer that is not recurrent."""
    assert count >= 1
    recurrent = GatedDeltaNetSpec | KimiDeltaSpec | MambaSpec
    mixers = [each.mixer for each in policy.layers if not isinstance(each.mixer, recurrent)]
    last = replace(policy.layers[-1], mixer=mixers[-1])
    if isinstance(last.mixer, MlaSpec) and last.mixer.indexer is not None:
        last = replace(last, mixer=replace(last.mixer, indexer=replace(last.mixer.indexer, source=None)))
    decoder = replace(policy, layers=count * (last,), quantization=None, adapters=None, vision=None)
    first = policy.num_layers if layout.after_layers else 0
    return DraftSpec(kind="mtp", decoder=decoder, mtp=layout, first_number=first)


# -- EAGLE-3 --------------------------------------------------------------------------------


def build_eagle_spec(policy: DecoderSpec, *, capture_layers: tuple[int, ...] | None = None) -> DraftSpec:
    """Build the spec of a new EAGLE-3 head for any policy: one Llama layer, features of three policy layers.

    The layers are by default those of ``choose_capture_layers``.

    >>> from miles.models.families import spec_from_config
    >>> llama = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
    ...     "num_hidden_layers": 16, "vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    >>> build_eagle_spec(spec_from_config(llama)).capture_layers
    (1, 7, 12)
    """
    layer = LayerSpec(mixer=_eagle_attention(policy), ffn=_eagle_mlp(policy))
    decoder = DecoderSpec(
        family="llama",
        vocab_size=policy.vocab_size,
        hidden_size=policy.hidden_size,
        norm_eps=policy.norm_eps,
        layers=(layer,),
        tie_embeddings=False,
        max_positions=policy.max_positions,
        eos_token_ids=policy.eos_token_ids,
        logit_softcap=policy.logit_softcap,
    )
    layers = choose_capture_layers(policy.num_layers) if capture_layers is None else capture_layers
    return DraftSpec(kind="eagle3", decoder=decoder, capture_layers=layers)


def choose_capture_layers(count: int) -> tuple[int, int, int]:
    """Return a low, a middle and a high layer of ``count``: those that SGLang captures by default, where they differ.

    SGLang cannot capture the output of the last layer. With fewer than four layers one is captured twice.

    >>> choose_capture_layers(36), choose_capture_layers(4), choose_capture_layers(1)
    ((1, 17, 32), (0, 1, 2), (0, 0, 0))
    """
    last = max(count - 2, 0)
    return (1, count // 2 - 1, count - 4) if count >= 7 else (0, last // 2, last)


def _eagle_attention(policy: DecoderSpec) -> AttentionSpec:
    """The heads of the policy's attention without its variations; for MLA, heads of the usual size."""
    found = next((each.mixer for each in policy.layers if isinstance(each.mixer, AttentionSpec)), None)
    if found is not None:
        rope = _plain_rope(found.rope)
        heads = (found.num_heads, found.num_kv_heads, found.head_dim)
        return AttentionSpec(num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2], rope=rope)
    mla = next((each.mixer for each in policy.layers if isinstance(each.mixer, MlaSpec)), None)
    head_dim = min(_HEAD_DIM, policy.hidden_size)
    num_heads = max(1, policy.hidden_size // head_dim)
    kv_heads = num_heads // _QUERIES_PER_KEY if num_heads % _QUERIES_PER_KEY == 0 else num_heads
    rope = _plain_rope(None if mla is None else mla.rope)
    return AttentionSpec(num_heads=num_heads, num_kv_heads=kv_heads, head_dim=head_dim, rope=rope)


def _plain_rope(rope: RopeSpec | None) -> RopeSpec:
    """RoPE over whole heads with the policy's base and, where a Llama config can say it, its scaling."""
    if rope is None:
        return RopeSpec(theta=10_000.0)
    if rope.kind not in _ROPE_KINDS:
        return RopeSpec(theta=rope.theta)
    return replace(rope, dim=None, interleaved=False, mrope_section=None, mrope_interleaved=False)


def _eagle_mlp(policy: DecoderSpec) -> MlpSpec:
    found = next((each.ffn for each in policy.layers if isinstance(each.ffn, MlpSpec) and each.ffn.gated), None)
    if found is not None:
        return MlpSpec(size=found.size)
    return MlpSpec(size=-(-8 * policy.hidden_size // (3 * _MLP_MULTIPLE)) * _MLP_MULTIPLE)
