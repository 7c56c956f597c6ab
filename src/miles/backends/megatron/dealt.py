"""Megatron's distributed optimizer as the training plane's: masters and moments dealt out over ranks with equal layers.

A rank has stretches of Megatron's tensors, which begin and end anywhere. ``state`` puts them together again, so that
a checkpoint is the same whole tensors under our names as with any other optimizer.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor

from miles.backends.megatron.buffers import Buffers, grad_of
from miles.backends.megatron.layout import Rings
from miles.backends.megatron.names import Home
from miles.backends.megatron.places import Places
from miles.core.errors import CheckpointError, UsageError
from miles.train.adam import FIRST, SECOND, STEP
from miles.train.config import TrainConfig
from miles.train.masters import States, decayed, taken
from miles.train.optim import MASTER, GradientError, complaint
from miles.train.rates import Schedule

_NOTHING = "nothing"
_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """What of one of the modules' tensors this rank updates: numbers ``start`` to ``stop``, with their ``master``."""

    tensor: Tensor
    number: int
    start: int
    stop: int
    master: Tensor
    rule: torch.optim.Optimizer

    def moment(self, key: str) -> Tensor:
        return self.rule.state[self.master][key]

    def grad(self) -> Tensor:
        return grad_of(self.tensor).view(-1)[self.start : self.stop]


