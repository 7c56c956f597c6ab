"""LoRA adapters: two low-rank factors of every target matrix are trained, over a frozen base.

Over a base in the model's dtype the weight is base plus their product:

    W' = round(W + scale * B A)        by ``merge``, in engine and trainer, so that both compute with the same bits

The decoder's own parameters are W'. The base is kept separately and never written. A forward pass uses W'; backward
gives the factors their gradient without computing that of W':  dB = s dY^T (X A^T),  dA = s (dY B)^T X.

Unmerged, which they are over a packed base, the decoder's parameters are the base, and the factors, rounded to the
model's dtype, are applied beside it (``layers.lora``); an engine's decoder has them as parameters of its own
(``lora.layout``).

Routed experts have their factors stacked; those that experts share have one matrix for all of them. A rank of a sharded
model has all factors, uses the part that belongs to its part of a weight, and gets the gradient of that part.

DoRA trains the length of every row too: W' = round(m / |V| * V) with V = W + scale * B A. The gradient of the factors
takes |V| as constant, as the paper proposes and PEFT does. Dropout is a term beside the merged weight in training
forwards, whose masks follow from the seed, the factors, and the number of the micro-batch.

The output layer computes no output of its own: whoever computes log-probs applies its factors (``head_factors``).

Shapes: T tokens, I inputs, O outputs of a projection, N outputs of the fused projection, r rank, E experts, R rows
sorted by expert.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from miles.core.errors import UsageError
from miles.kernels.batch_invariant.linear import linear_forward
from miles.kernels.moe.grouped_gemm import SortedRows, grouped_linear
from miles.models.checkpoint.param_slices import HfSlice
from miles.models.checkpoint.peft import (
    WEIGHTS,
    list_factor_files,
    list_magnitude_files,
    lora_a_name,
    lora_b_name,
    magnitude_name,
    peft_tensor_name,
)
from miles.models.hf_adapter.decoder import find_linear, set_adapter
from miles.models.layers.linear import Linear
from miles.models.layers.moe import MoeMlp
from miles.models.lora.dora import DoraAdapter, ExpertDoraAdapter, compute_dora_scale
from miles.models.lora.layout import LORA_A, LORA_B, build_layout, factor_name
from miles.models.lora.targets import LM_HEAD_PARAM, LoraSpec, LoraTarget

# Values of the product that are computed at a time.
_CHUNK_VALUES = 1 << 24


@torch.no_grad()
def merge(
    out_OI: Tensor,
    base_OI: Tensor,
    b_Or: Tensor,
    a_rI: Tensor,
    scale: float,
    magnitude_O: Tensor | None = None,
    norm_O: Tensor | None = None,
    *,
    knows_norms: bool = False,
) -> None:
    """Write base plus scaled product into ``out``; where the product is zero, the base's exact bits.

    Rows are computed independently: any subset gives the same bits as all rows. With magnitudes (DoRA) each row is
    scaled to its own, and ``norm_O`` receives the lengths that rows have without, unless it has them already. Factors
    may be on another device than the base, where the result is computed.
    """
    step = max(1, _CHUNK_VALUES // a_rI.shape[1])
    a_rI, b_Or = a_rI.to(base_OI.device), b_Or.to(base_OI.device)
    factor_Ir = a_rI.T.contiguous()
    for start in range(0, len(base_OI), step):
        rows = slice(start, start + step)
        delta_OI = linear_forward(b_Or[rows].contiguous(), factor_Ir, None, torch.float32).mul_(scale)
        base = base_OI[rows]
        if magnitude_O is None or norm_O is None:
            out_OI[rows].copy_(torch.where(delta_OI == 0, base, (base.float() + delta_OI).to(base.dtype)))
            continue
        sum_OI = torch.where(delta_OI == 0, base.float(), base.float() + delta_OI)
        # A GEMM whose sums have one order, however many rows there are.
        ones_1I = torch.ones_like(sum_OI[:1])
        if not knows_norms:
            norm_O[rows] = linear_forward(sum_OI.square(), ones_1I, None, torch.float32).squeeze(1).sqrt()
        out_OI[rows].copy_((sum_OI * compute_dora_scale(magnitude_O[rows], norm_O[rows]).unsqueeze(1)).to(base.dtype))


@dataclass(frozen=True, slots=True)
class ParamPart:
    """What a rank has of a parameter: its ``experts`` from first to last, and the full number of every row and column.

    None is all of them. Rows and columns of number -1 are padding.
    """

    experts: tuple[int, int] | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None

    def narrow(self, dim: int, first: int, last: int, shape: Sequence[int]) -> ParamPart:
        """Return indices ``first`` to ``last`` of dimension ``dim`` of this part, whose shape is given."""
        if (first, last) == (0, shape[dim]):
            return self
        if len(shape) == 3 and dim == 0:
            start = 0 if self.experts is None else self.experts[0]
            return ParamPart((start + first, start + last), self.rows, self.columns)
        assert dim == len(shape) - 2, "columns are not sharded any further"
        rows = torch.arange(shape[dim]) if self.rows is None else self.rows
        return ParamPart(self.experts, rows[first:last], self.columns)


WHOLE = ParamPart()
PartOf = Callable[[str], ParamPart]
"""Which part of a decoder's parameter a rank has, by its name."""


