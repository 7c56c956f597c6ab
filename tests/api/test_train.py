"""miles.train: rows, functions and options from Python are the run that the command line makes."""

import _thread
import asyncio
import doctest
import json
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from tests.api.conftest import ROWS, SMALL, shared_letters

import miles
from miles.api import options
from miles.launch.main import main

Small = dict[str, object]


def write_rows(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def read_weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_run_from_python_is_the_run_of_the_command_line_to_the_bit(model: str, tmp_path: Path):
    path = write_rows(tmp_path / "words.jsonl")
    made = miles.train(model, ROWS, "f1", steps=2, save=tmp_path / "library", **SMALL)
    flags = [
        "--label-key",
        "label",
        "--apply-chat-template",
        "--rollout-batch-size",
        "4",
        "--n-samples-per-prompt",
        "4",
    ]
    flags += ["--rollout-max-response-len", "6", "--lr", "1e-2", "--device", "cpu", "--num-threads", "1"]
    flags += ["--rm-type", "f1", "--num-rollout", "2", "--view", "none", "--prompt-data", str(path)]
    assert main(["train", "--hf-checkpoint", model, "--save", str(tmp_path / "command"), *flags]) == 0
    command = miles.TrainResult(directory=tmp_path / "command", finished=True)
    assert read_weights(made.checkpoint) == read_weights(command.checkpoint)
    assert read_weights(made.checkpoint) != read_weights(Path(model))
    assert made.metrics == command.metrics


def test_the_result_has_metrics_curves_samples_and_the_model(model: str):
    result = miles.train(model, ROWS, shared_letters, steps=2, **SMALL)
    assert result.finished and result.directory == Path("runs") / f"{Path(model).name}-grpo"
    assert [row["step"] for row in result.metrics] == [1, 2]
    steps, rewards = result.curve("reward")
    assert steps == [1, 2] and rewards == [row["reward"] for row in result.metrics]
    samples = result.samples(step=1)
    assert len(samples) == 16 and {s.version for s in samples} == {0}
    for sample in samples:
        assert sample.reward == shared_letters(sample.text, str(sample.prompt.label))
        assert len(sample.logprobs) == len(sample.response_tokens) > 0
    again = miles.train(result.model, ROWS, shared_letters, steps=1, **SMALL)
    assert again.directory != result.directory and again.finished
    with pytest.raises(miles.MilesError, match="has no metric rewart; there are"):
        result.curve("rewart")


def test_a_reward_gets_what_its_parameters_name(model: str):
    marks = [object() for _ in ROWS]
    rows = [{**row, "mark": mark} for row, mark in zip(ROWS, marks, strict=True)]
    seen: list[tuple[object, str, str]] = []

    class Grader:
        async def __call__(self, record, prompt, response, trajectory, weight=2.0):
            assert trajectory.metadata["text"] == response
            seen.append((record["mark"], record["label"], prompt.label))
            return miles.Reward(value=weight * len(response), parts={"length": float(len(response))})

    result = miles.train(model, rows, Grader(), steps=1, **SMALL)
    assert {mark for mark, _, _ in seen} == set(marks[:4])  # the very objects, which no file could hold
    assert all(label == own for _, label, own in seen)
    assert {s.reward for s in result.samples()} == {2.0 * len(s.text) for s in result.samples()}


def test_records_of_a_file_have_all_their_columns(model: str, tmp_path: Path):
    path = write_rows(tmp_path / "words.jsonl")
    numbers: set[int] = set()

    def reward(record, response):
        numbers.add(record["number"])
        return len(response)

    miles.train(model, f"{path}@[2:7]", reward, steps=1, **SMALL)
    assert numbers == {2, 3, 4, 5}


def test_records_of_a_held_out_set_are_its_own(model: str, tmp_path: Path):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({**row, "number": 100 + row["number"]}) + "\n" for row in ROWS[:3]))
    numbers: list[int] = []

    def reward(record, response):
        numbers.append(record["number"])
        return len(response)

    miles.train(model, ROWS, reward, steps=1, eval_prompt_data=["other", held_out], eval_interval=1, **SMALL)
    evaluated = [number for number in numbers if number >= 100]
    assert evaluated == [100, 101, 102] * 2 and sorted(set(numbers) - set(evaluated)) == [0, 1, 2, 3]


