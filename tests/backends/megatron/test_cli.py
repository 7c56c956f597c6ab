"""A run from the command line with two Megatron ranks, against the FSDP trainer in one process."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.launch.small_run import ROOT, flags, untie_embeddings, write_inputs
from tests.launch.test_draft_runs import accept_rates
from tests.launch.test_image_runs import write_rows
from tests.launch.test_preference_runs import write_pairs
from tests.launch.test_upstream_flags import read_metrics
from tests.models.draft.mtp_checkpoints import make_reference, save_reference
from tests.models.small_vision import write_vision_checkpoint

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]


def train(inputs: Path, run: Path, *more: str) -> list[float]:
    """The rewards of a short run."""
    run_miles("train", *flags(inputs, run, *more, steps=3))
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [reported["reward"] for reported in lines if "reward" in reported]


def run_miles(*words: str) -> None:
    """The command line in a process in which Megatron runs on the CPU."""
    done = start_miles(*words)
    assert done.returncode == 0, done.stdout + done.stderr


def start_miles(*words: str, kill_at: str = "") -> subprocess.CompletedProcess[str]:
    """The same to its end, which may be that a rank calls a function for the n-th time, as in ``small_run.miles``."""
    here = Path(__file__).parent / "cpu"
    paths = os.pathsep.join([str(here), str(ROOT), os.environ.get("PYTHONPATH", "")])
    line = [sys.executable, "-W", "ignore", "-m", "miles.launch.main", *words]
    env = os.environ | {"PYTHONPATH": paths, "MILES_TEST_MEGATRON": "1", "OMP_NUM_THREADS": "1"}
    env |= {"MILES_TEST_KILL": kill_at}
    return subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, start_new_session=True)


@pytest.mark.parametrize("more", [(), ("--megatron-use-distributed-optimizer",)], ids=["ours", "megatrons"])
def test_a_run_on_megatron_is_the_run_on_fsdp(tmp_path: Path, more: tuple[str, ...]):
    inputs = write_inputs(tmp_path / "inputs", moe=True)
    replay = "--use-rollout-routing-replay"
    wanted = train(inputs, tmp_path / "fsdp", replay)
    ranks = ("--train-backend", "megatron", "--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2")
    found = train(inputs, tmp_path / "megatron", replay, *ranks, *more)
    assert len(found) == 3 and found == pytest.approx(wanted, abs=1e-6)
    last = "checkpoints/step-000003"
    one, two = (_weights(tmp_path / name / last) for name in ("fsdp", "megatron"))
    assert one.keys() == two.keys() and all(torch.allclose(one[n], two[n], atol=2e-3) for n in one)


def test_a_ppo_run_on_megatron_is_the_run_on_fsdp(tmp_path: Path):
    inputs = write_inputs(tmp_path / "inputs")
    ppo = ("--advantage-estimator", "ppo", "--critic-lr", "1e-3")
    wanted = train(inputs, tmp_path / "fsdp", *ppo)
    ranks = ("--train-backend", "megatron", "--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2")
    found = train(inputs, tmp_path / "megatron", *ppo, *ranks)
    assert len(found) == 3 and found == pytest.approx(wanted, abs=1e-6)
    last = "checkpoints/step-000003/critic"
    one, two = (_weights(tmp_path / name / last) for name in ("fsdp", "megatron"))
    heads = [load_file(tmp_path / name / last / "value_head.safetensors") for name in ("fsdp", "megatron")]
    assert one.keys() == two.keys() and all(torch.allclose(one[n], two[n], atol=2e-3) for n in one)
    assert all(torch.allclose(heads[0][n], heads[1][n], atol=2e-3) and heads[0][n].any() for n in heads[0])


def test_a_ppo_run_with_an_adapter_critic_on_megatron_is_the_run_on_fsdp_and_resumes_to_the_bit(tmp_path: Path):
    inputs = write_inputs(tmp_path / "inputs")
    ppo = ("--advantage-estimator", "ppo", "--critic-lr", "1e-2", "--lora-rank", "4", "--lr", "1e-2")
    wanted = train(inputs, tmp_path / "fsdp", *ppo)
    ranks = ("--train-backend", "megatron", "--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2")
    found = train(inputs, tmp_path / "megatron", *ppo, *ranks)
    assert len(found) == 3 and found == pytest.approx(wanted, abs=1e-6)
    resumed, saved = tmp_path / "resumed", ("--save-interval", "1")
    run_miles("train", *flags(inputs, resumed, *ppo, *ranks, *saved, "--debug-exit-after-rollout", "2", steps=3))
    assert train(inputs, resumed, *ppo, *ranks, *saved) == found
    last, kept = "checkpoints/step-000003", [tmp_path / "fsdp", tmp_path / "megatron", resumed]
    heads = [load_file(run / last / "critic/value_head.safetensors") for run in kept]
    adapters = [load_file(run / last / "critic/adapter/adapter_model.safetensors") for run in kept]
    for one, two, three in (heads, adapters, [_weights(run / last) for run in kept]):
        assert one.keys() == two.keys() and all(torch.allclose(one[n], two[n], atol=2e-3) for n in one)
        assert three.keys() == two.keys() and all(torch.equal(three[n], two[n]) for n in two)


SERVED = ("--lora-rank", "4", "--use-kl-loss", "--kl-loss-coef", "0.1", "--rollout-backend", "served")
TENSOR_RANKS = ("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2")
ADAPTERS = {
    "merged": (False, SERVED, TENSOR_RANKS),
    "experts, named versions": (
        True,
        (*SERVED, "--target-modules", "all-linear,experts", "--no-lora-merge", "--lora-versions", "2"),
        ("--actor-num-gpus-per-node", "2", "--expert-model-parallel-size", "2"),
    ),
    "DoRA": (False, (*SERVED, "--use-dora"), TENSOR_RANKS),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_run_of_adapters_on_megatron_is_the_run_on_fsdp(tmp_path: Path, name: str):
    moe, more, ranks = ADAPTERS[name]
    inputs = write_inputs(tmp_path / "inputs", moe=moe)
    wanted = train(inputs, tmp_path / "fsdp", *more)
    found = train(inputs, tmp_path / "megatron", *more, "--train-backend", "megatron", *ranks)
    assert len(found) == 3 and found == pytest.approx(wanted, abs=1e-6)
    last = "checkpoints/step-000003"
    one, two = (_weights(tmp_path / name / last) for name in ("fsdp", "megatron"))
    assert one.keys() == two.keys() and all(torch.allclose(one[n], two[n], atol=2e-3) for n in one)
    assert (tmp_path / "megatron" / last / "adapter" / "adapter_model.safetensors").exists()


REFERENCES = {
    "pipeline": (False, (), ("--pipeline-model-parallel-size", "2")),
    "torch_dist": (True, (), ("--expert-model-parallel-size", "2", "--ckpt-format", "torch_dist")),
    "distributed optimizer": (False, (), ("--megatron-use-distributed-optimizer",)),
    "adapters": (False, ("--lora-rank", "4", "--lr", "1e-2"), ("--tensor-model-parallel-size", "2")),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_the_reference_follows_the_policy_on_megatron_as_on_fsdp_also_when_resumed(tmp_path: Path, name: str):
    moe, more, layout = REFERENCES[name]
    inputs = write_inputs(tmp_path / "inputs", moe=moe)
    line = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-update-interval", "2", "--save-interval", "1", *more)
    ranks = ("--train-backend", "megatron", "--actor-num-gpus-per-node", "2", *layout)
    wanted = train(inputs, tmp_path / "fsdp", *line)
    found = train(inputs, tmp_path / "megatron", *line, *ranks)
    assert found == pytest.approx(wanted, abs=1e-6)
    resumed = tmp_path / "resumed"
    run_miles("train", *flags(inputs, resumed, *line, *ranks, "--debug-exit-after-rollout", "2", steps=3))
    assert train(inputs, resumed, *line, *ranks) == found
    one, two, three = (read_metrics(tmp_path / each, "kl") for each in ("fsdp", "megatron", "resumed"))
    assert two == pytest.approx(one, rel=1e-3, abs=1e-7) and three == two
    # The last step begins at its reference, which the second one has left.
    assert abs(one[2]) < abs(one[1]) / 4


@pytest.mark.parametrize("saves", ["hf", "torch_dist"])
@pytest.mark.parametrize("adapters", [(), ("--lora-rank", "4")], ids=["weights", "adapters"])
def test_a_reward_model_run_on_megatron_is_the_run_on_fsdp(tmp_path: Path, adapters: tuple[str, ...], saves: str):
    inputs = write_inputs(tmp_path / "inputs")
    words = [json.loads(line)["input"] for line in (inputs / "train.jsonl").read_text().splitlines()]
    write_pairs(inputs / "pairs.jsonl", words)
    data = ("--prompt-data", str(inputs / "pairs.jsonl"), "--apply-chat-template", "--rollout-batch-size", "8")
    line = ("--hf-checkpoint", str(inputs), *data, "--device", "cpu", "--view", "plain", "--num-rollout", "3")
    losses: list[list[float]] = []
    ranks = ("--train-backend", "megatron", "--actor-num-gpus-per-node", "4", "--pipeline-model-parallel-size", "2")
    ranks += ("--ckpt-format", saves)
    for name, more in (("fsdp", ()), ("megatron", ranks)):
        rate = ("--loss-type", "rm_loss", "--lr", "3e-3")
        run_miles("train", *line, "--save", str(tmp_path / name), *rate, *adapters, *more)
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses.append([row["loss"] for row in lines if row["kind"] == "train"])
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], abs=1e-4)
    last = "checkpoints/step-000003"
    read = _weights if saves == "hf" else partial(load_torch_dist, out=tmp_path)
    one, two = _weights(tmp_path / "fsdp" / last), read(tmp_path / "megatron" / last)
    assert one.keys() == two.keys() and all(torch.allclose(one[n], two[n], atol=2e-3) for n in one)
    assert one["score.weight"].any()


TENSOR = ("--tensor-model-parallel-size", "2", "--rollout-num-gpus-per-engine", "2", "--rollout-backend", "served")
EXACT = {
    "dense": (False, "--dtype", "float32"),
    "dense tensor": (False, "--actor-num-gpus-per-node", "2", *TENSOR, "--dtype", "bfloat16"),
    "experts": (
        True,
        *("--actor-num-gpus-per-node", "2", "--expert-model-parallel-size", "2", "--use-rollout-routing-replay"),
        *("--dtype", "bfloat16"),
    ),
    "experts tensor": (
        True,
        *("--actor-num-gpus-per-node", "2", *TENSOR, "--sequence-parallel", "--megatron-use-distributed-optimizer"),
        *("--dtype", "bfloat16"),
    ),
    "adapters": (False, "--lora-rank", "4", "--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2"),
    "adapters of the output layer": (
        True,
        *("--lora-rank", "4", "--target-modules", "all-linear,lm_head", "--dtype", "bfloat16", "--sequence-parallel"),
        *("--actor-num-gpus-per-node", "4", *TENSOR, "--pipeline-model-parallel-size", "2"),
        "--use-rollout-routing-replay",
    ),
    "adapters of experts": (
        True,
        *("--lora-rank", "4", "--target-modules", "all-linear,experts", "--dtype", "bfloat16"),
        *("--actor-num-gpus-per-node", "2", "--expert-model-parallel-size", "2", "--use-rollout-routing-replay"),
    ),
    "fp8 cache": (False, "--kv-cache-dtype", "fp8_e4m3", "--dtype", "bfloat16"),
}


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_run_on_megatron_has_no_mismatch_after_any_publication(tmp_path: Path, name: str):
    moe, *more = EXACT[name]
    inputs = write_inputs(tmp_path / "inputs", moe=moe)
    if "output layer" in name:
        untie_embeddings(inputs)
    train(inputs, tmp_path / "run", "--train-backend", "megatron", "--parity", "exact", *more)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "train"]
    assert [row["parity_max_abs"] for row in steps] == [0.0] * 3
    assert all(row["parity_tokens"] > 0 and row["grad_norm"] > 0 for row in steps)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_a_run_resumes_from_megatrons_checkpoints_in_another_layout(tmp_path: Path):
    inputs = write_inputs(tmp_path / "inputs")
    megatron = ("--train-backend", "megatron", "--megatron-use-distributed-optimizer", "--save-interval", "1")
    pipeline = (*megatron, "--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2")
    tensor = (*megatron, "--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2")
    wanted = train(inputs, tmp_path / "whole", *pipeline)
    run, torch_dist = tmp_path / "run", ("--ckpt-format", "torch_dist", "--keep-checkpoints", "1")
    run_miles("train", *flags(inputs, run, *pipeline, *torch_dist, "--debug-exit-after-rollout", "2", steps=3))
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert [p.name for p in sorted(run.glob("iter_*"))] == ["iter_0000002"]
    assert (run / "iter_0000002" / ".metadata").is_file()
    found = train(inputs, run, *tensor, *torch_dist)
    assert found == pytest.approx(wanted, abs=1e-6)
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "3"
    run_miles("convert", str(run), str(tmp_path / "hf"), "--format", "float32")
    one, two = _weights(tmp_path / "whole" / "checkpoints/step-000003"), _weights(tmp_path / "hf")
    assert one.keys() == two.keys() and all(torch.allclose(one[n], two[n], atol=2e-3) for n in one)


DIST_ADAPTERS = {
    "merged": (False, ("--lora-rank", "4")),
    "experts, named versions": (
        True,
        (
            *("--lora-rank", "4", "--target-modules", "all-linear,experts", "--no-lora-merge", "--lora-versions", "2"),
            *("--rollout-backend", "served"),
        ),
    ),
}


@pytest.mark.parametrize("name", DIST_ADAPTERS)
def test_a_run_of_adapters_resumes_from_megatrons_checkpoints_in_another_layout(tmp_path: Path, name: str):
    moe, more = DIST_ADAPTERS[name]
    inputs = write_inputs(tmp_path / "inputs", moe=moe)
    how = (*more, "--lr", "1e-2", "--save-interval", "1")
    wanted = train(inputs, tmp_path / "whole", *how)
    how += ("--train-backend", "megatron", "--ckpt-format", "torch_dist", "--actor-num-gpus-per-node", "2")
    tensor = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    run, layouts = tmp_path / "run", (("--pipeline-model-parallel-size", "2"), tensor)
    run_miles("train", *flags(inputs, run, *how, *layouts[0], "--debug-exit-after-rollout", "2", steps=3))
    assert train(inputs, run, *how, *layouts[1]) == pytest.approx(wanted, abs=1e-6)
    last = run / "checkpoints/step-000003"
    assert (last / ".metadata").is_file() and not list(last.glob("model*.safetensors"))
    # The weights have the adapters merged into them, and these are in PEFT's format beside them.
    one, two = _weights(tmp_path / "whole/checkpoints/step-000003"), load_torch_dist(last, tmp_path)
    assert one.keys() == two.keys() and all(torch.allclose(one[n], two[n], atol=2e-3) for n in one)
    file = "adapter/adapter_model.safetensors"
    one, two = load_file(tmp_path / "whole/checkpoints/step-000003" / file), load_file(last / file)
    assert one.keys() == two.keys() and all(torch.allclose(one[n], two[n], atol=2e-3) for n in one)


def test_a_run_of_adapters_shares_moments_and_resumes_without_or_with_fsdp(tmp_path: Path):
    inputs = write_inputs(tmp_path / "inputs")
    how = ("--lora-rank", "4", "--lr", "1e-2", "--save-interval", "1")
    two = ("--train-backend", "megatron", "--actor-num-gpus-per-node", "2")
    shared = (*two, "--megatron-use-distributed-optimizer")
    wanted = train(inputs, tmp_path / "whole", *how, *two)
    stop = ("--debug-exit-after-rollout", "2")
    for name, first, then in (
        ("shared", shared, shared),
        ("fsdp", shared, ()),
        ("to", (*two, "--pipeline-model-parallel-size", "2"), shared),
    ):
        run_miles("train", *flags(inputs, tmp_path / name, *how, *first, *stop, steps=3))
        assert train(inputs, tmp_path / name, *how, *then) == pytest.approx(wanted, abs=1e-6)
        last = "checkpoints/step-000003"
        one, other = (_weights(tmp_path / each / last) for each in ("whole", name))
        assert one.keys() == other.keys() and all(torch.allclose(one[n], other[n], atol=2e-3) for n in one)


def test_a_run_killed_while_it_writes_in_the_background_resumes_from_the_checkpoint_before(tmp_path: Path):
    inputs = write_inputs(tmp_path / "inputs")
    how = ("--train-backend", "megatron", "--megatron-use-distributed-optimizer", "--actor-num-gpus-per-node", "2")
    how += ("--save-interval", "1", "--ckpt-format", "torch_dist", "--async-save")
    wanted = train(inputs, tmp_path / "whole", *how)
    run, write = tmp_path / "run", "miles.backends.megatron.checkpoint:InProcessSaveStrategy._write"
    killed = start_miles("train", *flags(inputs, run, *how, steps=3), kill_at=f"{write}:2")
    assert killed.returncode == -signal.SIGKILL
    assert [p.name for p in (run / "checkpoints").glob("step-*")] == ["step-000001"]
    assert train(inputs, run, *how) == wanted
    ends = (load_torch_dist(folder / "checkpoints/step-000003", tmp_path) for folder in (tmp_path / "whole", run))
    one, two = ends
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def load_torch_dist(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, by their Hugging Face names."""
    converted = out / f"converted-{folder.parts[-3]}"
    run_miles("convert", str(folder), str(converted), "--format", "float32")
    return _weights(converted)


