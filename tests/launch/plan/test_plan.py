"""What follows from a config, and how it is shown."""

import json
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from tests.launch.small_config import furnish
from transformers import Qwen3VLConfig

from miles.config.cli import parse
from miles.config.files import Layer, read_layers
from miles.config.provenance import to_toml
from miles.config.schema import get_options
from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.launch.main import main
from miles.launch.plan.hardware import choose_device
from miles.launch.plan.memory import MemoryShare, estimate_kv_tokens, estimate_memory, format_bytes
from miles.launch.plan.plan import Plan
from miles.launch.plan.render import format_batch_sizes, format_objective
from miles.launch.read_config import read
from miles.models.accounting.activations import activation_bytes, layer_bytes
from miles.models.accounting.cuda_graphs import count_prefill_graph_tokens
from miles.models.accounting.image_features import tower_activation_bytes
from miles.models.accounting.known_models import find_known_config
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def planned(line: str = "") -> tuple[Config, Plan]:
    config, plan, _ = read("plan", ["good.toml", *line.split()])
    return config, plan


@pytest.mark.parametrize(
    ("line", "size", "steps"),
    [
        ("", 128, 1),
        ("--num-steps-per-rollout 4", 32, 4),
        ("--global-batch-size 64", 64, 2),
        ("--global-batch-size 16 --num-steps-per-rollout 8", 16, 8),
    ],
)
def test_the_batch_identity_is_completed(line: str, size: int, steps: int):
    config, plan = planned(line)
    assert (plan.samples_per_step, plan.global_batch_size, plan.num_steps_per_rollout) == (128, size, steps)
    assert plan.optimizer_steps == 10 * steps
    said = f"16 × n_samples_per_prompt 8 = 128 = global_batch_size {size} × num_steps_per_rollout {steps}"
    assert said in format_batch_sizes(config, plan)


@pytest.mark.parametrize(
    ("line", "steps"), [("", 10), ("--no-num-rollout --num-epoch 4", 10), ("--no-num-rollout --num-epoch 1", 2)]
)
def test_epochs_become_steps(line: str, steps: int):
    assert planned(line)[1].steps == steps  # 40 prompts, 16 a step


def test_epochs_over_a_slice_and_over_parquet(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pyarrow.table({"input": ["x"] * 100, "label": ["y"] * 100}), tmp_path / "data" / "p.parquet"
    )
    for data, steps in (("data/train.jsonl@[0:20]", 2), ("data/p.parquet", 12), ("data/p.parquet@[-32:]", 4)):
        assert planned(f"--no-num-rollout --num-epoch 2 --prompt-data {data}")[1].steps == steps


@pytest.mark.parametrize(
    ("line", "lease", "transport", "tickets"),
    [("", "colocated", "shared", 16), ("--max-weight-staleness 2", "disjoint", "copy", 48)],
)
def test_the_staleness_budget_decides_who_waits(line: str, lease: str, transport: str, tickets: int):
    plan = planned(line)[1]
    assert (plan.lease, plan.transport, plan.tickets) == (lease, transport, tickets)


@pytest.mark.parametrize(
    ("line", "layout", "parts", "transport"),
    [
        ("", "", "", "shared"),
        ("--actor-num-gpus-per-node 4", "4 ranks = 4 shard", "in 4 parts of about 32 traj", "gathered"),
        (
            "--actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 --sequence-parallel "
            "--data-parallel-replicate-size 2",
            "8 ranks = 2 tensor (sequence parallel) × 2 shard × 2 replicate",
            "in 4 parts of about 32 traj",
            "gathered",
        ),
        (
            "--actor-num-gpus-per-node 6 --context-parallel-size 2 --hf-checkpoint moe --expert-model-parallel-size 2",
            "6 ranks = 2 context × 3 shard; experts over 2 of them",
            "in 3 parts of about 42 or 43 traj",
            "gathered",
        ),
        (
            "--actor-num-gpus-per-node 4 --global-batch-size 2",
            "4 ranks = 4 shard",
            "in 4 parts of about 0 or 1 trajectories, by tokens; 2 parts would have none",
            "gathered",
        ),
    ],
)
def test_a_plan_tells_the_layout_and_the_parts_of_a_batch(
    line: str, layout: str, parts: str, transport: str, capsys: pytest.CaptureFixture[str]
):
    assert planned(line)[1].transport == transport
    assert main(["plan", "good.toml", *line.split()]) == 0
    out = capsys.readouterr().out
    assert layout in out and parts in out
    assert ("layout  " in out) == bool(layout)


