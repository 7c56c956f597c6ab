"""The optimizer: gradients clipped by their norm, learning rates by a schedule, and a rule that updates the weights.

Parameters of a low precision have a float32 master each: gradients are added up in it, the update
happens in it, and the parameter is its rounding. A float32 parameter is its own master.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from miles.core.errors import CheckpointError, MilesError, UsageError
from miles.train.adam import Adam
from miles.train.config import TrainConfig
from miles.train.masters import States, Weight, taken
from miles.train.muon import Muon, Sharded
from miles.train.rates import Schedule

Norm = Callable[[Mapping[str, Tensor]], Tensor]
"""The norm of a gradient, given by this rank's parts of it."""

MASTER = "master"
# Halvings that single out one of more parameters than any model has.
_HALVINGS = 20


class GradientError(MilesError):
    """A gradient that is not a number; the weights are those before the step."""


class Rule(Protocol):
    """How some of the weights are updated, and what is remembered for it."""

    def step(self, lr: float, update: int) -> None: ...
    def makers(self) -> dict[str, Callable[[], Tensor]]: ...
    def load(self, state: dict[str, Tensor]) -> None: ...
    def move(self, device: torch.device) -> None: ...
    @property
    def bytes(self) -> int: ...


class Shared(Sharded, Protocol):
    """What an optimizer asks of a model that ranks share."""

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor: ...


class Updates(Protocol):
    """What a trainer and its checkpoints ask of an optimizer; see ``Optimizer`` for what each call means."""

    updates: int

    def step(self) -> tuple[float, float]: ...
    def state(self) -> Mapping[str, Tensor]: ...
    def load(self, state: Mapping[str, Tensor], *, updates: int) -> None: ...
    def move(self, device: torch.device) -> None: ...
    @property
    def bytes(self) -> int: ...


@runtime_checkable
class Equipped(Protocol):
    """A model that may bring an optimizer of its own."""

    def optimizer(self, train: TrainConfig, schedule: Schedule, *, rate: str) -> Updates | None: ...