def test_mtp_layers_of_a_run_on_megatron_are_those_of_the_run_on_fsdp(tmp_path: Path):
    inputs = write_inputs(tmp_path / "inputs")
    own = save_reference(make_reference("mimo", vocab_size=28, eos_token_id=27, pad_token_id=27), inputs)
    mtp = ("--enable-mtp-training", "--mtp-num-layers", "1", "--draft-lr", "1e-2", "--draft-train-steps", "2")
    exported = tmp_path / "exported-{rollout_id}"
    wanted = train(inputs, tmp_path / "fsdp", *mtp)
    ranks = ("--train-backend", "megatron", "--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2")
    saved = ("--ckpt-format", "torch_dist", "--save-hf", str(exported))
    found = train(inputs, tmp_path / "megatron", *mtp, *ranks, *saved)
    assert len(found) == 3 and found == pytest.approx(wanted, abs=1e-6)
    one, two = _weights(tmp_path / "fsdp" / "checkpoints/step-000003"), _weights(tmp_path / "exported-3")
    assert one.keys() == two.keys() and all(torch.allclose(one[n], two[n], atol=2e-3) for n in one)
    name = "model.mtp_layers.0.input_proj.weight"
    assert not torch.allclose(two[name], own[name], atol=2e-3)


def test_an_eagle_head_of_a_run_on_megatron_is_that_of_the_run_on_fsdp_and_drafts(tmp_path: Path):
    inputs = write_inputs(tmp_path / "inputs", moe=True)
    eagle = ("--draft-train", "eagle3", "--draft-lr", "1e-2", "--draft-train-steps", "2", "--parity", "exact")
    eagle += ("--speculative-algorithm", "eagle3", "--disable-speculative-adaptive")
    wanted = train(inputs, tmp_path / "fsdp", *eagle)
    ranks = ("--train-backend", "megatron", "--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2")
    saved = ("--ckpt-format", "torch_dist", "--save-hf", str(tmp_path / "exported-{rollout_id}"))
    assert train(inputs, tmp_path / "megatron", *eagle, *ranks, *saved) == pytest.approx(wanted, abs=1e-6)
    one, two, exported = (
        _weights(folder / "draft")
        for folder in (
            *(tmp_path / name / "checkpoints/step-000003" for name in ("fsdp", "megatron")),
            tmp_path / "exported-3",
        )
    )
    assert one.keys() == two.keys() and all(torch.allclose(one[n], two[n], atol=2e-3) for n in one)
    assert all(torch.equal(exported[n], two[n]) for n in two)
    found, plain = (accept_rates(tmp_path / name) for name in ("megatron", "fsdp"))
    assert max(found) > 0 and found == pytest.approx(plain, abs=1e-2)