@pytest.mark.parametrize(
    ("line", "folder"),
    [("", "runs/model-grpo"), ("--save here", "here"), ("--hf-checkpoint ./moe/", "runs/moe-grpo")],
)
def test_a_run_has_a_directory(line: str, folder: str):
    assert planned(line)[1].run_dir == Path(folder)


@pytest.mark.parametrize(
    ("line", "reference"),
    [("", None), ("--use-kl-loss", "model"), ("--use-kl-loss --ref-load moe", "moe"), ("--ref-load moe", None)],
)
def test_a_reference_is_held_only_for_a_penalty(line: str, reference: str | None):
    assert planned(line)[1].reference == (None if reference is None else Path(reference))


def test_a_plan_is_frozen():
    with pytest.raises(FrozenInstanceError):
        planned()[1].steps = 3  # pyright: ignore


def test_the_device_is_settled_without_torch(monkeypatch: pytest.MonkeyPatch):
    assert (planned()[1].device, planned()[1].dtype) == ("cpu", "float32")
    assert (planned("--device cuda")[1].device, planned("--device cuda")[1].dtype) == ("cuda", "float32")
    assert planned("--dtype bfloat16")[1].dtype == "bfloat16"
    monkeypatch.setattr("miles.launch.plan.hardware.list_accelerators", lambda: ["/dev/nvidia0"])
    monkeypatch.setattr("miles.launch.plan.hardware.get_torch_build", lambda: None)
    assert choose_device("auto").name == "cpu"
    monkeypatch.setattr("miles.launch.plan.hardware.get_torch_build", lambda: "CUDA 13.0")
    assert choose_device("auto").name == "cuda"
    assert choose_device("cpu").name == "cpu"


def test_an_accelerator_holds_weights_as_the_checkpoint_does(tmp_path: Path):
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    assert (planned()[1].dtype, planned("--device cuda")[1].dtype) == ("float32", "bfloat16")
    file.write_text(json.dumps(config | {"dtype": "float8_e4m3fn"}))
    with pytest.raises(UsageError, match="--hf-checkpoint model is in float8_e4m3fn; choose a --dtype for it"):
        planned("--device cuda")