def test_an_iterable_is_read_as_far_as_the_steps_need(model: str):
    taken: list[int] = []

    def endless():
        while True:
            taken.append(len(taken))
            yield ROWS[len(taken) % len(ROWS)]

    result = miles.train(model, endless(), shared_letters, steps=2, **SMALL)
    assert result.finished and len(taken) == 8


def test_texts_are_prompts_and_a_closure_is_a_reward(model: str):
    letter = "a"
    options = {**SMALL, "label_key": None}
    result = miles.train(model, ["abc", "cba"], lambda response: letter in response, steps=1, **options)
    assert {s.reward for s in result.samples()} <= {0.0, 1.0}
    assert {s.prompt.messages[0]["content"] for s in result.samples()} == {"abc", "cba"}


def test_the_same_call_resumes_and_a_changed_option_is_refused(model: str, tmp_path: Path):
    first = miles.train(model, ROWS, shared_letters, steps=1, save=tmp_path / "run", **SMALL)
    resumed = miles.train(model, ROWS, shared_letters, steps=3, save=tmp_path / "run", **SMALL)
    whole = miles.train(model, ROWS, shared_letters, steps=3, save=tmp_path / "whole", **SMALL)
    assert first.directory == resumed.directory and resumed.metrics == whole.metrics
    assert read_weights(resumed.checkpoint) == read_weights(whole.checkpoint)
    with pytest.raises(miles.MilesError, match="is a run with other options: prompt_data was"):
        miles.train(model, ROWS[::-1], shared_letters, steps=4, save=tmp_path / "run", **SMALL)


def test_it_works_where_a_loop_is_running_and_lets_it_run(model: str):
    async def notebook():
        inside = miles.train(model, ROWS, shared_letters, steps=1, save="inside", **SMALL)
        ticks = 0
        task = asyncio.create_task(miles.train_async(model, ROWS, shared_letters, steps=1, save="awaited", **SMALL))
        while not task.done():
            await asyncio.sleep(0)
            ticks += 1
        return inside, await task, ticks

    inside, awaited, ticks = asyncio.run(notebook())
    assert inside.metrics == awaited.metrics and ticks > 10


def test_an_interrupt_stops_the_run_after_its_step_and_saves(model: str):
    calls: list[str] = []

    def reward(response):
        calls.append(response)
        if len(calls) == 17:  # in the second step
            _thread.interrupt_main()
        return len(response)

    result = miles.train(model, ROWS, reward, steps=10**6, save="run", **SMALL)
    assert not result.finished
    made = len(result.metrics)
    assert 2 <= made < 10**6 and result.checkpoint.name == f"step-{made:06d}"


def test_a_cancelled_run_stops_and_its_directory_is_free_again(model: str):
    async def cancel():
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def grade(response):
            loop.call_soon_threadsafe(started.set)
            return len(response)

        task = asyncio.create_task(miles.train_async(model, ROWS, grade, steps=10**6, save="run", **SMALL))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    metrics = miles.TrainResult(directory=Path("run"), finished=False).metrics
    (grade := lambda response: len(response)).__name__ = "grade"
    miles.train(model, ROWS, grade, steps=len(metrics), save="run", **SMALL)


def test_hooks_may_be_functions_too(model: str):
    kept: list[int] = []

    def longest_first(group):
        kept.append(group.prompt.id)
        return [float(t.response_length) for t in group.trajectories]

    result = miles.train(model, ROWS, shared_letters, steps=1, custom_reward_post_process_path=longest_first, **SMALL)
    assert result.finished and kept == [0, 1, 2, 3]
    stored = tomllib.loads((result.directory / "config.toml").read_text())
    assert stored["algo"]["custom_reward_post_process_path"] == "miles.api.functions:longest_first"


def test_supervised_fine_tuning_is_an_algorithm(model: str):
    options = {name: value for name, value in SMALL.items() if name != "n_samples_per_prompt"}
    result = miles.train(model, ROWS, algorithm="sft", steps=3, **options)
    losses = result.curve("loss")[1]
    assert losses[-1] < losses[0]


# -- what is wrong ----------------------------------------------------------------------------


def refuse(model: str, *args: object, **options: object) -> str:
    with pytest.raises(miles.MilesError) as caught:
        miles.train(model, *args, **{"steps": 1, **SMALL, **options})
    assert not Path("runs").exists() or not list(Path("runs").iterdir())
    return str(caught.value)


