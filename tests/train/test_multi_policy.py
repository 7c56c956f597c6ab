"""Several trainers behind one door: each has its own rows at its own pace, and a checkpoint loses nothing of it."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from miles.core.errors import CheckpointError
from miles.core.types import Batch, Sample, StepReport, TimeSpan, TokenStats, Version
from miles.sync.publish import MultiPolicySync, PolicySync
from miles.train.multi_policy import MultiPolicyTrainer, PolicyLearner


class Counts:
    """A trainer that remembers what it was given."""

    def __init__(self, name: str) -> None:
        self.version = Version(name)
        self.seen: list[list[int]] = []
        self.awake = True

    def weights(self):
        return {}

    async def step(self, batch: Batch) -> StepReport:
        self.seen.append([row.prompt_id for row in batch.samples])
        self.version = self.version.next()
        return StepReport(version=self.version, metrics={"loss": 1.0}, seconds={"pack": 0.5})

    async def save(self, folder: Path) -> None:
        (folder / "numbers").write_text(str(self.version.number))

    async def load(self, folder: Path) -> None:
        self.version = Version(self.version.policy, int((folder / "numbers").read_text()))

    async def sleep(self) -> None:
        self.awake = False

    async def wake(self) -> None:
        self.awake = True


def row(policy: str, number: int, version: int = 0) -> Sample:
    return Sample(
        prompt_id=number,
        trajectory=0,
        tokens=np.array([1, 2], np.int32),
        mask=np.array([False, True]),
        logprobs=np.zeros(2, np.float32),
        advantages=np.ones(2, np.float32),
        versions=np.array([-1, version], np.int32),
        policy=policy,
        extras={"routed_experts": np.zeros((2, 3), np.uint8)},
    )


def batch(step: int) -> Batch:
    """Two rows for each of two policies, interleaved."""
    samples = tuple(row(policy, 10 * step + at) for at in range(2) for policy in ("a", "b"))
    return Batch(step=step, samples=samples, num_groups=2)


def several(every: int) -> tuple[MultiPolicyTrainer, Counts, Counts]:
    a, b = Counts("a"), Counts("b")
    return MultiPolicyTrainer({"a": PolicyLearner(trainer=a), "b": PolicyLearner(trainer=b, every=every)}, "a"), a, b


def test_each_is_trained_on_its_own_rows_at_its_own_pace():
    trainer, a, b = several(every=2)
    reports = [asyncio.run(trainer.step(batch(step))) for step in (1, 2, 3, 4)]
    assert a.seen == [[10, 11], [20, 21], [30, 31], [40, 41]]
    assert b.seen == [[10, 11, 20, 21], [30, 31, 40, 41]], "no row is lost or trained on twice"
    assert [r.version for r in reports] == [Version("a", n) for n in (1, 2, 3, 4)]
    assert ["policy/b/loss" in r.metrics for r in reports] == [False, True, False, True]
    assert reports[1].metrics["policy/b/version"] == 1.0 and reports[1].metrics["policy/b/staleness"] == 0.0
    assert reports[1].seconds == {"pack": 0.5, "b.pack": 0.5}


class Records(Counts):
    """A trainer that reports a log-prob for each sample: its prompt's id."""

    async def step(self, batch: Batch) -> StepReport:
        report, ids = await super().step(batch), [row.prompt_id for row in batch.samples]
        order = np.arange(len(ids), dtype=np.int32)[::-1].copy()
        stats = TokenStats(
            sample_indices=order,
            counts=np.ones(len(ids), np.int32),
            logprobs=np.array(ids, np.float32)[order],
            entropies=np.zeros(len(ids), np.float32),
        )
        return replace(report, spans=(TimeSpan(name="pack", start=5.0, seconds=0.5),), token_stats=stats)


def test_the_tokens_of_each_policy_keep_their_place_in_the_batch():
    learners = {"a": PolicyLearner(trainer=Records("a")), "b": PolicyLearner(trainer=Records("b"))}
    whole = batch(1)
    report = asyncio.run(MultiPolicyTrainer(learners, "a").step(whole))
    assert report.token_stats is not None
    found = {index: float(logprobs[0]) for index, (logprobs, _) in report.token_stats.split().items()}
    assert found == {index: float(row.prompt_id) for index, row in enumerate(whole.samples)}
    assert [(span.lane, span.name) for span in report.spans] == [("a", "pack"), ("b", "pack")]


def test_rows_that_wait_survive_a_checkpoint(tmp_path):
    calm, _, waits = several(every=3)
    for step in (1, 2, 3):
        asyncio.run(calm.step(batch(step)))
    first, _, _ = several(every=3)
    for step in (1, 2):
        asyncio.run(first.step(batch(step)))
    asyncio.run(first.save(tmp_path))
    again, _, b = several(every=3)
    asyncio.run(again.load(tmp_path))
    asyncio.run(again.step(batch(3)))
    assert b.seen == waits.seen


def test_a_checkpoint_without_a_policy_is_refused_before_anything_is_loaded(tmp_path):
    alone = MultiPolicyTrainer({"a": PolicyLearner(trainer=Counts("a"))}, "a")
    asyncio.run(alone.save(tmp_path))
    trainer, a, _ = several(every=1)
    (tmp_path / "numbers").write_text("5")
    with pytest.raises(CheckpointError, match="has no policy b"):
        asyncio.run(trainer.load(tmp_path))
    assert a.version.number == 0


def test_all_sleep_and_wake_together():
    trainer, a, b = several(every=1)
    asyncio.run(trainer.sleep())
    assert not a.awake and not b.awake
    asyncio.run(trainer.wake())
    assert a.awake and b.awake


class Heard:
    def __init__(self) -> None:
        self.versions: list[Version] = []

    async def publish(self, version: Version):
        self.versions.append(version)
        return {"publish/transfer": 1.0}


def test_a_policy_is_published_when_it_has_a_new_version_and_not_before():
    trainer, a, b = several(every=2)
    heard = {name: Heard() for name in ("a", "b", "frozen")}
    version_of = {"a": lambda: a.version, "b": lambda: b.version, "frozen": lambda: Version("frozen")}
    sync = MultiPolicySync({n: PolicySync(sync=heard[n], version=version_of[n]) for n in heard}, "a")
    seconds = [asyncio.run(sync.publish(a.version))]
    for step in (1, 2, 3):
        report = asyncio.run(trainer.step(batch(step)))
        seconds.append(asyncio.run(sync.publish(report.version)))
    assert [v.number for v in heard["a"].versions] == [0, 1, 2, 3]
    assert heard["b"].versions == [Version("b", 0), Version("b", 1)]
    assert heard["frozen"].versions == [Version("frozen")]
    assert [s["publish/transfer"] for s in seconds] == [3.0, 1.0, 2.0, 1.0]
