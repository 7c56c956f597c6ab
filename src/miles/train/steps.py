"""One optimizer step's gradient: micro-batch after micro-batch, read, judged and added up.

``_R`` trained tokens of a micro-batch; ``L`` layers with experts, ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from miles.algo.mismatch import gaps, mismatch
from miles.algo.objective import Evidence, Objective
from miles.kernels.arithmetic import exact
from miles.models.moe import imbalance
from miles.train.balance import Price, deal
from miles.train.config import TrainConfig
from miles.train.logits import Output, logprobs
from miles.train.peers import ALONE, Peers
from miles.train.prefix import bundles
from miles.train.roles import Kept, TrainModel
from miles.train.rows import Flat, Rows, paths_of, rows_of
from miles.train.teacher import Teaching

_LOGP, _LOAD = "logp", "expert_load"
"""What is kept of a micro-batch beside its metrics."""


@dataclass(slots=True)
class Tally:
    """Sums over micro-batches, kept on the device until a step is over. ``most`` holds largest values.

    ``load_LE`` is how often each expert was chosen, where any was. ``compared`` are the rows that were compared with
    the engine and the trainer's log-probs of them, where a single difference is to be named.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    most: dict[str, Tensor] = field(default_factory=dict)
    load_LE: Tensor | None = None
    compared: list[tuple[Rows, Tensor]] = field(default_factory=list)

    def add(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def rise(self, name: str, value: Tensor) -> None:
        self.most[name] = torch.maximum(self.most[name], value) if name in self.most else value

    def weigh(self, load_LE: Tensor) -> None:
        """Add to how often each expert was chosen."""
        self.load_LE = load_LE if self.load_LE is None else self.load_LE + load_LE

    def imbalance(self, peers: Peers = ALONE) -> dict[str, float]:
        """How unevenly the experts were chosen over all parts of a batch; nothing where nobody counted."""
        if self.load_LE is None:
            return {}
        return {"expert_imbalance": float(imbalance(peers.sum(self.load_LE.to(torch.float64))))}

    def floats(self, peers: Peers = ALONE) -> dict[str, float]:
        """Every entry as a number, over all parts of a batch, with one wait for the device."""
        found: dict[str, Tensor] = {}
        for entries, join in ((self.sums, peers.sum), (self.most, peers.most)):
            names = peers.names(list(entries))
            if names:
                none = next(iter((self.sums | self.most).values())).new_zeros((), dtype=torch.float64)
                stacked = torch.stack([entries.get(name, none).detach().to(torch.float64) for name in names])
                found |= dict(zip(names, join(stacked).unbind(), strict=True))
        return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True)) if found else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How log-probs are read off a model: at what temperature, how many tokens' logits at a time."""

    temperature: float
    chunk: int | None

    def output(self, model: TrainModel, rows: Rows) -> Output:
        """What predicts the trained tokens, before it is a distribution."""
        outputs: list[Output] = []

        def judge(_: int, output: Output) -> tuple[None, Kept]:
            outputs.append(output)
            return None, {}

        model.each([rows], judge)
        return outputs[0]

    def logprobs(self, output: Output, target_R: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probs of the tokens ``target_R``, and the entropies of what they were drawn from."""
        return logprobs(output, target_R, temperature=self.temperature, chunk=self.chunk)

    @torch.no_grad()
    def frozen(self, model: TrainModel, plan: Sequence[Rows]) -> list[Tensor]:
        """The log-probs of each micro-batch's trained tokens alone, without a gradient."""

        def judge(number: int, output: Output) -> tuple[None, Kept]:
            return None, {"logp": self.logprobs(output, plan[number].target_R)[0]}

        return [kept["logp"] for kept in model.each(plan, judge)]


def micro_batches(
    flat: Flat,
    config: TrainConfig,
    *,
    device: torch.device,
    replay: bool,
    paired: bool = False,
    peers: Peers = ALONE,
    price: Price | None = None,
) -> list[Rows]:
    """This rank's part of a global batch as packed rows; ``paired`` samples, 0 and 1, 2 and 3, ..., stay together.

    Every part has as many micro-batches; one for which no sample is left has rows that weigh nothing. ``price`` says
    what so many tokens cost where it is not their number that parts are to have alike.
    """
    together, share = 2 if paired else 1, config.share_prefix
    count = None if config.micro_batch_size is None or config.use_dynamic_batch_size else config.micro_batch_size
    limit = config.max_tokens_per_gpu * peers.context if share and count is None else None
    units, lengths = _units(flat, together=together, replay=replay, limit=limit, parts=peers.parts)
    if not units:
        return []
    bins = deal(
        lengths,
        parts=peers.parts,
        budget=config.max_tokens_per_gpu,
        context=peers.context,
        count=None if count is None else max(1, count // together),
        costs=None if price is None else [price(length) for length in lengths],
        balanced=config.balance_data,
        what="pair" if paired else "sample",
    )[peers.part]
    smallest = units[min(range(len(units)), key=lengths.__getitem__)]
    return [
        rows_of(flat, [i for unit in some for i in units[unit]], device=device, replay=replay, share=share)
        if some
        else _idle(rows_of(flat, smallest, device=device, replay=replay))
        for some in bins
    ]


def _units(
    flat: Flat, *, together: int, replay: bool, limit: int | None, parts: int
) -> tuple[list[list[int]], list[int]]:
    """What stays together, and how many tokens each is; with a ``limit``, as many samples of a prompt as fit."""
    kept = np.flatnonzero(flat.length_S).tolist()
    if limit is not None:
        found = bundles(paths_of(flat, kept, replay=replay), limit=limit, parts=parts, together=together)
        return [[kept[i] for i in bundle.members] for bundle in found], [bundle.tokens for bundle in found]
    units = [kept[start : start + together] for start in range(0, len(kept), together)]
    return units, [int(flat.length_S[unit].sum()) for unit in units]


def _idle(rows: Rows) -> Rows:
    """The same rows, weighing nothing: a rank without a sample must still be there when the others call on it."""
    nothing = {name: torch.zeros_like(getattr(rows, name)) for name in ("weight_R", "mean_R", "advantage_R")}
    return replace(rows, idle=True, oldest_R=torch.full_like(rows.oldest_R, -1), **nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """Adds up the gradient of one global batch."""

    actor: TrainModel
    reference: TrainModel | None
    objective: Objective
    reader: Reader
    teachers: Teaching | None = None

    def accumulate(self, plan: Sequence[Rows], olds: Sequence[Tensor | None], tally: Tally) -> list[Tensor]:
        """Forward, loss and backward of every micro-batch; gives the log-probs as they were.

        Where there are no old ones the policy is its own past: the ratio is 1 and only its gradient counts.
        """
        none: list[Tensor | None] = [None] * len(plan)
        refs = none if self.reference is None else self.reader.frozen(self.reference, [r.unrouted() for r in plan])

        def judge(number: int, output: Output) -> tuple[Tensor, Kept]:
            return self._judge(plan[number], olds[number], refs[number], output)

        kept = self.actor.each(plan, judge)
        for found in kept:
            if _LOAD in found:
                tally.weigh(found[_LOAD])
            for name, value in found.items():
                if name not in (_LOGP, _LOAD):
                    tally.add(name, value)
        return [found[_LOGP] for found in kept]

    def _judge(
        self, rows: Rows, old_logp_R: Tensor | None, ref_logp_R: Tensor | None, output: Output
    ) -> tuple[Tensor, Kept]:
        heard = None if self.teachers is None else self.teachers.read(rows, self.reader.output)
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
        kept = {name: part.detach() for name, part in terms.metrics.items()}
        if output.flips is not None and output.replayed is not None:
            kept |= {"routing_flips": output.flips, "routing_replayed": output.replayed}
        if output.load_LE is not None:
            kept[_LOAD] = output.load_LE if not rows.idle else torch.zeros_like(output.load_LE)
        return terms.loss, {**kept, _LOGP: now_R}


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
    if exact():
        tally.compared.append((rows, logp_R))


def parity_metrics(tally: Tally, peers: Peers = ALONE) -> dict[str, float]:
    """What the comparisons with the engine so far come to; empty where there was nothing to compare."""
    totals = {name.removeprefix("parity_"): value for name, value in tally.floats(peers).items()}
    return {f"parity_{name}": value for name, value in mismatch(totals).items()}