class Optimizer:
    """Updates live parameters in place. Use: backward passes, then ``step``; gradients are gone after it.

    Matrices are decayed; norms (fewer than two axes) and biases, also those of experts in a stack, are not. ``rate``
    is the flag of the learning rate, for complaints. Where ranks share a model each has an optimizer over its parts of
    the parameters: ``norm`` is then the model's, and so is ``model``, which Muon asks for whole matrices.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        config: TrainConfig,
        schedule: Schedule,
        *,
        rate: str = "--lr",
        norm: Norm | None = None,
        model: Sharded | None = None,
    ) -> None:
        self.updates = 0
        self._norm = norm or whole_norm
        self._rate, self._schedule, self._config = rate, schedule, config
        self._hosted = config.optimizer_cpu_offload
        self._weights = [Weight(name, p, hosted=self._hosted) for name, p in parameters.items()]
        self._rules = self._made(model)

    def step(self) -> tuple[float, float]:
        """One update of every parameter; gives the gradient's norm before clipping, and the learning rate.

        A norm that is not finite raises GradientError and changes nothing.
        """
        grads = {w.name: w.grad for w in self._weights if w.grad is not None}
        total = self._norm(grads)
        norm = float(total)
        if not math.isfinite(norm):
            told = self._complaint(norm)
            self._forget()
            raise GradientError(told)
        clip = self._config.clip_grad
        if clip and norm > clip and grads:
            _scale(list(grads.values()), torch.clamp(clip / (total + 1e-6), max=1.0))
        grads.clear()
        lr = self._schedule.at(self.updates + 1)
        for rule in self._rules:
            rule.step(lr, self.updates + 1)
        self._forget()
        self.updates += 1
        return norm, lr

    def state(self) -> Mapping[str, Tensor]:
        """Everything an exact continuation needs beside the parameters and ``updates``.

        Moments are float32 and shaped like their parameter in whatever form they are held, which the same form takes
        back to the bit; they are made one by one as they are asked for.
        """
        makers = {name: make for rule in self._rules for name, make in rule.makers().items()}
        return States(makers | {f"{MASTER}.{w.name}": w.master.detach for w in self._weights if not w.own})

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], *, updates: int) -> None:
        """Take back what ``state`` gave; the parameters are loaded by their owner."""
        left = dict(state)
        for weight in self._weights:
            if not weight.own:
                weight.master.copy_(taken(left, f"{MASTER}.{weight.name}", weight.master))
        for rule in self._rules:
            rule.load(left)
        if left:
            raise CheckpointError(
                f"the optimizer state holds {min(left)}, which this model does not have "
                f"under --optimizer {self._config.optimizer}."
            )
        self.updates = updates

    def move(self, device: torch.device) -> None:
        """Put the moments and the masters on ``device``; the parameters stay where they are.

        With --optimizer-cpu-offload they are on the host at all times.
        """
        for rule in self._rules:
            rule.move(device)
        for weight in self._weights:
            if not weight.own and not self._hosted:
                weight.master = weight.master.to(device)

    @property
    def bytes(self) -> int:
        """What moments and masters take, wherever they are."""
        return sum(rule.bytes for rule in self._rules) + sum(w.master.nbytes for w in self._weights if not w.own)

    def _made(self, model: Sharded | None) -> list[Rule]:
        if self._config.optimizer == "adam":
            return [Adam(self._weights, self._config)]
        known = {} if model is None else model.matrices()
        if model is None or not known:
            raise UsageError(
                "--optimizer muon needs to know which parameters of a model are matrices, and this one does not say; "
                "use --model-impl native, or --optimizer adam."
            )
        turned = [w for w in self._weights if w.name in known]
        rest = [w for w in self._weights if w.name not in known]
        return [Muon(turned, self._config, model), Adam(rest, self._config)]

    def _forget(self) -> None:
        for weight in self._weights:
            weight.forget()

    def _complaint(self, norm: float) -> str:
        return complaint(self.updates + 1, norm, self._first_bad(), self._rate)

    def _first_bad(self) -> str | None:
        """The first parameter of whose gradient some rank's part is not finite; all ranks find the same.

        They can ask each other nothing but norms, so they halve the list, each time asking for the norm of marks that
        stand for the parts that are bad.
        """
        bad = [w.grad is not None and not bool(w.grad.isfinite().all()) for w in self._weights]
        low, high = 0, 1 << _HALVINGS

        def any_in(start: int, stop: int) -> bool:
            marks = {
                w.name: w.grad.new_full((1,), float(bad[at] and start <= at < stop))
                for at, w in enumerate(self._weights)
                if w.grad is not None
            }
            return float(self._norm(marks)) > 0

        found = any_in(low, high)
        for _ in range(_HALVINGS):
            middle = (low + high) // 2
            low, high = (low, middle) if any_in(low, middle) else (middle, high)
        return self._weights[low].name if found and low < len(self._weights) else None


def optimizer_of(
    parameters: Mapping[str, Tensor],
    train: TrainConfig,
    schedule: Schedule,
    *,
    model: Shared,
    rate: str = "--lr",
) -> Updates:
    """An optimizer over this rank's ``parameters`` of ``model``: the one it brings, or else ours."""
    own = model.optimizer(train, schedule, rate=rate) if isinstance(model, Equipped) else None
    if own is not None:
        return own
    return Optimizer(parameters, train, schedule, rate=rate, norm=model.norm, model=model)


def complaint(update: int, norm: float, first: str | None, rate: str) -> str:
    """What to say of a gradient that is not finite, ``first`` at that parameter."""
    where = "no single parameter: their sum overflows" if first is None else first
    return (
        f"optimizer step {update}: the gradient's norm is {norm} (first at {where}); nothing was updated. "
        f"Look at this batch's rewards and log-probs, and lower {rate} if the loss had been growing."
    )


def whole_norm(grads: Mapping[str, Tensor]) -> Tensor:
    """The norm of a gradient that one rank has all of."""
    return get_total_norm(list(grads.values()), foreach=True) if grads else torch.zeros(())


@torch.no_grad()
def _scale(grads: list[Tensor], factor: Tensor) -> None:
    torch._foreach_mul_(grads, factor.to(grads[0].device))  # pyright: ignore[reportPrivateImportUsage]
