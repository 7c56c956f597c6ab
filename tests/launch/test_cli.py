"""The command as a user types it: what it says, and with which exit code."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.launch.invalid_options import WRONG
from tests.launch.small_config import furnish
from tests.tiers import examples

from miles import __version__
from miles.config.cli import index_flags, parse
from miles.config.schema import flag_from_name, get_options
from miles.core.errors import MilesError, UsageError
from miles.launch import main as entry
from miles.launch import read_config
from miles.launch.config import Config, DemoConfig, ServeRoot
from miles.launch.main import COMMANDS, main
from miles.launch.rules.check import Command
from miles.launch.upstream.table import RECORDED, explain_unknown_flag, load_flag_synonyms, load_upstream_flags

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)


def complaints(line: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(shlex.split(line)) == 2, line
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(reported.startswith("miles: ") for reported in captured.err.splitlines())
    return [reported.removeprefix("miles: ") for reported in captured.err.splitlines()]


@pytest.mark.parametrize(("line", "says"), WRONG, ids=[line for line, _ in WRONG])
def test_a_wrong_command_line_is_told_all_that_is_wrong(line: str, says: list[str], capsys: pytest.CaptureFixture[str]):
    assert complaints(f"train good.toml {line}", capsys) == says


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("trian", ["trian is not a command; did you mean train?"]),
        (
            "zzz",
            [
                "zzz is not a command; there are train, plan, check, demo, recipes, init, adopt, doctor, eval, "
                "chat, show, view, report, compare, "
                "bundle, engines, stacks, replay, convert, serve, parity, route."
            ],
        ),
        ("good.toml", ["good.toml is a recipe; write miles train good.toml."]),
        (
            "--lr 3",
            [
                "--lr comes after a command, as in miles train --lr; the commands are "
                "train, plan, check, demo, recipes, init, adopt, doctor, eval, chat, show, view, report, compare, "
                "bundle, engines, stacks, replay, "
                "convert, serve, parity, route."
            ],
        ),
        ("train nowhere.toml", ["nowhere.toml does not exist."]),
        ("train nowhere.toml --lr x", ["nowhere.toml does not exist.", "--lr takes a number, not 'x'."]),
        ("train model", ["model is not a recipe: a recipe is a .toml, .yaml or .yml file."]),
        ("demo --stepz 3", ["--stepz is not a flag; did you mean --steps?"]),
        ("demo --steps 0", ["--steps must be at least 1, not 0."]),
        ("demo fast", ["'fast' is not expected here: values follow their flag, as in --lr 1e-6."]),
        ("route --polisy prefix", ["--polisy is not a flag; did you mean --policy?"]),
        (
            "route --policy prefx --max-retries -1",
            [
                "--policy takes one of least_load, prefix, round_robin, not 'prefx'; did you mean prefix?",
                "--max-retries must be at least 0, not -1.",
            ],
        ),
        (
            "route http://a:1 nowhere",
            ["--engine-urls nowhere is not the URL of an engine; write one like http://127.0.0.1:30000."],
        ),
        (
            "route http://a:1 --engine-urls http://b:1",
            ["http://a:1 and --engine-urls both name engines; give all of them in one place."],
        ),
        ("doctor --fix", ["--fix is not a flag; see --help all."]),
        ("doctor --kernel", ["--kernel is not a flag; did you mean --kernels?"]),
        ("doctor --kernels model", ["--kernels takes no value, but was given 'model'."]),
        ("doctor a b", ["miles doctor takes one model folder, but was given 2: a b."]),
        ("doctor nowhere", ["nowhere does not exist; name the folder of a Hugging Face checkpoint, or hf://ORG/NAME."]),
        ("chat", ["--hf-checkpoint is missing: name the folder of the model to start from."]),
        (
            "chat nowhere",
            ["--hf-checkpoint nowhere does not exist; name the folder of a Hugging Face checkpoint, or hf://ORG/NAME."],
        ),
        (
            "chat model --hf-checkpoint moe",
            ["model and --hf-checkpoint both name a checkpoint; keep one."],
        ),
        (
            "eval model --rollout-max-response-len 64",
            [
                "--rm-type is missing: name a built-in reward, or your own with --custom-rm-path.",
                "--eval-prompt-data is missing: give a name and a file for each held-out set.",
            ],
        ),
        (
            "train",
            [
                "--hf-checkpoint is missing: name the folder of the model to start from.",
                "--prompt-data is missing: name a .jsonl, .parquet or .arrow file of prompts, or a folder of them.",
                "--rm-type is missing: name a built-in reward, or your own with --custom-rm-path.",
                "--num-rollout is missing: give the number of training steps (or of epochs with --num-epoch).",
            ],
        ),
    ],
)
def test_every_command_tells_what_is_wrong(line: str, says: list[str], capsys: pytest.CaptureFixture[str]):
    assert complaints(line, capsys) == says


def test_a_recipe_is_told_its_own_mistakes_with_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "bad.toml").write_text(
        'include = "good.toml"\nlr = "1"\nbananas = 1\nmoe_router_dtype = 2\n'
        "[algo]\nlr = 1.0\neps_clip = -1.0\n[shedule]\nsave_interval = 3\n"
    )
    assert complaints("train bad.toml", capsys) == [
        "bad.toml: lr takes a number, not the text '1'.",
        "bad.toml: bananas is not a key; see miles train --help all.",
        "bad.toml: moe_router_dtype is a flag of upstream; give it on the command line.",
        "bad.toml: lr belongs in [train], not in [algo].",
        "bad.toml: there is no section [shedule]; did you mean [schedule]?",
        "--eps-clip must be at least 0, not -1 (from bad.toml).",
    ]


def test_no_arguments_show_the_commands_and_fail(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert all(name in capsys.readouterr().err for name in ("miles COMMAND",))


@pytest.mark.parametrize("line", ["--help", "-h", "help"])
def test_help_lists_every_command_with_a_line(line: str, capsys: pytest.CaptureFixture[str]):
    assert main([line]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name.ljust(8)} {command.help}" in out for name, command in COMMANDS.items())


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]):
    assert main([name, "--help"]) == 0
    first = capsys.readouterr().out
    assert first.startswith(f"usage: miles {name} ")
    assert main(["help", name]) == 0
    assert capsys.readouterr().out == first


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"miles {__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (MilesError("The engine is gone."), 1, "miles: The engine is gone.\n"),
        (KeyboardInterrupt(), 130, "miles: interrupted.\n"),
    ],
)
def test_what_stops_a_command_is_told_in_a_line(
    error: BaseException, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(entry, "_dispatch", fail)
    assert main(["train"]) == code
    assert capsys.readouterr().err == says


def test_train_py_is_miles_train():
    run = subprocess.run([sys.executable, ROOT / "train.py", "--lr", "x"], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith("miles: --lr takes a number, not 'x'.\n")


def test_a_checkout_that_is_not_installed_has_the_command_too():
    command = [sys.executable, "-S", "-m", "miles", "--version"]
    run = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "src")})
    assert (run.returncode, run.stdout) == (0, f"miles {__version__}\n"), run.stderr


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m miles.launch.main train --help | head -n 1"
    run = subprocess.run(["bash", "-c", command + "; exit ${PIPESTATUS[0]}"], capture_output=True, text=True)
    assert run.returncode == 0 and run.stderr == ""


@pytest.mark.parametrize("folder", ["model", "run"])
def test_chat_takes_a_checkpoint_or_a_run(folder: str, tmp_path: Path):
    for step in (20, 100):
        checkpoint = tmp_path / "run" / "checkpoints" / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text((tmp_path / "model" / "config.json").read_text())
    draft = tmp_path / "run" / "checkpoints" / ".writing-step-000200"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    config, _, _ = read_config.read("chat", [folder])
    assert config.models.hf_checkpoint == {"model": "model", "run": "run/checkpoints/step-000100"}[folder]


def test_a_run_given_as_a_checkpoint_is_told_its_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    assert complaints("train good.toml --hf-checkpoint run", capsys) == [
        "--hf-checkpoint run is a run, not a checkpoint; its newest one is run/checkpoints/step-000003."
    ]


def test_an_upstream_command_line_is_answered_flag_by_flag(capsys: pytest.CaptureFixture[str]):
    line = (
        "train --hf-checkpoint model --ref-load model --prompt-data data/train.jsonl@[0:32] --input-key input "
        "--label-key label --apply-chat-template --rollout-shuffle --rm-type math --num-rollout 3000 "
        "--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 256 --rollout-temperature 1 "
        "--global-batch-size 256 --eval-interval 20 --eval-prompt-data aime data/held.jsonl "
        "--n-samples-per-eval-prompt 16 --eval-max-response-len 256 --eval-top-p 1 --use-dynamic-batch-size "
        "--max-tokens-per-gpu 9216 --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 "
        "--kl-loss-type low_var_kl --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28 --optimizer adam "
        "--lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 "
        "--actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus-per-engine 1 --colocate "
    )
    assert main(shlex.split(line.replace("train ", "plan ", 1))) == 0
    capsys.readouterr()
    foreign = "--hidden-dropout 0.0 --attention-dropout 0.0 --sglang-ep-size 8 --swiglu --memory-recorder torch"
    assert main(shlex.split(f"{line} {foreign}".replace("train ", "plan ", 1))) == 0
    out = capsys.readouterr().out
    assert "1 flag restates the checkpoint: agreed" in out
    assert "2 flags of Megatron's implementation: what is computed here is at least that exact" in out
    assert "2 flags have no effect here: --memory-recorder, --sglang-ep-size" in out
    assert len(complaints(f"{line} --fp8-format hybrid --num-layers 3 --hidden-dropout 0.1", capsys)) == 3
    wide = line.replace("--actor-num-gpus-per-node 1", "--actor-num-gpus-per-node 8")
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 "
    layout += "--context-parallel-size 2 --expert-model-parallel-size 1 --expert-tensor-parallel-size 2"
    assert main(shlex.split((wide + layout).replace("train ", "plan ", 1))) == 0
    assert "8 ranks = 2 tensor (sequence parallel) × 2 context × 2 shard" in capsys.readouterr().out


FLAGS = sorted({*index_flags(get_options(Config)), *list(load_upstream_flags())[::20]})
WORDS = st.sampled_from([*FLAGS, "good.toml", "model", "0", "-1", "1e9", "{}", "x=y", "--", "-", "", "--lr=", "none"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(200))
@given(st.sampled_from(["train", "plan", "eval", "chat", "demo"]), st.lists(WORDS | st.text(max_size=5), max_size=8))
def test_no_words_whatever_bring_the_reading_down(command: str, words: list[str]):
    try:
        if command == "demo":
            parse(DemoConfig, words)
        else:
            read_config.read(cast(Command, command), words)
    except UsageError as error:
        assert error.problems and all(problem.endswith((".", "?")) for problem in error.problems)


def test_no_flag_is_both_ours_and_retired():
    ours = index_flags(get_options(Config)).keys()
    rows = load_upstream_flags()
    assert {flag for flag, row in rows.items() if row.kind == "used"} == rows.keys() & ours
    assert not {flag_from_name(name) for name in load_flag_synonyms()} & ours
    texts = [*(f"{row.text} {row.feature}" for row in rows.values()), *load_flag_synonyms().values()]
    named = {word for text in texts for word in re.split("[ ,;]", text) if word[:2] == "--"}
    assert named <= ours | index_flags(get_options(ServeRoot)).keys()


def test_every_flag_of_upstream_is_explained_in_a_file():
    rows = load_upstream_flags()
    assert all(
        explain_unknown_flag(flag) for flag, row in rows.items() if row.kind in (*RECORDED, "map", "use", "missing")
    )
    assert explain_unknown_flag("--nothing-known") is None


def test_the_plan_is_printed_without_loading_what_is_heavy(tmp_path: Path):
    code = (
        "import sys; from miles.launch.main import main\n"
        f"code = main({['plan', 'good.toml', '--json']!r})\n"
        "heavy = {'torch', 'numpy', 'transformers', 'rich', 'yaml', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(code or (str(heavy) if heavy else 0))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ)
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["options"]["num_rollout"] == {
        "value": 10,
        "origin": "good.toml",
        "section": "schedule",
    }


@pytest.mark.parametrize("command", ["train", "plan", "eval"])
def test_help_shows_the_essentials_and_where_the_rest_is(command: str, capsys: pytest.CaptureFixture[str]):
    assert main([command, "--help"]) == 0
    brief = capsys.readouterr().out
    assert 25 < brief.count("\n    --") < 40 and "--hf-checkpoint" in brief and "--adam-beta2" not in brief
    assert f"miles {command} --help all lists all" in brief
    assert main([command, "--help", "all"]) == 0
    assert all(f"    {option.flag}" in capsys.readouterr().out for option in list(get_options(Config).values())[:1])


def test_help_finds_flags_by_name_and_by_sentence(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--help", "kl_loss"]) == 0
    found = capsys.readouterr().out
    assert "[algo]" in found and "--kl-loss-coef" in found and "--lr " not in found
    assert main(["train", "--help", "learning", "RATE"]) == 0
    assert "--lr X" in capsys.readouterr().out
    assert main(["help", "serve", "tensor"]) == 0
    assert "--tensor-parallel-size" in capsys.readouterr().out
    assert main(["train", "--help", "bananas"]) == 0
    assert capsys.readouterr().out == "No flag has bananas in its name or description.\n"


def test_section_titles_say_what_is_in_them(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--help", "all"]) == 0
    titles = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert len(titles) == 23 and not any("] Options of" in title for title in titles)


def test_warnings_of_transformers_are_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    assert main(["--version"]) == 0
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    assert main(["--version"]) == 0
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "info"