class Dealt:
    """``train.optim.Updates`` by Megatron-Core: gradients in its ``buffers``, its norm, its clipping, its update."""

    def __init__(
        self,
        buffers: Buffers,
        places: Places,
        homes: Mapping[str, Home],
        rings: Rings,
        config: TrainConfig,
        schedule: Schedule,
        *,
        rate: str,
    ) -> None:
        refuse(config)
        self.updates = 0
        self._buffers, self._places, self._homes, self._rings = buffers, places, homes, rings
        self._config, self._schedule, self._rate = config, schedule, rate
        self._names = [name for name, p in places.parameters.items() if p.requires_grad]
        self._steps: dict[str, int] = {}
        self.megatrons: Any = self._made()
        self._stretches = {name: list(self._found(name)) for name in self._names}
        self._rounded = buffers.shape.params_dtype not in _WIDE

    def step(self) -> tuple[float, float]:
        """One update; see ``train.optim.Optimizer.step``."""
        self.megatrons.prepare_grads()
        norm = float(self.megatrons.get_grad_norm())
        if not math.isfinite(norm):
            told = complaint(self.updates + 1, norm, self._first_bad(), self._rate)
            self._forget()
            raise GradientError(told)
        lr = self._schedule.at(self.updates + 1)
        self._tell(lr)
        for each in self.megatrons.chained_optimizers:
            if self._config.clip_grad and each.get_parameters():
                clip_grad_by_total_norm_fp32(each.get_parameters(), self._config.clip_grad, norm)
        self.megatrons.step_with_ready_grads()
        self._places.adopt()
        self._forget()
        self._steps = {name: self._steps.get(name, 0) + 1 for name in self._names}
        self.updates += 1
        return norm, lr

    def grads(self) -> Mapping[str, Tensor]:
        """This rank's part of every gradient after ``settle``, as others shape it; all ranks ask in one order."""
        return States({name: partial(self._whole, name, _Stretch.grad) for name in self._names})

    def state(self) -> Mapping[str, Tensor]:
        """Moments and masters in the shape of this rank's parameters; ranks make them together, in one order."""
        makers: dict[str, Callable[[], Tensor]] = {}
        for name in self._names:
            if self._rounded:
                makers[f"{MASTER}.{name}"] = partial(self._whole, name, lambda stretch: stretch.master)
            if name in self._steps:
                makers[f"{STEP}.{name}"] = partial(torch.tensor, float(self._steps[name]))
                for key in (FIRST, SECOND):
                    makers[f"{key}.{name}"] = partial(self._whole, name, lambda stretch, key=key: stretch.moment(key))
        return States(makers)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], *, updates: int) -> None:
        """Take back what ``state`` gave, or what any other optimizer's gave; parameters are loaded by their owner."""
        self.follow()
        left = dict(state)
        self._steps = {}
        for name in self._names:
            like = self._places.parameters[name]
            count = left.pop(f"{STEP}.{name}", None)
            wanted = [] if count is None else [FIRST, SECOND]
            found = {key: taken(left, f"{key}.{name}", like) for key in wanted}
            master = taken(left, f"{MASTER}.{name}", like) if self._rounded else None
            if count is not None:
                self._steps[name] = int(count)
            for stretch in self._stretches[name]:
                if master is not None:
                    stretch.master.copy_(self._cut(stretch, name, master))
                self._fill(stretch, {key: self._cut(stretch, name, whole) for key, whole in found.items()}, name)
        if left:
            raise CheckpointError(f"the optimizer state holds {min(left)}, which Megatron's optimizer does not have.")
        self._count()
        self.updates = updates

    def begin(self) -> None:
        """Let there be moments, of zero where there are none; Megatron's checkpoints are read into them."""
        for name in self._names:
            self._steps.setdefault(name, 0)
            for stretch in self._stretches[name]:
                if not stretch.rule.state[stretch.master]:
                    zero = torch.zeros_like(stretch.master)
                    self._fill(stretch, {FIRST: zero, SECOND: zero.clone()}, name)
        for rule in (each.optimizer for each in self.megatrons.chained_optimizers):
            if _counts_itself(self.megatrons) and rule.state.keys() <= {_NOTHING}:
                # Megatron asks every one of them for its count, also that of a stage without experts.
                rule.state[_NOTHING] = {STEP: torch.tensor(float(self.steps))}
        self._count()

    @property
    def steps(self) -> int:
        """How many updates the moments are of, which may be fewer than were made in all."""
        return max(self._steps.values(), default=0)

    def resume(self, updates: int, steps: int) -> None:
        """Megatron's optimizer was filled from its own checkpoint, which had made so many steps."""
        self.updates, self._steps = updates, dict.fromkeys(self._names, steps)
        if _counts_itself(self.megatrons):
            for name in self._names:
                for stretch in self._stretches[name]:
                    # Megatron gives all of them one tensor, which torch's Adam would then count up for each.
                    stretch.rule.state[stretch.master][STEP] = torch.tensor(float(steps))
        self._count()
        self._places.adopt()

    def follow(self) -> None:
        """The parameters were written to: let Megatron's masters be what these are."""
        self._places.publish()
        self.megatrons.reload_model_params()

    def move(self, device: torch.device) -> None:
        """Moments and masters to ``device``; masters that are the weights themselves go with these."""
        for stretch in (s for found in self._stretches.values() for s in found):
            if self._rounded:
                stretch.master.data = stretch.master.data.to(device)
            kept = stretch.rule.state.get(stretch.master, {})
            kept.update({key: kept[key].to(device) for key in (FIRST, SECOND) if key in kept})

    @property
    def bytes(self) -> int:
        """What moments and masters take here."""
        total = 0
        for stretch in (s for found in self._stretches.values() for s in found):
            kept = stretch.rule.state.get(stretch.master, {})
            total += stretch.master.nbytes * self._rounded + sum(kept[k].nbytes for k in (FIRST, SECOND) if k in kept)
        return total

    # -- Megatron's -------------------------------------------------------------------------

    def _made(self) -> Any:
        config, dtype = self._config, self._buffers.shape.params_dtype
        plain = {id(t) for name in self._names if not self._decayed(name) for t in self._places.modules(name)}
        undecayed = ParamKey(predicate=ParamPredicate(name="undecayed", fn=lambda p: id(p) in plain))
        rules: dict[ParamKey, Any] = {undecayed: {"wd_mult": 0.0}}
        told = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            clip_grad=config.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        made: Any = get_megatron_optimizer(
            told, self._buffers.wrapped, config_overrides=rules, use_gloo_process_groups=False
        )
        for each in made.chained_optimizers:
            for groups in (each.shard_fp32_groups, each.shard_float16_groups):
                self._buffers.views += [shard for group in groups for shard in group if shard is not None]
        return made

    def _decayed(self, name: str) -> bool:
        return decayed(name, len(self._homes[name].shape))

    def _found(self, name: str) -> Iterator[_Stretch]:
        for number, tensor in enumerate(self._places.modules(name)):
            for each in self.megatrons.chained_optimizers:
                if tensor in each.model_param_gbuf_map:
                    run = each._get_model_param_range_map(tensor)["param"]
                    group, place = each.model_param_group_index_map[tensor]
                    master, rule = each.optimizer.param_groups[group]["params"][place], each.optimizer
                    where: dict[str, int] = {"number": number, "start": run.start, "stop": run.end}
                    yield _Stretch(tensor=tensor, master=master, rule=rule, **where)

    def _tell(self, lr: float) -> None:
        for group in self.megatrons.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]

    def _forget(self) -> None:
        self.megatrons.zero_grad()
        self._buffers.forget()

    def _fill(self, stretch: _Stretch, moments: dict[str, Tensor], name: str) -> None:
        kept: dict[str, Any] = {key: m.to(stretch.master, copy=True) for key, m in moments.items()}
        if kept and _counts_itself(self.megatrons):
            kept[STEP] = torch.tensor(float(self._steps[name]))
        stretch.rule.state.pop(stretch.master, None)
        if kept:
            stretch.rule.state[stretch.master] = kept

    def _count(self) -> None:
        """Adams other than torch's count the steps of a group."""
        if not _counts_itself(self.megatrons) and self._steps:
            for group in self.megatrons.param_groups:
                group[STEP] = self.steps

    def _first_bad(self) -> str | None:
        """The first parameter of whose gradient some rank's part is not finite; all ranks find the same."""
        bad = [not all(bool(s.grad().isfinite().all()) for s in self._stretches[name]) for name in self._names]
        told = self._rings.everyone.most(torch.tensor(bad, dtype=torch.float32).to(self._buffers.shape.home))
        return next((name for name, flag in zip(self._names, told.tolist(), strict=True) if flag), None)

    # -- stretches and parameters -----------------------------------------------------------

    @torch.no_grad()
    def _whole(self, name: str, of: Callable[[_Stretch], Tensor]) -> Tensor:
        parameter, home = self._places.parameters[name], self._homes[name]
        whole = torch.zeros(parameter.shape, dtype=torch.float32, device=self._buffers.shape.home)
        for stretch in self._stretches[name]:
            self._cut(stretch, name, whole).copy_(of(stretch))
        if not self._places.modules(name):
            return whole
        return (self._rings.expert_rows if home.expert else self._rings.rows).sum(whole)

    def _cut(self, stretch: _Stretch, name: str, whole: Tensor) -> Tensor:
        part = whole[stretch.number] if self._homes[name].expert else whole
        return part.reshape(-1)[stretch.start : stretch.stop]


def _counts_itself(megatrons: Any) -> bool:
    """Does the Adam that Megatron found keep a count for every tensor, as torch's does?"""
    return any(isinstance(each.optimizer, torch.optim.AdamW) for each in megatrons.chained_optimizers)


def refuse(config: TrainConfig) -> None:
    """Say which knob Megatron's optimizer does not have, if one was turned."""
    for wrong, flag in (
        (config.optimizer != "adam", f"--optimizer {config.optimizer}"),
        (config.optimizer_state_dtype != "float32", f"--optimizer-state-dtype {config.optimizer_state_dtype}"),
        (config.optimizer_cpu_offload, "--optimizer-cpu-offload"),
    ):
        if wrong:
            raise UsageError(
                f"{flag} is not for Megatron's distributed optimizer, which is Adam over float32 on the device; "
                "leave out --megatron-use-distributed-optimizer, or this flag."
            )
