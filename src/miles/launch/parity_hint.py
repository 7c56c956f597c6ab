"""Where a run's parity is red: the very ``miles parity`` command that finds the operation its two planes part at."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from miles.core.errors import ParityError
from miles.core.events import Event, StepFinished
from miles.launch.config import Config
from miles.launch.found import newest_checkpoint
from miles.observe.text import Light, parity_light


def parity_command(config: Config, directory: Path, step: int | None = None) -> str:
    """What to type for the run in ``directory``: its own two planes, on tokens of ``step`` where they are kept."""
    s, saved = config.sglang, newest_checkpoint(directory) is not None
    words = ["miles", "parity", str(directory) if saved else str(config.models.hf_checkpoint)]
    if saved and step is not None and config.observe.save_rollouts:
        words += ["--step", str(step)]
    if s.rollout_external_engine_addrs:
        address = s.rollout_external_engine_addrs[0]
        engine = address if "://" in address else f"http://{address}"
    else:
        engine = "sglang" if s.rollout_backend == "sglang" else "native"
    words += ["--a", engine, "--b", config.train.train_backend]
    if engine == "sglang" and s.sglang_python is not None:
        words += ["--sglang-python", s.sglang_python]
    if config.models.dtype != "auto":
        words += ["--dtype", config.models.dtype]
    if config.cluster.device != "auto":
        words += ["--device", config.cluster.device]
    if config.models.parity == "exact":
        words += ["--parity", "exact", "--exact"]
    if config.models.trust_remote_code:
        words.append("--trust-remote-code")
    return shlex.join(words)


class ParityHint:
    """An observer of a run: when its light first turns red, ``note`` is given a sentence with the command."""

    def __init__(self, config: Config, directory: Path, note: Callable[[str], None]) -> None:
        self._config, self._directory, self._note = config, directory, note
        self._said = False

    def __call__(self, event: Event) -> None:
        if self._said or not isinstance(event, StepFinished) or "parity_mean_abs" not in event.metrics:
            return
        gap = event.metrics["parity_mean_abs"]
        if parity_light(gap, self._config.schedule.parity_tolerance) is Light.RED:
            self._said = True
            command = parity_command(self._config, self._directory, event.step)
            self._note(
                f"Parity is red at step {event.step}, {gap:.2e} on average; the operation that engine and trainer part "
                f"at is found by: {command}"
            )


@contextmanager
def pointed(config: Config, directory: Path) -> Iterator[None]:
    """Let a run that stops because its planes differ say what to type next."""
    try:
        yield
    except ParityError as error:
        command = parity_command(config, directory)
        raise ParityError(f"{error}; {command} finds the operation they part at") from error
