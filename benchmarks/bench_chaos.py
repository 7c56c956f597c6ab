"""Chaos test: kill, freeze and disconnect parts of a run at random, and compare its result with an undisturbed run.

    python -m benchmarks.bench_chaos --kills 50                          async GRPO, two engines, two trainer ranks
    python -m benchmarks.bench_chaos --kills 12 --deterministic          synchronous, embedded engine: bitwise equal
    python -m benchmarks.bench_chaos --kills 50 --ray --namespaces       on a Ray cluster of three nodes, as root
    python -m benchmarks.bench_chaos --kills 12 --ray --deterministic    there, synchronous: bitwise equal

The victims are the run itself (which its supervisor restarts), the second rank of its trainer, its engine servers, and
on a cluster whole nodes and their network links. Processes are killed (SIGKILL) or frozen (SIGSTOP). Faults come
during steps, each after the run has recovered from the previous one, so that every fault hits a running run.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Protocol

from benchmarks.chaos_ray_cluster import GUARD, ROOT, Cluster, processes
from benchmarks.chaos_report import compare_weights, final_rewards, load_final_weights, summarize_run

from miles.launch.commands import demo_task

SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
LOCAL = [(whom, how) for whom in ("driver", "rank", "engine") for how in SIGNALS]
IN_STEP = [(whom, how) for whom in ("driver", "rank") for how in SIGNALS]
CLUSTER = [*LOCAL, ("node", "killed")]
NAMESPACES = [*CLUSTER, ("link", "down")]
HEARTBEAT = 10.0
_LOOK = 0.05
_BETWEEN = 3
# Steps for each blow, with some to spare: many are made until a node that was lost is back.
_STEPS = {"node": 120, "link": 240}
_FEW = 6


@dataclass(kw_only=True)
class Blow:
    """One of them: at which second of the run, who was struck and how, and how long no step was made after it."""

    at: float
    whom: str
    how: str
    until: float | None = None

    def __str__(self) -> str:
        until = "no step was made" if self.until is None else f"a step {self.until:5.1f} s later"
        return f"{self.at:7.1f} s  {self.whom:14} {self.how:7} {until}"


@dataclass(kw_only=True)
class RunOutcome:
    """What happened to one run."""

    code: int | None = None
    seconds: float = 0.0
    blows: list[Blow] = field(default_factory=list)
    said: str = ""
    left: list[int] = field(default_factory=list)


class Stage(Protocol):
    """Where a run is made, and how it is struck there."""

    @property
    def around(self) -> Mapping[str, str]: ...
    def strike(self, supervisor: int, whom: str, how: str) -> str | None:
        """Who was struck; None where that part of the run is not there just now."""
        ...

    def tend(self, *, going: bool) -> None:
        """What an operator does meanwhile; ``going``: steps are made again."""
        ...

    def find_leftovers(self) -> list[int]:
        """Processes of a run that should have ended with it."""
        ...


# -- where runs are made ----------------------------------------------------------------------


class Here:
    """Processes of this machine."""

    around: Mapping[str, str] = {}

    def strike(self, supervisor: int, whom: str, how: str) -> str | None:
        return _signal(self._victims(supervisor, whom), whom, how)

    def tend(self, *, going: bool) -> None: ...

    def find_leftovers(self) -> list[int]:
        return []

    def _victims(self, supervisor: int, whom: str) -> list[int]:
        family = {pid: (parent, words) for pid, parent, words in processes()}
        driver = find_driver(supervisor)
        if whom == "driver":
            return driver
        if whom == "rank":
            return [p for p, (parent, words) in family.items() if parent in driver and b"spawn_main" in words]
        guards = [p for p, (parent, words) in family.items() if parent in driver and GUARD in words]
        return [p for p, (parent, _) in family.items() if parent in guards]


class OnCluster:
    """The nodes of a cluster; nobody is struck before all of these are there."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @property
    def around(self) -> Mapping[str, str]:
        return self._cluster.around

    def strike(self, supervisor: int, whom: str, how: str) -> str | None:
        if not self._cluster.is_complete:
            return None
        if whom in ("node", "link"):
            struck = self._cluster.kill_node() if whom == "node" else self._cluster.unplug()
            return None if struck is None else f"{whom} {struck}"
        if whom == "driver":
            return _signal(find_driver(supervisor), whom, how)
        return _signal(self._cluster.ranks() if whom == "rank" else self._cluster.engines(), whom, how)

    def tend(self, *, going: bool) -> None:
        self._cluster.tend(going=going)

    def find_leftovers(self) -> list[int]:
        return [*self._cluster.ranks(), *self._cluster.engines()]


def find_driver(supervisor: int) -> list[int]:
    """The run itself."""
    return [pid for pid, parent, words in processes() if parent == supervisor and b"miles.launch.main" in words]


