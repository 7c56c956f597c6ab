"""The critic: what may still be earned from a token on, learnt beside the policy and never published.

``_R`` trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from miles.algo.config import AlgoConfig
from miles.algo.value import ValueLoss
from miles.core.errors import CheckpointError
from miles.core.types import Version
from miles.train import checkpoint
from miles.train.config import TrainConfig
from miles.train.optim import optimizer_of
from miles.train.peers import ALONE, Peers
from miles.train.rates import critic_schedule_of
from miles.train.returns import Judged
from miles.train.roles import ValueModel
from miles.train.rows import Rows
from miles.train.steps import Tally

FOLDER = "critic"
"""Where in a checkpoint it lies."""


class Critic:
    """A value model with an optimizer and a schedule of its own, for ``updates`` optimizer steps in the whole run.

    It may be on another device than the policy: rows go there and values come back. One that is ``apart`` has that
    device to itself, and never makes room for an engine.
    """

    def __init__(
        self,
        model: ValueModel,
        *,
        algo: AlgoConfig,
        train: TrainConfig,
        updates: int,
        apart: bool = False,
        peers: Peers = ALONE,
    ) -> None:
        self.apart = apart
        self._model, self._peers = model, peers
        self._saving = checkpoint.saving_of(train)
        self._loss = ValueLoss(clip=algo.value_clip)
        trained = {name: p for name, p in model.parameters().items() if p.requires_grad}
        schedule = critic_schedule_of(train, updates=updates)
        self._optimizer = optimizer_of(trained, train, schedule, model=model, rate="--critic-lr")

    @property
    def updates(self) -> int:
        """Optimizer steps made so far."""
        return self._optimizer.updates

    @torch.no_grad()
    def values(self, rows: Rows) -> Tensor:
        """What it expects where each trained token is about to be drawn, where the rows are."""
        return self._read(rows.to(self._model.device)).to(rows.tokens_T.device)

    def update(self, plan: Sequence[Judged]) -> dict[str, float]:
        """One optimizer step on a global batch."""
        tally = Tally()
        for part in plan:
            assert part.value_R is not None and part.return_R is not None, "judged without the critic's values"
            rows, device = part.rows.to(self._model.device), self._model.device
            terms = self._loss(self._read(rows), part.value_R.to(device), part.return_R.to(device), rows.layout())
            terms.loss.backward()
            for name, value in terms.metrics.items():
                tally.add(name, value)
        self._model.settle()
        grad_norm, lr = self._optimizer.step()
        self._model.updated()
        return tally.floats(self._peers) | {"critic_grad_norm": grad_norm, "critic_lr": lr}

    def save(self, folder: Path, version: Version) -> None:
        """Write it into a folder of its own within the checkpoint ``folder``."""
        (folder / FOLDER).mkdir(exist_ok=True)  # by whichever rank is first
        checkpoint.save(folder / FOLDER, self._model, self._optimizer, version, self._peers, self._saving)

    def load(self, folder: Path) -> None:
        """Take back what ``save`` wrote."""
        if not (folder / FOLDER).is_dir():
            raise CheckpointError(
                f"{folder} holds no critic, which --advantage-estimator ppo goes on with; "
                f"to start from its weights alone use --hf-checkpoint {folder}."
            )
        checkpoint.load(folder / FOLDER, self._model, self._optimizer, self._peers)

    def move(self, device: torch.device) -> None:
        """Put the weights and all of the optimizer's state on ``device``: no engine shares them."""
        self._model.move(device)
        self._optimizer.move(device)

    def _read(self, rows: Rows) -> Tensor:
        rows = rows.apart()
        return self._model.values(rows.tokens_T, rows.positions_T, rows.lengths, rows.before_R)
