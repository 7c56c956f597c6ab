"""AdamW with optionally quantized moments and host-offloaded moments and master weights.

If both are float32 and on the parameters' device, each large parameter is updated by one kernel that also clips the
gradient and rounds the master, and the others together by one fused call of torch. Otherwise each parameter is
processed in slices that are fetched, dequantized, updated and written back, so that only a few slices exist twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from zlib import crc32

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from miles.cluster.host_copies import HostCopies
from miles.kernels.fused.adamw import AdamwParams, can_fuse_adamw, fused_adamw
from miles.train.config import TrainConfig
from miles.train.optim import offload_pipeline
from miles.train.optim.master_weights import (
    StateDevice,
    TrainedParam,
    copy_masters_to_params,
    scale_grads,
    select_state_device,
)
from miles.train.optim.quantized_state import make_random_fn, select_formats
from miles.train.optim.state import OptimizerMoments, allocate_together

FIRST = "exp_avg"
SECOND = "exp_avg_sq"
STEP = "step"
# Elements of a slice: 64 MiB in float32. A multiple of the quantization block size.
_SLICE = 1 << 24
_META = StateDevice(torch.device("meta"))


class Adam:
    """Updates ``params``, which are all on one device."""

    def __init__(self, params: Sequence[TrainedParam], config: TrainConfig) -> None:
        self._params = list(params)
        self._config = config
        self._offloaded = config.optimizer_cpu_offload
        self._moments: dict[str, OptimizerMoments] = {}
        self._steps: dict[str, int] = {}
        self._state_device: StateDevice | None = None

    def step(self, lr: float, update: int, scale: Tensor | None = None) -> None:
        """Apply the gradients, multiplied by ``scale``; ``update`` is the number of the optimizer step in the run."""
        params = [p for p in self._params if p.grad is not None and p.parameter.numel()]
        if not params:
            return
        self._create_missing(params)
        if self._config.optimizer_state_dtype == "float32" and not self._offloaded:
            self._update_on_device(params, lr, scale)
        else:
            scale_grads(params, scale)
            offload_pipeline.run(self._build_jobs(params, lr, update), params[0].device)
        for param in params:
            self._steps[param.name] = self._steps.get(param.name, 0) + 1

    def state_factories(self) -> dict[str, Callable[[], Tensor]]:
        """Return a factory for each entry of the state."""
        out: dict[str, Callable[[], Tensor]] = {}
        for name, moments in self._moments.items():
            out[f"{STEP}.{name}"] = partial(torch.tensor, float(self._steps[name]))
            out |= moments.state_factories()
        return out

    def load(self, state: dict[str, Tensor]) -> None:
        """Load its entries and remove them from ``state``."""
        self._moments.clear()
        self._steps.clear()
        for param in self._params:
            count = state.pop(f"{STEP}.{param.name}", None)
            if count is not None:
                self._steps[param.name] = int(count)
                self._moments[param.name] = self._create_moments(param)
                self._moments[param.name].load(state)

    def move(self, device: torch.device, copies: HostCopies) -> None:
        """Move the state to ``device``, unless it is offloaded to the host."""
        if not self._offloaded:
            self._state_device = StateDevice(device)
            raws = [moments.list_raws() for moments in self._moments.values()]
            copies.move({name: raw for found in raws for name, raw in found.items()}, device)

    @property
    def bytes(self) -> int:
        """Bytes of the moments."""
        return sum(m.bytes for m in self._moments.values())

    def _create_missing(self, params: Sequence[TrainedParam]) -> None:
        missing = [param for param in params if param.name not in self._moments]
        if not missing:
            return
        device = self._select_device(missing[0])
        if device.pinned:
            self._moments |= {param.name: self._create_moments(param) for param in missing}
            return
        self._moments |= {param.name: self._create_moments(param, on=_META) for param in missing}
        allocate_together([self._moments[param.name] for param in missing], device.device)

    def _select_device(self, param: TrainedParam) -> StateDevice:
        return self._state_device or select_state_device(param.device, offloaded=self._offloaded)

    def _create_moments(self, param: TrainedParam, *, on: StateDevice | None = None) -> OptimizerMoments:
        device = on or self._select_device(param)
        first, second = select_formats(self._config.optimizer_state_dtype, param.parameter.numel())
        return OptimizerMoments(param, {FIRST: first, SECOND: second}, device)

    def _update_on_device(self, params: Sequence[TrainedParam], lr: float, scale: Tensor | None) -> None:
        rest: list[TrainedParam] = []
        # The largest first, so that the GPU is busy while the host launches the others.
        for param in sorted(params, key=lambda p: -p.parameter.numel()):
            grad = param.grad
            assert grad is not None
            if param.is_own_master or not can_fuse_adamw(param.parameter, param.master, grad):
                rest.append(param)
                continue
            moments = self._moments[param.name].slice(0, param.parameter.numel())
            step = self._build_step(lr, self._steps.get(param.name, 0) + 1, decayed=param.is_decayed)
            fused_adamw(param.parameter.detach(), param.master, grad, (moments[0], moments[1]), step, scale=scale)
        scale_grads(rest, scale)
        self._update_together(rest, lr)

    def _build_step(self, lr: float, step: int, *, decayed: bool) -> AdamwParams:
        config = self._config
        return AdamwParams(
            lr=lr,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay if decayed else 0.0,
            step=step,
        )

    def _update_together(self, params: Sequence[TrainedParam], lr: float) -> None:
        for decayed in (True, False):
            group = [p for p in params if p.is_decayed == decayed]
            moments = [self._moments[p.name].slice(0, p.parameter.numel()) for p in group]
            self._adamw(
                [p.master for p in group],
                [p.grad for p in group],
                [pair[0].view(p.parameter.shape) for p, pair in zip(group, moments, strict=True)],
                [pair[1].view(p.parameter.shape) for p, pair in zip(group, moments, strict=True)],
                [self._steps.get(p.name, 0) for p in group],
                lr=lr,
                decayed=decayed,
            )
        copy_masters_to_params(params)

    def _build_jobs(
        self, params: Sequence[TrainedParam], lr: float, update: int
    ) -> Iterator[offload_pipeline.OffloadJob]:
        for param in params:
            moments, master_N = self._moments[param.name], param.master.detach().view(-1)
            for start in range(0, len(master_N), _SLICE):
                stop = min(start + _SLICE, len(master_N))
                work = partial(self._update_slice, param, start, stop, lr, update)
                yield offload_pipeline.OffloadJob(
                    tensors=(master_N[start:stop], *moments.slice(start, stop)), work=work
                )

    def _update_slice(
        self, param: TrainedParam, start: int, stop: int, lr: float, update: int, tensors: tuple[Tensor, ...]
    ) -> None:
        assert param.grad is not None
        master_N, *raws = tensors
        moments, step = self._moments[param.name], self._steps.get(param.name, 0)
        first, second = moments.decode(tuple(raws))
        grad_N = param.grad.reshape(-1)[start:stop]
        self._adamw([master_N], [grad_N], [first], [second], [step], lr=lr, decayed=param.is_decayed)
        seed = crc32(f"{self._config.seed} {update} {param.name} {start}".encode())
        moments.encode(tuple(raws), [first, second], make_random_fn(seed, master_N.device))
        if not param.is_own_master:
            param.parameter.detach().view(-1)[start:stop].copy_(master_N)

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
        # The fused kernels, one on the CPU too, are one pass over memory; they read the step counts on their device.
        counts = torch.tensor(steps, dtype=torch.float32).to(device, non_blocking=True).unbind()
        adamw(
            masters,
            grads,  # pyright: ignore[reportArgumentType]
            firsts,
            seconds,
            [],
            list(counts),
            fused=device.type in ("cuda", "cpu"),
            foreach=device.type not in ("cuda", "cpu"),
            amsgrad=False,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            lr=lr,
            weight_decay=config.weight_decay if decayed else 0.0,
            eps=config.adam_eps,
            maximize=False,
        )
