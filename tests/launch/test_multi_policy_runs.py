"""Runs with several policies: own weights, own pace, shared and frozen ones; and resumed."""

import json
import signal
import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from types import ModuleType

import aiohttp
import pytest
from safetensors.numpy import load_file
from tests.launch.small_run import everything, miles

from miles.core.types import Prompt
from miles.launch.main import main
from miles.observe.metric import list_undocumented
from miles.observe.rollouts import read_step
from miles.rollout.multi_agent.agents import Agents

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_agents"
sys.path.insert(0, str(EXAMPLE))
from signals import write_start  # noqa: E402


def load_module(name: str, path: Path) -> ModuleType:
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_module("two_agents_run", EXAMPLE / "run.py")
measured, run_flags = example.measured, example.flags


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two_agents")
    write_start(folder)
    return folder


def small(start: Path, run: Path, *more: str, steps: int = 4, **listener: object) -> list[str]:
    """The example's run with little to do in a step."""
    few = {"--rollout-batch-size": "4", "--n-samples-per-prompt": "4", "--n-samples-per-eval-prompt": "2"}
    flags = run_flags(start, run, steps, "--save-interval", "2", *more, **listener)
    for at, (flag, _) in enumerate(list(pairwise(flags))):
        if flag in few:
            flags[at + 1] = few[flag]
    return flags


def weights(run: Path, step: int, *inside: str) -> dict:
    return load_file((run / "checkpoints" / f"step-{step:06d}").joinpath(*inside) / "model.safetensors")


def same(one: dict, other: dict) -> bool:
    return all((one[name] == other[name]).all() for name in one)