@pytest.mark.parametrize(
    ("line", "formula"),
    [
        (
            "",
            "maximise mean over 128 trajectories of mean over tokens of min(ρ·A, clip(ρ, 0.8, 1.2)·A); "
            "ρ = π/π_old, A = (R − mean R) / std R over the 8 trajectories of a prompt",
        ),
        (
            "--eps-clip-high 0.28 --eps-clip-c 3 --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type k3 "
            "--entropy-coef 0.01 --disable-grpo-std-normalization --calculate-per-token-loss",
            "maximise mean over all tokens of 128 trajectories of [max(min(ρ·A, clip(ρ, 0.8, 1.28)·A), 3·A where "
            "A < 0) − 0.001·KL[k3](π, π_ref) + 0.01·H(π)]; ρ = π/π_old, A = R − mean R over the 8 trajectories of a "
            "prompt",
        ),
        (
            "--advantage-estimator gspo --eps-clip 0.0003 --eps-clip-high 0.0004 --use-opsm --constant-loss-length 64",
            "maximise mean over 128 trajectories of 1/64 of the sum over tokens of "
            "m·min(ρ·A, clip(ρ, 0.9997, 1.0004)·A); ρ = exp(mean over the sample of log π/π_old), "
            "A = (R − mean R) / std R over the 8 trajectories of a prompt; "
            "m = 0 where A < 0 and mean over the sample of log π_engine/π > 0.0001, else 1",
        ),
        (
            "--advantage-estimator cispo --eps-clip 1 --eps-clip-high 3 --use-kl-loss --kl-loss-coef 0.1 "
            "--kl-loss-type k3 --use-unbiased-kl --disable-grpo-std-normalization --use-tis",
            "maximise mean over 128 trajectories of mean over tokens of [w·sg[clip(ρ, 0, 4)]·A·log π − "
            "0.1·(π/π_old)·KL[k3](π, π_ref)]; ρ = π/π_old, A = R − mean R over the 8 trajectories of a prompt; "
            "w = clip(π_old/π_engine, 0, 2)",
        ),
        (
            "--advantage-estimator rloo --advantage-role-key side --overlong-buffer-len 16",
            "maximise mean over 128 trajectories of mean over tokens of min(ρ·A, clip(ρ, 0.8, 1.2)·A); ρ = π/π_old, "
            "A = R − mean of the others' R over the 8 trajectories of a prompt with the same side, "
            "R less 1·clip((length − 48) / 16, 0, 1)",
        ),
        (
            "--loss-type custom_loss --custom-loss-function-path mine.py:loss --advantage-estimator maxrl",
            "minimise mine.py:loss, where a mean is the mean over 128 trajectories of mean over tokens; "
            "A = (R − mean R) / mean R over the 8 trajectories of a prompt",
        ),
        (
            "--custom-pg-loss-reducer-function-path mine.py:weigh --custom-reward-post-process-path mine.py:worth "
            "--use-tis --tis-mode mask --tis-level sequence --use-rs --rs-veto-threshold 0.001 --tis-batch-normalize",
            "maximise sum over the tokens of 128 trajectories, weighted by mine.py:weigh, of w·min(ρ·A, clip(ρ, 0.8, "
            "1.2)·A); ρ = π/π_old, A = mine.py:worth(R); w = Π over the sample of π_old/π_engine within [0, 2] and "
            "else 0, 0 where π_old/π_engine is outside [0.5, 2] or any π_old/π_engine of the sample is below 0.001, "
            "over its mean",
        ),
        (
            "--advantage-estimator ppo --gamma 0.99 --lambd 0.95 --kl-coef 0.01 --normalize-advantages",
            "maximise mean over 128 trajectories of mean over tokens of min(ρ·A, clip(ρ, 0.8, 1.2)·A); ρ = π/π_old, "
            "A = GAE(γ 0.99, λ 0.95) of r and the critic's V, r = (R at the last token) − "
            "0.01·KL[k1](π_old, π_ref), A normalized to mean 0 and deviation 1 over the batch",
        ),
        (
            "--loss-type sft_loss --no-rm-type --n-samples-per-prompt 1",
            "maximise mean over 16 trajectories of mean over tokens of log π(token)",
        ),
    ],
)
def test_the_objective_is_one_line_with_its_numbers(line: str, formula: str):
    assert format_objective(*planned(line)) == formula


def test_the_memory_plan_counts_what_is_known():
    config, plan = planned("--use-kl-loss --engine-kv-tokens 1000 --max-weight-staleness 1 --dtype bfloat16")
    spec = spec_from_config(read_config("model"))
    # By hand: embedding, then two layers of attention (q, k, v, o and two norms of 24), MLP, two norms; one last norm.
    layer = (4 + 2 + 2 + 4) * 24 * 96 + 2 * 24 + 3 * 96 * 256 + 2 * 96
    parameters = 1000 * 96 + 2 * layer + 96
    sizes = {share.name: share.bytes for share in estimate_memory(config, plan, spec)}
    assert sizes.pop("activations") == activation_bytes(spec, 16384, size=2, fused=False, checkpointing=False)
    assert sizes == {
        "weights": 2 * parameters,
        "engine": 2 * parameters,
        "gradients": 4 * parameters,
        "optimizer": 12 * parameters,
        "reference": 2 * parameters,
        "kv cache": 1000 * (2 * 2 * 2 * 24) * 2,
    }


