"""A decoder whose weights stay as they are while adapters to them are trained, alone or shared by ranks.

The weights under the usual names are base and adapters together, made anew after every update: what is published,
saved and computed with. Each rank has its part of those, and all of the adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles.core.errors import CheckpointError
from miles.models import peft
from miles.models.files import write_json
from miles.models.lora import Adapters
from miles.models.lora_targets import Lora
from miles.models.matrices import Matrices
from miles.models.outline import Outline, Unit
from miles.models.pieces import Piece
from miles.models.spec import DecoderSpec
from miles.train.optim import whole_norm
from miles.train.roles import Judge, Kept, Paced, TrainModel
from miles.train.rows import Rows

_WEIGHTS, _CONFIG = f"{peft.FOLDER}/{peft.WEIGHTS}", f"{peft.FOLDER}/{peft.CONFIG}"


class Trunk(TrainModel, Protocol):
    """A frozen model that adapters can be added to."""

    @property
    def spec(self) -> DecoderSpec: ...
    def adapt(self, adapters: Adapters) -> None: ...
    def first_row(self, name: str) -> int: ...
    def added(self, grad: Tensor) -> Tensor: ...


class AdaptedModel:
    """A TrainModel over a frozen ``trunk``, which holds the weights of the model in the folder ``base``.

    New adapters come of ``seed``; or they are those of the folder ``start``, in PEFT's format.
    """

    def __init__(self, trunk: Trunk, lora: Lora, *, base: Path, seed: int, start: Path | None = None) -> None:
        self._trunk, self._lora, self._folder = trunk, lora, base
        self._adapters = Adapters(lora, device=trunk.device, seed=seed)
        trunk.adapt(self._adapters)
        parts = trunk.parameters()
        self._base = {ours: parts[ours].detach().clone() for ours in self._adapters.places}
        if start is not None:
            self._adapters.fill(_read(start))
            self.updated()

    def adapters(self) -> Adapters:
        """What is trained."""
        return self._adapters

    @property
    def device(self) -> torch.device:
        return self._trunk.device

    def parameters(self) -> Mapping[str, Tensor]:
        return {**self._trunk.parameters(), **self._adapters.parameters}

    def settle(self) -> None:
        self._trunk.settle()
        every = list(self._adapters.parameters.values())
        flat = torch.cat([torch.zeros_like(p).view(-1) if p.grad is None else p.grad.view(-1) for p in every])
        for parameter, grad in zip(every, self._trunk.added(flat).split([p.numel() for p in every]), strict=True):
            parameter.grad = grad.view_as(parameter)

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        return whole_norm(grads).to(self.device)

    @torch.no_grad()
    def updated(self) -> None:
        parts = self._trunk.parameters()
        for ours, base in self._base.items():
            self._adapters.merge(ours, parts[ours], base, self._trunk.first_row(ours))
        self._trunk.updated()

    def gather(self, name: str, local: Tensor) -> Tensor:
        return local if name in self._adapters.parameters else self._trunk.gather(name, local)

    def cut(self, name: str, whole: Tensor) -> Tensor:
        return whole if name in self._adapters.parameters else self._trunk.cut(name, whole)

    def matrices(self) -> Mapping[str, Matrices]:
        return {}

    def move(self, device: torch.device) -> None:
        self._trunk.move(device)
        self._adapters.move(device)
        self._base = {ours: base.to(device) for ours, base in self._base.items()}

    def each(self, plan: Sequence[Rows], judge: Judge) -> list[Kept]:
        return self._trunk.each(plan, judge)

    def pace(self) -> float | None:
        return self._trunk.pace() if isinstance(self._trunk, Paced) else None

    # -- where it is kept ---------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        self._trunk.save(folder)
        (folder / peft.FOLDER).mkdir(exist_ok=True)
        found = {peft.stored_name(n): p.detach().cpu().contiguous() for n, p in self._adapters.parameters.items()}
        save_file(found, folder / _WEIGHTS, metadata={"format": "pt"})
        write_json(folder / _CONFIG, self._told())

    def outline(self) -> Outline | None:
        whole = self._trunk.outline()
        if whole is None:
            return None
        units = tuple(_unit(name, parameter) for name, parameter in self._adapters.parameters.items())
        return replace(whole, apart={**whole.apart, _WEIGHTS: units}, beside={**whole.beside, _CONFIG: self._told()})

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        if not (folder / _WEIGHTS).exists():
            raise CheckpointError(
                f"{folder} has no adapter: its weights themselves were trained; leave --lora-rank out, or start from "
                "it as --hf-checkpoint."
            )
        tensors = _read(folder / peft.FOLDER)
        shapes = {name: p.shape for name, p in self._adapters.parameters.items()}
        if {name: t.shape for name, t in tensors.items()} != shapes:
            raise CheckpointError(
                f"{folder / peft.FOLDER} holds other adapters than --lora-rank and --target-modules ask for."
            )
        self._adapters.fill(tensors)
        self._trunk.load(folder)
        self._compare(folder)

    def _compare(self, folder: Path) -> None:
        """Refuse a checkpoint whose weights are not this base and its adapters together."""
        parts = self._trunk.parameters()
        for ours, base in self._base.items():
            made = base.clone()
            self._adapters.merge(ours, made, base, self._trunk.first_row(ours))
            if not torch.equal(made, parts[ours].detach()):
                raise CheckpointError(
                    f"{folder} was trained over another base than {self._folder}, or merged on another kind of "
                    f"device (see {ours}); give the --hf-checkpoint and --lora-alpha it was trained with."
                )

    def _told(self) -> dict[str, object]:
        return peft.config_for(self._lora, self._trunk.spec, str(self._folder))


def _unit(name: str, parameter: Tensor) -> Unit:
    shape = tuple(parameter.shape)
    piece = Piece(peft.stored_name(name), shape, 0, shape[0])
    return Unit(name=name, shape=shape, dtype=parameter.dtype, pieces=(piece,))


def _read(folder: Path) -> dict[str, Tensor]:
    found = load_file(folder / peft.WEIGHTS)
    return {name.removeprefix(peft.stored_name("")): tensor for name, tensor in found.items()}