def _signal(victims: Sequence[int], whom: str, how: str) -> str | None:
    if not victims:
        return None
    with suppress(ProcessLookupError):
        os.kill(random.choice(victims), SIGNALS[how])
        return whom
    return None


# -- a run --------------------------------------------------------------------------------------


def write_inputs(folder: Path) -> Path:
    """A random checkpoint of the demo's size, and words to reverse."""
    folder.mkdir(parents=True, exist_ok=True)
    demo_task.write_task(folder, demo_task.Task(warmup_words=64, train_words=64, heldout_words=8, longest=4), seed=1)
    demo_task.write_checkpoint(folder, moe=False, seed=1)
    return folder


def flags(
    world: Path, run: Path, *, steps: int, deterministic: bool = False, reward: str, ray: str | None = None
) -> list[str]:
    """GRPO on two trainer ranks: drifting on two engines of their own processes, or in step on one inside.

    ``ray`` is the address of a cluster, on whose workers the second rank and the engines are; in step these two are
    exact, so that it is all the same which of them answers.
    """
    ranks = ("--actor-num-gpus-per-node", "2", "--rollout-num-engines", "2")
    if ray is not None:
        ranks = ("--actor-num-nodes", "2", "--rollout-num-gpus", "2", "--runtime", "ray", "--ray-address", ray)
    tempo = ("--parity", "exact") if deterministic else ("--max-weight-staleness", "2")
    served = [
        *(*tempo, "--rollout-backend", "served", "--rollout-max-restarts", "1000"),
        *("--rollout-health-check-interval", "1", "--rollout-health-check-timeout", "3"),
        *("--update-weight-timeout", "30"),
    ]
    return [
        *("--hf-checkpoint", str(world), "--prompt-data", str(world / "train.jsonl"), "--save", str(run)),
        *("--label-key", "label", "--apply-chat-template", "--custom-rm-path", reward, "--rollout-shuffle"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "6"),
        *("--num-rollout", str(steps), "--lr", "1e-2", "--save-interval", "2", "--keep-checkpoints", "3"),
        *("--num-threads", "1", "--device", "cpu", "--view", "plain"),
        *("--max-restarts", "20", "--trainer-max-restarts", "20", "--heartbeat-timeout", f"{HEARTBEAT:g}"),
        *("--stall-timeout", "300", "--reward-timeout", "60"),
        *(ranks[:2] if deterministic and ray is None else (*ranks, *served)),
    ]


def run_with_faults(
    line: Sequence[str],
    run: Path,
    blows: Sequence[tuple[str, str]],
    *,
    patience: float,
    stage: Stage | None = None,
    tell: Callable[[Blow], None] = lambda blow: None,
) -> RunOutcome:
    """Make the run, striking it once for each of ``blows`` (whom, how); it is given up after ``patience`` seconds.

    What it says is beside its folder as it goes, in a file of the same name.
    """
    reported, stage = RunOutcome(), stage or Here()
    with run.with_suffix(".txt").open("w+") as out:
        words = [sys.executable, "-m", "miles.launch.main", "train", *line]
        around = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", **stage.around}
        going = subprocess.Popen(words, stdout=out, stderr=out, env=around, cwd=ROOT)
        try:
            _live(going, run, blows, reported, stage, patience, tell)
        finally:
            if going.poll() is None:
                going.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    going.wait(30)
                going.kill()
                going.wait()
        reported.code = going.returncode
        reported.left = _wait_for_leftovers(stage)
        out.seek(0)
        reported.said = out.read()
    return reported


def _live(
    going: subprocess.Popen[bytes],
    run: Path,
    blows: Sequence[tuple[str, str]],
    reported: RunOutcome,
    stage: Stage,
    patience: float,
    tell: Callable[[Blow], None],
) -> None:
    """Look at the run until it has ended; strike it each time that it has made a few steps since the last blow."""
    began, coming, made, last, blow = time.monotonic(), list(blows), 0, count_steps(run), None
    while going.poll() is None and reported.seconds < patience:
        reported.seconds = time.monotonic() - began
        now = count_steps(run)  # fewer when the run has gone back to a checkpoint
        made, last = made + max(0, now - last), now
        if blow is not None and blow.until is None and made:
            blow.until = reported.seconds - blow.at
            tell(blow)
        stage.tend(going=made >= 2)  # the first may have been under way
        if coming and made >= _BETWEEN and (struck := stage.strike(going.pid, *coming[0])) is not None:
            blow = Blow(at=reported.seconds, whom=struck, how=coming.pop(0)[1])
            reported.blows.append(blow)
            made = 0
        time.sleep(_LOOK)


def _wait_for_leftovers(stage: Stage, seconds: float = 20.0) -> list[int]:
    """What a run has left behind for good."""
    deadline = time.monotonic() + seconds
    while (left := stage.find_leftovers()) and time.monotonic() < deadline:
        time.sleep(_LOOK)
    return left