STAGES = "--pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2"


def test_the_memory_plan_is_that_of_the_fullest_stage():
    known = find_known_config("Qwen3-4B")
    assert known is not None
    spec = spec_from_config(known)

    def plan_stage(line: str) -> dict[str, MemoryShare]:
        base = f"{STAGES} --train-backend megatron --device cuda --dtype bfloat16 --engine-kv-tokens 1000"
        return {share.name: share for share in estimate_memory(*planned(f"{base} {line}"), spec)}

    # The first stage has two micro-batches in flight; of a single one the last, with the head, has more.
    many, few = plan_stage("--max-tokens-per-gpu 8192"), plan_stage("--max-tokens-per-gpu 8192 --global-batch-size 1")
    assert "micro-batches in flight: 2 of stage 1 of 2" in many["activations"].note
    assert "micro-batches in flight: 1 of stage 2 of 2" in few["activations"].note
    # Both have the embedding, which is the head, and the last one a norm.
    assert few["weights"].bytes - many["weights"].bytes == 2 * spec.hidden_size
    # A rollout function may make any number of samples.
    unknown = plan_stage("--max-tokens-per-gpu 8192 --global-batch-size 1 --rollout-function-path some.function")
    assert unknown["activations"].bytes == many["activations"].bytes


def test_the_memory_plan_counts_drafts_in_trainer_and_engine():
    spec = spec_from_config(read_config("model"))
    line = "--engine-kv-tokens 1000 --device cpu --dtype bfloat16 --draft-train eagle3 --draft-train-steps 2"
    plain = {share.name for share in estimate_memory(*planned("--engine-kv-tokens 1000 --device cpu"), spec)}
    sizes = {share.name: share.bytes for share in estimate_memory(*planned(line), spec)}
    # By hand: projection of three layers, q, k, v of two vectors, o, MLP, and four norms.
    head = 96 * 3 * 96 + (4 + 2 + 2) * 24 * 192 + 4 * 24 * 96 + 3 * 96 * 256 + 4 * 96
    assert sizes.keys() - plain == {"draft", "draft grad", "draft adam", "draft activations"}
    assert (sizes["draft"], sizes["draft grad"], sizes["draft adam"]) == (2 * head, 4 * head, 12 * head)
    assert sizes["draft activations"] > 2 * 16384 * 96 * 2

    drafting = f"{line} --speculative-algorithm eagle3"
    engine = {share.name: share.bytes for share in estimate_memory(*planned(drafting), spec)}
    assert engine["engine draft"] == 0  # the trainer's own
    assert engine["draft kv cache"] == 1000 * (2 * 2 * 24) * 2
    apart = {s.name: s.bytes for s in estimate_memory(*planned(f"{drafting} --max-weight-staleness 1"), spec)}
    assert apart["engine draft"] == 2 * head

    line = line.replace(
        "--device cpu --dtype bfloat16", "--dtype float32 --train-backend megatron --max-tokens-per-gpu 64"
    )
    staged = {s.name: s.bytes for s in estimate_memory(*planned(f"{line} {STAGES}"), spec)}
    alone = {s.name: s.bytes for s in estimate_memory(*planned(line), spec)}
    # What the last of two stages receives of three layers, two of them the same; whole embedding and head.
    assert staged["draft activations"] - alone["draft activations"] == 4 * 96 * (64 + 2 * 1000)

    smaller = "--engine-kv-tokens 1000 --speculative-algorithm draft-model --speculative-draft-model-path model"
    shares = {s.name: s.bytes for s in estimate_memory(*planned(smaller), spec)}
    assert shares["engine draft"] == shares["weights"] and shares["draft kv cache"] == shares["kv cache"]


