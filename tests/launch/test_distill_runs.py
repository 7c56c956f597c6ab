"""Distillation through the front door: what a command line may ask for, whole runs, and what they learn."""

import json
import signal
from pathlib import Path
from statistics import fmean

import pytest
from tests.launch.small_config import QWEN3, furnish
from tests.launch.small_run import everything, flags, miles, write_inputs

from miles.config.cli import parse
from miles.config.files import read_layers
from miles.launch.commands import demo_task
from miles.launch.commands.demo import DemoFolders, grpo_flags
from miles.launch.config import Config, DemoOptions
from miles.launch.plan.memory import estimate_memory
from miles.launch.plan.objective_text import format_objective
from miles.launch.read_config import read
from miles.launch.rules.check import check_rules
from miles.models.accounting.params import weight_bytes
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config
from miles.observe.metric import list_undocumented
from miles.schedule.checkpoints import CheckpointDirectory

OPD = "--advantage-estimator on_policy_distillation"
ALONE = f"{OPD} --opd-teacher-load moe"
SERVED = f"{OPD} --opd-teacher-urls http://127.0.0.1:30000"


# -- what a command line may ask for --------------------------------------------------------


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    changes = {"narrow": {"vocab_size": 500}, "short": {"max_position_embeddings": 64}, "wide": {"vocab_size": 1024}}
    for name, changed in changes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(QWEN3 | changed))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def list_problems(line: str) -> list[str]:
    reading = parse(Config, line.split(), read_layers("good.toml"))
    return [*reading.problems, *check_rules(reading, "train")]


@pytest.mark.usefixtures("house")
@pytest.mark.parametrize(
    "line",
    [
        ALONE,
        f"{ALONE} --no-rm-type --n-samples-per-prompt 1",
        f"{OPD} --opd-teachers math moe code wide --opd-teacher-key domain --opd-log-prob-top-k -1",
        "--use-opd --opd-teacher-load wide --opd-kl-coef 0.5 --opd-log-prob-top-k 16 --opd-top-k-strategy union",
        "--use-opd --opd-teacher-load short --rollout-max-context-len 64",
        "--use-opd --opd-teacher-load moe --advantage-estimator ppo --normalize-advantages",
        f"{ALONE} --opd-type fsdp --opd-log-prob-top-k -1 --opd-reward-weight-mode teacher_p",
        f"{SERVED} --opd-type sglang",
        f"{OPD} --opd-teacher-urls math=http://h1:30000/generate code=https://h2 default=http://h3 --opd-teacher-key k",
        f"{SERVED} --opd-log-prob-top-k 16 --opd-top-k-strategy union --opd-teacher-token-env T",
    ],
)
def test_what_goes_together_is_accepted(line: str):
    assert list_problems(line) == []