def test_errors_are_those_of_the_command_line_all_at_once(model: str):
    text = refuse(model, ROWS, shared_letters, lrr=1, rollout_batch_size="x", rollout_temperature=-1)
    assert sorted(text.splitlines()) == [
        "--lrr is not a flag; did you mean --lr?",
        "--rollout-batch-size takes a whole number, not 'x'.",
        "--rollout-temperature must be at least 0, not -1.",
    ]
    assert refuse(model, ROWS) == "--rm-type is missing: name a built-in reward, or your own with --custom-rm-path."
    assert refuse(model, None, shared_letters).startswith("--prompt-data is missing")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([{"question": "abc"}], "data[0]: there is no column input (found: question); name the right one"),
        ([3], "data[0] is a int; a row is a dictionary of columns, or a text."),
        ([], "data holds no rows"),
        ({"input": "abc"}, "data is a dict; give a list of dictionaries"),
        ([{"input": "abc", "label": object()}], "data[0] cannot be written as JSON"),
        ("nowhere.jsonl", "--prompt-data nowhere.jsonl does not exist"),
    ],
)
def test_bad_data_is_named_by_its_row(model: str, data: object, words: str):
    assert words in refuse(model, data, lambda response: 1.0)


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda text, record: 1.0, "the reward takes text; name its parameters by what they are: response, label"),
        (lambda: 1.0, "the reward takes nothing of its input"),
        (7, "the reward is a int; give a function."),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused_before_anything_starts(model: str, reward: object, words: str):
    assert words in refuse(model, ROWS, reward)


def test_a_reward_that_returns_no_number_ends_the_run_with_one_sentence(model: str):
    with pytest.raises(miles.MilesError, match=r"the reward returned None; return a number or a miles\.Reward"):
        miles.train(model, ROWS, lambda response: None, steps=1, **SMALL)


def test_parameters_and_options_do_not_contradict(model: str):
    assert "hf_checkpoint is set by a parameter" in refuse(model, ROWS, shared_letters, hf_checkpoint="other")
    assert "algorithm 'grop' is not one of grpo" in refuse(model, ROWS, shared_letters, algorithm="grop")
    assert "the workers of reward_num_workers cannot call" in refuse(model, ROWS, shared_letters, reward_num_workers=2)
    assert "max_restarts starts the command line again" in refuse(model, ROWS, shared_letters, max_restarts=1)


def test_the_command_line_says_where_the_function_of_a_run_is(model: str, capsys: pytest.CaptureFixture[str]):
    run = miles.train(model, ROWS, lambda response: 1.0, steps=1, save="run", **SMALL)
    recipe = (run.directory / "config.toml").read_text()
    (run.directory / "config.toml").write_text(recipe.replace("functions:reward", "functions:elsewhere"))
    assert main(["train", "run/config.toml", "--save", "other"]) == 1
    assert "elsewhere is a function of the Python program that started this run" in capsys.readouterr().err


def test_options_become_flags_as_the_examples_show():
    assert doctest.testmod(options).failed == 0
    assert options.build_argv({"save": Path("a"), "hook_arguments": {"x": 1}, "seed": np.int64(3)}) == [
        "--save=a",
        '--hook-arguments={"x": 1}',
        "--seed=3",
    ]
    with pytest.raises(miles.UsageError, match="lr is a object; give a number, a text"):
        options.build_argv({"lr": object()})
    with pytest.raises(miles.UsageError, match="rollout_stop has the value '--x', which looks like a flag"):
        options.build_argv({"rollout_stop": ["--x"]})


def write_log(folder: Path) -> miles.TrainResult:
    rows = [{"kind": "train", "step": step, "reward": step / 4} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return miles.TrainResult(directory=folder, finished=True)


def test_the_metrics_are_a_table_of_pandas(tmp_path: Path):
    pytest.importorskip("pandas")
    frame = write_log(tmp_path).frame
    assert list(frame.index) == [1, 2] and frame.index.name == "step"
    assert list(frame["reward"]) == [0.25, 0.5]


def test_without_pandas_a_sentence_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(miles.MilesError, match=r"result\.frame needs pandas; install it, or use result\.metrics"):
        _ = write_log(tmp_path).frame
