"""Whole runs whose teachers are served elsewhere: the same lessons as with the same teachers in the trainer."""

import json
from pathlib import Path

import pytest
import torch
from tests.launch.small_run import miles, write_inputs
from tests.launch.test_distill_runs import OPD, line, rows
from tests.rollout.distill.scoring import in_a_thread, scorer
from tests.rollout.reward.scripted_server import Fault
from tests.train.test_served_teacher import logps_of

from miles.backends.fsdp.local_model import LocalModel
from miles.launch.commands import demo_task
from miles.models.checkpoint import hf
from miles.observe.metric import list_undocumented

SAMPLED = ("--opd-log-prob-top-k", "0")
OWN = ("--opd-log-prob-top-k", "4", "--opd-top-k-strategy", "only-teacher")
UNION = ("--opd-log-prob-top-k", "4", "--opd-top-k-strategy", "union", "--num-steps-per-rollout", "1")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A policy, two teachers, and prompts that ask for one or the other."""
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    for name, moe, seed in (("dense", False, 2), ("moe", True, 3)):
        demo_task.write_checkpoint(folder / name, moe=moe, seed=seed)
    lines = [json.loads(each) for each in (folder / "train.jsonl").read_text().splitlines()]
    asked = [row | {"metadata": {"opd_teacher": "moe"} if i % 2 else {}} for i, row in enumerate(lines)]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    return folder


def teacher(inputs, name, **how):
    torch.set_num_threads(1)
    return scorer(logps_of(LocalModel(hf.load(inputs / name, device="cpu", dtype=torch.float32), frozen=True)), **how)


def run(inputs, where, *more, steps=3):
    plain = line(inputs, where, *OPD.split(), *more, steps=steps, scored=False)
    if "--num-steps-per-rollout" in more:
        at = plain.index("--num-steps-per-rollout")
        del plain[at : at + 2]
    return miles("train", *plain)


@pytest.mark.parametrize(
    "more",
    [pytest.param(SAMPLED, marks=pytest.mark.slow), pytest.param(OWN, marks=pytest.mark.slow), UNION],
    ids=["drawn", "only-teacher", "union"],
)
def test_a_run_learns_from_a_server_what_it_learns_from_a_checkpoint(inputs, tmp_path, more):
    held = run(inputs, tmp_path / "held", *more, "--opd-teacher-load", str(inputs / "moe"))
    with in_a_thread(teacher(inputs, "moe")) as served:
        asked = run(inputs, tmp_path / "asked", *more, "--opd-teacher-urls", f"{served.url}/generate")
    assert held.returncode == 0, held.stderr
    assert asked.returncode == 0, asked.stderr
    one, other = rows(tmp_path / "held"), rows(tmp_path / "asked")
    assert len(other) == 3 and not list_undocumented(other[0].keys() - {"kind", "step", "version"})
    for name in ("distill_kl", "teacher_logp", "grad_norm"):
        # Within the second step Adam has made much of the last bits of the first.
        assert other[0][name] == pytest.approx(one[0][name], rel=1e-4, abs=1e-6)
        assert other[1][name] == pytest.approx(one[1][name], rel=0.05, abs=0.05)


def test_each_prompt_is_scored_by_the_server_it_names(inputs, tmp_path):
    plain = line(inputs, tmp_path / "run", *OPD.split(), steps=2, scored=False)
    plain[plain.index("--prompt-data") + 1] = str(inputs / "asked.jsonl")
    with in_a_thread(teacher(inputs, "moe")) as moe, in_a_thread(teacher(inputs, "dense")) as dense:
        done = miles("train", *plain, "--opd-teacher-urls", f"moe={moe.url}", f"default={dense.url}")
        assert done.returncode == 0, done.stderr
        counts = [sum(len(a.body["input_ids"]) for a in s.asked if a.path == "/generate") for s in (moe, dense)]
    assert sum(counts) == 2 * 16 + 2 and min(counts) > 4
    plain[plain.index("--save") + 1] = str(tmp_path / "other")
    with in_a_thread(teacher(inputs, "moe")) as moe:
        done = miles("train", *plain, "--opd-teacher-urls", f"art={moe.url}")
    assert done.returncode == 1 and "names no teacher in metadata['opd_teacher']" in done.stderr


def test_a_teacher_that_dies_ends_the_run_with_one_sentence(inputs, tmp_path):
    whole, left = teacher(inputs, "dense"), iter(range(6))

    def answer(asked):
        if asked.path == "/generate" and next(left, None) is None:
            return Fault(hang_up=True)
        return whole(asked)

    with in_a_thread(answer) as served:
        done = run(inputs, tmp_path / "run", "--opd-teacher-urls", served.url, "--opd-teacher-retries", "0")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "the teacher default did not score a trajectory" in done.stderr


def test_a_teacher_that_is_not_there_is_told_before_anything_starts(inputs, tmp_path):
    with in_a_thread(teacher(inputs, "dense")) as served:
        gone = served.url
    done = run(inputs, tmp_path / "run", "--opd-teacher-urls", gone, "--opd-teacher-retries", "0")
    assert done.returncode == 2 and f"the teacher default at {gone} cannot be used" in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not rows(tmp_path / "run")
