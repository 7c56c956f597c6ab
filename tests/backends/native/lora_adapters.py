"""Adapters for the tests of the native backend: random factors, PEFT folders, and what the formula makes of a model."""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from miles.models.lora.factors import LoraFactors, ModuleFactors, parse_factors
from miles.models.lora.targets import list_targets
from miles.models.spec import DecoderSpec


def random_adapter(spec: DecoderSpec, seed: int, *, rank=4, alpha=8.0, only=None, scale=0.15, **config):
    """The config and the tensors of an adapter in PEFT's names; ``only`` are the short names of its targets."""
    random = torch.Generator().manual_seed(seed)
    targets = [
        t
        for t in list_targets(spec)
        if not t.is_vision and not t.num_experts and (t.short_name in only if only else not t.is_head)
    ]
    tensors = {}
    for target in targets:
        name = f"base_model.model.{target.module}"
        tensors[f"{name}.lora_A.weight"] = scale * torch.randn(rank, target.inputs, generator=random)
        tensors[f"{name}.lora_B.weight"] = scale * torch.randn(target.outputs, rank, generator=random)
    return {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", **config}, tensors


def random_factors(spec: DecoderSpec, seed: int, **options) -> LoraFactors:
    return parse_factors(*random_adapter(spec, seed, **options), spec, where="the adapter")


def save_adapter(folder: Path, spec: DecoderSpec, seed: int, **options) -> Path:
    """Write an adapter as PEFT does."""
    config, tensors = random_adapter(spec, seed, **options)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged_model(model: PreTrainedModel, factors: LoraFactors | None) -> PreTrainedModel:
    """transformers' model with scale * B A added to its weights, in float64 and rounded once."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for module, own in ({} if factors is None else factors.modules).items():
            # what checkpoints of Mixtral and Kimi-Linear name otherwise than transformers' modules
            owner = model.get_submodule(module.replace(".block_sparse_moe.", ".mlp."))
            if module == "lm_head":  # which may be the embedding, and is not from now on
                owner.weight = torch.nn.Parameter(owner.weight.clone())
            weight = owner.weight
            delta = own.scale * (own.b_Or.double() @ own.a_rI.double())
            weight.copy_((weight.double() + delta).to(weight.dtype))
    return model


def random_expert_factors(spec, seed):
    """Factors of all routed experts, of rank 1, 2 or 3."""
    random, rank = torch.Generator().manual_seed(seed), 1 + seed
    return LoraFactors(
        {
            target.module: ModuleFactors(
                0.5 * torch.randn(target.num_experts, rank, target.inputs, generator=random),
                0.5 * torch.randn(target.num_experts, target.outputs, rank, generator=random),
                2.0,
            )
            for target in list_targets(spec)
            if target.num_experts
        }
    )
