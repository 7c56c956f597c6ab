"""``miles`` in a process whose engine reports a wrong log-prob for one token."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from tests.launch.small_run import FORKS, ROOT, Done, undrawn
from tests.pool import PRELOADED

from miles.backends.native.runner.model_runner import EagerStep
from miles.launch.commands import train
from miles.launch.main import main


def skewed(folder: Path, *argv: str) -> Done:
    """Run the command to its end; ``folder`` is for what it says."""
    FORKS.set_forkserver_preload([*PRELOADED, __name__])
    process = FORKS.Process(target=_child, args=(argv, folder))
    process.start()
    process.join(300)
    return Done(process.exitcode, (folder / "out").read_text(), (folder / "err").read_text())


def _child(argv: tuple[str, ...], folder: Path) -> None:
    os.chdir(ROOT)
    train.plot_curves = undrawn
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    result, calls = EagerStep.result, 0

    def nudged(self):
        nonlocal calls
        calls += 1
        output = result(self)
        if calls != 12 or not len(output.logprobs_D):
            return output
        logprobs_D = output.logprobs_D.copy()
        logprobs_D[0] = np.nextafter(logprobs_D[0], np.float32(-100))
        return replace(output, logprobs_D=logprobs_D)

    EagerStep.result = nudged
    sys.exit(main(argv))