Rows = tuple[int, int] | Tensor
"""Rows of a part of a weight: from first to last, or the number of each."""


@dataclass(frozen=True, slots=True)
class TargetPart:
    """The factors of a target as a part of a weight needs them; ``rows`` are those of the part that it is."""

    rows: Rows
    a: Tensor
    b: Tensor
    own_rows: Tensor | None
    columns: Tensor | None
    experts: tuple[int, int] | None
    target: LoraTarget

    def factors(self, *, expand: bool = True) -> tuple[Tensor, Tensor]:
        """Return the factors; of experts, those in the part, shared ones as often as there are experts, or once."""
        a, b = _select(self.a, -1, self.columns), _select(self.b, -2, self.own_rows)
        if self.experts is None:
            return a, b
        first, last = self.experts
        count = last - first if expand else 1
        a, b = (f.expand(count, *f.shape[1:]) if len(f) == 1 else f[first:last] for f in (a, b))
        return a, b


def _select(factor: Tensor, dim: int, index: Tensor | None) -> Tensor:
    """Select along a dimension; -1 selects zeros."""
    if index is None:
        return factor
    index = index.to(factor.device)
    found = factor.index_select(dim, index.clamp(min=0))
    mask = (index >= 0).to(factor.dtype)
    return found * (mask if dim == -1 else mask.unsqueeze(-1))