def train_on_images(folder: Path, run: Path, *more: str) -> list[dict[str, float]]:
    """What the steps of a short run on images report."""
    run_miles(
        *("train", "--hf-checkpoint", str(folder / "model"), "--prompt-data", str(folder / "data.jsonl")),
        *("--multimodal-keys", '{"image": "images"}', "--label-key", "label", "--apply-chat-template"),
        *("--rm-type", "f1", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--num-rollout", "2"),
        *("--num-steps-per-rollout", "1", "--rollout-max-response-len", "6", "--lr", "1e-3", "--save", str(run)),
        *("--entropy-coef", "0.1", "--device", "cpu", "--num-threads", "1", "--view", "plain"),
        *more,
    )
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "train"]


VISION_LAYOUTS = {
    "qwen2_5_vl": ("--tensor-model-parallel-size", "2", "--rollout-num-gpus-per-engine", "2"),
    "qwen3_vl": ("--context-parallel-size", "2"),
}


@pytest.mark.parametrize("kind", VISION_LAYOUTS)
def test_a_run_on_images_on_megatron_is_the_run_on_fsdp_and_exact(tmp_path: Path, kind: str):
    write_vision_checkpoint(tmp_path / "model", kind)
    write_rows(tmp_path)
    exact = ("--parity", "exact", "--rollout-backend", "served")
    megatron = ("--train-backend", "megatron", "--actor-num-gpus-per-node", "2", *VISION_LAYOUTS[kind])
    runs = [
        train_on_images(tmp_path, tmp_path / name, *exact, *more)
        for name, more in (("fsdp", ()), ("megatron", megatron))
    ]
    assert [[row["parity_max_abs"] for row in rows] for rows in runs] == [[0.0, 0.0]] * 2
    assert all(row["grad_norm"] > 0 for row in runs[1])
    last = "checkpoints/step-000002"
    one, two = (_weights(tmp_path / name / last) for name in ("fsdp", "megatron"))
    assert one.keys() == two.keys() and all(torch.allclose(one[n], two[n], atol=2e-3) for n in one)
    before = _weights(tmp_path / "model")
    name = next(name for name in one if "visual.blocks.0" in name and name.endswith("weight"))
    assert not torch.equal(before[name], two[name])
