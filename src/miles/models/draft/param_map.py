"""Mapping between draft parameter names and Hugging Face tensor names, and the config of an EAGLE-3 folder. No torch.

MTP layers have the names of their family. An EAGLE-3 head has those that SGLang and vLLM read (``fc``, ``midlayer``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from miles.core.errors import CheckpointError
from miles.models.checkpoint.hf_names import HF_NAMES
from miles.models.checkpoint.param_map import build_layer_map
from miles.models.checkpoint.param_slices import HfSlice, ModuleNames, ParamMap, concat_slices
from miles.models.draft.spec import DraftSpec, choose_capture_layers
from miles.models.families import spec_from_config
from miles.models.families.base import MtpLayout
from miles.models.families.registry import config_from_spec, find_family
from miles.models.spec import AttentionSpec, DecoderSpec, MlpSpec, MoeSpec

EAGLE_ARCHITECTURE = "LlamaForCausalLMEagle3"
TOKEN_OFFSETS = "d2t"
_LAYER = "midlayer"


def build_draft_map(spec: DraftSpec) -> Mapping[str, tuple[HfSlice, ...]]:
    """Map every draft parameter, in the module's order, to the Hugging Face tensors it consists of."""
    return _build_mtp_map(spec) if spec.kind == "mtp" else _build_eagle_map(spec)


# -- multi-token prediction -----------------------------------------------------------------


def _build_mtp_map(spec: DraftSpec) -> ParamMap:
    assert spec.mtp is not None
    layout, width = spec.mtp, spec.decoder.hidden_size
    names = {**HF_NAMES, **find_family(spec.decoder.family).names}
    params: ParamMap = {}
    for i, layer in enumerate(spec.decoder.layers):
        number, own = spec.first_number + i, f"blocks.{i}"
        block = layout.block.format(number)
        params[f"{own}.embedding_norm.weight"] = concat_slices((f"{block}.{layout.embedding_norm}.weight", (width,)))
        params[f"{own}.hidden_norm.weight"] = concat_slices((f"{block}.{layout.hidden_norm}.weight", (width,)))
        projection = (f"{block}.{layout.projection}.weight", (width, 2 * width))
        params[f"{own}.projection.weight"] = concat_slices(projection)
        params |= build_layer_map(layer, width, ModuleNames(f"{own}.layer", layout.layer.format(number), names))
        params[f"{own}.norm.weight"] = concat_slices((f"{block}.{layout.norm}.weight", (width,)))
    return params


def stacked_draft_names(spec: DraftSpec) -> Mapping[str, str]:
    """Map draft parameter -> Hugging Face name of experts that a checkpoint may store as one stacked tensor."""
    names = {**HF_NAMES, **find_family(spec.decoder.family).names}
    if spec.mtp is None or "stacked" in names:
        return {}
    return {
        f"blocks.{i}.layer.moe.{param}": f"{spec.mtp.layer.format(spec.first_number + i)}.{names['moe']}."
        + HF_NAMES[f"experts_{param}"]
        for i, layer in enumerate(spec.decoder.layers)
        if isinstance(layer.ffn, MoeSpec)
        for param in ("gate_up" if layer.ffn.gated else "up", "down")
    }


def count_mtp_layers(policy: DecoderSpec, layout: MtpLayout, stored: Collection[str]) -> int:
    """Count the MTP layers among the tensors of a checkpoint, by their attention's norms."""
    first = policy.num_layers if layout.after_layers else 0
    count = 0
    while f"{layout.layer.format(first + count)}.{HF_NAMES['attention_norm']}.weight" in stored:
        count += 1
    if count > 1 and layout.block.format(0) == layout.block.format(1):
        raise CheckpointError(
            f"the checkpoint has {count} MTP layers behind one projection; only one such layer is supported."
        )
    return count


# -- EAGLE-3 --------------------------------------------------------------------------------


def _build_eagle_map(spec: DraftSpec) -> ParamMap:
    width, layer = spec.decoder.hidden_size, spec.decoder.layers[0]
    assert isinstance(layer.mixer, AttentionSpec) and isinstance(layer.ffn, MlpSpec)
    attention = layer.mixer
    queries, keys = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    prefix, size = f"{_LAYER}.self_attn", layer.ffn.size
    inputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    params: ParamMap = {
        "projection.weight": concat_slices(("fc.weight", (width, spec.feature_size))),
        "embedding_norm.weight": concat_slices((f"{_LAYER}.input_layernorm.weight", (width,))),
        "hidden_norm.weight": concat_slices((f"{_LAYER}.hidden_norm.weight", (width,))),
        "attention.qkv.weight": concat_slices(
            *((f"{prefix}.{name}.weight", (rows, 2 * width)) for name, rows in inputs.items())
        ),
        "attention.output.weight": concat_slices((f"{prefix}.o_proj.weight", (width, queries))),
        "mlp_norm.weight": concat_slices((f"{_LAYER}.post_attention_layernorm.weight", (width,))),
        "mlp.gate_up.weight": concat_slices(
            (f"{_LAYER}.mlp.gate_proj.weight", (size, width)), (f"{_LAYER}.mlp.up_proj.weight", (size, width))
        ),
        "mlp.down.weight": concat_slices((f"{_LAYER}.mlp.down_proj.weight", (width, size))),
        "norm.weight": concat_slices(("norm.weight", (width,))),
    }
    if spec.draft_vocab_size is not None:
        params["lm_head.weight"] = concat_slices(("lm_head.weight", (spec.draft_vocab_size, width)))
    return params


def build_eagle_config(spec: DraftSpec, dtype: str) -> dict[str, Any]:
    """Build config.json of an EAGLE-3 head, as SGLang and vLLM read it."""
    assert spec.kind == "eagle3"
    eagle = {"eagle_aux_hidden_state_layer_ids": list(spec.capture_layers), "use_aux_hidden_state": True}
    return {
        **config_from_spec(spec.decoder),
        "architectures": [EAGLE_ARCHITECTURE],
        "target_hidden_size": spec.decoder.hidden_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "eagle_config": eagle,
        "dtype": dtype,
    }


def read_eagle_spec(config: Mapping[str, Any], policy: DecoderSpec, folder: object) -> DraftSpec:
    """Read the spec of an EAGLE-3 head from its config.json; a CheckpointError if it is not for this policy."""
    named = (config.get("architectures") or ["none"])[0]
    if named != EAGLE_ARCHITECTURE:
        raise CheckpointError(
            f"{folder} is not an EAGLE-3 head: its architecture is {named}, not {EAGLE_ARCHITECTURE}."
        )
    decoder = spec_from_config({**config, "architectures": ["LlamaForCausalLM"]})
    for key, own, wanted in (
        ("vocab_size", decoder.vocab_size, policy.vocab_size),
        ("hidden_size", decoder.hidden_size, policy.hidden_size),
        ("num_hidden_layers", decoder.num_layers, 1),
    ):
        if own != wanted:
            raise CheckpointError(f"{key} of {folder} is {own}, but a draft of this policy needs {wanted}.")
    count = policy.num_layers
    captured = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(captured or choose_capture_layers(count))
    if any(not 0 <= layer < count for layer in layers):
        raise CheckpointError(f"{folder} reads the layers {list(layers)}, but the policy has {count} layers.")
    vocab = config.get("draft_vocab_size")
    reduced = None if vocab is None or vocab == decoder.vocab_size else int(vocab)
    decoder = replace(decoder, logit_softcap=policy.logit_softcap, tie_embeddings=False)
    return DraftSpec(kind="eagle3", decoder=decoder, capture_layers=layers, draft_vocab_size=reduced)
