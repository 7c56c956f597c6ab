"""Adam with sharded moments (ZeRO stage 1): ranks with the same parameters each update an even range of the values.

Every rank has all of the parameters and of their reduced gradient. It keeps the moments of its range, and an all-gather
returns the updated values. What ``state_factories`` returns is whole again, so that checkpoints do not depend on the
number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from miles.cluster.host_copies import HostCopies
from miles.train.config import TrainConfig
from miles.train.optim.adam import FIRST, SECOND, STEP, Adam
from miles.train.optim.master_weights import TrainedParam, pop_state


class RankGroup(Protocol):
    """The ranks that share the moments."""

    rank: int
    world: int

    def sum(self, x: Tensor) -> Tensor: ...
    def gather(self, x: Tensor) -> list[Tensor]: ...


@runtime_checkable
class HasMomentsGroup(Protocol):
    """A model whose trained parameters every rank of ``moments_group`` has in full, or None where they are sharded."""

    @property
    def device(self) -> torch.device: ...
    @property
    def moments_group(self) -> RankGroup | None: ...


@dataclass(frozen=True, slots=True)
class ShardedMoments:
    """The ranks that share moments, and the device that their collectives need."""

    group: RankGroup
    device: torch.device

    def bounds(self, total: int) -> tuple[int, int]:
        """Return the range of ``total`` values that this rank updates."""
        each = ceil(total / self.group.world)
        return min(self.group.rank * each, total), min((self.group.rank + 1) * each, total)


class ParamRange(TrainedParam):
    """Values ``start`` to ``stop`` of a float32 parameter."""

    def __init__(self, whole: TrainedParam, start: int, stop: int) -> None:
        assert whole.is_own_master, "a low-precision parameter would have a master of its own"
        self._whole = whole
        self._start, self._stop = start, stop
        super().__init__(whole.name, self.view(whole.parameter.detach()), offloaded=False)

    @property
    def is_decayed(self) -> bool:
        return self._whole.is_decayed

    def view(self, full: Tensor) -> Tensor:
        """Return these values of a tensor of the parameter's shape."""
        return full.reshape(-1)[self._start : self._stop]

    def bind(self) -> None:
        """Take the parameter and its gradient as they are now; a parameter that was moved has another storage."""
        values, grad = self.view(self._whole.parameter.detach()), self._whole.grad
        values.grad = None if grad is None else self.view(grad)
        self.parameter = self.master = values


class ShardedAdam:
    """The update rule of ``params``, float32 parameters that every rank has."""

    def __init__(self, params: Sequence[TrainedParam], config: TrainConfig, shards: ShardedMoments) -> None:
        self._params = list(params)
        self._shards = shards
        self._steps: dict[str, int] = {}
        self._ranges = {each.name: each for each in self._cut()}
        self._adam = Adam(list(self._ranges.values()), config)

    def _cut(self) -> Iterator[ParamRange]:
        """Yield this rank's ranges: the parameters lie one after the other, and ranks have even parts of all."""
        first, last = self._shards.bounds(sum(p.parameter.numel() for p in self._params))
        place = 0
        for param in self._params:
            count = param.parameter.numel()
            start, stop = max(first - place, 0), min(last - place, count)
            place += count
            if start < stop:
                yield ParamRange(param, start, stop)

    def step(self, lr: float, update: int, scale: Tensor | None = None) -> None:
        """Apply the gradients, multiplied by ``scale``, to this rank's range; get what the other ranks have updated."""
        trained = [param.name for param in self._params if param.grad is not None]
        for each in self._ranges.values():
            each.bind()
        self._adam.step(lr, update, scale)
        for each in self._ranges.values():
            each.zero_grad()
        self._steps |= {name: self._steps.get(name, 0) + 1 for name in trained}
        self._gather_values()

    @torch.no_grad()
    def _gather_values(self) -> None:
        """All-gather the parameters."""
        counts = [param.parameter.numel() for param in self._params]
        own = [each.parameter for each in self._ranges.values()]
        size = ceil(sum(counts) / self._shards.group.world)
        padded = torch.zeros(size, dtype=torch.float32, device=self._shards.device)
        if own:
            values = torch.cat(own)
            padded[: len(values)] = values
        flat = torch.cat(self._shards.group.gather(padded))
        for param, values in zip(self._params, flat[: sum(counts)].split(counts), strict=True):
            param.parameter.copy_(values.view_as(param.parameter))

    def state_factories(self) -> dict[str, Callable[[], Tensor]]:
        """Return a factory for each entry of the state, whole; all ranks call them in the same order."""
        out: dict[str, Callable[[], Tensor]] = {}
        for param in self._params:
            if param.name in self._steps:
                out[f"{STEP}.{param.name}"] = partial(torch.tensor, float(self._steps[param.name]))
                out |= {f"{key}.{param.name}": partial(self._gather_moment, key, param) for key in (FIRST, SECOND)}
        return out

    @torch.no_grad()
    def _gather_moment(self, key: str, param: TrainedParam) -> Tensor:
        full = torch.zeros(param.parameter.shape, dtype=torch.float32, device=self._shards.device)
        if param.name in self._ranges:
            moment = self._adam.state_factories()[f"{key}.{param.name}"]()
            self._ranges[param.name].view(full).copy_(moment)
        return self._shards.group.sum(full)

    def load(self, state: dict[str, Tensor]) -> None:
        """Load this rank's part of its entries, and remove them from ``state``."""
        self._steps.clear()
        own: dict[str, Tensor] = {}
        for param in self._params:
            count = state.pop(f"{STEP}.{param.name}", None)
            if count is None:
                continue
            self._steps[param.name] = int(count)
            moments = {key: pop_state(state, f"{key}.{param.name}", param.parameter) for key in (FIRST, SECOND)}
            if param.name in self._ranges:
                view = self._ranges[param.name].view
                own |= {f"{key}.{param.name}": view(moment) for key, moment in moments.items()}
                own[f"{STEP}.{param.name}"] = count
        self._adam.load(own)

    def move(self, device: torch.device, copies: HostCopies) -> None:
        """Move the moments to ``device``."""
        self._adam.move(device, copies)

    @property
    def bytes(self) -> int:
        """Bytes of this rank's moments."""
        return self._adam.bytes
