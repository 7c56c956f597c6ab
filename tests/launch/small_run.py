"""A training run small enough to be made many times, and a way to kill it at an exact point."""

import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import transformers.models.auto.tokenization_auto  # noqa: F401
from safetensors.torch import load_file, save_file
from tests.pool import PRELOADED

import miles.launch.commands.demo
from miles.core.types import Prompt, Reward, Trajectory
from miles.launch.commands import demo_task
from miles.launch.commands import train as miles_run
from miles.launch.main import main

STEPS = 6
ROOT = Path(__file__).parents[2]
FORKS = multiprocessing.get_context("forkserver")


def write_inputs(folder: Path, *, moe: bool = False) -> Path:
    """A random checkpoint and words to reverse, in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    demo_task.write_task(folder, demo_task.Task(warmup_words=64, train_words=24, heldout_words=6, longest=4), seed=1)
    demo_task.write_checkpoint(folder, moe=moe, seed=1)
    return folder


def untie_embeddings(folder: Path) -> Path:
    """Give the checkpoint an output layer of its own, which begins as the embedding."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def flags(
    inputs: Path, run: Path, *more: str, steps: int = STEPS, lr: str = "1e-2", reward: str = "shared_letters"
) -> list[str]:
    """GRPO with everything that must survive: shuffling, epochs, a filter that drops, evaluation, a schedule."""
    return [
        *("--hf-checkpoint", str(inputs), "--prompt-data", str(inputs / "train.jsonl"), "--save", str(run)),
        *(
            "--label-key",
            "label",
            "--apply-chat-template",
            "--custom-rm-path",
            f"tests.launch.small_run:{reward}",
            "--rollout-shuffle",
        ),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--num-steps-per-rollout", "2"),
        *("--rollout-max-response-len", "6", "--num-rollout", str(steps), "--lr", lr),
        *("--lr-decay-style", "cosine", "--lr-warmup-iters", "2", "--use-kl-loss", "--kl-loss-coef", "0.01"),
        *("--dynamic-sampling-filter-path", "nonzero_std", "--save-interval", "2", "--num-threads", "1"),
        *("--eval-interval", "3", "--eval-prompt-data", "heldout", str(inputs / "heldout.jsonl")),
        *("--device", "cpu", "--view", "plain", *more),
    ]


async def shared_letters(prompt: Prompt, trajectory: Trajectory) -> Reward:
    """How many of the wanted letters a reply has: something even a random model earns now and then."""
    wanted = set(prompt.label or "")
    return Reward(value=float(len(wanted & set(trajectory.metadata["text"]))))


async def broken(prompt: Prompt, trajectory: Trajectory) -> Reward:
    """A user's mistake."""
    raise RuntimeError("this grader is broken")


@dataclass(frozen=True)
class Done:
    """How a process ended, and what it said."""

    returncode: int | None
    stdout: str
    stderr: str


class Command:
    """``miles ...`` in a process of its own, forked from one that has the imports behind it."""

    def __init__(self, *argv: str, kill_at: str = "", drawn: bool = False) -> None:
        FORKS.set_forkserver_preload(PRELOADED)
        self._said = Path(tempfile.mkdtemp())
        self._process = FORKS.Process(target=_child, args=(argv, kill_at, drawn, self._said))
        self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def interrupt(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGINT)

    def wait_to_hear(self, text: str) -> None:
        """Return once the process has said ``text``, or has ended without."""
        while self._process.is_alive() and text not in self._read("out"):
            self._process.join(0.02)
        assert text in self._read("out"), self._read("err")

    def done(self, patience: float = 300) -> Done:
        self._process.join(patience)
        return Done(self._process.exitcode, self._read("out"), self._read("err"))

    def _read(self, name: str) -> str:
        path = self._said / name
        return path.read_text() if path.exists() else ""


def miles(*argv: str, kill_at: str = "", drawn: bool = False, patience: float = 300) -> Done:
    """Run the command to its end; ``kill_at`` is ``module:Class.method:n``, to die in its n-th call.

    ``drawn``: its curves are, which takes longer than most of these runs.
    """
    return Command(*argv, kill_at=kill_at, drawn=drawn).done(patience)


def undrawn(metrics_jsonl: Path, png: Path, title: str) -> bool:
    """No picture."""
    return False


def _child(argv: tuple[str, ...], kill_at: str, drawn: bool, said: Path) -> None:
    os.chdir(ROOT)
    if not drawn:
        miles_run.plot_curves = undrawn
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(said / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    sys.stdout.reconfigure(line_buffering=True)
    if kill_at:
        die_in(kill_at)
    sys.exit(main(argv))


def die_in(point: str, *, group: bool = False) -> None:
    """Kill this process, or its whole ``group``, with no chance to tidy up, in the n-th call of a function."""
    module, path, number = point.split(":")
    owner = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    whole = getattr(owner, name)
    calls = 0

    def dies(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == int(number):
            os.kill(0 if group else os.getpid(), signal.SIGKILL)
        return whole(*args, **kwargs)

    setattr(owner, name, dies)


def everything(run: Path) -> dict[str, bytes]:
    """What must be equal to the bit: the logs, and all of the last checkpoint but the offsets of wall-clock logs."""
    last = max((run / "checkpoints").iterdir())
    files = (p for p in last.rglob("*") if p.is_file() and p.name not in ("cursor.json", "manifest.json"))
    kept = {str(p.relative_to(last)): p.read_bytes() for p in files}
    cursor = json.loads((last / "cursor.json").read_text())
    del cursor["log_offsets"]["timings"]
    kept["cursor.json"] = json.dumps(cursor, sort_keys=True).encode()
    for name in ("events.jsonl", "metrics.jsonl"):
        kept[name] = (run / name).read_bytes()
    return kept
