"""One plane without the other, steps made again, and trajectories on the screen: all through the front door."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file
from tests.launch.small_run import flags, write_inputs

from miles.launch.main import main
from miles.observe.log_reader import read_rows
from miles.observe.rollouts import WALL_CLOCK_COLUMNS, step_path

LEARNED = ("model.safetensors", "optimizer.safetensors", "trainer.json")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """A run of both planes that wrote its groups down twice."""
    folder = tmp_path_factory.mktemp("whole")
    dump = str(folder / "dump" / "at-{rollout_id}.parquet")
    assert main(["train", *flags(inputs, folder / "run", "--save-debug-rollout-data", dump, steps=4)]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def overlapped(inputs, tmp_path_factory):
    """A run whose planes overlapped, and whose corrections go by rows that waited."""
    run = tmp_path_factory.mktemp("overlapped") / "run"
    more = ("--max-weight-staleness", "1", "--use-tis", "--tis-mode", "auto")
    assert main(["train", *flags(inputs, run, *more, steps=4)]) == 0
    return run


def again(run, to, *more):
    """The command of a run, from what it wrote of it, into another directory."""
    return main(["train", str(run / "config.toml"), "--save", str(to), "--no-eval-interval", *more])


def trained(run):
    return {(p.parent.name, p.name): p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.name in LEARNED}


def metrics(run):
    rows = read_rows(run / "metrics.jsonl").select("train")
    return [{name: value for name, value in row.values.items() if name != "groups_dropped"} for row in rows]


# -- training alone -------------------------------------------------------------------------


def test_training_on_a_runs_own_rollouts_gives_its_weights_to_the_bit(whole, tmp_path):
    more = ("--no-save-debug-rollout-data", "--debug-train-only", "--load-debug-rollout-data", str(whole))
    assert again(whole, tmp_path / "run", *more) == 0
    assert trained(tmp_path / "run") == trained(whole)
    assert metrics(tmp_path / "run") == metrics(whole)


def test_training_on_named_files_needs_no_prompts_no_reward_and_no_engine(whole, tmp_path, monkeypatch):
    monkeypatch.setattr("miles.backends.native.engine.engine.NativeEngine.__init__", _never)
    named = str(whole.parent / "dump" / "at-{rollout_id}.parquet")
    more = ("--load-debug-rollout-data", named, "--no-save-debug-rollout-data", "--no-custom-rm-path")
    assert again(whole, tmp_path / "run", *more, "--no-prompt-data", "--no-eval-prompt-data") == 0
    assert trained(tmp_path / "run") == trained(whole)


def test_training_alone_goes_on_where_it_was_stopped(whole, tmp_path):
    more = ("--no-save-debug-rollout-data", "--load-debug-rollout-data", str(whole))
    assert again(whole, tmp_path / "run", *more, "--num-rollout", "2", "--lr-decay-iters", "8") == 0
    assert again(whole, tmp_path / "run", *more, "--lr-decay-iters", "8") == 0
    assert [row.step for row in read_rows(tmp_path / "run" / "metrics.jsonl").select("train")] == [1, 2, 3, 4]


def test_groups_of_overlapping_planes_train_to_the_same_weights(overlapped, tmp_path):
    more = ("--load-debug-rollout-data", str(overlapped / "rollouts"), "--max-weight-staleness", "0")
    assert again(overlapped, tmp_path / "run", *more) == 0
    assert trained(tmp_path / "run") == trained(overlapped)
    assert metrics(tmp_path / "run") == metrics(overlapped)


def _never(*args, **kwargs):
    raise AssertionError("this run has no use for it")


# -- sampling alone -------------------------------------------------------------------------


def test_sampling_alone_gives_the_first_groups_and_holds_no_trainer(inputs, whole, tmp_path, monkeypatch):
    monkeypatch.setattr("miles.train.policy_trainer.PolicyTrainer.__init__", _never)
    run = tmp_path / "run"
    assert main(["train", *flags(inputs, run, "--debug-rollout-only", steps=3)]) == 0
    first = step_path(whole / "rollouts", 1), step_path(run / "rollouts", 1)
    tables = [pq.read_table(path).drop_columns(WALL_CLOCK_COLUMNS) for path in first]
    assert tables[0].equals(tables[1])
    rows = read_rows(run / "metrics.jsonl").select("train")
    assert [row.step for row in rows] == [1, 2, 3] and all("loss" not in row.values for row in rows)
    versions = pq.read_table(step_path(run / "rollouts", 3))["versions"].to_pylist()
    assert {version for row in versions for version in row} == {-1, 0}
    assert not list((run / "checkpoints").rglob("*.safetensors"))


def test_a_plan_of_sampling_alone_counts_no_optimizer(inputs, tmp_path, capsys):
    assert main(["plan", *flags(inputs, tmp_path / "run", "--debug-rollout-only")]) == 0
    output = capsys.readouterr().out
    assert "optimizer " not in output.split("memory")[-1] and "nothing is trained" in output


# -- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--debug-rollout-only --debug-train-only",
            "does not train and --debug-train-only does not sample; keep one",
        ),
        ("--debug-train-only", "--debug-train-only needs --load-debug-rollout-data; add that"),
        (
            "--debug-rollout-only --load-debug-rollout-data RUN",
            "samples groups and --load-debug-rollout-data reads them",
        ),
        ("--load-debug-rollout-data nowhere", "--load-debug-rollout-data nowhere is not a folder"),
        ("--load-debug-rollout-data RUN", "without an engine, which --eval-interval needs"),
        ("--save-debug-rollout-data one.parquet", "names one file for all steps; put {rollout_id} into it"),
        ("--save-debug-rollout-data {step}", "has a placeholder other than {rollout_id}"),
        ("--debug-rollout-only --load RUN", "samples with the weights of --hf-checkpoint"),
    ],
)
def test_what_contradicts_itself_is_said(inputs, whole, tmp_path, capsys, line, expected):
    words = line.replace("RUN", str(whole)).split()
    assert main(["train", *flags(inputs, tmp_path / "run", *words, steps=1)]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--num-rollout 9", "has no step 5"),
        ("--rollout-batch-size 8", "holds 4 groups, and a step of this run has 8; give --rollout-batch-size 4"),
        ("--n-samples-per-prompt 2", "holds 4 trajectories for prompt"),
    ],
)
def test_groups_that_do_not_fit_are_refused(whole, tmp_path, capsys, line, expected):
    more = ("--no-save-debug-rollout-data", "--load-debug-rollout-data", str(whole), *line.split())
    assert again(whole, tmp_path / "run", *more) == 1
    assert expected in capsys.readouterr().err


def test_groups_of_another_vocabulary_are_refused(inputs, whole, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(inputs, other)
    text = (other / "tokenizer.json").read_text()
    tokenizer = json.loads(text)
    words = tokenizer["model"]["vocab"]
    (a, b) = list(words)[-2:]
    words[a], words[b] = words[b], words[a]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    more = ("--no-save-debug-rollout-data", "--load-debug-rollout-data", str(whole), "--hf-checkpoint", str(other))
    assert again(whole, tmp_path / "run", *more) == 1
    assert "holds tokens of another vocabulary than the tokenizer of --hf-checkpoint" in capsys.readouterr().err


# -- a step made again ----------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_step_of_a_run_repeats_to_the_bit(whole, capsys, step):
    assert main(["replay", str(whole), str(step)]) == 0
    output = capsys.readouterr().out
    assert "log-probs      16 of 16 equal" in output and output.rstrip().endswith("equal bit for bit")
    assert ("24 of 24 equal" in output) == (step == 4)


def test_steps_of_overlapping_planes_are_trained_again_and_not_sampled(overlapped, capsys):
    assert main(["replay", str(overlapped), "4"]) == 0
    output = capsys.readouterr().out
    assert "tokens" not in output and "optimizer" in output and "sampling   not repeated" in output
    assert main(["replay", str(overlapped), "4", "--sample", "0"]) == 2
    assert "depend on timing, so --sample cannot repeat one" in capsys.readouterr().err


def test_one_trajectory_is_sampled_again_and_printed(whole, capsys):
    assert main(["replay", str(whole), "2", "--sample", "5"]) == 0
    output = capsys.readouterr().out
    assert "policy, version 1 (" in output and "tokens          1 of 1 equal" in output and "metrics" not in output
    assert main(["replay", str(whole), "2", "--sample", "16"]) == 2
    assert "step 2 has trajectories 0 to 15" in capsys.readouterr().err


def test_a_token_that_was_another_is_named(whole, tmp_path, capsys):
    run = copied(whole, tmp_path)
    path = step_path(run / "rollouts", 2)
    table = pq.read_table(path)
    rows = table["tokens"].to_pylist()
    rows[6][-1] = (rows[6][-1] + 1) % 20
    put(path, table, "tokens", rows)
    assert main(["replay", str(run), "2"]) == 1
    output = capsys.readouterr().out
    last = len(rows[6]) - 1
    assert "different; the first: trajectory 6 (prompt " in output and f"token {last} of {last + 1} was " in output


def test_a_log_prob_that_was_another_is_named_with_how_far_it_is(whole, tmp_path, capsys):
    run = copied(whole, tmp_path)
    path = step_path(run / "rollouts", 1)
    table = pq.read_table(path)
    rows = [list(row) for row in table["logprobs"].to_pylist()]
    rows[3][-1] += 0.25
    put(path, table, "logprobs", rows)
    assert main(["replay", str(run), "1", "--sample", "3"]) == 1
    output = capsys.readouterr().out
    assert f"the log-prob of token {len(rows[3]) - 1} of {len(rows[3])} was " in output and "(0.25 apart)" in output
    assert main(["replay", str(run), "1", "--sample", "3", "--tolerance", "0.3"]) == 0


def test_weights_that_were_others_are_named(whole, tmp_path, capsys):
    run = copied(whole, tmp_path)
    path = run / "checkpoints" / "step-000004" / "model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + np.float32(0.5)
    save_file(tensors, path)
    assert main(["replay", str(run), "4"]) == 1
    assert f"different; the first: {name} in model.safetensors differs by up to 0.5" in capsys.readouterr().out


def test_steps_that_are_not_there_are_refused(whole, tmp_path, capsys):
    assert main(["replay", str(whole), "5"]) == 2
    assert "has 4 steps, so there is no step 5 to replay" in capsys.readouterr().err
    assert main(["replay", str(tmp_path), "1"]) == 2
    assert "is not a run" in capsys.readouterr().err
    run = copied(whole, tmp_path)
    step_path(run / "rollouts", 3).unlink()
    assert main(["replay", str(run), "4"]) == 1
    assert "step-000003.parquet does not exist" in capsys.readouterr().err


def copied(run, folder):
    shutil.copytree(run, folder / "copy")
    return folder / "copy"


def put(path, table, name, rows):
    at = table.schema.get_field_index(name)
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array(rows, table.schema.field(at).type)), path)


# -- on the screen --------------------------------------------------------------------------


def test_the_best_and_the_worst_of_the_last_step_are_shown(whole, capsys):
    assert main(["show", str(whole)]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"step 4 of {whole}: 4 prompts, 16 trajectories, reward ")
    assert output.count("policy, version 3 (") == 2 and "\x1b" not in output and "label " in output


def test_a_trajectory_is_shown_with_its_reward_tokens_and_advantage(whole, capsys):
    assert main(["show", str(whole), "--step", "2", "--sample", "5"]) == 0
    output = capsys.readouterr().out
    row = pq.read_table(step_path(whole / "rollouts", 2)).to_pylist()[5]
    assert f"trajectory 5 of 16: prompt {row['prompt_id']} (epoch 0), sample {row['trajectory']}" in output
    assert f"reward {row['reward']:.3f}; advantage " in output and row["status"] in output


def test_all_trajectories_at_a_prompt_are_shown(whole, capsys):
    assert main(["show", str(whole), "--group", "--worst"]) == 0
    output = capsys.readouterr().out
    assert [f"sample {n}\n" in output for n in range(5)] == [True, True, True, True, False]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--sample 16", "step 4 has trajectories 0 to 15"),
        ("--step 9", "has no rollouts of step 9; it has steps 1 to 4"),
        ("--best --worst", "--best and --worst each select one; keep one."),
    ],
)
def test_trajectories_that_are_not_there_are_refused(whole, capsys, line, expected):
    assert main(["show", str(whole), *line.split()]) == 2
    assert expected in capsys.readouterr().err


# -- conversations --------------------------------------------------------------------------


def test_an_agents_sessions_are_audited_written_down_and_repeated(inputs, tmp_path, capsys):
    run = tmp_path / "run"
    more = ("--custom-agent-function-path", "tests.launch.test_agent_runs:twice")
    assert main(["train", *flags(inputs, run, *more, steps=2)]) == 0
    rows = read_rows(run / "metrics.jsonl").select("train")
    assert all(0.0 <= row.values["session_mismatch/retokenised"] <= 1.0 for row in rows)
    capsys.readouterr()
    # When an agent asks is its own affair, and with whom a token is computed decides its last bits.
    assert main(["replay", str(run), "2", "--tolerance", "1e-5"]) == 0, capsys.readouterr().out
    assert main(["show", str(run), "--best"]) == 0
    assert "turns " in capsys.readouterr().out
    loaded = ("--load-debug-rollout-data", str(run), "--no-custom-agent-function-path")
    assert again(run, tmp_path / "loaded", *loaded) == 0
    assert trained(tmp_path / "loaded") == trained(run)


def test_the_routing_of_experts_is_written_down_where_it_is_replayed(tmp_path, capsys):
    inputs, run, plain = write_inputs(tmp_path / "inputs", moe=True), tmp_path / "run", tmp_path / "plain"
    assert main(["train", *flags(inputs, run, "--use-rollout-routing-replay", steps=2)]) == 0
    assert again(run, tmp_path / "loaded", "--load-debug-rollout-data", str(run)) == 0
    assert trained(tmp_path / "loaded") == trained(run)
    assert main(["replay", str(run), "2"]) == 0
    assert main(["train", *flags(inputs, plain, steps=2)]) == 0
    extras = [pq.read_table(step_path(one / "rollouts", 1))["extras"].null_count for one in (run, plain)]
    assert extras == [0, 16]
    capsys.readouterr()
    assert again(run, tmp_path / "without", "--load-debug-rollout-data", str(plain)) == 1
    assert "was written without routed_experts, which this run replays" in capsys.readouterr().err