def test_the_memory_plan_counts_the_pool_of_cuda_graphs():
    spec = spec_from_config(read_config("model"))
    line = "--device cuda --dtype bfloat16 --engine-kv-tokens 1000 --engine-max-running 100"
    shares = {share.name: share for share in estimate_memory(*planned(line), spec)}
    layer = layer_bytes(spec, 0, size=2, fused=True)
    # By hand: what a layer saves of 4,096 tokens, of a model this small, and the logits of 100 rows.
    assert shares["CUDA graphs"].bytes == int(4096 * layer) + 100 * 1000 * 2
    assert "4,096 tokens" in shares["CUDA graphs"].note
    for more in ("--disable-engine-cuda-graph", "--device cpu", "--rollout-num-gpus-per-engine 2"):
        names = {share.name for share in estimate_memory(*planned(f"{line} {more}"), spec)}
        assert "CUDA graphs" not in names
    known = find_known_config("Qwen3-8B")
    assert known is not None
    large = spec_from_config(known)
    assert (count_prefill_graph_tokens(spec), count_prefill_graph_tokens(large)) == (4096, 2048)


def test_graphs_of_torch_attention_hold_contexts_and_their_scores():
    known = find_known_config("DeepSeek-V3.2")
    assert known is not None
    spec, line = spec_from_config(known), "--device cuda --dtype bfloat16 --engine-kv-tokens 1000"
    shares = {share.name: share.bytes for share in estimate_memory(*planned(line), spec)}
    # By hand: latents of 576 channels and index keys of 128 in bf16 and float32, and three tensors of scores.
    contexts = 2**18 * (576 + 128) * 6 + 3 * 4 * 2**26
    assert contexts < shares["CUDA graphs"] < contexts + 4 * 2**30
    exact = {share.name for share in estimate_memory(*planned(f"{line} --parity exact"), spec)}
    assert "CUDA graphs" not in exact


def test_the_cache_is_sized_by_what_can_run_at_once():
    spec = spec_from_config(read_config("model"))
    for line, tokens in (
        ("--device cpu", 256 * 512),
        ("--device cpu --engine-max-running 10 --engine-page-size 100", 10 * 600),
    ):
        (share,) = (s for s in estimate_memory(*planned(line), spec) if s.name == "kv cache")
        assert f"{tokens:,} tokens" in share.note


def test_the_cache_is_sized_by_the_limits_of_prompts_and_responses_where_they_bound_requests(tmp_path: Path):
    spec = spec_from_config(read_config("model"))

    def need(line: str = "") -> int:
        base = "--device cpu --engine-max-running 10 --engine-page-size 1 --rollout-max-response-len 20"
        config, plan = planned(f"{base} {line}")
        return estimate_kv_tokens(config, plan, spec)[0] // 10

    (tmp_path / "held_out.jsonl").write_text('{"input": "1", "label": "1"}\n')
    held_out = f"--rollout-max-prompt-len 30 --eval-prompt-data held {tmp_path / 'held_out.jsonl'}"
    assert need() == 512  # a prompt may have any length
    assert need("--rollout-max-prompt-len 30") == 50
    assert need("--rollout-max-prompt-len 30 --rollout-max-context-len 40") == 40
    assert need(held_out) == 50
    assert need(f"{held_out} --eval-max-response-len 100 --eval-max-prompt-len 31") == 131
    assert need("--rollout-max-prompt-len 500") == 512
    # Of these nobody knows how many tokens their requests have.
    for function in ("--custom-generate-function-path", "--rollout-function-path"):
        assert need(f"--rollout-max-prompt-len 30 {function} some.function") == 512


def test_a_vision_tower_takes_memory_for_features_and_activations():
    spec = spec_from_config(
        Qwen3VLConfig(vision_config={"out_hidden_size": 4096}).to_dict()
        | {"architectures": ["Qwen3VLForConditionalGeneration"]}
    )
    (share,) = (
        s for s in estimate_memory(*planned("--device cpu --engine-vision-cache-mib 300"), spec) if s.name == "images"
    )
    assert share.bytes - (300 << 20) == tower_activation_bytes(spec, "float32") > 0
    assert "300.0 MiB of features" in share.note


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (1 << 50, "1024.0 TiB")]
)
def test_bytes_are_shown_for_people(count: int, text: str):
    assert format_bytes(count) == text


