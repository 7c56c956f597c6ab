"""What ``miles plan`` counts for the benchmark's cases, against the peak of their steps as tensors without memory."""

import json
import os
import subprocess
import sys

import pytest
from benchmarks.bench_memory_plan import CASES

# Adapters are not traced.
TRACED = [number for number, case in enumerate(CASES) if not case.adapters]


def test_the_plan_is_within_three_percent_of_every_traced_peak():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.models.accounting.traced_peak", *map(str, TRACED)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}  # interpreted kernels read their arguments
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(TRACED)
    wrong = [each for each in found if abs(each["planned"] / each["traced"] - 1) > 0.03]
    assert not wrong
    # Without weights, gradients and optimizer. A plan of one long sequence has room for several short ones instead.
    shares = {each["label"]: (each["planned"] - each["fixed"]) / (each["traced"] - each["fixed"]) for each in found}
    assert not {label: share for label, share in shares.items() if not 0.95 < share < 1.1}
