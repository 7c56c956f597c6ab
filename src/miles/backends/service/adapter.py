"""An adapter in training: float32 factors, summed gradients and AdamW; its state is written and read as safetensors.

Shapes: I inputs, O outputs, r rank; factors of experts have a first dimension for them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from miles.backends.service.multi_lora import AdapterFactors, GradientSum
from miles.core.errors import CheckpointError
from miles.models.checkpoint.peft import CONFIG, WEIGHTS, build_peft_config, list_factor_files, peft_tensor_name
from miles.models.lora.adapters import encode_factor
from miles.models.lora.targets import LoraSpec, LoraTarget
from miles.models.spec import DecoderSpec

__all__ = ["AdamParams", "Adapter", "AdapterShape", "get_target_flag", "sync_folder", "write_peft"]

_A, _B = "lora_A.weight", "lora_B.weight"
STATE = "state.safetensors"
"""The file of a training checkpoint beside the adapter: factors, gradients and moments in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """Rank and targets of an adapter: attention, MLP with routed experts, output layer, or several of them."""

    rank: int
    alpha: float
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def select(self, targets: tuple[LoraTarget, ...]) -> tuple[LoraTarget, ...]:
        """Return those of the targets that the adapter has."""
        return tuple(target for target in targets if getattr(self, get_target_flag(target)))

    def has_same_targets(self, other: AdapterShape) -> bool:
        """Whether both have factors of the same shapes."""
        return all(
            getattr(self, name) == getattr(other, name) for name in ("rank", "train_attn", "train_mlp", "train_unembed")
        )


