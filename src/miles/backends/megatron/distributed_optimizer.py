"""Megatron's distributed optimizer behind the trainer's optimizer protocol: master weights and moments are sharded over
data-parallel ranks.

A rank has ranges of Megatron's tensors, which begin and end anywhere. ``state`` reassembles them, so that a checkpoint
has the same full tensors under the same names as with any other optimizer.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor

from miles.backends.megatron import patches
from miles.backends.megatron.buffers import ParamGradBuffers, get_main_grad
from miles.backends.megatron.parallel_state import ParallelState
from miles.backends.megatron.param_mapping import ParamMapping
from miles.backends.megatron.param_registry import ParamRegistry
from miles.cluster.host_copies import HostCopies
from miles.core.errors import CheckpointError, UsageError
from miles.models.optim_groups import is_vision_param
from miles.train.config import TrainConfig
from miles.train.optim.adam import FIRST, SECOND, STEP
from miles.train.optim.lr_scheduler import LRSchedule, build_vision_lr_schedule
from miles.train.optim.master_weights import LazyStates, is_decayed, pop_state
from miles.train.optim.optimizer import MASTER, GradientError, format_gradient_error

_NOTHING = "nothing"
_OWN_LR = "is_decoupled_lr"
"""Megatron's mark of a parameter group with a learning rate of its own: the vision tower's with --vision-lr."""
_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """The part of a module's tensor that this rank updates: values ``start`` to ``stop``, with their ``master``."""

    tensor: Tensor
    number: int
    start: int
    stop: int
    master: Tensor
    rule: torch.optim.Optimizer

    @property
    def has_master(self) -> bool:
        """Whether the master is a tensor of its own; that of a float32 tensor is part of it."""
        return self.tensor.dtype not in _WIDE

    def moment(self, key: str) -> Tensor:
        return self.rule.state[self.master][key]

    def grad(self) -> Tensor:
        return get_main_grad(self.tensor).view(-1)[self.start : self.stop]


