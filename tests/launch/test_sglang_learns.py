"""The demo's model learns on stock SGLang as it does on the engine inside."""

import json
from pathlib import Path

import pytest
from tests.launch.small_run import miles
from tests.server_api.live_servers import PYTHON, STUB

STEPS = 120


def held_out(run: Path) -> list[float]:
    """Held-out reward, before the first step and after some."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["eval/heldout/reward"] for row in rows if row["kind"] == "eval"]


@pytest.mark.sglang
@pytest.mark.slow
def test_a_run_on_stock_sglang_learns_as_on_the_engine_inside(tmp_path):
    demo, run, python = tmp_path / "demo", tmp_path / "run", tmp_path / "python"
    done = miles("demo", "--plain", "--device", "cpu", "--steps", str(STEPS), "--save", str(demo), patience=1800)
    assert done.returncode == 0, done.stderr
    python.write_text(f'#!/bin/sh\nPYTHONPATH={STUB} exec {PYTHON} "$@"\n')
    python.chmod(0o755)
    more = ("--rollout-backend", "sglang", "--sglang-python", str(python), "--sglang-max-total-tokens", "16384")
    done = miles("train", str(demo / "grpo" / "config.toml"), "--save", str(run), *more, patience=3600)
    assert done.returncode == 0, done.stderr
    inside, served = held_out(demo / "grpo"), held_out(run)
    assert len(inside) == len(served)
    # The same weights before, and as much learnt, give or take what differs from seed to seed.
    assert abs(inside[0] - served[0]) < 0.1
    assert min(inside[-1] - inside[0], served[-1] - served[0]) > 0.25
    assert abs(inside[-1] - served[-1]) < 0.12
