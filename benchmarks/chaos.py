"""Kill and freeze the processes of a run at random, and hold what it comes to against a run that nothing happened to.

    python -m benchmarks.chaos --kills 50                    asynchronous GRPO, two engines, two trainer ranks
    python -m benchmarks.chaos --kills 12 --deterministic    in step, engine inside: to the bit

The victims are the run itself (which its supervisor starts again), the second rank of its trainer, and its engine
servers; half of the blows are SIGKILL, half SIGSTOP. Blows fall while steps are made, each after the run has recovered
from the one before, so that every one of them hits a living run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.launch import demo_task

BLOWS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
_LOOK = 0.05
_BETWEEN = 3
HEARTBEAT = 20.0


@dataclass(kw_only=True)
class Told:
    """What happened to one run."""

    code: int | None = None
    seconds: float = 0.0
    blows: Counter[str] = field(default_factory=Counter)
    said: str = ""


def write_world(folder: Path) -> Path:
    """A random checkpoint of the demo's size, and words to reverse."""
    folder.mkdir(parents=True, exist_ok=True)
    demo_task.write_task(folder, demo_task.Task(warmup_words=64, train_words=64, heldout_words=8, longest=4), seed=1)
    demo_task.write_checkpoint(folder, moe=False, seed=1)
    return folder


def flags(world: Path, run: Path, *, steps: int, deterministic: bool, reward: str) -> list[str]:
    """GRPO on two trainer ranks: drifting on two engines of their own processes, or in step on one inside."""
    tempo = () if deterministic else ("--max-weight-staleness", "2", "--rollout-backend", "served")
    engines = () if deterministic else ("--rollout-num-engines", "2", "--rollout-max-restarts", "1000")
    health = () if deterministic else ("--rollout-health-check-interval", "2", "--rollout-health-check-timeout", "4")
    return [
        *("--hf-checkpoint", str(world), "--prompt-data", str(world / "train.jsonl"), "--save", str(run)),
        *("--label-key", "label", "--apply-chat-template", "--custom-rm-path", reward, "--rollout-shuffle"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "6"),
        *("--num-rollout", str(steps), "--lr", "1e-2", "--save-interval", "2", "--keep-checkpoints", "3"),
        *("--num-threads", "1", "--device", "cpu", "--view", "plain", "--actor-num-gpus-per-node", "2"),
        *("--max-restarts", "20", "--trainer-max-restarts", "20", "--heartbeat-timeout", f"{HEARTBEAT:g}"),
        *("--stall-timeout", "300", "--reward-timeout", "60", *tempo, *engines, *health),
    ]