def _fuse_factors(parts: Sequence[TargetPart], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the A and B factors of targets in one weight, one target after the other, rounded to ``dtype``."""
    factors = [part.factors(expand=False) for part in parts]
    return torch.cat([a.to(dtype) for a, _ in factors]), torch.cat([b.to(dtype) for _, b in factors])


def compute_factor_grads(
    x_TI: Tensor, dy_TN: Tensor, rows: Sequence[Rows], scale: float, factors: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of the factors A and B of each target, from those of the outputs."""
    grads: list[Tensor] = []
    for own, a_rI, b_Or in zip(rows, factors[::2], factors[1::2], strict=True):
        dy_TO = dy_TN.index_select(1, own.to(dy_TN.device)) if isinstance(own, Tensor) else dy_TN[:, slice(*own)]
        xa_Tr = x_TI @ a_rI.to(x_TI.dtype).T
        dyb_Tr = dy_TO @ b_Or.to(dy_TO.dtype)
        grads.append((dyb_Tr.T @ x_TI).to(a_rI.dtype).mul_(scale))
        grads.append((dy_TO.T @ xa_Tr).to(b_Or.dtype).mul_(scale))
    return grads


class _LoraGradient(torch.autograd.Function):
    """Identity of a projection's output; its gradient also goes to the factors."""

    @staticmethod
    def forward(ctx: Any, y_TN: Tensor, x_TI: Tensor, scale: float, rows: tuple[Rows, ...], *factors: Tensor) -> Tensor:
        ctx.scale, ctx.rows = scale, rows
        ctx.save_for_backward(x_TI, *factors)
        return y_TN.view_as(y_TN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *factors = ctx.saved_tensors
        x_TI, rows_TN = x.reshape(-1, x.shape[-1]), grad_TN.reshape(-1, grad_TN.shape[-1])
        grads = compute_factor_grads(x_TI, rows_TN, ctx.rows, ctx.scale, factors)
        return (grad_TN, None, None, None, *grads)


class _ExpertLoraGradient(torch.autograd.Function):
    """Identity of a grouped GEMM's output; its gradient also goes to the factors of every expert."""

    @staticmethod
    def forward(
        ctx: Any,
        y_RN: Tensor,
        x_RI: Tensor,
        scale: float,
        rows: tuple[tuple[int, int], ...],
        sorted_rows: SortedRows,
        *factors: Tensor,
    ) -> Tensor:
        ctx.scale, ctx.rows = scale, rows
        ctx.sorted_rows = sorted_rows
        ctx.save_for_backward(x_RI, *factors)
        return y_RN.view_as(y_RN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_RI, *factors = ctx.saved_tensors
        grads: list[Tensor] = []
        for (start, stop), a_ErI, b_EOr in zip(ctx.rows, factors[::2], factors[1::2], strict=True):
            dy_RO = grad_RN[:, start:stop].contiguous()
            # The gradient of the low-rank path, by that of grouped GEMMs; the path's own output is not used.
            with torch.enable_grad():
                a, b = (f.detach().to(x_RI.dtype).contiguous().requires_grad_() for f in (a_ErI, b_EOr))
                low_RO = grouped_linear(grouped_linear(x_RI, a, ctx.sorted_rows), b, ctx.sorted_rows)
            grad_a, grad_b = torch.autograd.grad(low_RO, (a, b), dy_RO)
            grads.append(grad_a.to(a_ErI.dtype) * ctx.scale)
            grads.append(grad_b.to(b_EOr.dtype) * ctx.scale)
        return (grad_RN, None, None, None, None, *grads)


class LoraAdapter:
    """The factors of the targets inside one decoder matrix, applied to that matrix's output."""

    def __init__(self, targets: Sequence[TargetPart], scale: float, dropout: Dropout | None = None) -> None:
        self._targets, self._scale = tuple(targets), scale
        self._dropout = dropout
        self._rows = tuple(target.rows for target in targets)

    def __call__(self, y_TN: Tensor, x_TI: Tensor) -> Tensor:
        """Return ``y``, through which gradients also reach the factors."""
        if not torch.is_grad_enabled():
            return y_TN
        if self._dropout is not None:
            return self._apply_dropped(y_TN, x_TI, self._dropout)
        return _LoraGradient.apply(y_TN, x_TI, self._scale, self._rows, *self._factors())  # pyright: ignore[reportReturnType]

    def _factors(self) -> list[Tensor]:
        return [factor for target in self._targets for factor in target.factors()]

    def _apply_dropped(self, y_TN: Tensor, x_TI: Tensor, dropout: Dropout) -> Tensor:
        """Replace the adapters' part of ``y``, which is that of all inputs, by that of inputs some of which are 0."""
        for target in self._targets:
            assert isinstance(target.rows, tuple)
            start, stop = target.rows
            a_rI, b_Or = (factor.detach().to(x_TI.dtype) for factor in target.factors())
            dropped_TI = dropout(x_TI, target)
            change_TO = self._scale * (((dropped_TI - x_TI) @ a_rI.T) @ b_Or.T)
            y_TN = y_TN + nn.functional.pad(change_TO, (start, y_TN.shape[-1] - stop))
            y_TN = _LoraGradient.apply(y_TN, dropped_TI, self._scale, (target.rows,), *target.factors())  # pyright: ignore[reportAssignmentType]
        return y_TN


class Dropout:
    """Dropout of the inputs of adapters: its masks follow from ``seed``, ``key`` and the target.

    Whoever runs a forward sets ``key``; a recomputed forward has the same.
    """

    def __init__(self, probability: float, seed: int, targets: Sequence[LoraTarget]) -> None:
        self._probability, self._seed = probability, seed
        self._numbers = {target.module: number for number, target in enumerate(targets)}
        self.key = 0

    def __call__(self, x_TI: Tensor, target: TargetPart) -> Tensor:
        """Return the inputs for a target: some are zero, and the others larger."""
        number = self._numbers[target.target.module]
        digest = hashlib.blake2b(f"{self._seed} {self.key} {number}".encode(), digest_size=7).digest()
        generator = torch.Generator(x_TI.device).manual_seed(int.from_bytes(digest))
        kept = 1 - self._probability
        # That of all inputs, of which a tensor-parallel rank may have some: masks do not depend on their number.
        shape = (*x_TI.shape[:-1], target.target.inputs)
        mask_TI = torch.empty(shape, device=x_TI.device).bernoulli_(kept, generator=generator)
        if target.columns is not None:
            mask_TI = mask_TI.index_select(-1, target.columns.to(x_TI.device).clamp(min=0))
        return x_TI * (mask_TI / kept).to(x_TI.dtype)


class ExpertLoraAdapter(LoraAdapter):
    """The same for a stacked tensor of experts, applied to the output of its grouped GEMM."""

    def __call__(self, y_RN: Tensor, x_RI: Tensor, rows: SortedRows | None = None) -> Tensor:
        assert rows is not None
        if self._dropout is None:
            return _ExpertLoraGradient.apply(y_RN, x_RI, self._scale, self._rows, rows, *self._factors())  # pyright: ignore[reportReturnType]
        if not torch.is_grad_enabled():
            return y_RN
        for target in self._targets:
            assert isinstance(target.rows, tuple)
            start, stop = target.rows
            a_ErI, b_EOr = (factor.detach().to(x_RI.dtype).contiguous() for factor in target.factors())
            dropped_RI = self._dropout(x_RI, target)
            change_RO = self._scale * grouped_linear(grouped_linear(dropped_RI - x_RI, a_ErI, rows), b_EOr, rows)
            y_RN = y_RN + nn.functional.pad(change_RO, (start, y_RN.shape[-1] - stop))
            y_RN = _ExpertLoraGradient.apply(  # pyright: ignore[reportAssignmentType]
                y_RN, dropped_RI, self._scale, (target.rows,), rows, *target.factors()
            )
        return y_RN


def load_engine_factors(
    folder: Path, lora: LoraSpec, *, device: torch.device | str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Load the factors of a PEFT folder by the names of an engine's parameters."""
    adapters = LoraAdapters(lora, device=torch.device(device), seed=0)
    adapters.load(read_adapter(folder, lora))
    return adapters.build_engine_factors(dtype)


def read_adapter(folder: Path, lora: LoraSpec, *, skip: Sequence[str] = ()) -> dict[str, Tensor]:
    """Read the factors of a PEFT folder by their parameter names; KeyError if one is not there.

    KeyError too if there is another tensor, unless it is to ``skip``.
    """
    found = load_file(folder / WEIGHTS)
    stored = {name.removeprefix(peft_tensor_name("")): tensor for name, tensor in found.items()}
    factors: dict[str, Tensor] = {}
    for target in lora.targets:
        for name, pieces, shape in _list_factors(lora, target):
            tensors = [stored.pop(piece.hf_name) for piece in pieces]
            factors[name] = _share_factor(
                decode_factor(tensors, is_a=name == lora_a_name(target), target=target), shape, target
            )
        if lora.use_dora:
            magnitudes = [stored.pop(piece.hf_name) for piece in list_magnitude_files(lora, target)]
            factors[magnitude_name(target)] = magnitudes[0] if len(magnitudes) == 1 else torch.stack(magnitudes)
    if stored.keys() - set(skip):
        raise KeyError(min(stored.keys() - set(skip)))
    return factors


def _list_factors(lora: LoraSpec, target: LoraTarget) -> list[tuple[str, tuple[HfSlice, ...], tuple[int, ...]]]:
    """List name, tensors in the file and shape of both factors."""
    names = lora_a_name(target), lora_b_name(target)
    return list(zip(names, list_factor_files(lora, target), lora.factor_shapes(target), strict=True))


def decode_factor(tensors: Sequence[Tensor], *, is_a: bool, target: LoraTarget) -> Tensor:
    """Return a factor from its tensors in the file; of experts, one matrix for each."""
    if not target.num_experts:
        return tensors[0]
    if not target.is_stacked:
        return torch.stack(list(tensors))
    if is_a:
        return tensors[0].unflatten(0, (target.num_experts, -1))
    return tensors[0].unflatten(1, (-1, target.num_experts)).permute(2, 0, 1)


def _share_factor(factor: Tensor, shape: tuple[int, ...], target: LoraTarget) -> Tensor:
    """Return a factor in its ``shape``; UsageError if experts are to share it and do not."""
    if not target.num_experts:
        return factor
    if shape[0] == 1 and not bool((factor == factor[:1]).all()):
        raise UsageError(f"the experts of {target.module} do not share a factor; remove --experts-shared-outer-loras.")
    return factor[: shape[0]].contiguous()


def encode_factor(factor: Tensor, *, is_a: bool, target: LoraTarget) -> Tensor:
    """Return a factor of a stacked target as the file has it."""
    full = factor.expand(target.num_experts, *factor.shape[1:])
    return full.flatten(0, 1) if is_a else full.permute(1, 2, 0).flatten(1)


class LoraAdapters:
    """All factors of a model, float32 and unsharded, by PEFT's names; new ones add nothing at first.

    ``seed`` determines the initial values, whatever the device and the number of ranks.
    """

    def __init__(self, lora: LoraSpec, *, device: torch.device, seed: int) -> None:
        self.lora = lora
        self.parameters: dict[str, Tensor] = {}
        self._norms: dict[str, Tensor] = {}
        self.dropout = Dropout(lora.dropout, seed, lora.targets) if lora.dropout else None
        for number, target in enumerate(lora.targets):
            random = torch.Generator().manual_seed((seed << 20) + number)
            bound = 1 / math.sqrt(target.inputs)  # PEFT's initialization
            shape_a, shape_b = lora.factor_shapes(target)
            a_rI = torch.empty(shape_a).uniform_(-bound, bound, generator=random)
            self.parameters[lora_a_name(target)] = nn.Parameter(a_rI.to(device))
            self.parameters[lora_b_name(target)] = nn.Parameter(torch.zeros(shape_b, device=device))
            if lora.use_dora:  # to be set to the lengths of the base's rows
                shape = target.magnitude_shape
                self.parameters[magnitude_name(target)] = nn.Parameter(torch.ones(shape, device=device))
                self._norms[target.module] = torch.zeros(shape, device=device)
        self.targets_by_param: dict[str, list[LoraTarget]] = {}
        for target in lora.targets:
            self.targets_by_param.setdefault(target.param_name, []).append(target)

    def attach_beside(
        self, model: nn.Module, part_of: PartOf = lambda name: WHOLE, names: Collection[str] | None = None
    ) -> None:
        """Attach the factors to projections beside their weights; ``part_of`` and ``names`` are as in ``attach``."""
        for name in self.targets_by_param if names is None else names:
            targets = self.targets_by_param[name]
            parts = [] if targets[0].is_head else self._list_parts(targets, part_of(name))
            if not parts:
                continue
            layout = replace(build_layout(self.lora, targets), rows=tuple(part.rows for part in parts))
            if layout.experts is None:
                module = model.get_submodule(name.removesuffix(".weight"))
                assert isinstance(module, Linear), f"{name} is not a projection"
                module.lora = layout
                module.read_factors = partial(_fuse_factors, parts)
                continue
            path, _, attribute = name.rpartition(".")
            moe = model.get_submodule(path)
            assert isinstance(moe, MoeMlp), f"{name} is not a tensor of experts"
            num_a, num_b = (len(factor) for factor in parts[0].factors(expand=False))
            moe.lora[attribute] = replace(layout, experts=(num_a, num_b))
            moe.read_factors[attribute] = partial(_fuse_factors, parts)

    def head_factors(self, part_of: PartOf = lambda name: WHOLE) -> tuple[Tensor, Tensor] | None:
        """Return the factors of the output layer for the part of its rows that a rank has; None without any."""
        if LM_HEAD_PARAM not in self.targets_by_param:
            return None
        parts = self.list_parts(LM_HEAD_PARAM, part_of(LM_HEAD_PARAM))
        return parts[0].factors() if parts else None

    def list_parameters(self, name: str) -> list[str]:
        """List the names of the factors, and of DoRA's magnitudes, of all targets in a decoder's weight."""
        targets = self.targets_by_param[name]
        names = [each for target in targets for each in (lora_a_name(target), lora_b_name(target))]
        return names + [magnitude_name(target) for target in targets] if self.lora.use_dora else names

    def fuse_factors(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the A and B factors of all targets in a decoder's weight, as its decoder would hold them."""
        return _fuse_factors(self._list_parts(self.targets_by_param[name], WHOLE), dtype)

    @torch.no_grad()
    def build_engine_factors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return new tensors of all factors in ``dtype``, by the names of an engine's parameters."""
        factors: dict[str, Tensor] = {}
        for name in self.targets_by_param:
            for factor, tensor in zip((LORA_A, LORA_B), self.fuse_factors(name, dtype), strict=True):
                factors[factor_name(name, factor)] = tensor
        return factors

    def attach(
        self, model: nn.Module, part_of: PartOf = lambda name: WHOLE, names: Collection[str] | None = None
    ) -> None:
        """Attach the adapters to a decoder's projections, into whose weights they are merged.

        ``part_of`` returns the part of a weight that this decoder has; ``names`` are the weights, by default all.
        """
        for name in self.targets_by_param if names is None else names:
            targets = self.targets_by_param[name]
            if targets[0].is_head:  # whose gradients come from those of the logits (``head_factors``)
                continue
            if targets[0].num_experts:
                parts = self._list_parts(targets, part_of(name))
                path, _, attribute = name.rpartition(".")
                moe = model.get_submodule(path)
                assert isinstance(moe, MoeMlp), f"{name} is not a tensor of experts"
                moe.adapters[attribute] = self._build_expert_adapter(moe, attribute, parts)
            else:
                module = model.get_submodule(name.removesuffix(".weight"))
                assert isinstance(module, Linear), f"{name} is not a projection"
                module.adapter = self._build_adapter(module, targets, part_of(name))

    def attach_to_linears(self, model: nn.Module) -> None:
        """Attach the adapters to the linear layers of a transformers module, into whose weights they are merged."""
        for target in self.lora.targets:
            module = find_linear(model, target.module, target.piece.shape)
            set_adapter(module, self._build_adapter(module, [target], WHOLE))

    def _build_adapter(
        self, module: nn.Linear, targets: Sequence[LoraTarget], part: ParamPart
    ) -> LoraAdapter | DoraAdapter:
        if self.lora.use_dora:
            return self._build_dora(module, targets, part)
        return LoraAdapter(self._list_parts(targets, part), self.lora.scale, self.dropout)

    def _build_expert_adapter(
        self, moe: MoeMlp, attribute: str, parts: Sequence[TargetPart]
    ) -> ExpertLoraAdapter | ExpertDoraAdapter:
        if not self.lora.use_dora:
            return ExpertLoraAdapter(parts, self.lora.scale, self.dropout)
        magnitudes = [self.parameters[magnitude_name(each.target)] for each in parts]
        norms = [self._norms[each.target.module] for each in parts]

        def read_bias() -> Tensor | None:
            return moe.down_bias if attribute == "down" else moe.gate_up_bias

        return ExpertDoraAdapter(parts, magnitudes, norms, self.lora.scale, read_bias)

    def _build_dora(self, module: nn.Linear, targets: Sequence[LoraTarget], part: ParamPart) -> DoraAdapter:
        parts = self._list_parts(targets, part)
        magnitudes = [self.parameters[magnitude_name(each.target)] for each in parts]
        norms = [self._norms[each.target.module] for each in parts]
        return DoraAdapter(parts, magnitudes, norms, self.lora.scale, module)

    @torch.no_grad()
    def clear_norms(self) -> None:
        """Forget the lengths of rows (DoRA), before all parts are merged again."""
        for norm_O in self._norms.values():
            norm_O.zero_()

    @torch.no_grad()
    def share_norms(self, maximum: Callable[[Tensor], Tensor]) -> None:
        """Share the lengths of rows (DoRA), by a ``maximum`` over ranks: each has those of the rows that it merged."""
        if self._norms:
            norms = list(self._norms.values())
            found = maximum(torch.cat([norm.flatten() for norm in norms])).split([norm.numel() for norm in norms])
            for norm, values in zip(norms, found, strict=True):
                norm.copy_(values.view_as(norm))

    @torch.no_grad()
    def reset_magnitudes(self) -> None:
        """Set the magnitudes (DoRA) to the lengths that rows have without them: nothing is scaled then."""
        for target in self.lora.targets if self.lora.use_dora else ():
            self.parameters[magnitude_name(target)].copy_(self._norms[target.module])

    def list_parts(self, name: str, part: ParamPart) -> list[TargetPart]:
        """List the targets in a part of a decoder's weight; those of which it has no row are left out."""
        return self._list_parts(self.targets_by_param[name], part)

    def _list_parts(self, targets: Sequence[LoraTarget], part: ParamPart) -> list[TargetPart]:
        parts: list[TargetPart] = []
        for target in targets:
            start, stop = target.rows
            rows, own_rows = target.rows, None
            if part.rows is not None:
                places = ((part.rows >= start) & (part.rows < stop)).nonzero().flatten()
                if not len(places):
                    continue
                first, last = int(places[0]), int(places[-1]) + 1
                found = part.rows[first:last]
                if len(places) == int((found >= 0).sum()):
                    rows, own_rows = (first, last), torch.where(found < 0, found, found - start)
                else:  # rows of other targets are in between
                    rows, own_rows = places, part.rows[places] - start
            experts = part.experts or (0, target.num_experts) if target.num_experts else None
            a, b = self.factors(target)
            parts.append(TargetPart(rows, a, b, own_rows, part.columns, experts, target))
        return parts

    def factors(self, target: LoraTarget) -> tuple[Tensor, Tensor]:
        """Return the factors of a target: [r, I] and [O, r], of experts [E, r, I] and [E, O, r]."""
        return self.parameters[lora_a_name(target)], self.parameters[lora_b_name(target)]

    @torch.no_grad()
    def merge(self, name: str, out: Tensor, base: Tensor, part: ParamPart = WHOLE) -> None:
        """Write base plus products into ``out``, which are a part of a weight; rows of no target are not written."""
        for target in self._list_parts(self.targets_by_param[name], part):
            a, b = target.factors()
            if isinstance(target.rows, Tensor):
                index = target.rows.to(base.device)
                merged = torch.empty_like(base[index])
                merge(merged, base[index], b, a, self.lora.scale)
                out[index] = merged
                continue
            rows = slice(*target.rows)
            if target.experts is None:
                self._merge_rows(target, out[rows], base[rows], a, b)
                continue
            experts = range(*target.experts)
            for expert, out_NI, base_NI, a_rI, b_Or in zip(experts, out, base, a, b, strict=True):
                self._merge_rows(target, out_NI[rows], base_NI[rows], a_rI, b_Or, expert)

    def _merge_rows(
        self, part: TargetPart, out_OI: Tensor, base_OI: Tensor, a_rI: Tensor, b_Or: Tensor, expert: int | None = None
    ) -> None:
        """Merge the factors of one matrix, of an expert by its number; DoRA also computes the lengths of its rows."""
        if not self.lora.use_dora:
            merge(out_OI, base_OI, b_Or, a_rI, self.lora.scale)
            return
        magnitudes, norms = self.parameters[magnitude_name(part.target)].detach(), self._norms[part.target.module]
        if expert is not None:
            magnitudes, norms = magnitudes[expert], norms[expert]
        index = slice(None) if part.own_rows is None else part.own_rows.to(out_OI.device)
        magnitude_O, norm_O = magnitudes[index], norms[index]
        knows_norms = part.columns is not None
        norm_O = norm_O if knows_norms else torch.empty_like(magnitude_O)
        merge(out_OI, base_OI, b_Or, a_rI, self.lora.scale, magnitude_O, norm_O, knows_norms=knows_norms)
        if not knows_norms:
            norms[index] = norm_O

    @torch.no_grad()
    def compute_norms(self, name: str, base: Tensor) -> None:
        """Compute the lengths of the rows (DoRA) of a whole weight; before a part of its columns is merged."""
        for part in self._list_parts(self.targets_by_param[name], WHOLE):
            a, b = part.factors()
            rows, norms = slice(*part.target.rows), self._norms[part.target.module]
            matrices = [(base[rows], a, b, norms)]
            if part.experts is not None:
                matrices = [(base_NI[rows], *each) for base_NI, *each in zip(base, a, b, norms, strict=True)]
            for base_OI, a_rI, b_Or, norm_O in matrices:
                ones_O = torch.ones_like(norm_O)
                merge(torch.empty_like(base_OI), base_OI, b_Or, a_rI, self.lora.scale, ones_O, norm_O)

    def export(self) -> dict[str, Tensor]:
        """Return the tensors of a PEFT file by their parameter names, on the host."""
        tensors: dict[str, Tensor] = {}
        for target in self.lora.targets:
            for name, pieces, _ in _list_factors(self.lora, target):
                factor = self.parameters[name].detach().cpu()
                if target.is_stacked:
                    factor = encode_factor(factor, is_a=name == lora_a_name(target), target=target)
                tensors |= {
                    piece.hf_name: piece.view(factor).clone(memory_format=torch.contiguous_format) for piece in pieces
                }
            if self.lora.use_dora:
                magnitudes = self.parameters[magnitude_name(target)].detach().cpu()
                tensors |= {p.hf_name: p.view(magnitudes).clone() for p in list_magnitude_files(self.lora, target)}
        return tensors

    def to(self, device: torch.device) -> None:
        """Move the factors to ``device``; they stay the same objects."""
        for tensor in (*self.parameters.values(), *self._norms.values()):
            tensor.data = tensor.data.to(device)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy these values into the factors."""
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])
