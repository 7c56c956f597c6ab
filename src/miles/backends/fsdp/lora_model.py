"""LoRA training: the base weights are frozen and adapters are trained, in one process or sharded over ranks.

Merged, the weights under the usual names are base plus adapters, written after every update: these are published,
saved and used in forwards. Unmerged (``UnmergedLoraModel``), which adapters over a packed base are (QLoRA), they are
the base. Each rank has its shard of those, and all of the adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from miles.cluster.host_copies import HostCopies
from miles.core.errors import CheckpointError
from miles.kernels.numerics import Numerics
from miles.models.checkpoint import hf, peft
from miles.models.checkpoint.safetensors_io import write_json
from miles.models.checkpoint.save_plan import SavePlan, SaveUnit
from miles.models.checkpoint.torch_dist_folders import is_torch_dist
from miles.models.lora.adapters import LoraAdapters, ParamPart, encode_factor, read_adapter
from miles.models.lora.targets import LoraSpec, LoraTarget
from miles.models.optim_groups import MuonMatrices
from miles.models.quantization import plan_quantization
from miles.models.spec import DecoderSpec
from miles.precision.quantize import dequantize, row_block
from miles.precision.quantized_tensor import QuantizedTensor
from miles.train.batch_tensors import MicroBatch
from miles.train.model_protocols import (
    KeptTensors,
    LossCallback,
    Pipelined,
    ProvidesFeatures,
    ReportsTokenTime,
    TrainModel,
    find_torch_dist_model,
)
from miles.train.optim.optimizer import full_grad_norm
from miles.train.optim.sharded_adam import HasMomentsGroup, RankGroup

_WEIGHTS, _CONFIG = f"{peft.FOLDER}/{peft.WEIGHTS}", f"{peft.FOLDER}/{peft.CONFIG}"

_Rows = TypeVar("_Rows")
_Output = TypeVar("_Output")
_Judge = Callable[[int, _Output], tuple[Tensor | None, KeptTensors]]
_ForwardBackward = Callable[[Sequence[_Rows], _Judge[_Output]], list[KeptTensors]]


class LoraBaseModel(TrainModel, Protocol):
    """A frozen model that adapters can be attached to."""

    @property
    def spec(self) -> DecoderSpec: ...
    def attach_adapters(self, adapters: LoraAdapters, *, beside: bool = False) -> None: ...
    def export(self, folder: Path, gather_unit: Callable[[str], Tensor]) -> None: ...
    def local_part(self, name: str) -> ParamPart: ...
    def sum_grad(self, grad: Tensor) -> Tensor: ...
    def max_over_ranks(self, tensor: Tensor) -> Tensor: ...
    def counts_grad(self, name: str) -> bool: ...
    @property
    def rank(self) -> int: ...


class LoraModel:
    """A TrainModel over a frozen ``base_model`` with the weights of the model in the folder ``base``.

    New adapters are initialized from ``seed``, or loaded from the PEFT folder ``start``.
    """

    saved_tensors: tuple[str, ...] = ()
    """Further tensors in the adapter's file: those of modules that are trained whole."""

    def __init__(
        self, base_model: LoraBaseModel, lora: LoraSpec, *, base: Path, seed: int, start: Path | None = None
    ) -> None:
        self._base_model = base_model
        self._lora = lora
        self._folder = base
        self._start = start
        self._merges_on = base_model.device
        self._adapters = LoraAdapters(lora, device=base_model.device, seed=seed)
        self._base = self._attach()
        self._host_copies = HostCopies()
        if lora.use_dora and start is None:
            self.after_update()
            self._adapters.reset_magnitudes()
            self.after_update()
        if start is not None:
            self._adapters.load(read_adapter(start, lora))
            self.after_update()

    def _attach(self) -> dict[str, Tensor]:
        """Attach the adapters; returns the base of the weights that they are merged into."""
        self._attach_adapters()
        params = self._base_model.parameters()
        return {name: params[name].detach().clone() for name in self._adapters.targets_by_param}

    def _attach_adapters(self) -> None:
        self._base_model.attach_adapters(self._adapters)

    @property
    def base_model(self) -> LoraBaseModel:
        """The frozen model."""
        return self._base_model

    def adapters(self) -> LoraAdapters:
        """Return the trained adapters."""
        return self._adapters

    def build_adapters(self, *, seed: int) -> LoraAdapters:
        """Return further adapters of the same form and start over the same base, for ``use_adapters``."""
        adapters = LoraAdapters(self._lora, device=self.device, seed=seed)
        if self._start is not None:
            adapters.load(read_adapter(self._start, self._lora))
        elif self._lora.use_dora:
            with self.use_adapters(adapters):
                adapters.reset_magnitudes()
        return adapters

    @contextmanager
    def use_adapters(self, adapters: LoraAdapters) -> Iterator[None]:
        """Compute with other adapters over the same base meanwhile; backward passes must end within."""
        own = self._adapters
        self._switch_adapters(adapters)
        try:
            yield
        finally:
            self._switch_adapters(own)

    def _switch_adapters(self, adapters: LoraAdapters) -> None:
        self._adapters = adapters
        self._attach_adapters()
        self.after_update()

    def sum_factor_grads(self, adapters: LoraAdapters) -> None:
        """All-reduce the gradients of adapters over this base; a factor without one gets zeros."""
        own = {name for name in adapters.targets_by_param if self._base_model.counts_grad(name)}
        for each in (
            each for name in adapters.targets_by_param.keys() - own for each in adapters.list_parameters(name)
        ):
            adapters.parameters[each].grad = None  # another rank has the same
        factors = list(adapters.parameters.values())
        flat = torch.cat([torch.zeros_like(p).view(-1) if p.grad is None else p.grad.view(-1) for p in factors])
        grads = self._base_model.sum_grad(flat).split([p.numel() for p in factors])
        for parameter, grad in zip(factors, grads, strict=True):
            parameter.grad = grad.view_as(parameter)

    @property
    def device(self) -> torch.device:
        return self._base_model.device

    @property
    def moments_group(self) -> RankGroup | None:
        """The ranks that share the moments of adapters, if the base model has such."""
        return self._base_model.moments_group if isinstance(self._base_model, HasMomentsGroup) else None

    @property
    def numerics(self) -> Numerics:
        return self._base_model.numerics

    def engine_weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._base_model.parameters().items()}

    def parameters(self) -> Mapping[str, Tensor]:
        return {**self._base_model.parameters(), **self._adapters.parameters}

    def finalize_grads(self) -> None:
        self._base_model.finalize_grads()
        self.sum_factor_grads(self._adapters)

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        return full_grad_norm(grads).to(self.device)

    @torch.no_grad()
    def after_update(self) -> None:
        params = self._base_model.parameters()
        self._adapters.clear_norms()
        for name, base in self._base.items():
            self._merge(name, params[name], base)
        self._adapters.share_norms(self._base_model.max_over_ranks)
        self._base_model.after_update()

    def _merge(self, name: str, out: Tensor, base: Tensor) -> None:
        """Write this rank's part of a base weight, with the adapters merged into it, into ``out``."""
        part = self._base_model.local_part(name)
        if self._lora.use_dora and part.columns is not None:
            self._adapters.compute_norms(name, self._base_model.gather(name, base))
        self._adapters.merge(name, out, base, part)

    def gather(self, name: str, local: Tensor) -> Tensor:
        return local if name in self._adapters.parameters else self._base_model.gather(name, local)

    def shard(self, name: str, full: Tensor) -> Tensor:
        return full if name in self._adapters.parameters else self._base_model.shard(name, full)

    def muon_matrices(self) -> Mapping[str, MuonMatrices]:
        return list_factor_matrices(self._adapters)

    def move(self, device: torch.device) -> None:
        self._base_model.move(device)
        self._adapters.to(device)
        self._host_copies.move(self._base, device)

    def forward_backward(self, plan: Sequence[MicroBatch], judge: LossCallback) -> list[KeptTensors]:
        return self.run_with_dropout(self._base_model.forward_backward, plan, judge)

    def run_with_dropout(
        self, run: _ForwardBackward[_Rows, _Output], plan: Sequence[_Rows], judge: _Judge[_Output]
    ) -> list[KeptTensors]:
        """Run forward and backward over micro-batches with the adapters in use; each has dropout masks of its own."""
        if self._adapters.dropout is None or not torch.is_grad_enabled():
            return run(plan, judge)
        kept: list[KeptTensors] = []
        for number, rows in enumerate(plan):
            self._set_dropout_key(number)
            kept += run([rows], lambda _, output, n=number: judge(n, output))
        return kept

    def _set_dropout_key(self, number: int) -> None:
        """Select the dropout masks of micro-batch ``number``; an update changes them, a resumed run has the same."""
        dropout, factors = self._adapters.dropout, self._adapters.parameters.values()
        assert dropout is not None
        bits = [factor.detach().flatten().view(torch.int32).sum(dtype=torch.int64) for factor in factors]
        dropout.key = hash((int(torch.stack(bits).sum()), number, self._base_model.rank))

    @contextmanager
    def use_factors(self, factors: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Compute with other factors meanwhile, or with the base alone."""
        own = {name: parameter.detach().clone() for name, parameter in self._adapters.parameters.items()}
        if factors is None:
            self._turn_off()
        else:
            self._adapters.load(factors)
            self.after_update()
        try:
            yield
        finally:
            self._adapters.load(own)
            self.after_update()

    @torch.no_grad()
    def _turn_off(self) -> None:
        """Compute with the base alone, until the next ``after_update``."""
        params = self._base_model.parameters()
        for name, base in self._base.items():
            params[name].copy_(base)
        self._base_model.after_update()

    def read_factors(self, folder: Path) -> dict[str, Tensor]:
        """Read the factors of a checkpoint."""
        if not (folder / _WEIGHTS).exists():
            raise CheckpointError(
                f"{folder} has no adapter because its weights were trained; leave --lora-rank out, or start from "
                "it as --hf-checkpoint."
            )
        shapes = {name: p.shape for name, p in self._adapters.parameters.items()}
        try:
            tensors = read_adapter(folder / peft.FOLDER, self._lora, skip=self.saved_tensors)
        except (KeyError, RuntimeError):  # a tensor is missing, is of no target, or cannot be one of experts
            tensors = {}
        if {name: t.shape for name, t in tensors.items()} != shapes:
            raise CheckpointError(
                f"{folder / peft.FOLDER} holds other adapters than --lora-rank and --target-modules select."
            )
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def enable_features(self, layers: Sequence[int]) -> None:
        """Return the features of a draft model, which are those of the base with the adapters."""
        assert isinstance(self._base_model, ProvidesFeatures), "a rule requires a model with features"
        self._base_model.enable_features(layers)

    @property
    def pipeline_size(self) -> int:
        return self._base_model.pipeline_size if isinstance(self._base_model, Pipelined) else 1

    def seconds_per_token(self) -> float | None:
        return self._base_model.seconds_per_token() if isinstance(self._base_model, ReportsTokenTime) else None

    # -- checkpoints ---------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        self._save_weights(folder)
        self.save_adapters(folder, self._adapters)

    def save_adapters(self, folder: Path, adapters: LoraAdapters) -> None:
        """Write adapters over this base in PEFT's format into a subfolder."""
        (folder / peft.FOLDER).mkdir(exist_ok=True)
        found = {peft.peft_tensor_name(name): tensor for name, tensor in self._export_adapters(adapters).items()}
        save_file(found, folder / _WEIGHTS, metadata={"format": "pt"})
        write_json(folder / _CONFIG, self._peft_config())

    def _export_adapters(self, adapters: LoraAdapters) -> dict[str, Tensor]:
        return adapters.export()

    def _save_weights(self, folder: Path) -> None:
        self._base_model.save(folder)

    def save_plan(self) -> SavePlan | None:
        plan = self._base_model.save_plan()
        if plan is None:
            return None
        return self.plan_adapters(plan, self._adapters)

    def plan_adapters(self, plan: SavePlan, adapters: LoraAdapters) -> SavePlan:
        """Add adapters over this base, in PEFT's format in a subfolder, to what is saved."""
        return replace(
            plan,
            extra_files={**plan.extra_files, _WEIGHTS: _list_units(adapters)},
            json_files={**plan.json_files, _CONFIG: self._peft_config()},
        )

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        self._adapters.load(self.read_factors(folder))
        params, plan = self._base_model.parameters(), self._base_model.save_plan()
        saved = {} if plan is None else plan.dtypes()
        rounded = {name: dtype for name, dtype in saved.items() if name in params and params[name].dtype != dtype}
        frozen = {name: params[name].detach().clone() for name in rounded if name not in self._base}
        self._load_weights(folder)
        self._check_base(folder, frozen, rounded)
        for name, value in frozen.items():
            params[name].copy_(value)
        self.after_update()

    def _load_weights(self, folder: Path) -> None:
        self._base_model.load(folder)

    def _check_base(self, folder: Path, frozen: Mapping[str, Tensor], rounded: Mapping[str, torch.dtype]) -> None:
        """Raise an error if the weights of a checkpoint, ``rounded`` in its files, are not this base plus its adapters.

        ``frozen`` are weights of the base without an adapter.
        """
        params = self._base_model.parameters()
        for name, base in {**self._base, **frozen}.items():
            merged = base.clone()
            if name in self._base:
                self._merge(name, merged, base)
            in_file = merged.to(rounded.get(name, merged.dtype)).to(merged.dtype)
            loaded = params[name].detach()
            if not torch.equal(merged, loaded) and not torch.equal(in_file, loaded):
                raise self._build_base_error(folder, name)

    def _build_base_error(self, folder: Path, name: str) -> CheckpointError:
        return CheckpointError(
            f"{folder} was trained over another base than {self._folder}, or merged on another type of device (see "
            f"{name}); use the --hf-checkpoint and --lora-alpha it was trained with."
        )

    def _peft_config(self) -> dict[str, object]:
        return peft.build_peft_config(self._lora, self._base_model.spec, str(self._folder))


class LoraReference:
    """The reference of a policy with adapters: its base with the adapters off, or with those of an earlier version.

    It has no weights of its own.
    """

    def __init__(self, policy: LoraModel) -> None:
        self._policy = policy
        self._factors: dict[str, Tensor] | None = None

    def forward_backward(self, plan: Sequence[MicroBatch], judge: LossCallback) -> list[KeptTensors]:
        assert not torch.is_grad_enabled(), "a reference has no gradients"
        with self._policy.use_factors(self._factors):
            return self._policy.forward_backward(plan, judge)

    def track(self) -> None:
        """Be the policy as it is now, from now on."""
        parameters = self._policy.adapters().parameters
        self._factors = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    def load(self, folder: Path) -> None:
        """Be the policy of a checkpoint."""
        self._factors = self._policy.read_factors(folder)

    def move(self, device: torch.device) -> None:
        if self._factors is not None:
            self._factors = {name: factor.to(device) for name, factor in self._factors.items()}


class UnmergedLoraModel(LoraModel):
    """A LoraModel whose base, which may be packed (quantized once), is never written: adapters are applied beside it.

    Engines have the same base, and are sent the adapters in the model's dtype. Checkpoints have the adapters, and the
    base, dequantized, with the adapters merged into it.
    """

    def _attach(self) -> dict[str, Tensor]:
        self._attach_adapters()
        return {}

    def _attach_adapters(self) -> None:
        self._base_model.attach_adapters(self._adapters, beside=True)

    @torch.no_grad()
    def _turn_off(self) -> None:
        for target in self._lora.targets:
            self._adapters.parameters[peft.lora_b_name(target)].zero_()

    @property
    def _dtype(self) -> torch.dtype:
        return self._base_model.parameters()["embedding.weight"].dtype

    def engine_weights(self) -> dict[str, Tensor]:
        return super().engine_weights() | self._adapters.build_engine_factors(self._dtype)

    def gather(self, name: str, local: Tensor) -> Tensor:
        return self._base_model.gather(name, local) if name in self._base_model.parameters() else local

    def _save_weights(self, folder: Path) -> None:
        self._base_model.export(folder, self._gather_merged)

    def save_plan(self) -> SavePlan | None:
        plan = super().save_plan()
        return None if plan is None else replace(plan, gather_unit=self._gather_merged)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load the adapters; the base stays the one that was loaded at the start, and is compared."""
        self._adapters.load(self.read_factors(folder))
        if is_torch_dist(folder):
            self._compare_torch_dist(folder)
            self.after_update()
            return
        plan = self._base_model.save_plan()
        assert plan is not None, "the native decoder has a save plan"
        dtypes = plan.dtypes()
        for name, stored in hf.load_slices(folder, rank=0, world=1, device="cpu", dtype=dtypes["embedding.weight"]):
            merged = self._gather_merged(name).cpu().to(dtypes[name])
            if not torch.equal(merged, stored.to(dtypes[name])):
                raise self._build_base_error(folder, name)
        self.after_update()

    def _compare_torch_dist(self, folder: Path) -> None:
        """Raise an error on all ranks if the weights of a Megatron checkpoint are not this base plus its adapters."""
        model = find_torch_dist_model(self)
        assert model is not None, "only a model of Megatron loads its checkpoints"
        name = model.find_different_weight(folder, self._gather_merged)
        if name is not None:
            raise self._build_base_error(folder, name)

    @torch.no_grad()
    def _gather_merged(self, name: str) -> Tensor:
        """Return a full weight, dequantized, with its adapters merged into it; rounded once by the caller.

        It is computed on the device of training, also while the model is on the host: a resumed run compares its bits.
        """
        params, quantized = self._base_model.parameters(), plan_quantization(self._base_model.spec).get(name)
        adapted = name in self._adapters.targets_by_param
        suffixes = ("",) if quantized is None else quantized.suffixes
        parts = {
            f"{name}{s}": self._base_model.gather(f"{name}{s}", params[f"{name}{s}"].detach()).to(self._merges_on)
            for s in suffixes
        }
        base = parts[name]
        if quantized is not None:
            block = row_block(quantized.format, base.shape[-2], quantized.segments, quantized.tensor_parallel_size)
            packed = QuantizedTensor.from_tensors(quantized.format, name, parts, block)
            base = dequantize(packed, torch.float32 if adapted else self._dtype)
        if not adapted:
            return base
        merged = base.clone()
        self._adapters.merge(name, merged, base)
        return merged


def list_factor_matrices(adapters: LoraAdapters) -> dict[str, MuonMatrices]:
    """Return the factors as Muon's matrices; those of experts are a matrix each."""
    magnitudes = {peft.magnitude_name(target) for target in adapters.lora.targets}
    shapes = {n: tuple(factor.shape) for n, factor in adapters.parameters.items() if n not in magnitudes}
    return {name: MuonMatrices(shape, ((0, shape[-2], 1),)) for name, shape in shapes.items()}


def _list_units(adapters: LoraAdapters) -> tuple[SaveUnit, ...]:
    """List what a checkpoint has of the factors; those of experts are written as PEFT has them."""
    units: list[SaveUnit] = []
    for target in adapters.lora.targets:
        names = peft.lora_a_name(target), peft.lora_b_name(target)
        for name, pieces in zip(names, peft.list_factor_files(adapters.lora, target), strict=True):
            pieces = tuple(replace(piece, hf_name=peft.peft_tensor_name(piece.hf_name)) for piece in pieces)
            factor = adapters.parameters[name]
            shape, dtype = tuple(factor.shape), factor.dtype
            if not target.is_stacked:
                units.append(SaveUnit(name=name, shape=shape, dtype=dtype, pieces=pieces))
                continue
            units.append(
                _StackedUnit(name=name, shape=shape, dtype=dtype, pieces=pieces, target=target, is_a=name == names[0])
            )
        if adapters.lora.use_dora:
            name = peft.magnitude_name(target)
            pieces = peft.list_magnitude_files(adapters.lora, target)
            pieces = tuple(replace(piece, hf_name=peft.peft_tensor_name(piece.hf_name)) for piece in pieces)
            shape, dtype = target.magnitude_shape, adapters.parameters[name].dtype
            units.append(SaveUnit(name=name, shape=shape, dtype=dtype, pieces=pieces))
    return tuple(units)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StackedUnit(SaveUnit):
    """A factor of experts that are one tensor in the checkpoint."""

    target: LoraTarget
    is_a: bool

    def views(self, param: Tensor | QuantizedTensor) -> list[Tensor]:
        assert isinstance(param, Tensor)
        return [encode_factor(param.detach(), is_a=self.is_a, target=self.target)]
