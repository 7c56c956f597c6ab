"""Small models whose packed base has whole blocks on each rank, and a step of adapters beside it. Imported by ranks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.backends.megatron import cases
from transformers import DeepseekV3Config, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from miles.backends.fsdp.local_model import LocalModel
from miles.backends.fsdp.lora_model import LoraReference, UnmergedLoraModel
from miles.cluster.parallel_dims import ParallelDims
from miles.core.types import Sample
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config
from miles.models.lora.targets import LoraSpec
from miles.models.spec import DecoderSpec
from miles.precision.formats import FORMATS, QuantizationSpec
from miles.train.dp_group import SINGLE_RANK

WIDE: dict[str, Any] = {**cases.SIZES, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
BLOCKS: dict[str, Any] = {
    **{**cases.SIZES, "hidden_size": 64, "intermediate_size": 256, "head_dim": 64},
    **{"num_key_value_heads": 4, "tie_word_embeddings": False},
}
EXPERTS: dict[str, Any] = cases.EXPERTS | {"moe_intermediate_size": 64}
LATENT: dict[str, Any] = {
    **{"q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "n_shared_experts": 1},
    **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "norm_topk_prob": True},
    **{"num_key_value_heads": 4, "routed_scaling_factor": 2.5, "tie_word_embeddings": False},
}


def _describe(config: PretrainedConfig, name: str) -> dict[str, Any]:
    return config.to_dict() | {"architectures": [name]}


KINDS: dict[str, dict[str, Any]] = {
    "wide qwen3": _describe(Qwen3Config(**WIDE, tie_word_embeddings=True), "Qwen3ForCausalLM"),
    "qwen3 of blocks": _describe(Qwen3Config(**BLOCKS), "Qwen3ForCausalLM"),
    "wide qwen3_moe": _describe(
        Qwen3MoeConfig(**WIDE, tie_word_embeddings=False, **EXPERTS),
        "Qwen3MoeForCausalLM",
    ),
    "wide deepseek_v3": _describe(
        DeepseekV3Config(**({n: v for n, v in WIDE.items() if n != "head_dim"} | LATENT)), "DeepseekV3ForCausalLM"
    ),
}
cases.KINDS.update(KINDS)
cases.ROUTED.update({f"wide {kind}": cases.ROUTED[kind] for kind in ("qwen3_moe", "deepseek_v3")})


def pack_spec(folder: Path, precision: str, **which: Any) -> DecoderSpec:
    """The spec of a model in a folder, packed in a format; ``which`` layers are says the rest."""
    quantization = QuantizationSpec(format=FORMATS[precision], packed=True, **which)
    return replace(spec_from_config(read_config(folder)), quantization=quantization)


def attach(base: Any, folder: Path, lora: LoraSpec) -> UnmergedLoraModel:
    """The packed base under adapters none of which is zero."""
    model = UnmergedLoraModel(base, lora, base=folder, seed=1)
    cases.fill_factors(model.adapters(), seed=2)
    model.after_update()
    return model


def load_alone(folder: Path, spec: DecoderSpec) -> LocalModel:
    """The packed base in one process of the embedded trainer."""
    decoder = hf.load_model(folder, spec, device="cpu", dtype=torch.float32)
    return LocalModel(decoder, config=read_config(folder), frozen=True)


def step_alone(
    folder: Path,
    spec: DecoderSpec,
    batch: tuple[Sample, ...],
    algo: dict[str, Any],
    lora: LoraSpec,
    referred: bool = False,
) -> dict[str, Any]:
    """The step in one process of the embedded trainer: the oracle."""
    model = attach(load_alone(folder, spec), folder, lora)
    return cases.stepped(model, batch, SINGLE_RANK, algo, LoraReference(model) if referred else None)


def step_shared(
    rank: int,
    world: int,
    folder: Path,
    spec: DecoderSpec,
    layout: ParallelDims,
    flags: tuple[str, ...],
    batch: tuple[Sample, ...],
    algo: dict[str, Any],
    lora: LoraSpec,
    out: Path | None = None,
    referred: bool = False,
) -> dict[str, Any]:
    """The same on one of Megatron's ranks, with the bytes of the base; after it a checkpoint is written and read."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        how: dict[str, Any] = {"dtype": torch.float32, "flags": flags, "frozen": True, "lora": lora}
        base = load_megatron_model(folder, spec, layout, config=read_config(folder), **how)
        try:
            model = attach(base, folder, lora)
            found = cases.stepped(model, batch, base.dp_group, algo, LoraReference(model) if referred else None)
            trainer = found.pop("trainer")
            if out is not None:
                asyncio.run(trainer.save(out))
                base.barrier()  # until the lead has written its files
                asyncio.run(trainer.load(out))
            return found
        finally:
            destroy_parallel_state()
