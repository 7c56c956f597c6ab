"""Every example of docs/hooks.md in a run of its own or with others, called when the table says it is."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.launch.documented_hooks import Examples, names
from tests.launch.small_run import flags, write_inputs

from miles.core.types import Batch, Group, Prompt, Reward, Trajectory
from miles.hooks.registry import HOOK_POINTS
from miles.launch.main import main


async def odd_or_even(prompt: Prompt, trajectory: Trajectory) -> Reward:
    """Sometimes 1 and sometimes 0, whatever the model."""
    return Reward(value=float(sum(int(t) for span in trajectory.spans for t in span.tokens) % 2))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("documented") / "inputs")


@pytest.fixture
def examples(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examples:
    monkeypatch.chdir(tmp_path)
    return Examples(tmp_path, MODEL=str(inputs))


def trained(inputs: Path, run: Path, *more: str, steps: int = 2, reward: str = f"{__name__}:odd_or_even") -> list[dict]:
    """The rows of metrics.jsonl of a whole run; a flag that is given again is given anew."""
    usual = _words(flags(inputs, run, steps=steps))
    for flag in ("--lr-decay-style", "--lr-warmup-iters", "--use-kl-loss", "--kl-loss-coef"):
        del usual[flag]
    line = usual | {"--custom-rm-path": [reward]} | _words(more)
    assert main(["train", *(word for flag, values in line.items() for word in (flag, *values))]) == 0
    return [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]


def _words(line: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in line:
        if word.startswith("--"):
            found[word] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def test_every_example_of_the_page_is_in_one_of_these_tests():
    text = Path(__file__).read_text()
    parts = {"tokenizer", "voted"}  # which others call
    assert not {name for name in names() - parts if f'"{name}"' not in text}
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
    code = page.split("## An agent", 1)[1]
    shown_elsewhere = {"--custom-cast-function-path"}
    assert not [point.flag for point in HOOK_POINTS if point.flag not in code and point.flag not in shown_elsewhere]


def test_the_planes_are_the_users_own(inputs: Path, tmp_path: Path, examples: Examples):
    rows = trained(
        inputs,
        tmp_path / "run",
        *("--rollout-function-path", examples("second_chance"), "--data-source-path", examples("ShortFirst")),
        *("--eval-function-path", examples("by_majority"), "--custom-tracker-path", examples("Tracker")),
        *("--rollout-sample-filter-path", examples("not_cut_short"), "--n-samples-per-eval-prompt", "3"),
        *("--rollout-all-samples-process-path", examples("keep_the_rest")),
        *("--custom-rollout-log-function-path", examples("by_length")),
        *("--custom-eval-rollout-log-function-path", examples("solved")),
    )
    assert len({prompt.id for prompt, *_ in examples.of("second_chance")}) >= 8
    assert [name for name, *_ in examples.of("by_majority")] == ["heldout"] * 2
    seen = examples.of("keep_the_rest")
    assert [step for step, _, _ in seen] == [1, 2] and all(len(kept) == 4 for _, kept, _ in seen)
    dropped = [json.loads(line) for line in Path("dropped.jsonl").read_text().splitlines()]
    assert len(dropped) == sum(len(groups) for _, _, groups in seen) == sum(r.get("groups_dropped", 0) for r in rows)
    steps, evals = [r for r in rows if r["kind"] == "train"], [r for r in rows if r["kind"] == "eval"]
    assert all("reward_of_the_short" in row for row in steps) and all("eval/heldout/solved" in row for row in evals)
    assert [step for step, *_ in examples.of("by_length")] == [1, 2]
    assert [step for step, *_ in examples.of("solved")] == [0, 2]
    tracked = [json.loads(line) for line in Path("tracked.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in tracked if "reward" in row] == [row["reward"] for row in steps]
    lengths = [len(str(prompt.messages)) for prompt, *_ in examples.of("second_chance")]
    assert lengths[:8] == sorted(lengths[:8])


def test_the_trainer_calls_the_users_functions_in_their_order(inputs: Path, tmp_path: Path, examples: Examples, capsys):
    trained(
        inputs,
        tmp_path / "run",
        *("--custom-model-provider-path", examples("only_the_last_layers")),
        *("--custom-megatron-init-path", examples("count")),
        *("--custom-megatron-before-log-prob-hook-path", examples("refuse_nonsense")),
        *("--custom-megatron-before-train-step-hook-path", examples("noisy")),
        *("--custom-megatron-post-save-hook-path", examples("in_the_catalogue")),
        *("--custom-update-weight-post-write-path", examples("Drift")),
        *("--custom-advantage-function-path", examples("over_the_batch")),
        *("--rollout-data-postprocess-path", examples("without_the_unlikely"), "--use-kl-loss"),
    )
    step = ["over_the_batch", "without_the_unlikely", "refuse_nonsense", "noisy", "noisy", "Drift"]
    assert [name for name, _ in examples.calls if name != "only_the_last_layers"] == [
        *("count", "Drift", *step, *step, "in_the_catalogue"),
    ]
    assert len(examples.of("only_the_last_layers")) == 3  # the trainer's, the engine's, the reference's
    assert [version.number for version, _ in examples.of("Drift")] == [0, 1, 2]
    assert [given[:2] for given in examples.of("noisy")] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    ((_, folder),) = examples.of("in_the_catalogue")
    assert (folder / "manifest.json").exists() and (folder.parent / "catalogue.jsonl").exists()
    said = capsys.readouterr().out
    assert "version 0 is 0 from the start" in said and "numbers are trained on cpu" in said
    for (batch,) in examples.of("over_the_batch"):
        assert isinstance(batch, Batch) and len(batch.samples) == 16


def test_what_is_learned_follows_from_the_users_functions(inputs: Path, tmp_path: Path, examples: Examples):
    rows = trained(
        inputs,
        tmp_path / "run",
        *("--dynamic-sampling-filter-path", examples("neither_easy_nor_hopeless")),
        *("--custom-convert-samples-to-train-data-path", examples("later_tokens_count_less")),
        *("--custom-pg-loss-reducer-function-path", examples("square_root")),
        *("--use-tis", "--custom-tis-function-path", examples("gently_bounded")),
    )
    assert {name for name, _ in examples.calls} == {
        *("neither_easy_nor_hopeless", "later_tokens_count_less", "square_root", "gently_bounded")
    }
    assert all(isinstance(group, Group) for (group,) in examples.of("neither_easy_nor_hopeless"))
    assert all(0 < row["tis_weight"] < 2 for row in rows if row["kind"] == "train")


def test_a_loss_and_a_worth_of_ones_own(inputs: Path, tmp_path: Path, examples: Examples):
    rows = trained(
        inputs,
        tmp_path / "run",
        *("--loss-type", "custom_loss", "--custom-loss-function-path", examples("softly_bounded")),
        *("--custom-reward-post-process-path", examples("ranked")),
    )
    assert examples.of("softly_bounded") and examples.of("ranked")
    assert all(row["ratio"] == pytest.approx(1, abs=0.5) for row in rows if row["kind"] == "train")


def test_rewards_of_ones_own(inputs: Path, tmp_path: Path, examples: Examples):
    keep = ("--dynamic-sampling-filter-path", "keep_all")
    rows = trained(inputs, tmp_path / "one", *keep, reward=examples("score"), steps=1)
    assert {"reward/right", "reward/brief"} <= set(rows[-2])
    trained(inputs, tmp_path / "all", *keep, "--group-rm", reward=examples("shortest_wins"), steps=1)
    assert len(examples.of("score")) == 16 + 2 * 6 and len(examples.of("shortest_wins")) == 4 + 2 * 6


def test_a_buffer_of_ones_own(inputs: Path, tmp_path: Path, examples: Examples):
    rows = trained(
        inputs,
        tmp_path / "run",
        *("--max-weight-staleness", "2", "--reorder-window", "3", "--eval-interval", "100"),
        *("--custom-async-data-buffer-path", examples("most_telling")),
        *("--buffer-filter-path", examples("fresh_enough")),
        steps=4,
    )
    chosen = examples.of("most_telling")
    assert chosen and all(1 <= len(waiting) <= 3 for waiting, _ in chosen)
    assert len(examples.of("fresh_enough")) >= 16
    assert all(row["staleness"] <= 1 for row in rows if row["kind"] == "train")


def test_a_curriculum_and_a_generate_function_of_ones_own(inputs: Path, tmp_path: Path, examples: Examples):
    data = (f"{inputs / 'train.jsonl'}@[0:12]", f"{inputs / 'train.jsonl'}@[12:24]")
    trained(
        inputs,
        tmp_path / "run",
        *("--prompt-data", *data, "--curriculum-path", examples("harder_when_ready")),
        *("--custom-generate-function-path", examples("think_again"), "--eval-interval", "100"),
        steps=1,
    )
    assert examples.of("harder_when_ready") and len(examples.of("think_again")) >= 16


def test_an_agent_with_a_matcher_and_a_picker(inputs: Path, tmp_path: Path, examples: Examples):
    pytest.importorskip("openai")
    pytest.importorskip("aiohttp")
    asks = ("--custom-agent-function-path", examples("agent"), "--eval-interval", "100")
    picks = ("--session-sample-picker-path", examples("the_longest"))
    processes = ("--session-sample-postprocessor-path", examples("halved_when_truncated"))
    trained(inputs, tmp_path / "once", *asks, *picks, *processes, steps=1)
    assert all(len(examples.of(name)) >= 16 for name in ("agent", "the_longest", "halved_when_truncated"))
    replays = ("--custom-agent-function-path", "tests.launch.test_agent_runs:twice", "--eval-interval", "100")
    trained(inputs, tmp_path / "again", *replays, "--session-message-matcher-path", examples("but_for_spaces"), steps=1)
    assert any(stored["role"] == "user" == given["role"] for stored, given in examples.of("but_for_spaces"))


def test_functions_written_for_upstream_train(inputs: Path, tmp_path: Path, examples: Examples):
    rows = trained(
        inputs,
        tmp_path / "run",
        *("--custom-generate-function-path", examples("ask_twice")),
        reward=examples("letters"),
    )
    assert max(row["parity_max_abs"] for row in rows if row["kind"] == "train") < 1e-4
    args, sample, parameters = examples.of("ask_twice")[0]
    assert args.rollout_batch_size == 4 and parameters["max_new_tokens"] == 6 and sample.label