@pytest.mark.usefixtures("house")
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            OPD,
            f"{OPD} needs a teacher: name the folder of its checkpoint with --opd-teacher-load, or its server with "
            "--opd-teacher-urls.",
        ),
        (
            "--use-opd",
            "--use-opd needs a teacher: name the folder of its checkpoint with --opd-teacher-load, or its "
            "server with --opd-teacher-urls.",
        ),
        (
            "--opd-teacher-load moe",
            "--opd-teacher-load needs --use-opd; add that, or remove --opd-teacher-load.",
        ),
        ("--opd-kl-coef 2", "--opd-kl-coef needs --use-opd; add that, or remove --opd-kl-coef."),
        (f"{ALONE} --opd-kl-coef -1", "--opd-kl-coef must be at least 0, not -1."),
        (
            "--use-opd --opd-teachers math",
            "--opd-teachers takes pairs of a name and a folder, but was given: math.",
        ),
        (
            "--use-opd --opd-teachers a moe a wide",
            "--opd-teachers names the teacher a twice; give each its own name.",
        ),
        (
            f"{ALONE} --opd-teachers default wide",
            "--opd-teachers names the teacher default twice; remove --opd-teacher-load, or this one.",
        ),
        (
            "--use-opd --opd-teachers a nowhere",
            "--opd-teachers a nowhere does not exist; name the folder of a Hugging Face checkpoint, or hf://ORG/NAME.",
        ),
        (
            f"{OPD} --opd-teacher-load narrow",
            "--opd-teacher-load narrow has 500 tokens and --hf-checkpoint 1000; name a teacher with the "
            "policy's whole vocabulary.",
        ),
        (
            f"{OPD} --opd-teacher-load short",
            "--opd-teacher-load short has 64 positions but contexts may have 512; give "
            "--rollout-max-context-len 64 or less.",
        ),
        (
            f"{ALONE} --opd-top-k-strategy union",
            "--opd-top-k-strategy needs --opd-log-prob-top-k; add that, or remove --opd-top-k-strategy.",
        ),
        (
            f"{ALONE} --opd-teacher-key domain",
            "--opd-teacher-key needs --opd-teachers; add that, or remove --opd-teacher-key.",
        ),
        (
            f"{ALONE} --opd-reward-weight-mode teacher_p",
            "--opd-reward-weight-mode needs --opd-log-prob-top-k; add that, or remove --opd-reward-weight-mode.",
        ),
        (
            f"{ALONE} --opd-reward-weight-mode none",
            "--opd-reward-weight-mode takes one of student_p, teacher_p, not 'none'.",
        ),
        (
            "--opd-teacher-urls http://h",
            "--opd-teacher-urls needs --use-opd; add that, or remove --opd-teacher-urls.",
        ),
        (
            f"{ALONE} --opd-teacher-urls http://h",
            "--opd-teacher-load loads a teacher in the trainer and --opd-teacher-urls calls a server; keep "
            "one of them.",
        ),
        (
            f"{ALONE} --opd-type sglang",
            "--opd-type sglang calls servers, but --opd-teacher-load names folders; use --opd-teacher-urls.",
        ),
        (
            f"{SERVED} --opd-type fsdp",
            "--opd-type fsdp loads teachers in the trainer, but --opd-teacher-urls names servers; remove it.",
        ),
        (
            f"{OPD} --opd-teacher-urls math",
            "--opd-teacher-urls takes a URL such as http://host:30000, or one with a name such as "
            "math=http://host:30000, not math.",
        ),
        (
            f"{OPD} --opd-teacher-urls a=http://h a=http://i",
            "--opd-teacher-urls names the teacher a twice; give each its own name.",
        ),
        (
            f"{OPD} --opd-teacher-urls a=ftp://h",
            "--opd-teacher-urls ftp://h is not a URL: write http://host:port/path.",
        ),
        (
            f"{OPD} --opd-teacher-urls http://me:pw@h",
            "--opd-teacher-urls contains a password: put it in an environment variable and name that with "
            "--opd-teacher-token-env.",
        ),
        (
            f"{SERVED} --opd-log-prob-top-k -1",
            "--opd-log-prob-top-k -1 needs the teacher's logprobs of the whole vocabulary, which no server "
            "sends; give a number, or load the teacher in the trainer with --opd-teacher-load.",
        ),
        (
            f"{SERVED} --opd-teacher-timeout 1800",
            "--opd-teacher-timeout 1800 with --opd-teacher-retries 3 is not below --stall-timeout 1800; "
            "lower one of them.",
        ),
        (
            f"{ALONE} --opd-teacher-concurrency 4",
            "--opd-teacher-concurrency needs --opd-teacher-urls; add that, or remove --opd-teacher-concurrency.",
        ),
        (
            f"{ALONE} --normalize-advantages",
            f"{OPD} ignores rewards, so --normalize-advantages has no effect; remove it, or choose another "
            "estimator with --use-opd.",
        ),
        (
            "--loss-type sft_loss --n-samples-per-prompt 1 --no-rm-type --use-opd --opd-teacher-load moe",
            "--loss-type sft_loss trains on demonstrations, so --use-opd has no effect; remove it.",
        ),
    ],
)
def test_what_contradicts_itself_is_told(line: str, sentence: str):
    assert list_problems(line) == [sentence]


@pytest.mark.usefixtures("house")
def test_a_plan_says_what_is_learned_and_what_the_teachers_take():
    line = [*ALONE.split(), "--opd-teachers", "art", "wide"]
    config, plan, _ = read("plan", ["good.toml", *line])
    shares = {s.name: s for s in estimate_memory(config, plan, spec_from_config(read_config("model")))}
    held = sum(weight_bytes(spec_from_config(read_config(name)), plan.dtype) for name in ("moe", "wide"))
    assert shares["teacher"].bytes == held and "art: wide" in shares["teacher"].note
    assert format_objective(config, plan).endswith("A = 0, then A + 1·(log π_teacher − log π_old)")
    config, plan, _ = read("plan", ["good.toml", *line, "--opd-log-prob-top-k", "4"])
    assert " − 1·KL(π ‖ π_teacher) over the top 4 (only-student) and all others as one]" in format_objective(
        config, plan
    )
    config, plan, _ = read("plan", ["good.toml"])
    assert not plan.teachers and "teacher" not in {
        s.name for s in estimate_memory(config, plan, spec_from_config(read_config("model")))
    }


# -- whole runs -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A policy, two teachers of which one is a mixture of experts, and prompts that ask for one or the other."""
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    for name, moe in {"dense": False, "moe": True}.items():
        demo_task.write_checkpoint(folder / name, moe=moe, seed=2)
    lines = map(json.loads, (folder / "train.jsonl").read_text().splitlines())
    asked = [row | {"metadata": {"opd_teacher": "moe"} if i % 2 else {}} for i, row in enumerate(lines)]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    return folder


def line(inputs, run, *more, steps=3, scored=True):
    plain = flags(inputs, run, steps=steps)
    drop = {"--dynamic-sampling-filter-path": 2, "--use-kl-loss": 1, "--kl-loss-coef": 2}
    if not scored:
        drop |= {"--custom-rm-path": 2, "--eval-interval": 2, "--eval-prompt-data": 3}
    for flag, count in drop.items():
        at = plain.index(flag)
        del plain[at : at + count]
    return [*plain, *more]


