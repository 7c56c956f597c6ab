"""One loop, every mode. The planes here are the smallest honest ones: they only remember."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from miles.algo.advantages import limit_staleness
from miles.core.errors import MilesError
from miles.core.events import BatchTaken, Evaluated, GroupFinished, PromptAdmitted, RunEnded, Saved, StepFinished
from miles.core.protocols import FilterResult
from miles.core.types import Author, Batch, Group, Prompt, Reward, Sample, Span, Status, StepReport, Trajectory, Version
from miles.schedule.checkpoints import CheckpointDirectory
from miles.schedule.device_lease import ColocatedLease, DisjointLease
from miles.schedule.loop import Interval, Loop, LoopSettings, Planes


class Harness:
    """A source that counts, an engine that answers out of order, a trainer and a journal that remember."""

    def __init__(self, folder: Path, *, seed: int = 0, drop: float = 0.0, colocated: bool = False) -> None:
        self.chance, self.drop = random.Random(seed), drop
        self.position, self.version, self.trained = 0, Version(), 0
        self.batches: list[Batch] = []
        self.staleness: list[int] = []
        self.events: list[object] = []
        self.awake = {"engine": True, "trainer": True}
        self.busy = 0
        engine, trainer = _Sleeper(self, "engine"), _Sleeper(self, "trainer")
        self.planes = Planes(
            source=self,
            rollout=self,
            group_filter=self.keep,
            estimator=self.credit,
            trainer=self,
            sync=self,
            lease=ColocatedLease(engine=engine, trainer=trainer) if colocated else DisjointLease(),
            evaluate=self.evaluate,
            checkpoints=CheckpointDirectory(folder),
            journal=_Journal(self.events),
            measure=lambda groups, version: {"reward": float(len(groups))},
        )

    def next(self) -> Prompt:
        self.position += 1
        return Prompt(id=self.position - 1, messages=[])

    def state(self):
        return {"position": self.position}

    async def load(self, folder): ...

    async def produce(self, prompt: Prompt) -> Group:
        assert self.awake["engine"], "asked to write while asleep"
        self.busy += 1
        version = self.version
        for _ in range(self.chance.randrange(20)):
            await asyncio.sleep(0)
        self.busy -= 1
        span = Span(
            author=Author.POLICY, tokens=np.zeros(2, np.int32), logprobs=np.zeros(2, np.float32), version=version
        )
        asked = Span(author=Author.PROMPT, tokens=np.zeros(1, np.int32))
        one = Trajectory(branches=((asked, span),), status=Status.COMPLETED, reward=Reward(value=1.0))
        return Group(prompt=prompt, trajectories=(one,))

    def keep(self, group: Group) -> FilterResult:
        unlucky = random.Random(group.prompt.id).random() < self.drop
        return FilterResult(keep=not unlucky, reason="unlucky" if unlucky else "kept")

    def credit(self, group: Group):
        number = group.trajectories[0].oldest_version.number
        return [
            Sample(
                prompt_id=group.prompt.id,
                trajectory=0,
                tokens=np.zeros(3, np.int32),
                mask=np.array([False, True, True]),
                logprobs=np.zeros(3, np.float32),
                advantages=np.zeros(3, np.float32),
                versions=np.array([-1, number, number], np.int32),
            )
        ]

    async def step(self, batch: Batch) -> StepReport:
        assert self.awake["trainer"], "asked to train while asleep"
        self.batches.append(batch)
        self.staleness.append(batch.staleness(Version(number=self.trained)))
        for _ in range(7):
            await asyncio.sleep(0)
        self.trained += 1
        return StepReport(version=Version(number=self.trained))

    async def save(self, folder: Path) -> None:
        (folder / "trained").write_text(str(self.trained))

    async def publish(self, version: Version) -> Mapping[str, float]:
        self.version = version
        return {}

    async def evaluate(self) -> Mapping[str, float]:
        return {"eval/version": float(self.version.number)}


class _Sleeper:
    """Takes ``sleeping`` and ``waking`` seconds of the clock ``now``."""

    def __init__(
        self, harness: Harness, who: str, now: list[float] | None = None, sleeping: float = 0.0, waking: float = 0.0
    ) -> None:
        self.harness, self.who = harness, who
        self.now = [0.0] if now is None else now
        self.sleeping, self.waking = sleeping, waking

    async def sleep(self) -> None:
        self.now[0] += self.sleeping
        assert self.who == "trainer" or not self.harness.busy, "put to sleep while writing"
        self.harness.awake[self.who] = False

    async def wake(self) -> None:
        self.now[0] += self.waking
        self.harness.awake[self.who] = True


class _Journal:
    def __init__(self, events: list[object]) -> None:
        self.events = events
        self.hear = lambda event: None

    def __call__(self, event: object) -> None:
        self.events.append(event)
        self.hear(event)

    def commit(self) -> None: ...

    def offsets(self) -> Mapping[str, int]:
        return {"events": len(self.events)}


def prompts_of(harness: Harness) -> list[int]:
    return [s.prompt_id for b in harness.batches for s in b.samples]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("k", [0, 1, 3])
def test_no_token_is_staler_than_asked_and_the_budget_is_used(tmp_path, k, seed):
    harness = Harness(tmp_path, seed=seed)
    version = asyncio.run(Loop(harness.planes, LoopSettings(steps=12, groups_per_step=4, max_staleness=k)).run())
    assert version.number == 12
    assert max(harness.staleness) == k


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_every_step_trains_on_whole_batches_in_the_order_the_prompts_came(tmp_path, k, drop):
    harness = Harness(tmp_path, drop=drop)
    asyncio.run(Loop(harness.planes, LoopSettings(steps=6, groups_per_step=4, max_staleness=k)).run())
    assert [b.num_groups for b in harness.batches] == [4] * 6
    kept = [i for i in range(harness.position) if random.Random(i).random() >= drop]
    assert prompts_of(harness) == kept[:24]
    assert max(harness.staleness) <= k


def test_no_prompt_is_drawn_that_no_step_will_eat(tmp_path):
    harness = Harness(tmp_path)
    asyncio.run(Loop(harness.planes, LoopSettings(steps=3, groups_per_step=4, max_staleness=2)).run())
    assert harness.position == 12


def test_every_drawn_prompt_is_trained_or_dropped_with_a_reason(tmp_path):
    harness = Harness(tmp_path, drop=0.4)
    asyncio.run(Loop(harness.planes, LoopSettings(steps=5, groups_per_step=3)).run())
    reported = [e for e in harness.events if isinstance(e, GroupFinished)]
    assert sorted(e.ticket for e in reported) == list(range(harness.position)) == [e.ticket for e in reported]
    assert {e.reason for e in reported if not e.kept} == {"unlucky"}
    taken = [t for e in harness.events if isinstance(e, BatchTaken) for t in e.tickets]
    assert taken == [e.ticket for e in reported if e.kept]


def test_colocated_planes_never_overlap(tmp_path):
    harness = Harness(tmp_path, colocated=True, drop=0.3)
    asyncio.run(
        Loop(harness.planes, LoopSettings(steps=5, groups_per_step=4)).run()
    )  # the harness asserts who is awake
    assert harness.staleness == [0] * 5


def test_the_time_of_a_step_has_both_hand_overs_and_no_evaluation(tmp_path, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]

    class Slow(Harness):
        async def evaluate(self):
            now[0] += 1000.0
            return await super().evaluate()

        async def step(self, batch):
            now[0] += 20.0
            return await super().step(batch)

    harness = Slow(tmp_path, colocated=True)
    for who, spent in (("engine", (1.0, 2.0)), ("trainer", (4.0, 8.0))):
        sleeper = _Sleeper(harness, who, now, *spent)
        setattr(harness.planes.lease, f"_{who}", sleeper)
    monkeypatch.setattr("miles.schedule.loop.time.perf_counter", lambda: now[0])
    settings = LoopSettings(steps=3, groups_per_step=2, evaluate=Interval(every=1, at_start=True))
    asyncio.run(Loop(harness.planes, settings).run())
    steps = [event.seconds for event in harness.events if isinstance(event, StepFinished)]
    handed = {"offload": 15.0, "offload/to_rollout": 6.0, "offload/to_train": 9.0}
    own = {"rollout": 0.0, "train": 20.0, "publish": 0.0, "step": 35.0}
    assert [{name: seconds[name] for name in (*handed, *own)} for seconds in steps] == [handed | own] * 3


def test_a_failing_reward_ends_the_run_and_is_the_error_shown(tmp_path):
    harness = Harness(tmp_path)

    async def broken(prompt):
        raise MilesError(f"no reward for {prompt.id}")

    harness.produce = broken
    with pytest.raises(MilesError, match="no reward for 0"):
        asyncio.run(Loop(harness.planes, LoopSettings(steps=5, groups_per_step=4)).run())


def test_a_failing_trainer_ends_the_run(tmp_path):
    harness = Harness(tmp_path)

    async def broken(batch):
        raise MilesError("NaN in step 1")

    harness.step = broken
    with pytest.raises(MilesError, match="NaN in step 1"):
        asyncio.run(Loop(harness.planes, LoopSettings(steps=5, groups_per_step=4, max_staleness=1)).run())


def test_a_rollout_that_hangs_is_named_when_its_deadline_passes(tmp_path):
    harness = Harness(tmp_path)

    async def hangs(prompt):
        await asyncio.Event().wait()

    harness.produce = hangs
    tempo = LoopSettings(steps=1, groups_per_step=2, stall_timeout=0.01)
    with pytest.raises(MilesError, match=r"step 1 waited .* tickets 0 \(prompt 0\), 1 \(prompt 1\)"):
        asyncio.run(Loop(harness.planes, tempo).run())


def test_a_run_that_is_stopped_while_its_engines_start_ends_without_a_step(tmp_path):
    harness = Harness(tmp_path)
    ended: list[str] = []

    async def start_for_ever(version):
        loop.stop_soon()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("publish")

    harness.publish = start_for_ever
    loop = Loop(harness.planes, LoopSettings(steps=3, groups_per_step=2))
    asyncio.run(loop.run())
    assert not loop.finished and not harness.batches and ended == ["publish"]
    assert harness.events[-1] == RunEnded(step=0, finished=False)
    assert CheckpointDirectory(tmp_path).latest() is None


def test_engines_that_cannot_start_end_the_run_with_their_error(tmp_path):
    harness = Harness(tmp_path)

    async def fail(version):
        raise MilesError("engine 0 ended with SIGKILL while it started")

    harness.publish = fail
    with pytest.raises(MilesError, match="engine 0 ended with SIGKILL while it started"):
        asyncio.run(Loop(harness.planes, LoopSettings(steps=3, groups_per_step=2)).run())


def test_a_filter_that_drops_everything_ends_the_run_with_its_reasons(tmp_path):
    harness = Harness(tmp_path, drop=1.0)
    tempo = LoopSettings(steps=1, groups_per_step=2, max_dropped=30)
    with pytest.raises(MilesError, match=r"dropped 30 groups in a row \(unlucky 30 times\).*--max-dropped-groups"):
        asyncio.run(Loop(harness.planes, tempo).run())


def test_evaluations_and_saves_come_when_they_are_due(tmp_path):
    harness = Harness(tmp_path)
    tempo = LoopSettings(
        steps=5,
        groups_per_step=2,
        evaluate=Interval(every=2, at_start=True, at_end=True),
        save=Interval(every=3, at_end=True),
    )
    asyncio.run(Loop(harness.planes, tempo).run())
    assert [(e.step, e.metrics["eval/version"]) for e in harness.events if isinstance(e, Evaluated)] == [
        (0, 0),
        (2, 2),
        (4, 4),
        (5, 5),
    ]
    assert [e.step for e in harness.events if isinstance(e, Saved)] == [3, 5]


def read_slowly(seed: int):
    """Calls the source a little later, and is not told of its result at once, as with a source in another thread."""
    chance = random.Random(seed)

    async def read(call):
        for _ in range(chance.randrange(30)):
            await asyncio.sleep(0)
        result = call()
        for _ in range(chance.randrange(30)):
            await asyncio.sleep(0)
        return result

    return read


def test_a_data_source_that_hangs_is_named_when_the_deadline_passes(tmp_path):
    harness = Harness(tmp_path)

    async def read(call):
        return await asyncio.Event().wait() if harness.position == 3 else call()

    tempo = LoopSettings(steps=2, groups_per_step=2, stall_timeout=0.05)
    with pytest.raises(MilesError, match=r"the data source has not returned the next prompt \(--data-source-path\)"):
        asyncio.run(Loop(replace(harness.planes, read=read), tempo).run())


@pytest.mark.parametrize("read", [None, *map(read_slowly, range(4))])
@pytest.mark.parametrize(("k", "drop"), [(0, 0.0), (0, 0.4), (2, 0.0), (2, 0.4)])
def test_a_continued_run_trains_on_what_the_first_life_did_not(tmp_path, k, drop, read):
    """Stop early at some step, go on in a new loop with a new source: no prompt twice, none left out."""
    tempo = LoopSettings(steps=6, groups_per_step=3, max_staleness=k)
    first = Harness(tmp_path, drop=drop)
    first.planes = replace(first.planes, read=read)
    loop = Loop(first.planes, tempo)
    first.planes.journal.hear = lambda e: loop.stop_soon() if isinstance(e, StepFinished) and e.step == 2 else None
    asyncio.run(loop.run())
    assert RunEnded(step=2, finished=False) in first.events
    folder, cursor = CheckpointDirectory(tmp_path).latest()
    assert (cursor.step, folder.name) == (2, "step-000002")

    second = Harness(tmp_path, drop=drop, seed=5)
    second.position, second.trained = cursor.source["position"], cursor.version
    asyncio.run(Loop(second.planes, tempo, cursor).run())
    calm = Harness(tmp_path / "calm", drop=drop)
    asyncio.run(Loop(calm.planes, tempo).run())
    assert prompts_of(first) + prompts_of(second) == prompts_of(calm)


def test_a_loop_that_starts_beyond_its_last_step_ends_without_training(tmp_path):
    tempo = LoopSettings(steps=4, groups_per_step=2)
    first = Harness(tmp_path)
    asyncio.run(Loop(first.planes, tempo).run())
    found = CheckpointDirectory(tmp_path).latest()
    assert found is not None
    second = Harness(tmp_path)
    loop = Loop(second.planes, replace(tempo, steps=2, evaluate=Interval(every=1)), found[1])
    asyncio.run(asyncio.wait_for(loop.run(), 60))
    assert loop.finished and not second.batches
    assert second.events[-1] == RunEnded(step=4, finished=True)


class Oversampled(Harness):
    """Trajectories take a few turns each, unless they are cut; what was begun goes on."""

    def __init__(self, folder: Path, **how) -> None:
        super().__init__(folder, **how)
        self.shut, self.left, self.resumed = False, {}, 0
        self.planes = replace(self.planes, interruptible=self)

    async def produce(self, prompt: Prompt) -> Group:
        self.left[prompt.id] = 3 + 10 * (prompt.id % 3)
        return await self.resume_group(await super().produce(prompt), fresh=True)

    async def resume_group(self, begun: Group, fresh: bool = False) -> Group:
        self.shut = False
        self.resumed += not fresh
        self.busy += 1
        while self.left[begun.prompt.id] and not self.shut:
            self.left[begun.prompt.id] -= 1
            await asyncio.sleep(0)
        self.busy -= 1
        status = Status.ABORTED if self.left[begun.prompt.id] else Status.COMPLETED
        return replace(begun, trajectories=tuple(replace(t, status=status) for t in begun.trajectories))

    async def interrupt(self) -> None:
        self.shut = True


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("drop", [0.0, 0.4])
def test_spare_groups_are_cut_and_every_ticket_is_accounted_for(tmp_path, partial, colocated, drop):
    harness = Oversampled(tmp_path, drop=drop, colocated=colocated)
    asyncio.run(Loop(harness.planes, LoopSettings(steps=6, groups_per_step=4, extra_groups=3, partial=partial)).run())
    assert [len(batch.samples) for batch in harness.batches] == [4] * 6
    reported = [event for event in harness.events if isinstance(event, GroupFinished)]
    admitted = [event.ticket for event in harness.events if isinstance(event, PromptAdmitted)]
    assert sorted(event.ticket for event in reported) == sorted(admitted)
    assert len({row.prompt_id for batch in harness.batches for row in batch.samples}) == 24
    assert sum(event.kept for event in reported) == 24
    reasons = {event.reason for event in reported if not event.kept} - {"unlucky"}
    assert reasons <= ({"leftover"} if partial else {"aborted", "oversampled"}) and reasons
    assert bool(harness.resumed) == partial
    if not partial:
        assert max(harness.staleness) == 0
    finished = [event for event in harness.events if isinstance(event, StepFinished)]
    assert all("groups_aborted" in event.metrics for event in finished)


def test_a_spare_group_that_will_not_be_cut_is_named(tmp_path):
    class Deaf(Oversampled):
        async def interrupt(self) -> None: ...

        async def resume_group(self, begun: Group, fresh: bool = False) -> Group:
            if begun.prompt.id == 5:
                await asyncio.Event().wait()
            return await super().resume_group(begun, fresh)

    with pytest.raises(MilesError, match=r"interrupted ones to return; in flight: tickets 5 \(prompt 5\)"):
        asyncio.run(
            Loop(
                Deaf(tmp_path).planes, LoopSettings(steps=2, groups_per_step=4, extra_groups=2, stall_timeout=0.5)
            ).run()
        )


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("drop", [0.0, 0.4])
@pytest.mark.parametrize("k", [1, 2])
def test_spare_groups_of_overlapping_planes_keep_the_staleness_bound(tmp_path, k, drop, partial):
    """Every seventh prompt takes longer than the bound allows, and is overtaken."""

    class Uneven(Harness):
        async def produce(self, prompt: Prompt) -> Group:
            group = await super().produce(prompt)
            for _ in range(400 if prompt.id % 7 == 3 else 0):
                await asyncio.sleep(0)
            return group

    def limit(samples):
        return limit_staleness(samples, lambda _: harness.trained, k)

    harness = Uneven(tmp_path, drop=drop)
    harness.planes = replace(harness.planes, limit_staleness=limit if partial else None)
    settings = LoopSettings(steps=12, groups_per_step=4, max_staleness=k, extra_groups=3, partial=partial)
    asyncio.run(asyncio.wait_for(Loop(harness.planes, settings).run(), 60))
    assert [len(batch.samples) for batch in harness.batches] == [4] * 12
    assert max(harness.staleness) == k
    assert all(sample.mask.any() for batch in harness.batches for sample in batch.samples)
    reported = [event for event in harness.events if isinstance(event, GroupFinished)]
    tickets = [event.ticket for event in reported]
    assert len(tickets) == len(set(tickets)), "every ticket has one end"
    assert sum(event.kept for event in reported) == 48
    assert {event.reason for event in reported if not event.kept} - {"unlucky", "leftover"} == {"stale"}
    last = [e for e in harness.events if isinstance(e, StepFinished)][-1]
    assert partial or last.metrics["groups_aborted"] >= 0
    admitted = {event.ticket for event in harness.events if isinstance(event, PromptAdmitted)}
    assert set(tickets) <= admitted and len(admitted) - len(tickets) <= (k + 1) * 4 + 3


def test_a_late_group_that_will_not_be_cancelled_is_named(tmp_path):
    class Deaf(Harness):
        async def produce(self, prompt: Prompt) -> Group:
            group = await super().produce(prompt)
            for _ in range(2 if prompt.id == 1 else 0):
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    continue
            return group

    settings = LoopSettings(steps=6, groups_per_step=4, max_staleness=1, extra_groups=2, stall_timeout=0.5)
    with pytest.raises(MilesError, match=r"late ones to be cancelled; in flight: tickets .*1 \(prompt 1\)"):
        asyncio.run(Loop(Deaf(tmp_path).planes, settings).run())
