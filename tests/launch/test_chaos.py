"""The short form of benchmarks/chaos.py: a run of drifting planes that loses a rank, an engine, and itself."""

import pytest
from benchmarks import chaos

BLOWS = [("rank", "killed"), ("engine", "killed"), ("driver", "killed")]


@pytest.mark.slow
def test_a_run_that_is_struck_again_and_again_completes_and_every_ticket_has_one_end(tmp_path):
    world, run = chaos.write_world(tmp_path / "world"), tmp_path / "run"
    reward = "tests.launch.small_run:shared_letters"
    line = chaos.flags(world, run, steps=14, deterministic=False, reward=reward)
    told = chaos.lived(line, run, BLOWS, patience=600)
    assert told.code == 0, told.said
    assert told.blows.total() == len(BLOWS)
    assert chaos.account(run)["steps"] == 14
    assert "the trainer's ranks are started again" in told.said
    assert "miles: the run was ended by SIGKILL" in told.said
    assert "engine" in (run / "logs" / "engines.log").read_text()