def lived(line: Sequence[str], run: Path, blows: Sequence[tuple[str, str]], *, patience: float) -> Told:
    """Make the run, striking it once for each of ``blows`` (whom, how); it is given up after ``patience`` seconds."""
    told, began = Told(), time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        words = [sys.executable, "-m", "miles.launch.main", "train", *line]
        going = subprocess.Popen(words, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            for whom, how in blows:
                if not _strike(going, run, whom, how, began + patience):
                    break
                told.blows[f"{whom} {how}"] += 1
            going.wait(max(1.0, began + patience - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            if going.poll() is None:
                going.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    going.wait(30)
                going.kill()
        told.code, told.seconds = going.returncode, time.monotonic() - began
        out.seek(0)
        told.said = out.read()
    return told


def _strike(going: subprocess.Popen[bytes], run: Path, whom: str, how: str, deadline: float) -> bool:
    """Wait for a few more steps, the first of which may have been under way, then strike; false where the run ended."""
    made, last = 0, _steps(run)
    while going.poll() is None and time.monotonic() < deadline:
        now = _steps(run)  # fewer when the run has gone back to a checkpoint
        made, last = made + max(0, now - last), now
        victim = None if made < _BETWEEN else _victim(going.pid, whom)
        if victim is not None:
            with suppress(ProcessLookupError):
                os.kill(victim, BLOWS[how])
                return True
        time.sleep(_LOOK)
    return False


def _steps(run: Path) -> int:
    with suppress(OSError):
        return (run / "timings.jsonl").read_bytes().count(b"\n")
    return 0


def _victim(supervisor: int, whom: str) -> int | None:
    """A process of the run that plays this part."""
    family = {pid: (parent, words) for pid, parent, words in _processes()}
    driver = next((p for p, (parent, w) in family.items() if parent == supervisor and b"miles.launch.main" in w), None)
    if driver is None or whom == "driver":
        return driver
    if whom == "rank":
        return next((p for p, (parent, words) in family.items() if parent == driver and b"spawn_main" in words), None)
    guards = [p for p, (parent, words) in family.items() if parent == driver and b"guard.py" in words]
    servers = [p for p, (parent, _) in family.items() if parent in guards]
    return random.choice(servers) if servers else None


def _processes() -> Iterator[tuple[int, int, bytes]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                yield int(entry.name), parent, (entry / "cmdline").read_bytes()


# -- what it came to ------------------------------------------------------------------------


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def account(run: Path) -> dict[str, int]:
    """Tickets by what became of them; an AssertionError where one has no end, or was trained on twice."""
    events = rows(run / "events.jsonl")
    finished = [event for event in events if event["event"] == "GroupFinished"]
    trained = Counter(t for event in events if event["event"] == "BatchTaken" for t in event["tickets"])
    assert max(trained.values()) == 1, f"trained on twice: {[t for t, n in trained.items() if n > 1][:8]}"
    ends = Counter(event["ticket"] for event in finished)
    assert max(ends.values()) == 1, "a ticket ended twice"
    assert sorted(ends) == list(range(len(ends))), "a ticket below the last has no end"
    assert set(trained) == {event["ticket"] for event in finished if event["kept"]}
    assert all(event["reason"] for event in finished)
    steps = [event["step"] for event in events if event["event"] == "BatchTaken"]
    assert steps == list(range(1, len(steps) + 1)), "a step is missing or was made twice"
    return {"trained": len(trained), "dropped": len(ends) - len(trained), "steps": len(steps)}


def reward_at_end(run: Path, last: int = 8) -> float:
    """The mean reward of the last steps."""
    found = [row["reward"] for row in rows(run / "metrics.jsonl") if row["kind"] == "train"][-last:]
    return sum(found) / len(found)


def weights(run: Path) -> bytes:
    return (max((run / "checkpoints").iterdir()) / "model.safetensors").read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument(
        "--steps", type=int, default=None, help="training steps; as many as the blows need when not given"
    )
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=3600.0, help="seconds for each run")
    parser.add_argument("--reward", default="tests.launch.small_run:shared_letters")
    args = parser.parse_args()
    random.seed(args.seed)
    whom = ("driver", "rank") if args.deterministic else ("driver", "rank", "engine", "engine")
    blows = [(random.choice(whom), random.choice(list(BLOWS))) for _ in range(args.kills)]
    steps = args.steps or 6 + (_BETWEEN + 2) * args.kills
    with tempfile.TemporaryDirectory() as folder:
        world, runs = write_world(Path(folder) / "world"), {name: Path(folder) / name for name in ("calm", "struck")}
        told = {}
        for name, run in runs.items():
            line = flags(world, run, steps=steps, deterministic=args.deterministic, reward=args.reward)
            told[name] = lived(line, run, blows if name == "struck" else (), patience=args.patience)
            if told[name].code != 0:
                print(told[name].said[-6000:])
                sys.exit(f"the {name} run ended with {told[name].code} after {told[name].blows.total()} blows")
        for name, run in runs.items():
            found = account(run)
            print(
                f"{name:7} {found['steps']:4} steps {told[name].seconds:7.1f} s   "
                f"{found['trained']} tickets trained on, {found['dropped']} dropped   "
                f"reward at the end {reward_at_end(run):.3f}"
            )
        struck = told["struck"].blows
        print(f"blows   {struck.total():4}: " + ", ".join(f"{what} {n}" for what, n in sorted(struck.items())))
        for line in told["struck"].said.splitlines():
            if "started again" in line:
                print(f"  {line.strip()}")
        if args.deterministic:
            same = weights(runs["calm"]) == weights(runs["struck"])
            print(f"final weights {'equal to the bit' if same else 'DIFFER'}")
            sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
