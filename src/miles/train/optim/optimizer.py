"""Optimizer: gradient clipping by global norm, learning-rate schedule, and AdamW or Muon updates of master weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from miles.cluster.host_copies import HostCopies
from miles.core.errors import CheckpointError, MilesError, UsageError
from miles.models.optim_groups import is_vision_param
from miles.train.config import TrainConfig
from miles.train.optim.adam import Adam
from miles.train.optim.lr_scheduler import LRSchedule, build_vision_lr_schedule
from miles.train.optim.master_weights import LazyStates, TrainedParam, pop_state
from miles.train.optim.muon import MatrixModel, Muon
from miles.train.optim.sharded_adam import HasMomentsGroup, ShardedAdam, ShardedMoments

GradNormFn = Callable[[Mapping[str, Tensor]], Tensor]
"""Global norm of a gradient, given this rank's shards."""

MASTER = "master"
# Bisection steps that identify one of more parameters than any model has.
_BISECTIONS = 20


class GradientError(MilesError):
    """A non-finite gradient; the weights are unchanged."""


class UpdateRule(Protocol):
    """Update rule of some of the parameters, with its state."""

    def step(self, lr: float, update: int, scale: Tensor | None = None) -> None: ...
    def state_factories(self) -> dict[str, Callable[[], Tensor]]: ...
    def load(self, state: dict[str, Tensor]) -> None: ...
    def move(self, device: torch.device, copies: HostCopies) -> None: ...
    @property
    def bytes(self) -> int: ...


class ModelWithGradNorm(MatrixModel, Protocol):
    """What the optimizer needs of a sharded model."""

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor: ...


class OptimizerProtocol(Protocol):
    """What a trainer and its checkpoints need of an optimizer; see ``Optimizer``."""

    updates: int

    def step(self, lr: float | None = None) -> tuple[float, float]: ...
    def state(self) -> Mapping[str, Tensor]: ...
    def load(self, state: Mapping[str, Tensor], *, updates: int) -> None: ...
    def move(self, device: torch.device) -> None: ...
    @property
    def bytes(self) -> int: ...


@runtime_checkable
class HasOwnOptimizer(Protocol):
    """A model that may provide its own optimizer."""

    def optimizer(self, train: TrainConfig, schedule: LRSchedule, *, lr_flag: str) -> OptimizerProtocol | None: ...


