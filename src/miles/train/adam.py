"""AdamW over weights whose moments and masters may be held in few bits, or on the host.

Where both are float32 and on the weights' device, one call updates everything. Otherwise a stretch of a weight at a
time is fetched, made float32, updated and put back, so that no more than a few stretches exist twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from zlib import crc32

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from miles.train import lane
from miles.train.config import TrainConfig
from miles.train.low_bit import chance_of, forms
from miles.train.masters import Home, Weight, home_of, rounded
from miles.train.moments import Moments

FIRST, SECOND, STEP = "exp_avg", "exp_avg_sq", "step"
# Numbers of a stretch: 64 MiB in float32. A multiple of what shares a scale.
_STRETCH = 1 << 24


class Adam:
    """Updates ``weights``; they are all on one device."""

    def __init__(self, weights: Sequence[Weight], config: TrainConfig) -> None:
        self._weights, self._config = list(weights), config
        self._hosted = config.optimizer_cpu_offload
        self._moments: dict[str, Moments] = {}
        self._steps: dict[str, int] = {}
        self._home: Home | None = None

    def step(self, lr: float, update: int) -> None:
        """Take in the gradients; ``update`` counts those of the run."""
        found = [w for w in self._weights if w.grad is not None and w.parameter.numel()]
        if not found:
            return
        for weight in found:
            if weight.name not in self._moments:
                self._moments[weight.name] = self._made(weight)
        if self._config.optimizer_state_dtype == "float32" and not self._hosted:
            self._at_once(found, lr)
        else:
            lane.run(self._jobs(found, lr, update), found[0].device)
        for weight in found:
            self._steps[weight.name] = self._steps.get(weight.name, 0) + 1

    def makers(self) -> dict[str, Callable[[], Tensor]]:
        """What makes each entry of the state."""
        out: dict[str, Callable[[], Tensor]] = {}
        for name, moments in self._moments.items():
            out[f"{STEP}.{name}"] = partial(torch.tensor, float(self._steps[name]))
            out |= moments.makers()
        return out

    def load(self, state: dict[str, Tensor]) -> None:
        """Take its entries out of ``state``."""
        self._moments.clear()
        self._steps.clear()
        for weight in self._weights:
            count = state.pop(f"{STEP}.{weight.name}", None)
            if count is not None:
                self._steps[weight.name] = int(count)
                self._moments[weight.name] = self._made(weight)
                self._moments[weight.name].load(state)

    def move(self, device: torch.device) -> None:
        """Hold the state on ``device``, unless it lives on the host anyway."""
        if not self._hosted:
            self._home = Home(device)
            for moments in self._moments.values():
                moments.move(device)

    @property
    def bytes(self) -> int:
        """What the moments take."""
        return sum(m.bytes for m in self._moments.values())

    def _made(self, weight: Weight) -> Moments:
        home = self._home or home_of(weight.device, hosted=self._hosted)
        first, second = forms(self._config.optimizer_state_dtype, weight.parameter.numel())
        return Moments(weight, {FIRST: first, SECOND: second}, home)

    def _at_once(self, weights: Sequence[Weight], lr: float) -> None:
        for decayed in (True, False):
            group = [w for w in weights if w.decayed == decayed]
            means = [self._moments[w.name].cut(0, w.parameter.numel()) for w in group]
            self._adamw(
                [w.master for w in group],
                [w.grad for w in group],
                [pair[0].view(w.parameter.shape) for w, pair in zip(group, means, strict=True)],
                [pair[1].view(w.parameter.shape) for w, pair in zip(group, means, strict=True)],
                [self._steps.get(w.name, 0) for w in group],
                lr=lr,
                decayed=decayed,
            )
        rounded(weights)

    def _jobs(self, weights: Sequence[Weight], lr: float, update: int) -> Iterator[lane.Job]:
        for weight in weights:
            moments, master_N = self._moments[weight.name], weight.master.detach().view(-1)
            for start in range(0, len(master_N), _STRETCH):
                stop = min(start + _STRETCH, len(master_N))
                work = partial(self._stretch, weight, start, stop, lr, update)
                yield lane.Job(held=(master_N[start:stop], *moments.cut(start, stop)), work=work)

    def _stretch(self, weight: Weight, start: int, stop: int, lr: float, update: int, held: tuple[Tensor, ...]) -> None:
        assert weight.grad is not None
        master_N, *raws = held
        moments, step = self._moments[weight.name], self._steps.get(weight.name, 0)
        first, second = moments.decode(tuple(raws))
        grad_N = weight.grad.reshape(-1)[start:stop]
        self._adamw([master_N], [grad_N], [first], [second], [step], lr=lr, decayed=weight.decayed)
        seed = crc32(f"{self._config.seed} {update} {weight.name} {start}".encode())
        moments.encode(tuple(raws), [first, second], chance_of(seed, master_N.device))
        if not weight.own:
            weight.parameter.detach().view(-1)[start:stop].copy_(master_N)

    @torch.no_grad()
    def _adamw(
        self,
        masters: list[Tensor],
        grads: list[Tensor | None],
        firsts: list[Tensor],
        seconds: list[Tensor],
        steps: list[int],
        *,
        lr: float,
        decayed: bool,
    ) -> None:
        if not masters:
            return
        config, device = self._config, masters[0].device
        # The fused kernel reads the counts on its device; torch's other one wants them on the host.
        counts = torch.tensor(steps, dtype=torch.float32).to(device, non_blocking=True).unbind()
        adamw(
            *(masters, grads, firsts, seconds, [], list(counts)),  # pyright: ignore[reportArgumentType]
            fused=device.type == "cuda",
            foreach=device.type != "cuda",
            amsgrad=False,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            lr=lr,
            weight_decay=config.weight_decay if decayed else 0.0,
            eps=config.adam_eps,
            maximize=False,
        )
