"""One optimizer step's gradient: micro-batch after micro-batch, read, judged and added up.

``_R`` trained tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from miles.algo.mismatch import gaps, mismatch
from miles.algo.objective import Evidence, Objective
from miles.train.config import TrainConfig
from miles.train.logits import Output, logprobs
from miles.train.pack import by_count, by_tokens
from miles.train.roles import TrainModel
from miles.train.rows import Flat, Rows, rows_of
from miles.train.teacher import Teaching


@dataclass(slots=True)
class Tally:
    """Sums over micro-batches, kept on the device until a step is over. ``most`` holds largest values."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    most: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def rise(self, name: str, value: Tensor) -> None:
        self.most[name] = torch.maximum(self.most[name], value) if name in self.most else value

    def floats(self) -> dict[str, float]:
        """Every entry as a number, with one wait for the device."""
        found = self.sums | self.most
        if not found:
            return {}
        stacked = torch.stack([v.detach().to(torch.float64) for v in found.values()])
        return dict(zip(found, stacked.tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How log-probs are read off a model: at what temperature, how many tokens' logits at a time."""

    temperature: float
    chunk: int | None

    def __call__(self, model: TrainModel, rows: Rows, tally: Tally | None = None) -> tuple[Tensor, Tensor]:
        """The log-probs and entropies of the trained tokens; how often a replay overruled goes to ``tally``."""
        return self.logprobs(self.output(model, rows, tally), rows.target_R)

    def output(self, model: TrainModel, rows: Rows, tally: Tally | None = None) -> Output:
        """What predicts the trained tokens, before it is a distribution."""
        read = model.read(rows.tokens_T, rows.positions_T, rows.lengths, rows.replay_TLk)
        if tally is not None and read.flips is not None and read.replayed is not None:
            tally.add("routing_flips", read.flips)
            tally.add("routing_replayed", read.replayed)
        hidden_RD = read.hidden_TD.index_select(0, rows.before_R)
        return Output(hidden_RD=hidden_RD, head_VD=model.head(), softcap=model.softcap)

    def logprobs(self, output: Output, target_R: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probs of the tokens ``target_R``, and the entropies of what they were drawn from."""
        return logprobs(
            output.hidden_RD,
            output.head_VD,
            target_R,
            temperature=self.temperature,
            softcap=output.softcap,
            chunk=self.chunk,
        )

    @torch.no_grad()
    def frozen(self, model: TrainModel, rows: Rows) -> Tensor:
        """The log-probs alone, without a gradient."""
        return self(model, rows)[0]


def micro_batches(
    flat: Flat, config: TrainConfig, *, device: torch.device, replay: bool, paired: bool = False
) -> list[Rows]:
    """A global batch as packed rows; ``paired`` samples, 0 and 1, 2 and 3, ..., are in one micro-batch each."""
    kept = np.flatnonzero(flat.length_S)
    units = kept.reshape(-1, 2 if paired else 1)
    if config.micro_batch_size is not None and not config.use_dynamic_batch_size:
        bins = by_count(len(units), max(1, config.micro_batch_size // units.shape[1]))
    else:
        lengths = flat.length_S[units].sum(1).tolist()
        bins = by_tokens(lengths, config.max_tokens_per_gpu, "pair" if paired else "sample")
    return [rows_of(flat, units[chosen].ravel().tolist(), device=device, replay=replay) for chosen in bins]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """Adds up the gradient of one global batch."""

    actor: TrainModel
    reference: TrainModel | None
    objective: Objective
    reader: Reader
    teachers: Teaching | None = None

    def accumulate(self, rows: Rows, old_logp_R: Tensor | None, tally: Tally) -> Tensor:
        """One micro-batch: forward, loss, backward; gives the log-probs as they were.

        Without ``old_logp_R`` the policy is its own past: the ratio is 1 and only its gradient counts.
        """
        ref_logp_R = None if self.reference is None else self.reader.frozen(self.reference, rows)
        heard = None if self.teachers is None else self.teachers.read(rows, self.reader.output)
        output = self.reader.output(self.actor, rows, tally)
        logp_R, entropy_R = self.reader.logprobs(output, rows.target_R)
        now_R = logp_R.detach()
        old_logp_R = now_R if old_logp_R is None else old_logp_R
        advantage_R, lesson = rows.advantage_R, None
        if self.teachers is not None and heard is not None:
            lesson = self.teachers.lesson(heard, output, rows)
            advantage_R = lesson.advantage(advantage_R, old_logp_R)
        evidence = Evidence(
            logp_R=logp_R,
            old_logp_R=old_logp_R,
            engine_logp_R=rows.engine_logp_R,
            advantage_R=advantage_R,
            entropy_R=entropy_R,
            sample_R=rows.sample_R,
            samples=len(rows.lengths),
            ref_logp_R=ref_logp_R,
        )
        terms = self.objective(evidence, rows.layout())
        if lesson is not None:
            terms = lesson.added(terms, old_logp_R, rows.layout())
        terms.loss.backward()
        for name, part in terms.metrics.items():
            tally.add(name, part)
        return now_R


def parity(logp_R: Tensor, rows: Rows, version: int, tally: Tally) -> None:
    """Engine against trainer, over the samples that the trainer's present weights wrote alone.

    A token after one of older weights was sampled from a past that those had remembered: no one version gives its
    log-prob.
    """
    found = gaps(rows.engine_logp_R, logp_R, rows.oldest_R == version, rows.layout())
    for name, value in found.sums.items():
        tally.add(f"parity_{name}", value)
    for name, value in found.most.items():
        tally.rise(f"parity_{name}", value)


def parity_metrics(tally: Tally) -> dict[str, float]:
    """What the comparisons with the engine so far come to; empty where there was nothing to compare."""
    totals = {name.removeprefix("parity_"): value for name, value in tally.floats().items()}
    return {f"parity_{name}": value for name, value in mismatch(totals).items()}