class Optimizer:
    """Updates live parameters in place. Use: backward passes, then ``step``, which also drops the gradients.

    Weight decay applies to matrices, not to norms (fewer than two axes) and biases. ``lr_flag`` names the
    learning-rate option in error messages. --vision-lr is the vision tower's own, which Adam updates. In distributed
    training each rank has an optimizer over its shards: ``norm`` is the model's, and Muon gathers full matrices through
    ``model``. Where every rank has all parameters, ranks may share the moments (``shards``).
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        config: TrainConfig,
        schedule: LRSchedule,
        *,
        lr_flag: str = "--lr",
        norm: GradNormFn | None = None,
        model: MatrixModel | None = None,
        shards: ShardedMoments | None = None,
    ) -> None:
        self.updates = 0
        self._norm = norm or full_grad_norm
        self._lr_flag = lr_flag
        self._schedule = schedule
        self._config = config
        self._offloaded = config.optimizer_cpu_offload
        self._shards = shards
        self._host_copies = HostCopies()
        self._params = [TrainedParam(name, p, offloaded=self._offloaded) for name, p in parameters.items()]
        vision = [p for p in self._params if config.vision_lr is not None and is_vision_param(p.name)]
        self._rules = self._build_rules([p for p in self._params if p not in vision], model)
        self._rule_schedules = [schedule] * len(self._rules)
        if vision and config.vision_lr is not None:
            self._rules.append(Adam(vision, config))
            self._rule_schedules.append(build_vision_lr_schedule(schedule, config.vision_lr))

    def trained_params(self) -> Sequence[TrainedParam]:
        """Return the parameters with their accumulated gradients, which the caller may replace before a step."""
        return self._params

    def step(self, lr: float | None = None) -> tuple[float, float]:
        """Update all parameters; returns the gradient norm before clipping, and the learning rate.

        ``lr`` replaces the rate of the schedule; a vision tower with a rate of its own keeps that. A non-finite norm
        raises GradientError and changes nothing.
        """
        grads = {p.name: p.grad for p in self._params if p.grad is not None}
        total = self._norm(grads)
        norm = float(total)
        if not math.isfinite(norm):
            message = format_gradient_error(self.updates + 1, norm, self._find_first_bad(), self._lr_flag)
            self._zero_grad()
            raise GradientError(message)
        clip, scale = self._config.clip_grad, None
        if clip and norm > clip and grads:
            scale = torch.clamp(clip / (total + 1e-6), max=1.0).to(next(iter(grads.values())).device)
        grads.clear()
        update = self.updates + 1
        for rule, schedule in zip(self._rules, self._rule_schedules, strict=True):
            rule.step(lr if lr is not None and schedule is self._schedule else schedule.at(update), update, scale)
        self._zero_grad()
        self.updates = update
        return norm, self._schedule.at(update) if lr is None else lr

    def state(self) -> Mapping[str, Tensor]:
        """Return the state that exact resumption needs besides the parameters and ``updates``.

        Moments are float32 and shaped like their parameter whatever their storage format, which restores them bit for
        bit; they are created one by one on access.
        """
        factories = {name: factory for rule in self._rules for name, factory in rule.state_factories().items()}
        factories |= {f"{MASTER}.{p.name}": p.master.detach for p in self._params if not p.is_own_master}
        return LazyStates(factories)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], *, updates: int) -> None:
        """Restore ``state``; the parameters are loaded by their owner."""
        remaining = dict(state)
        for weight in self._params:
            if not weight.is_own_master:
                weight.master.copy_(pop_state(remaining, f"{MASTER}.{weight.name}", weight.master))
        for rule in self._rules:
            rule.load(remaining)
        if remaining:
            raise CheckpointError(
                f"the optimizer state holds {min(remaining)}, which this model does not have "
                f"under --optimizer {self._config.optimizer}."
            )
        self.updates = updates

    def move(self, device: torch.device) -> None:
        """Move moments and masters to ``device``; the parameters stay.

        With --optimizer-cpu-offload they are always on the host.
        """
        for rule in self._rules:
            rule.move(device, self._host_copies)
        if not self._offloaded:
            masters = {f"{MASTER}.{p.name}": p.master for p in self._params if not p.is_own_master}
            self._host_copies.move(masters, device)

    @property
    def bytes(self) -> int:
        """Bytes of moments and masters, wherever they are."""
        masters = sum(p.master.nbytes for p in self._params if not p.is_own_master)
        return sum(rule.bytes for rule in self._rules) + masters

    def _build_rules(self, params: Sequence[TrainedParam], model: MatrixModel | None) -> list[UpdateRule]:
        if self._shards is not None:
            assert self._config.optimizer == "adam", "a rule refuses others"
            return [ShardedAdam(params, self._config, self._shards)]
        if self._config.optimizer == "adam":
            return [Adam(params, self._config)]
        matrices = {} if model is None else model.muon_matrices()
        if model is None or not matrices:
            raise UsageError(
                "--optimizer muon does not support this model, whose matrices are unknown; "
                "use --model-impl native, or --optimizer adam."
            )
        muon_params = [p for p in params if p.name in matrices]
        rest = [p for p in params if p.name not in matrices]
        return [Muon(muon_params, self._config, model), Adam(rest, self._config)]

    def _zero_grad(self) -> None:
        for param in self._params:
            param.zero_grad()

    def _find_first_bad(self) -> str | None:
        """Return the first parameter with a non-finite gradient on some rank; all ranks find the same.

        Ranks communicate only by norms, so they bisect the list by the norms of indicators of bad shards.
        """
        bad = [p.grad is not None and not bool(p.grad.isfinite().all()) for p in self._params]
        low, high = 0, 1 << _BISECTIONS

        def any_in(start: int, stop: int) -> bool:
            indicators = {
                p.name: p.grad.new_full((1,), float(bad[i] and start <= i < stop))
                for i, p in enumerate(self._params)
                if p.grad is not None
            }
            return float(self._norm(indicators)) > 0

        found = any_in(low, high)
        for _ in range(_BISECTIONS):
            middle = (low + high) // 2
            low, high = (low, middle) if any_in(low, middle) else (middle, high)
        return self._params[low].name if found and low < len(self._params) else None


def build_optimizer(
    parameters: Mapping[str, Tensor],
    train: TrainConfig,
    schedule: LRSchedule,
    *,
    model: ModelWithGradNorm,
    lr_flag: str = "--lr",
) -> OptimizerProtocol:
    """Build an optimizer over this rank's ``parameters`` of ``model``: the model's own, or the built-in one."""
    own = model.optimizer(train, schedule, lr_flag=lr_flag) if isinstance(model, HasOwnOptimizer) else None
    if own is not None:
        return own
    shards: ShardedMoments | None = None
    if isinstance(model, HasMomentsGroup) and model.moments_group is not None:
        shards = ShardedMoments(model.moments_group, model.device)
    return Optimizer(parameters, train, schedule, lr_flag=lr_flag, norm=model.norm, model=model, shards=shards)


def format_gradient_error(update: int, norm: float, first: str | None, lr_flag: str) -> str:
    """Return the error message for a non-finite gradient, ``first`` at that parameter."""
    where = "no single parameter: their sum overflows" if first is None else first
    return (
        f"optimizer step {update}: the gradient norm is {norm} (first at {where}), so nothing was updated; "
        f"check this batch's rewards and log-probs, and lower {lr_flag} if the loss had been growing."
    )


def full_grad_norm(grads: Mapping[str, Tensor]) -> Tensor:
    """Return the norm of an unsharded gradient."""
    return get_total_norm(list(grads.values()), foreach=True) if grads else torch.zeros(())
