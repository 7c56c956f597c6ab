"""Several policies, each trained by ranks of its own: as in one process, also when killed, resumed and recovered."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.backends.megatron.test_cli import run_miles
from tests.launch.small_run import everything, miles
from tests.launch.test_multi_policy_runs import EXAMPLE, measured, small
from torch import distributed as dist

from miles.cluster import spmd
from miles.core.types import Prompt
from miles.launch.main import main
from miles.rollout.multi_agent.agents import Agents

sys.path.insert(0, str(EXAMPLE))
from signals import write_start

PAIR = ("--actor-num-gpus-per-node", "2")
TENSOR = {"actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2}
FALLS = "MILES_TEST_RANK_FALLS"
LONG = ("--save-interval", "5")


@pytest.fixture(scope="module", autouse=True)
def swift() -> Iterator[None]:
    """Ranks are forked from a process that has what they import."""
    multiprocessing.set_forkserver_preload(["miles.launch.distributed.models_fsdp", "tests.launch.small_run"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spmd, "START_METHOD", "forkserver")
        yield
    assert not [one for one in multiprocessing.active_children() if one.name.startswith("the trainer")]
    assert not dist.is_initialized()


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("policy_ranks")
    write_start(folder)
    return folder


async def play(prompt: Prompt, cast: Agents) -> dict[str, float]:
    """The game of the example, with rewards that nearly always differ, so that every step has a gradient."""
    said = await cast["speaker"].chat(prompt.messages)
    heard = await cast["listener"].chat([{"role": "user", "content": said.text or "?"}])
    return {role: float(ord(reply.text[:1] or "a")) for role, reply in (("speaker", said), ("listener", heard))}


def reduce(counts_N: Sequence[int]) -> np.ndarray:
    """The mean over tokens; rank 1 falls once, in the second step of its policy."""
    folder = os.environ.get(FALLS)
    if folder is not None and dist.is_initialized() and dist.get_rank() == 1:
        calls = len(list(Path(folder).iterdir()))
        (Path(folder) / str(calls)).touch()
        if calls == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return np.full(len(counts_N), 1 / sum(counts_N))


def flags(start: Path, run: Path, *more: str, steps: int = 3, **listener: object) -> list[str]:
    line = small(start, run, steps=steps, **listener)
    own = {"--custom-cast-function-path": f"{__name__}:play", "--lr-warmup-iters": "0"}
    for at, (flag, _) in enumerate(list(pairwise(line))):
        if flag in own:
            line[at + 1] = own[flag]
    at = line.index("--eval-prompt-data")
    del line[at : at + 3]
    at = line.index("--eval-interval")
    del line[at : at + 2]
    return [*line, *more]


def trained(start: Path, name: str, *more: str, steps: int = 3, **listener: object) -> Path:
    run = start / name
    assert main(["train", *flags(start, run, *more, steps=steps, **listener)]) == 0
    return run


def metrics(run: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if isinstance(v, float | int)} for row in measured(run, "train")]


def weights(run: Path, step: int, *inside: str) -> dict[str, np.ndarray]:
    folder = (run / "checkpoints" / f"step-{step:06d}").joinpath(*inside)
    return {
        name: value for file in sorted(folder.glob("model*.safetensors")) for name, value in load_file(file).items()
    }


def assert_alike(run: Path, other: Path) -> None:
    ours, theirs = metrics(run), metrics(other)
    assert len(ours) == len(theirs) > 0
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.keys() == expected.keys()
        # How many micro-batches there are depends on how many share them; parity is all rounding.
        for name in (n for n in mine if not n.endswith("micro_batches") and "parity" not in n):
            assert mine[name] == pytest.approx(expected[name], abs=1e-4, rel=1e-4), name
        assert mine["grad_norm"] > 0 and mine["policy/listener/grad_norm"] > 0


def test_two_policies_on_two_ranks_each_learn_as_two_in_one_process(start):
    """The speaker's ranks share its parameters, the listener's its layers."""
    alone = trained(start, "alone", lr=4e-3)
    ranks = trained(start, "ranks", *PAIR, lr=4e-3, **TENSOR)
    assert_alike(ranks, alone)
    for inside in ((), ("policies", "listener")):
        expected, found = weights(alone, 3, *inside), weights(ranks, 3, *inside)
        assert found.keys() == expected.keys() and found
        assert all(np.allclose(found[name], expected[name], atol=1e-4) for name in found)
        assert any((expected[name] != value).any() for name, value in weights(alone, 2, *inside).items())


def test_a_policy_on_ranks_has_adapters_a_critic_and_a_teacher_of_its_own(start):
    own = {
        **{"lora_rank": 2, "lr": 1e-2, "advantage_estimator": "ppo", "critic_lr": 1e-3, "use_kl_loss": True},
        **{"kl_loss_coef": 0.1, "use_opd": True, "opd_teacher_load": str(start / "speaker")},
    }
    alone = trained(start, "own-alone", steps=2, **own)
    ranks = trained(start, "own-ranks", steps=2, actor_num_gpus_per_node=2, **own)
    assert_alike(ranks, alone)
    listener = ranks / "checkpoints" / "step-000002" / "policies" / "listener"
    assert list(listener.rglob("adapter_config.json")) and list((listener).rglob("*critic*"))
    assert not list((ranks / "checkpoints" / "step-000002").glob("adapter*"))
    assert {f"policy/listener/{name}" for name in ("value_loss", "kl", "teacher_logp")} <= metrics(ranks)[-1].keys()


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]")
def test_a_policy_on_ranks_of_megatron_learns_as_one_in_one_process(start):
    """The listener has ranks of Megatron beside a speaker in one process, and then both."""
    runs = {
        "fsdp": ((), {}),
        "mixed": ((), {"train_backend": "megatron", **TENSOR}),
        "megatron": ((*PAIR, "--train-backend", "megatron"), TENSOR),
    }
    for name, (more, own) in runs.items():
        run_miles("train", *flags(start, start / name, *more, steps=2, lr=4e-3, **own))
        assert_alike(start / name, start / "fsdp")


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]")
def test_policies_resume_from_megatrons_checkpoints_with_a_reference_each(start, tmp_path):
    """The listener, with adapters, has made three steps, and its reference is that of its second one."""
    how = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-update-interval", "2", "--save-interval", "1")
    own = {"lora_rank": 2, "lr": 1e-2}
    alone = trained(start, "references", *how, steps=4, **own)
    how += (*PAIR, "--train-backend", "megatron", "--ckpt-format", "torch_dist")
    runs = [start / name for name in ("references-whole", "references-resumed")]
    run_miles("train", *flags(start, runs[0], *how, steps=4, **own, **TENSOR))
    run_miles("train", *flags(start, runs[1], *how, "--debug-exit-after-rollout", "3", steps=4, **own, **TENSOR))
    run_miles("train", *flags(start, runs[1], *how, steps=4, **own, **TENSOR))
    assert_alike(runs[0], alone)
    assert metrics(runs[1]) == metrics(runs[0])
    assert (runs[1] / "latest_checkpointed_iteration.txt").read_text() == "4"
    for inside in ((), ("policies", "listener")):
        saved = (runs[1] / "checkpoints" / "step-000004").joinpath(*inside)
        assert (saved / ".metadata").is_file() and not list(saved.glob("model*.safetensors"))
        out = tmp_path / "-".join(("out", *inside))
        run_miles("convert", str(saved), str(out), "--format", "float32")
        expected, found = weights(alone, 4, *inside), load_file(out / "model.safetensors")
        assert found.keys() == expected.keys() and found
        assert all(np.allclose(found[name], expected[name], atol=1e-4) for name in found)


# -- killed, resumed and recovered ----------------------------------------------------------


@pytest.fixture(scope="module")
def falling() -> dict[str, object]:
    return {"train_every": 2, "custom_pg_loss_reducer_function_path": f"{__name__}:reduce", **TENSOR}


@pytest.fixture(scope="module")
def calm(start: Path, falling: dict[str, object]) -> Path:
    return trained(start, "calm", *LONG, steps=6, **falling)


def test_a_rank_of_one_policy_that_is_killed_is_replaced_and_the_run_is_the_same_to_the_bit(
    start, calm, falling, tmp_path, monkeypatch, capsys
):
    """Its second step is the fourth of the run, before any checkpoint: the first one is trained again."""
    monkeypatch.setattr(spmd, "START_METHOD", "spawn")  # which hands on the environment
    monkeypatch.setenv(FALLS, str(tmp_path))
    fallen = trained(start, "fallen", *LONG, steps=6, **falling)
    said = capsys.readouterr().out
    assert "policy listener's ranks are restarted from the initial weights, and step 2 is trained again" in said
    assert len(list(tmp_path.iterdir())) == 5, "three steps, and two that were trained twice"
    assert metrics(fallen) == metrics(calm)
    for inside in ((), ("policies", "listener")):
        expected, found = weights(calm, 6, *inside), weights(fallen, 6, *inside)
        assert found.keys() == expected.keys()
        assert all((found[name] == expected[name]).all() for name in found)


def test_a_killed_run_with_ranks_continues_to_the_bit(start, calm, falling):
    """The listener waits with the samples of step 5."""
    run = start / "killed"
    command = ["train", *flags(start, run, *LONG, steps=6, **falling)]
    killed = miles(*command, kill_at="miles.sync.publish:MultiPolicySync.publish:7")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    held = run / "checkpoints" / "step-000005" / "policies" / "listener" / "held.rows"
    assert held.stat().st_size > 1000
    again = miles(*command)
    assert again.returncode == 0, again.stderr
    expected, found = everything(calm), everything(run)
    assert found.keys() == expected.keys() and "policies/listener/model-00002-of-00002.safetensors" in found
    for name, content in expected.items():
        assert found[name] == content, f"{name} differs"


# -- asynchronous ---------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [False, True])
def test_over_sampled_policies_on_ranks_keep_the_staleness_bound(start, partial):
    more = (
        "--max-weight-staleness",
        "1",
        "--over-sampling-batch-size",
        "6",
        *(["--partial-rollout"] if partial else []),
    )
    run = trained(start, f"async-{partial}", *more, steps=4, train_every=2, actor_num_gpus_per_node=2)
    steps = metrics(run)
    assert max(row["staleness"] for row in steps) <= 1
    assert [row["policy/listener/version"] for row in steps[1::2]] == [1, 2]
    assert max(row["policy/listener/staleness"] for row in steps[1::2]) <= 1
    assert [row["samples"] for row in steps] == [16] * 4 and all("groups_aborted" in row for row in steps)


def test_over_sampled_policies_in_turns_are_interrupted(start):
    steps = metrics(trained(start, "extra", "--over-sampling-batch-size", "6", lr=1e-3))
    assert sum(row["groups_aborted"] for row in steps) > 0 and max(row["staleness"] for row in steps) == 0