def test_two_policies_learn_in_one_run_each_at_its_own_pace(start, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", *small(start, run, train_every=2, lr=5e-3)]) == 0
    steps = measured(run, "train")
    assert [row.get("policy/listener/version") for row in steps] == [None, 1, None, 2]
    assert [row["samples"] for row in steps] == [16] * 4
    assert [row["policy/listener/samples"] for row in steps[1::2]] == [32, 32]
    assert steps[3]["policy/listener/lr"] == 5e-3 and steps[3]["lr"] == 2e-3
    assert max(row["policy/listener/parity_max_abs"] for row in steps[1::2]) < 1e-5
    assert max(row["parity_max_abs"] for row in steps) < 1e-5
    assert all(row["reward/speaker"] == row["reward/listener"] == row["reward"] for row in steps)
    evals = measured(run, "eval")
    assert evals[0].keys() >= {"eval/each/reward/speaker", "eval/each/reward/listener"}
    plain = {"kind", "step", "time"}
    assert not list_undocumented({name for row in (*steps, *evals) for name in row} - plain)
    speaker, listener = weights(run, 4), weights(run, 4, "policies", "listener")
    assert not same(speaker, listener)
    assert not same(listener, load_file(start / "listener" / "model.safetensors"))
    rows = read_step(run / "rollouts" / "step-000004.parquet")
    assert {row["policy"] for row in rows} == {"speaker", "listener"}
    capsys.readouterr()
    assert main(["show", str(run), "--best"]) == 0
    shown = capsys.readouterr().out
    assert "-- branch 0, speaker" in shown and "versions listener 1, speaker 3" in shown


def test_a_killed_run_of_two_policies_continues_to_the_bit(start, tmp_path):
    """The listener waits with the rows of two steps when it is killed."""
    calm, run = tmp_path / "calm", tmp_path / "run"
    done = miles("train", *small(start, calm, train_every=3))
    assert done.returncode == 0, done.stderr
    killed = miles("train", *small(start, run, train_every=3), kill_at="miles.sync.publish:MultiPolicySync.publish:4")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    held = run / "checkpoints" / "step-000002" / "policies" / "listener" / "held.rows"
    assert held.stat().st_size > 1000
    again = miles("train", *small(start, run, train_every=3))
    assert again.returncode == 0, again.stderr
    whole = everything(calm)
    assert "policies/listener/optimizer.safetensors" in whole
    assert everything(run).keys() == whole.keys()
    for name, content in whole.items():
        assert everything(run)[name] == content, f"{name} differs"


def test_the_reference_of_each_policy_follows_it_also_when_resumed(start, tmp_path):
    """The listener has made three steps when the run is resumed, and its reference is that of its second, step 4."""
    how = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-update-interval", "2", "--save-interval", "1")
    how += ("--lr-warmup-iters", "0", "--lr", "1e-2")
    runs = [tmp_path / name for name in ("whole", "resumed")]
    assert main(["train", *small(start, runs[0], *how, steps=8, train_every=2, lr=1e-2)]) == 0
    resumed = small(start, runs[1], *how, steps=8, train_every=2, lr=1e-2)
    assert main(["train", *resumed, "--debug-exit-after-rollout", "7"]) == 0
    assert main(["train", *resumed]) == 0
    whole, found = ([{**row, "time": 0} for row in measured(run, "train")] for run in runs)
    assert found == whole
    for inside in ((), ("policies", "listener")):
        assert same(weights(runs[0], 8, *inside), weights(runs[1], 8, *inside))
    # A step that begins at its reference has nothing between the two.
    speaker = [abs(row["kl"]) for row in whole]
    listener = [abs(row["policy/listener/kl"]) for row in whole[1::2]]
    assert max(speaker[2::2]) < min(speaker[1::2]) / 4
    assert listener[2] < min(listener[1], listener[3]) / 4


def test_a_policy_with_the_weights_of_another_is_one_more_role_of_it(start, tmp_path):
    run = tmp_path / "run"
    table = {"speaker": {"hf_checkpoint": str(start / "speaker")}, "listener": {"weights": "speaker"}}
    flags = small(start, run, steps=2)
    flags[flags.index("--policies") + 1] = json.dumps(table)
    assert main(["train", *flags]) == 0
    steps = measured(run, "train")
    assert [row["samples"] for row in steps] == [32, 32], "a row for each role of each trajectory"
    assert not [name for row in steps for name in row if name.startswith("policy/")]
    assert not (run / "checkpoints" / "step-000002" / "policies").exists()


def test_a_frozen_policy_stays_as_it_is(start, tmp_path):
    run = tmp_path / "run"
    assert main(["train", *small(start, run, steps=2, frozen=True)]) == 0
    assert [row["samples"] for row in measured(run, "train")] == [16, 16]
    assert not (run / "checkpoints" / "step-000002" / "policies").exists()


def test_overlapping_planes_keep_every_policy_within_the_staleness_budget(start, tmp_path):
    run = tmp_path / "run"
    assert main(["train", *small(start, run, "--max-weight-staleness", "1", steps=6, train_every=2)]) == 0
    steps = measured(run, "train")
    assert max(row["staleness"] for row in steps) <= 1 and max(row["staleness_mean"] for row in steps) <= 1
    assert [row["policy/listener/version"] for row in steps[1::2]] == [1, 2, 3]
    assert max(row["policy/listener/staleness"] for row in steps[1::2]) <= 1


async def over_http(prompt: Prompt, cast: Agents):
    """The game of the example, with the listener behind its address."""
    said = await cast["speaker"].chat(prompt.messages)
    address = await cast["listener"].base_url()
    body = {"model": "any", "messages": [{"role": "user", "content": said.text or "?"}]}
    async with aiohttp.ClientSession() as http, http.post(f"{address}/v1/chat/completions", json=body) as response:
        heard = await response.json()
    right = float(heard["choices"][0]["message"]["content"] == prompt.label)
    return {"speaker": right, "listener": right}


def test_a_role_can_be_spoken_to_over_http(start, tmp_path):
    run = tmp_path / "run"
    flags = small(start, run, steps=2)
    flags[flags.index("--custom-cast-function-path") + 1] = f"{__name__}:over_http"
    assert main(["train", *flags]) == 0
    steps = measured(run, "train")
    assert [row["policy/listener/samples"] for row in steps] == [16, 16]
    assert min(row["policy/listener/trained_tokens"] for row in steps) > 0
    assert max(row["policy/listener/parity_max_abs"] for row in steps) < 1e-5


def test_the_checkpoint_of_a_run_is_evaluated_with_all_its_policies(start, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", *small(start, run, steps=2)]) == 0
    capsys.readouterr()
    flags = small(start, run, steps=2)
    flags[flags.index("--policies") + 1] = '{"speaker": {}, "listener": {}}'
    del flags[flags.index("--save") : flags.index("--save") + 2]
    assert main(["eval", str(run), *flags]) == 0
    output = dict(line.split() for line in capsys.readouterr().out.splitlines())
    last = measured(run, "eval")[-1]
    for role in ("speaker", "listener"):
        name = f"eval/each/reward/{role}"
        assert float(output[name]) == pytest.approx(last[name], abs=1e-4)


@pytest.mark.slow
def test_two_agents_invent_a_language(start, tmp_path):
    run = tmp_path / "run"
    done = miles("train", *run_flags(start, run))
    assert done.returncode == 0, done.stderr
    steps, evals = measured(run, "train"), measured(run, "eval")
    for role in ("speaker", "listener"):
        earned = [row[f"reward/{role}"] for row in steps]
        before, after = (row[f"eval/each/reward/{role}"] for row in evals)
        reported = (
            f"{role}: trained on {fmean(earned[:3]):.3f} -> {fmean(earned[-5:]):.3f}, {before:.3f} -> {after:.3f}"
        )
        assert before < 0.3 and after > before + 0.35 and fmean(earned[-5:]) > fmean(earned[:3]) + 0.35, reported
    assert max(row["parity_max_abs"] for row in steps) < 1e-5
    assert max(row["policy/listener/parity_max_abs"] for row in steps) < 1e-5