class MegatronOptimizer:
    """The trainer's optimizer protocol on Megatron-Core: its gradient ``buffers``, norm, clipping and update."""

    def __init__(
        self,
        buffers: ParamGradBuffers,
        registry: ParamRegistry,
        mappings: Mapping[str, ParamMapping],
        state: ParallelState,
        config: TrainConfig,
        schedule: LRSchedule,
        *,
        rate: str,
    ) -> None:
        check_optimizer_config(config)
        self.updates = 0
        self._buffers = buffers
        self._registry = registry
        self._mappings = mappings
        self._state = state
        self._config = config
        self._schedule = schedule
        self._vision_schedule = (
            None if config.vision_lr is None else build_vision_lr_schedule(schedule, config.vision_lr)
        )
        self._rate = rate
        self._host_copies = HostCopies()
        self._names = [name for name, p in registry.parameters.items() if p.requires_grad]
        self._steps: dict[str, int] = {}
        self.inner: Any = self._build_inner()
        self._ranges = {name: list(self._find_ranges(name)) for name in self._names}

    def step(self, lr: float | None = None) -> tuple[float, float]:
        """Make one update; see the trainer's own optimizer."""
        self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        if not math.isfinite(norm):
            problem = format_gradient_error(self.updates + 1, norm, self._first_bad(), self._rate)
            self._zero_grads()
            raise GradientError(problem)
        lr = self._schedule.at(self.updates + 1) if lr is None else lr
        self._set_lr(lr)
        for each in self.inner.chained_optimizers:
            if self._config.clip_grad and each.get_parameters():
                clip_grad_by_total_norm_fp32(each.get_parameters(), self._config.clip_grad, norm)
        self.inner.step_with_ready_grads()
        self._registry.adopt()
        self._zero_grads()
        self._steps = {name: self._steps.get(name, 0) + 1 for name in self._names}
        self.updates += 1
        return norm, lr

    def grads(self) -> Mapping[str, Tensor]:
        """Return this rank's part of every reduced gradient in parameter shape; all ranks ask in the same order."""
        return LazyStates({name: partial(self._gather_full, name, _Range.grad) for name in self._names})

    def state(self) -> Mapping[str, Tensor]:
        """Return moments and master weights in the shape of this rank's parameters; ranks gather them together, in one
        order.
        """
        makers: dict[str, Callable[[], Tensor]] = {}
        for name in self._names:
            if self._has_master(name):
                makers[f"{MASTER}.{name}"] = partial(self._gather_full, name, lambda span: span.master)
            if name in self._steps:
                makers[f"{STEP}.{name}"] = partial(torch.tensor, float(self._steps[name]))
                for key in (FIRST, SECOND):
                    makers[f"{key}.{name}"] = partial(self._gather_full, name, lambda span, key=key: span.moment(key))
        return LazyStates(makers)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], *, updates: int) -> None:
        """Load what ``state`` of this or any other optimizer returned; parameters are loaded by their owner."""
        self.follow()
        left = dict(state)
        self._steps = {}
        for name in self._names:
            like = self._registry.parameters[name]
            count = left.pop(f"{STEP}.{name}", None)
            wanted = [] if count is None else [FIRST, SECOND]
            found = {key: pop_state(left, f"{key}.{name}", like) for key in wanted}
            master = pop_state(left, f"{MASTER}.{name}", like) if self._has_master(name) else None
            if count is not None:
                self._steps[name] = int(count)
            for span in self._ranges[name]:
                if master is not None:
                    span.master.copy_(self._view_range(span, name, master))
                self._fill(span, {key: self._view_range(span, name, full) for key, full in found.items()}, name)
        if left:
            raise CheckpointError(f"the optimizer state holds {min(left)}, which Megatron's optimizer does not have.")
        self._set_group_steps()
        self.updates = updates

    def init_state(self) -> None:
        """Create missing moments as zeros; Megatron's checkpoints are read into them."""
        for name in self._names:
            self._steps.setdefault(name, 0)
            for span in self._ranges[name]:
                if not span.rule.state[span.master]:
                    zero = torch.zeros_like(span.master)
                    self._fill(span, {FIRST: zero, SECOND: zero.clone()}, name)
        for rule in (each.optimizer for each in self.inner.chained_optimizers):
            if _steps_per_tensor(self.inner) and rule.state.keys() <= {_NOTHING}:
                # Megatron reads the step count of every optimizer, also on a stage without experts.
                rule.state[_NOTHING] = {STEP: torch.tensor(float(self.steps))}
        self._set_group_steps()

    @property
    def steps(self) -> int:
        """Number of updates in the moments, which may be fewer than all updates."""
        return max(self._steps.values(), default=0)

    def load_inner(self, state: Any) -> None:
        """Load the state of Megatron's own checkpoint, whose run may have had no --vision-lr."""
        chained = self.inner.chained_optimizers
        parts = [state] if len(chained) == 1 else [part for _, part in sorted(state.items())]
        for each, part in zip(chained, parts, strict=True):
            groups = part["optimizer"]["param_groups"]
            known = {(group["wd_mult"], group[_OWN_LR]): group for group in groups}
            for own in each.optimizer.param_groups:
                if (own["wd_mult"], own[_OWN_LR]) not in known:
                    groups.append({**known[own["wd_mult"], False], _OWN_LR: own[_OWN_LR]})
        self.inner.load_state_dict(state)

    def resume(self, updates: int, steps: int) -> None:
        """Set the counters after Megatron's optimizer was loaded from its own checkpoint."""
        self.updates, self._steps = updates, dict.fromkeys(self._names, steps)
        if _steps_per_tensor(self.inner):
            for name in self._names:
                for span in self._ranges[name]:
                    # Megatron shares one tensor among all, which torch's Adam would then increment for each.
                    span.rule.state[span.master][STEP] = torch.tensor(float(steps))
        self._set_group_steps()
        self._registry.adopt()

    def follow(self) -> None:
        """The parameters were written to: let Megatron's masters be what these are."""
        self._registry.publish()
        self.inner.reload_model_params()

    def move(self, device: torch.device) -> None:
        """Move moments and master weights to ``device``; masters that are the weights themselves move with these."""
        moved: dict[str, Tensor] = {}
        for name, ranges in self._ranges.items():
            for number, span in enumerate(ranges):
                state = span.rule.state.get(span.master, {})
                moved |= {f"{key}.{name}.{number}": state[key] for key in (FIRST, SECOND) if key in state}
                if span.has_master:
                    moved[f"{MASTER}.{name}.{number}"] = span.master
        self._host_copies.move(moved, device)

    @property
    def bytes(self) -> int:
        """Bytes of moments and master weights on this rank."""
        total = 0
        for span in (s for found in self._ranges.values() for s in found):
            state = span.rule.state.get(span.master, {})
            total += span.master.nbytes * span.has_master + sum(state[k].nbytes for k in (FIRST, SECOND) if k in state)
        return total

    def _has_master(self, name: str) -> bool:
        return self._registry.parameters[name].dtype not in _WIDE

    # -- Megatron's optimizer ----------------------------------------------------------------

    def _build_inner(self) -> Any:
        config, dtype = self._config, self._buffers.tf_config.params_dtype
        undecayed = [name for name in self._names if not self._is_decayed(name)]
        rules: dict[ParamKey, Any] = {self._build_key("undecayed", undecayed): {"wd_mult": 0.0}}
        if self._vision_schedule is not None:
            vision = [name for name in self._names if is_vision_param(name)]
            rules[self._build_key("vision", vision)] = {_OWN_LR: True}
        optimizer_config = OptimizerConfig(
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
        inner: Any = get_megatron_optimizer(
            optimizer_config, self._buffers.ddp_chunks, config_overrides=rules, use_gloo_process_groups=False
        )
        patches.patch_mixed_dtype_groups(inner)
        for each in inner.chained_optimizers:
            for groups in (each.shard_fp32_groups, each.shard_float16_groups):
                self._buffers.views += [shard for group in groups for shard in group if shard is not None]
        return inner

    def _build_key(self, group: str, names: Sequence[str]) -> ParamKey:
        """Build what selects the tensors of some parameters for a group of Megatron's."""
        ids = {id(tensor) for name in names for tensor in self._registry.modules(name)}
        return ParamKey(predicate=ParamPredicate(name=group, fn=lambda p: id(p) in ids))

    def _is_decayed(self, name: str) -> bool:
        return is_decayed(name, len(self._mappings[name].shape))

    def _find_ranges(self, name: str) -> Iterator[_Range]:
        for number, tensor in enumerate(self._registry.modules(name)):
            for each in self.inner.chained_optimizers:
                if tensor in each.model_param_gbuf_map:
                    run = each._get_model_param_range_map(tensor)["param"]
                    group, place = each.model_param_group_index_map[tensor]
                    master, rule = each.optimizer.param_groups[group]["params"][place], each.optimizer
                    where: dict[str, int] = {"number": number, "start": run.start, "stop": run.end}
                    yield _Range(tensor=tensor, master=master, rule=rule, **where)

    def _set_lr(self, lr: float) -> None:
        vision = self._vision_schedule
        for group in self.inner.param_groups:
            group["lr"] = vision.at(self.updates + 1) if vision is not None and group[_OWN_LR] else lr
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]

    def _zero_grads(self) -> None:
        self.inner.zero_grad()
        self._buffers.zero_grads()

    def _fill(self, span: _Range, moments: dict[str, Tensor], name: str) -> None:
        state: dict[str, Any] = {key: m.to(span.master, copy=True) for key, m in moments.items()}
        if state and _steps_per_tensor(self.inner):
            state[STEP] = torch.tensor(float(self._steps[name]))
        span.rule.state.pop(span.master, None)
        if state:
            span.rule.state[span.master] = state

    def _set_group_steps(self) -> None:
        """Set the step count of parameter groups, which Adams other than torch's use."""
        if not _steps_per_tensor(self.inner) and self._steps:
            for group in self.inner.param_groups:
                group[STEP] = self.steps

    def _first_bad(self) -> str | None:
        """Return the first parameter with a non-finite gradient on any rank; the same on all ranks."""
        bad = [not all(bool(s.grad().isfinite().all()) for s in self._ranges[name]) for name in self._names]
        flags = self._state.world_group.max(
            torch.tensor(bad, dtype=torch.float32).to(self._buffers.tf_config.param_device)
        )
        return next((name for name, flag in zip(self._names, flags.tolist(), strict=True) if flag), None)

    # -- ranges and parameters -----------------------------------------------------------

    @torch.no_grad()
    def _gather_full(self, name: str, of: Callable[[_Range], Tensor]) -> Tensor:
        parameter, mapping = self._registry.parameters[name], self._mappings[name]
        full = torch.zeros(parameter.shape, dtype=torch.float32, device=self._buffers.tf_config.param_device)
        for span in self._ranges[name]:
            self._view_range(span, name, full).copy_(of(span))
        if not self._registry.modules(name):
            return full
        return (self._state.expert_dp_group if mapping.expert else self._state.dp_cp_group).sum(full)

    def _view_range(self, span: _Range, name: str, full: Tensor) -> Tensor:
        part = full[span.number] if self._mappings[name].by_expert else full
        return part.reshape(-1)[span.start : span.stop]


def _steps_per_tensor(inner: Any) -> bool:
    """Return whether Megatron's Adam keeps a step count per tensor, as torch's does."""
    return any(isinstance(each.optimizer, torch.optim.AdamW) for each in inner.chained_optimizers)


def check_optimizer_config(config: TrainConfig) -> None:
    """Raise an error for options that Megatron's optimizer does not support."""
    for unsupported, flag in (
        (config.optimizer != "adam", f"--optimizer {config.optimizer}"),
        (config.optimizer_state_dtype != "float32", f"--optimizer-state-dtype {config.optimizer_state_dtype}"),
        (config.optimizer_cpu_offload, "--optimizer-cpu-offload"),
    ):
        if unsupported:
            raise UsageError(
                f"{flag} is not supported by Megatron's distributed optimizer, which is Adam in float32 on the GPU; "
                "leave out --megatron-use-distributed-optimizer, or this flag."
            )
