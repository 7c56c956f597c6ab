"""``miles eval RUN`` and ``miles chat RUN`` take everything from the run's config."""

import io
import json

import pytest
from tests.launch.small_run import flags, undrawn, write_inputs

from miles.launch.commands import train as train_command
from miles.launch.commands.chat import ReplyPrinter
from miles.launch.main import main
from miles.launch.read_config import read


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one step with a prompt template, whose ``--load`` names its own new directory."""
    folder = tmp_path_factory.mktemp("run")
    inputs, run = write_inputs(folder / "inputs"), folder / "run"
    more = ("--prompt-template", "oo{prompt}", "--load", str(run), "--lr-warmup-iters", "0", "--no-eval-interval")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_command, "plot_curves", undrawn)
        words = flags(inputs, run, *more, "--dynamic-sampling-filter-path", "keep_all", steps=1)
        assert main(["train", *words, "--save-interval", "1"]) == 0
    return run


def test_the_template_is_recorded_and_rendered(run, capsys):
    assert 'prompt_template = "oo{prompt}"' in (run / "config.toml").read_text()
    assert main(["show", str(run), "--no-color"]) == 0
    assert "oo" in capsys.readouterr().out


def test_eval_of_a_run_needs_nothing_else_and_saves_its_samples(run, capsys):
    assert main(["eval", str(run), "--n-samples-per-eval-prompt", "2"]) == 0
    output = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert (output["eval/heldout/prompts"], output["eval/heldout/n"]) == ("6", "12")
    assert {"eval/heldout/reward_stderr", "eval/heldout/pass@1", "eval/heldout/pass@2"} <= output.keys()
    result = json.loads((run / "eval" / "step-000001-1.json").read_text())
    assert result["metrics"]["eval/heldout/n"] == 12 and result["options"]["prompt_template"] == "oo{prompt}"
    samples = [json.loads(line) for line in (run / "eval" / "step-000001-1.jsonl").read_text().splitlines()]
    assert len(samples) == 12 and samples[0]["messages"][0]["content"].startswith("oo")
    assert isinstance(samples[0]["response"], str)


FAILING = """
from miles.core.types import Reward

async def some(prompt, trajectory):
    if prompt.id == 1:
        raise ValueError("no judge for this")
    return Reward(value=1.0)

async def always(prompt, trajectory):
    raise OSError("the judge is away")
"""


def test_eval_reports_the_first_reward_that_failed_and_fails_without_any(run, tmp_path, capsys, monkeypatch):
    (tmp_path / "failing_judge.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["eval", str(run), "--custom-rm-path", "failing_judge:some"]) == 0
    printed = capsys.readouterr().err
    assert (
        "1 of 6 trajectories of heldout (17%) have no reward and count as 0; the first is sample 0 of prompt" in printed
    )
    assert "ValueError: no judge for this" in printed and "Traceback" not in printed
    assert main(["eval", str(run), "--custom-rm-path", "failing_judge:always"]) == 1
    assert "6 of 6 trajectories of heldout (100%) have no reward" in capsys.readouterr().err
    assert main(["eval", str(run), "--custom-rm-path", "failing_judge:always", "--max-reward-failures", "4"]) == 1
    printed = capsys.readouterr().err
    assert "The reward failed for 4 trajectories in a row" in printed and "the judge is away" in printed


def test_flags_replace_what_a_run_was_trained_with(run):
    config, _, _ = read("eval", [str(run), "--rm-type", "exact"])
    assert (config.rollout.rm_type, config.rollout.custom_rm_path) == ("exact", None)
    assert config.models.hf_checkpoint == str(run / "checkpoints" / "step-000001")
    config, _, _ = read("eval", [str(run / "checkpoints" / "step-000001")])
    assert config.rollout.eval_prompt_data[0] == "heldout"


def test_a_run_without_held_out_sets_is_evaluated_on_its_first_training_prompts(run, tmp_path):
    text = (run / "config.toml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("eval_prompt_data")]
    other = tmp_path / "other"
    (other / "checkpoints").mkdir(parents=True)
    (other / "checkpoints" / "step-000001").symlink_to(run / "checkpoints" / "step-000001")
    (other / "config.toml").write_text("\n".join(lines))
    config, _, _ = read("eval", [str(other)])
    name, path = config.rollout.eval_prompt_data
    assert name == "train" and path.endswith("train.jsonl@[:256]")


def test_chat_streams_and_samples_as_the_checkpoint_says(run, capsys, monkeypatch):
    checkpoint = run / "checkpoints" / "step-000001"
    (checkpoint / "generation_config.json").write_text(json.dumps({"temperature": 0.0}))
    replies = []
    for seed in ("1", "2", "3"):
        monkeypatch.setattr("sys.stdin", io.StringIO("abc\n"))
        assert main(["chat", str(run), "--rollout-seed", seed]) == 0
        replies.append(capsys.readouterr().out)
    assert len(set(replies)) == 1, "temperature 0 is greedy"


def test_a_reply_is_printed_piece_by_piece_and_equals_the_whole(capsys):
    printer = ReplyPrinter(lambda tokens: "".join(map(chr, tokens)))
    printer.add([32, 72])
    assert capsys.readouterr().out == "H"
    printer.add([105, 32])
    printer.add([0xFFFD])
    assert capsys.readouterr().out == "i"
    printer.finish("Hi é")
    assert capsys.readouterr().out == " é\n"


def test_show_draws_every_reward_in_order(run, capsys):
    assert main(["show", str(run), "--no-color"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rewards  ")]
    assert [len(word) for word in line.removeprefix("rewards  ").split()] == [4, 4, 4, 4]