def get_target_flag(target: LoraTarget) -> str:
    """Return the name of the flag of an AdapterShape that a target belongs to."""
    if target.is_head:
        return "train_unembed"
    return "train_attn" if target.group == "attn" else "train_mlp"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """The hyperparameters of one AdamW step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class Adapter:
    """One adapter of one training run. Not safe for threads: the trainer's thread owns it."""

    def __init__(self, shape: AdapterShape, targets: tuple[LoraTarget, ...], *, device: torch.device) -> None:
        self.shape = shape
        self.targets = shape.select(targets)
        assert self.targets, "an adapter has at least one target"
        self._lora = LoraSpec(rank=shape.rank, alpha=shape.alpha, targets=self.targets)
        generator = torch.Generator().manual_seed(shape.seed & 0x7FFFFFFFFFFFFFFF)
        self._params: dict[str, tuple[Tensor, Tensor]] = {}
        for target in self.targets:
            bound = math.sqrt(1 / target.inputs)
            shape_a, shape_b = self._lora.factor_shapes(target)
            a_rI = torch.empty(shape_a).uniform_(-bound, bound, generator=generator)
            self._params[target.module] = (a_rI.to(device), torch.zeros(shape_b, device=device))
        self.factors = AdapterFactors(factors=self._params, scale=shape.scale, rank=shape.rank)
        self._optimizer = self._build_optimizer()
        self.num_steps = 0

    def _build_optimizer(self) -> torch.optim.AdamW:
        # One tensor at a time: the update of a factor is the same on any device and beside any other factor.
        return torch.optim.AdamW([tensor for pair in self._params.values() for tensor in pair], foreach=False)

    # -- training ---------------------------------------------------------------------------

    def add_gradients(self, grads: GradientSum) -> None:
        """Add the gradients of one segment."""
        for module, pair in grads.items():
            for tensor, grad in zip(self._params[module], pair, strict=True):
                tensor.grad = grad if tensor.grad is None else tensor.grad.add_(grad)

    @torch.no_grad()
    def step(self, params: AdamParams) -> dict[str, float]:
        """Update the factors by AdamW and clear the gradients; without gradients nothing changes."""
        grads = [tensor.grad for pair in self._params.values() for tensor in pair if tensor.grad is not None]
        norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt().item() if grads else 0.0
        if params.grad_clip_norm > 0 and norm > params.grad_clip_norm:
            for grad in grads:
                grad.mul_(params.grad_clip_norm / norm)
        for group in self._optimizer.param_groups:
            group["lr"], group["eps"] = params.learning_rate, params.eps
            group["betas"] = (params.beta1, params.beta2)
            group["weight_decay"] = params.weight_decay
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        return {"grad_norm": norm}

    # -- state ------------------------------------------------------------------------------

    def export(self) -> dict[str, Tensor]:
        """Return the factors in PEFT's names; those of experts as their checkpoint has experts."""
        tensors: dict[str, Tensor] = {}
        for target in self.targets:
            files = list_factor_files(self._lora, target)
            for is_a, tensor, pieces in zip((True, False), self._params[target.module], files, strict=True):
                factor = tensor.detach()
                if target.is_stacked:
                    factor = encode_factor(factor, is_a=is_a, target=target)
                tensors |= {peft_tensor_name(piece.hf_name): piece.view(factor) for piece in pieces}
        return tensors

    def collect_state(self) -> dict[str, Tensor]:
        """Return all tensors: factors, and gradients and moments where there are any."""
        state: dict[str, Tensor] = {}
        for module, pair in self._params.items():
            for name, tensor in zip((_A, _B), pair, strict=True):
                key = f"{module}.{name}"
                state[key] = tensor.detach()
                if tensor.grad is not None:
                    state[f"{key}:grad"] = tensor.grad
                for kind, value in self._optimizer.state.get(tensor, {}).items():
                    state[f"{key}:{kind}"] = value
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor], *, optimizer: bool = True) -> None:
        """Take over factors, and with ``optimizer`` also gradients and moments; else these are cleared."""
        self._optimizer = self._build_optimizer()
        for module, pair in self._params.items():
            for name, tensor in zip((_A, _B), pair, strict=True):
                key = f"{module}.{name}"
                if key not in state or state[key].shape != tensor.shape:
                    raise CheckpointError(
                        f"the checkpoint does not fit the adapter: {key} is missing or has another shape"
                    )
                tensor.copy_(state[key])
                tensor.grad = None
                if optimizer:
                    self._load_moments(tensor, key, state)

    def _load_moments(self, tensor: Tensor, key: str, state: Mapping[str, Tensor]) -> None:
        if (grad := state.get(f"{key}:grad")) is not None:
            tensor.grad = grad.to(tensor.device, torch.float32, copy=True)
        if (step := state.get(f"{key}:step")) is not None:
            self._optimizer.state[tensor] = {
                "step": step.clone(),
                "exp_avg": state[f"{key}:exp_avg"].to(tensor.device, copy=True),
                "exp_avg_sq": state[f"{key}:exp_avg_sq"].to(tensor.device, copy=True),
            }

    def save(self, file: Path) -> None:
        """Write the whole state to a file that is complete or absent."""
        temporary = file.with_suffix(".tmp")
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.collect_state().items()}
        save_file(tensors, temporary, metadata={"num_steps": str(self.num_steps)})
        _sync_file(temporary)
        os.replace(temporary, file)
        sync_folder(file.parent)

    def load(self, file: Path, *, optimizer: bool = True) -> None:
        """Read a state that ``save`` wrote."""
        with safe_open(file, "pt") as stored:
            state = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            steps = int((stored.metadata() or {}).get("num_steps", "0"))
        self.load_state(state, optimizer=optimizer)
        self.num_steps = steps if optimizer else 0


def write_peft(folder: Path, adapter: Adapter, spec: DecoderSpec, base: str) -> None:
    """Write an adapter in PEFT's format, which the engine, PEFT and other servers read."""
    lora = LoraSpec(rank=adapter.shape.rank, alpha=adapter.shape.alpha, targets=adapter.targets)
    folder.mkdir(parents=True, exist_ok=True)
    config = build_peft_config(lora, spec, base)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # Experts are parts of one tensor here, and tensors of their own in the file.
    tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in adapter.export().items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    for name in (CONFIG, WEIGHTS):
        _sync_file(folder / name)


def _sync_file(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