def routed(inputs, run, *more, **how):
    out = line(inputs, run, *OPD.split(), "--opd-teacher-load", str(inputs / "dense"), *more, **how)
    out[out.index("--prompt-data") + 1] = str(inputs / "asked.jsonl")
    return [*out, "--opd-teachers", "moe", str(inputs / "moe")]


def rows(run, kind="train"):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


@pytest.mark.parametrize(
    "more",
    [
        OPD,
        f"{OPD} --opd-log-prob-top-k -1",
        "--use-opd --opd-kl-coef 0.5 --opd-log-prob-top-k 5 --opd-top-k-strategy union --max-weight-staleness 1",
    ],
    ids=["drawn tokens", "whole vocabulary", "top tokens beside rewards"],
)
def test_three_steps_leave_metrics_that_are_explained(inputs, tmp_path, more):
    run, teacher = tmp_path / "run", str(inputs / "moe")
    scored = "--use-opd" in more
    done = miles("train", *line(inputs, run, *more.split(), "--opd-teacher-load", teacher, scored=scored))
    assert done.returncode == 0, done.stderr
    seen = rows(run)
    assert len(seen) == 3
    for row in seen:
        assert not list_undocumented(row.keys() - {"kind", "step", "version"})
        assert row["grad_norm"] > 0 and row["teacher_logp"] < 0 and row.get("parity_max_abs", 0) < 1e-4
        assert row["distill_kl"] > 0 or "top-k" not in more
        assert (row["advantage_std"] > 0) == scored


def test_a_killed_run_with_two_teachers_continues_to_the_bit(inputs, tmp_path):
    calm, run = tmp_path / "calm", tmp_path / "run"
    done = miles("train", *routed(inputs, calm, "--opd-log-prob-top-k", "6", steps=4))
    assert done.returncode == 0, done.stderr
    again = routed(inputs, run, "--opd-log-prob-top-k", "6", steps=4)
    killed = miles("train", *again, kill_at="miles.train.optim.optimizer:Optimizer.step:6")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = miles("train", *again)
    assert done.returncode == 0, done.stderr
    expected = everything(calm)
    assert everything(run).keys() == expected.keys()
    for name, content in expected.items():
        assert everything(run)[name] == content, f"{name} differs"


def test_a_teacher_of_other_words_is_told_before_anything_starts(inputs, tmp_path):
    other = tmp_path / "other"
    demo_task.write_checkpoint(other, moe=False, seed=3)
    written = json.loads((other / "tokenizer.json").read_text())
    vocabulary = written["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(written))
    done = miles("train", *line(inputs, tmp_path / "run", *OPD.split(), "--opd-teacher-load", str(other)))
    assert done.returncode == 2
    assert f"the teacher in {other} has another tokenizer than --hf-checkpoint" in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not rows(tmp_path / "run")


def test_a_prompt_that_asks_for_nobody_is_told_before_anything_starts(inputs, tmp_path):
    asks = routed(inputs, tmp_path / "run")
    asks[asks.index("--opd-teachers") + 1] = "art"
    done = miles("train", *asks)
    assert done.returncode == 1
    assert (
        "names teacher moe in metadata['opd_teacher'], but the teachers are default, art; fix the name, or add that "
        "teacher" in done.stderr
    )


# -- what they learn ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--opd-log-prob-top-k -1", "--opd-log-prob-top-k 4"], ids=["drawn", "all", "top"])
def test_a_student_comes_nearer_to_its_teacher_and_does_as_well(more, demo, tmp_path):
    """The student is the demo after its warm-up, the teacher the same after 80 steps of GRPO."""
    places, student = demo
    teacher = CheckpointDirectory(places.grpo / "checkpoints").latest()
    assert teacher is not None
    run, steps = tmp_path / "run", 40
    argv = grpo_flags(places, DemoOptions(steps=steps, device="cpu"), student)
    changed = {"--save": str(run), "--advantage-estimator": "on_policy_distillation", "--eval-interval": str(steps)}
    for flag, value in changed.items():
        argv[argv.index(flag) + 1] = value
    done = miles("train", *argv, "--opd-teacher-load", str(teacher[0]), "--view", "plain", *more.split())
    assert done.returncode == 0, done.stderr
    kls = [row["distill_kl"] for row in rows(run)]
    before, after = (row["eval/heldout/reward"] for row in rows(run, "eval"))
    first, last = fmean(kls[:3]), fmean(kls[-3:])
    reported = f"reverse KL {first:.4f} -> {last:.4f}, held out {before:.3f} -> {after:.3f}"
    assert last < 0.6 * first and after > before + 0.1, reported


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[DemoFolders, Path]:
    places = DemoFolders(root=tmp_path_factory.mktemp("distill") / "demo")
    done = miles("demo", "--plain", "--steps", "80", "--device", "cpu", "--save", str(places.root))
    assert done.returncode == 0, done.stderr
    newest = CheckpointDirectory(places.warmup / "checkpoints").latest()
    assert newest is not None
    return places, newest[0]
