"""AdamW with float32 masters and gradient clipping.

Parameters of a low precision have a float32 master each: gradients are added up in it, the update
happens in it, and the parameter is its rounding. A float32 parameter is its own master.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from miles.core.errors import CheckpointError, MilesError
from miles.train.config import TrainConfig
from miles.train.rates import Schedule

Norm = Callable[[Mapping[str, Tensor]], Tensor]
"""The norm of a gradient, given by this rank's parts of it."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


class GradientError(MilesError):
    """A gradient that is not a number; the weights are those before the step."""


class Optimizer:
    """Updates live parameters in place. Use: backward passes, then ``step``; gradients are gone after it.

    Matrices are decayed; norms (fewer than two axes) and biases, also those of experts in a stack, are not. ``rate``
    is the flag of the learning rate, for complaints.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        config: TrainConfig,
        schedule: Schedule,
        *,
        rate: str = "--lr",
        norm: Norm | None = None,
    ) -> None:
        self.updates = 0
        self._norm = norm or whole_norm
        self._rate = rate
        self._schedule = schedule
        self._clip = config.clip_grad
        self._parameters = dict(parameters)
        self._masters = {name: _master(p) for name, p in self._parameters.items()}
        self._device = next(iter(self._masters.values())).device
        decayed = {name for name, m in self._masters.items() if m.ndim >= 2 and not name.endswith("bias")}
        self._adam = torch.optim.AdamW(
            [
                {"params": [m for n, m in self._masters.items() if n in decayed], "weight_decay": config.weight_decay},
                {"params": [m for n, m in self._masters.items() if n not in decayed], "weight_decay": 0.0},
            ],
            lr=schedule.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=self._device.type == "cuda",
            foreach=self._device.type != "cuda",
        )

    def step(self) -> tuple[float, float]:
        """One update of every parameter; gives the gradient's norm before clipping, and the learning rate.

        A norm that is not finite raises GradientError and changes nothing.
        """
        masters = list(self._masters.values())
        total = self._norm({name: m.grad for name, m in self._masters.items() if m.grad is not None})
        norm = float(total)
        if not math.isfinite(norm):
            complaint = self._complaint(norm)
            self._adam.zero_grad(set_to_none=True)
            raise GradientError(complaint)
        if self._clip and norm > self._clip:
            clip_grads_with_norm_(masters, self._clip, total, foreach=True)
        lr = self._schedule.at(self.updates + 1)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self.updates += 1
        self._round()
        return norm, lr

    def state(self) -> dict[str, Tensor]:
        """Everything an exact continuation needs beside the parameters and ``updates``."""
        out: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            for key, value in self._adam.state.get(master, {}).items():
                out[f"{key}.{name}"] = value
            if master is not self._parameters[name]:
                out[f"master.{name}"] = master.detach()
        return out

    def load(self, state: Mapping[str, Tensor], *, updates: int) -> None:
        """Take back what ``state`` gave; the parameters are loaded by their owner."""
        left = dict(state)
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                master.data.copy_(_take(left, f"master.{name}", master))
            self._adam.state.pop(master, None)
            if f"step.{name}" in left:
                where = master.device if self._device.type == "cuda" else "cpu"
                entry = {"step": left.pop(f"step.{name}").to(where)}
                entry |= {key: _take(left, f"{key}.{name}", master).to(master.device) for key in _MOMENTS}
                self._adam.state[master] = entry
        if left:
            raise CheckpointError(f"the optimizer state holds {min(left)}, which this model does not have.")
        self.updates = updates

    def move(self, device: torch.device) -> None:
        """Put the moments and the masters on ``device``; the parameters stay where they are."""
        for name, master in self._masters.items():
            entry = self._adam.state.get(master, {})
            for key in _MOMENTS:
                if key in entry:
                    entry[key] = entry[key].to(device)
            if master is not self._parameters[name]:
                master.data = master.data.to(device)

    @torch.no_grad()
    def _round(self) -> None:
        pairs = [(p, self._masters[name]) for name, p in self._parameters.items() if p is not self._masters[name]]
        if pairs:
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [p for p, _ in pairs], [m for _, m in pairs]
            )

    def _complaint(self, norm: float) -> str:
        bad = (n for n, m in self._masters.items() if m.grad is not None and not bool(m.grad.isfinite().all()))
        where = next(bad, "no single parameter: their sum overflows")
        return (
            f"optimizer step {self.updates + 1}: the gradient's norm is {norm} (first at {where}); "
            "nothing was updated. "
            f"Look at this batch's rewards and log-probs, and lower {self._rate} if the loss had been growing."
        )


def whole_norm(grads: Mapping[str, Tensor]) -> Tensor:
    """The norm of a gradient that one rank has all of."""
    return get_total_norm(list(grads.values()), foreach=True) if grads else torch.zeros(())


def _master(parameter: Tensor) -> Tensor:
    """The tensor the optimizer updates in place of ``parameter``, which hands it its gradients as they come."""
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    master = parameter.detach().float().requires_grad_()

    def hand_over(p: Tensor) -> None:
        assert p.grad is not None
        master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
        p.grad = None

    parameter.register_post_accumulate_grad_hook(hand_over)
    return master


def _take(state: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    if name not in state:
        raise CheckpointError(f"the optimizer state lacks {name}; the checkpoint is of another model or incomplete.")
    found = state.pop(name)
    if found.shape != like.shape:
        raise CheckpointError(f"{name} has shape {tuple(found.shape)} in the optimizer state, not {tuple(like.shape)}.")
    return found