def test_a_plan_shows_every_knob_with_its_origin(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "good.toml", "--lr", "3e-5", "--all"]) == 0
    out = capsys.readouterr().out
    rows = {line[2:].split()[0]: line for line in out.splitlines() if line[:2] in ("* ", "  ") and line[2:3].islower()}
    assert get_options(Config).keys() <= rows.keys()
    assert rows["lr"].split() == ["*", "lr", "3e-05", "flag"]
    assert rows["num_rollout"].split() == ["*", "num_rollout", "10", "good.toml"]
    assert rows["eps_clip"].split() == ["eps_clip", "0.2", "default"]
    for word in (
        "batch\n",
        "objective\n",
        "memory\n",
        "placement\n",
        "10 training steps",
        "run        runs/model-grpo",
    ):
        assert word in out


def test_a_plan_can_be_read_by_programs(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--json", "--lr", "3e-5", *_flags_of_the_recipe()]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["options"]["lr"] == {"value": 3e-5, "origin": "flag", "section": "train"}
    assert output["plan"]["global_batch_size"] == 128 and output["plan"]["run_dir"] == "runs/model-grpo"
    assert output["model"]["family"] == "qwen3" and len(output["memory"]) == 7


def _flags_of_the_recipe() -> list[str]:
    return [
        *("--hf-checkpoint", "model", "--prompt-data", "data/train.jsonl", "--rm-type", "math", "--num-rollout", "10"),
        *("--label-key", "label"),
        *("--rollout-batch-size", "16", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "64"),
    ]


def test_the_config_a_run_writes_reads_back_as_itself_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flags = "--eval-prompt-data held data/held.jsonl --rollout-stop a b --save run --lr 3e-7 --no-use-rollout-logprobs"
    config, _, origins = read("plan", ["good.toml", *flags.split()])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(to_toml(config, origins))
    monkeypatch.chdir("/")
    again = parse(Config, [], read_layers(str(tmp_path / "run" / "config.toml"))).config
    assert again is not None
    assert again.models.hf_checkpoint == str(tmp_path / "model")
    assert again.schedule.save == str(tmp_path / "run")
    assert to_toml(again, origins) == to_toml(parse(Config, [], [_layer(tmp_path)]).config or again, origins)
    assert (again.algo, again.train, again.cluster) == (config.algo, config.train, config.cluster)


def _layer(folder: Path) -> Layer:
    import tomllib

    text = (folder / "run" / "config.toml").read_text()
    return Layer(label=str(folder / "run" / "config.toml"), values=tomllib.loads(text))


def test_an_accelerator_that_is_not_here_is_remarked(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "good.toml", "--device", "cuda"]) == 0
    assert (
        "cuda: set by --device, but not available here (this machine shows no accelerator)" in capsys.readouterr().out
    )


def test_a_plan_leads_with_what_was_set_and_lists_all_on_request(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "good.toml", "--lr", "3e-5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "options" and any(line.split() == ["lr", "3e-05", "flag"] for line in lines)
    assert not any("adam_beta2" in line for line in lines) and len(lines) < 50
    titles = [line for line in lines if line and line[0] != " "]
    assert titles[1:6] == ["batch", "memory", "time limit of a step", "placement", "objective"]
    assert lines[-1].endswith("other options have their defaults; --all prints every one.")
    assert main(["plan", "good.toml", "--all"]) == 0
    assert "adam_beta2" in capsys.readouterr().out


def test_a_step_of_one_micro_batch_says_so_of_gradients_and_activations_alone():
    line = "--device cuda --rollout-batch-size 1 --n-samples-per-prompt 2 --rollout-max-context-len 64"
    config, plan = planned(line)
    spec = spec_from_config(read_config(Path(config.models.hf_checkpoint)))
    notes = {share.name: share.note for share in estimate_memory(config, plan, spec)}
    assert "while activations are at their widest" in notes["gradients"] and "all of a step" in notes["activations"]
    assert notes["optimizer"].startswith("Adam: two moments")
