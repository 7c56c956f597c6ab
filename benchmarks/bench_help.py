"""Start of the command line: `miles train --help` against a bare start of Python, in one run.

The limit is the bare start: both read the interpreter, and the help adds the import of every package's flags.

    python benchmarks/bench_help.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "bare": ("-c", "import dataclasses"),
    "help": ("-m", "miles.launch.main", "train", "--help"),
}


def seconds(*arguments: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
    return time.perf_counter() - started


def main() -> None:
    # Interleaved, so that other load on the machine slows both alike.
    runs = [{name: seconds(*arguments) for name, arguments in COMMANDS.items()} for _ in range(9)]
    for name in COMMANDS:
        print(f"{name}  {1e3 * statistics.median(run[name] for run in runs):5.0f} ms")
    print(f"ratio {statistics.median(run['help'] / run['bare'] for run in runs):5.1f}")


if __name__ == "__main__":
    main()