def count_steps(run: Path) -> int:
    """How many its log has now."""
    with suppress(OSError):
        return (run / "timings.jsonl").read_bytes().count(b"\n")
    return 0


# -- what it came to ----------------------------------------------------------------------------


def shares(kinds: Sequence[tuple[str, str]], kills: int) -> list[tuple[str, str]]:
    """Blows in a random order, about as many of each kind."""
    whole, rest = divmod(kills, len(kinds))
    blows = [*list(kinds) * whole, *random.sample(list(kinds), rest)]
    random.shuffle(blows)
    return blows


def steps_for(blows: Sequence[tuple[str, str]]) -> int:
    """As many as there must be for all of them to fall before the run is over."""
    return _FEW + sum(_STEPS.get(whom, _FEW) for whom, _ in blows)


def report(folder: Path, expected: Mapping[str, RunOutcome]) -> None:
    """The table, and why anything was started again."""
    for name, one in expected.items():
        found = summarize_run(folder / name)
        print(
            f"{name:7} {found['steps']:4} steps {one.seconds:7.1f} s   {found['trained']} tickets trained on, "
            f"{found['dropped']} dropped   reward at the end {fmean(final_rewards(folder / name)):.3f}"
        )
    struck = expected["struck"].blows
    for what, kind in sorted(Counter((blow.whom.split()[0], blow.how) for blow in struck).items()):
        waits = sorted(b.until for b in struck if (b.whom.split()[0], b.how) == what and b.until is not None)
        middle = f"{waits[len(waits) // 2]:.1f} s, at most {waits[-1]:.1f} s" if waits else "-"
        print(f"  {what[0]} {what[1]:7} {kind:3} times; until the next step {middle}")
    again = Counter("the run" if "the run " in line else "ranks" for line in _again(expected["struck"].said))
    print(f"blows   {len(struck):4}   started again: {', '.join(f'{whom} {n} times' for whom, n in again.items())}")


def _again(said: str) -> list[str]:
    return [line for line in said.splitlines() if "started again" in line]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--steps", type=int, help="training steps; as many as the blows need when not given")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--ray", action="store_true", help="on a Ray cluster that is started for it")
    parser.add_argument("--namespaces", action="store_true", help="with --ray: each worker in a network of its own")
    parser.add_argument("--only", nargs="*", help="strike these alone, such as node or engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=7200.0, help="seconds for each run")
    parser.add_argument("--keep", type=Path, help="a folder that runs, logs and what was said stay in")
    parser.add_argument("--reward", default="tests.launch.small_run:shared_letters")
    args = parser.parse_args()
    if args.namespaces and not args.ray:
        parser.error("--namespaces is for --ray")
    return args


def main() -> None:
    args = arguments()
    random.seed(args.seed)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the run and the cluster are ended too
    kinds = IN_STEP if args.deterministic else LOCAL
    if args.ray:
        kinds = NAMESPACES if args.namespaces else CLUSTER
    kinds = [kind for kind in kinds if not args.only or kind[0] in args.only]
    blows = shares(kinds, args.kills)
    steps = args.steps or steps_for(blows)
    reported: dict[str, RunOutcome] = {}
    with ExitStack() as held:
        folder = args.keep or Path(held.enter_context(tempfile.TemporaryDirectory()))
        world = write_inputs(folder.resolve() / "world")
        stage, ray = Here(), None
        if args.ray:
            cluster = held.enter_context(Cluster(folder / "nodes", namespaces=args.namespaces).up())
            stage, ray = OnCluster(cluster), cluster.address
        for name, struck in (("calm", ()), ("struck", blows)):
            run = folder.resolve() / name
            line = flags(world, run, steps=steps, deterministic=args.deterministic, reward=args.reward, ray=ray)
            how = {"patience": args.patience, "stage": stage, "tell": lambda blow: print(blow, flush=True)}
            one = reported[name] = run_with_faults(line, run, struck, **how)
            if one.code != 0 or len(one.blows) < len(struck):
                print(one.said[-6000:])
                more = "" if one.code else "; give it more --steps"
                sys.exit(f"the {name} run ended with {one.code} after {len(one.blows)} of {len(struck)} blows{more}")
            if one.left:
                sys.exit(f"the {name} run left processes behind: {one.left}")
        report(folder, reported)
        far, bound = compare_weights(folder / "calm", folder / "struck")
        print(f"rewards {far:.3f} apart at the end, which is {'within' if far <= bound else 'BEYOND'} {bound:.3f}")
        if args.deterministic:
            same = load_final_weights(folder / "calm") == load_final_weights(folder / "struck")
            print(f"final weights {'equal to the bit' if same else 'DIFFER'}")
            sys.exit(0 if same else 1)
        sys.exit(0 if far <= bound else 1)


if __name__ == "__main__":
    main()
