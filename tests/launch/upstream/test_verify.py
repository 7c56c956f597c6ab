"""Flags of upstream are mapped, passed on, compared with the checkpoint, or noted."""

import json
from pathlib import Path

import pytest
from tests.launch.small_config import MOE, furnish

from miles.config.cli import parse
from miles.config.files import read_layers
from miles.config.provenance import to_toml
from miles.core.errors import UsageError
from miles.launch.build.hooks import build_upstream_context
from miles.launch.config import Config
from miles.launch.main import main
from miles.launch.read_config import read
from miles.launch.upstream.rewrite import LaunchContext, rewrite_argv
from miles.launch.upstream.verify import list_flag_outcomes


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def plan(line: str) -> Config:
    return read("plan", ["good.toml", *line.split()])[0]


def find_problems(line: str) -> list[str]:
    with pytest.raises(UsageError) as refused:
        plan(line)
    return list(refused.value.problems)


def list_outcomes(line: str) -> dict[str, str]:
    return {each.given: each.outcome for each in list_flag_outcomes(plan(line))}


DENSE = """--num-layers 2 --hidden-size 96 --ffn-hidden-size 256 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --kv-channels 24 --vocab-size 1000 --swiglu --normalization RMSNorm --norm-epsilon 1e-6
--rotary-base 10000 --rotary-percent 1.0 --use-rotary-position-embeddings --position-embedding-type rope --qk-layernorm
--disable-bias-linear --seq-length 512 --max-position-embeddings 512"""
EXPERTS = """--hf-checkpoint moe --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-layer-freq [1]*2
--moe-layer-freq 1 --moe-router-score-function softmax"""


def test_flags_that_restate_the_checkpoint_agree():
    outcomes = list_outcomes(DENSE)
    assert set(outcomes.values()) == {"checkpoint"} and len(outcomes) == 19
    outcomes = list_outcomes(EXPERTS)
    assert set(outcomes.values()) == {"checkpoint"} and "--moe-layer-freq 1" in outcomes and len(outcomes) == 5


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--num-layers 28", "2"),
        ("--hidden-size x", "96"),
        ("--norm-epsilon 1e-5", "1e-06"),
        ("--normalization LayerNorm", "RMSNorm"),
        ("--add-qkv-bias", "otherwise"),
        ("--untie-embeddings-and-output-weights", "otherwise"),
        ("--multi-latent-attention", "otherwise"),
        ("--num-experts 8", "0"),
        ("--seq-length 4096", "at most 512"),
        ("--rotary-base 1000000", "10000"),
        ("--hf-checkpoint moe --moe-layer-freq [0]*1+[1]*1", "[1]*2"),
        ("--hf-checkpoint moe --moe-router-score-function sigmoid", "softmax"),
    ],
)
def test_a_flag_that_disagrees_names_both_values(line: str, says: str):
    flag = line.removeprefix("--hf-checkpoint moe ")
    assert find_problems(line) == [
        f"{flag} disagrees with config.json of --hf-checkpoint, which says {says}; remove it."
    ]


def test_what_the_checkpoint_does_not_say_is_noted():
    assert list_outcomes("--mscale 1.0 --q-lora-rank 1536 --make-vocab-size-divisible-by 128") == {
        "--mscale 1.0": "noted",
        "--q-lora-rank 1536": "noted",
        "--make-vocab-size-divisible-by 128": "noted",
    }


@pytest.mark.parametrize(
    ("line", "feature"),
    [
        ("--attention-dropout 0.1", "dropout in training"),
        ("--moe-aux-loss-coeff 1e-3", "a load-balancing loss of the router under --train-backend fsdp"),
    ],
)
def test_a_value_that_changes_the_mathematics_is_refused(line: str, feature: str):
    advice = "; use --train-backend megatron" if "--moe" in line else ""
    assert find_problems(line) == [f"{line} asks for {feature}, which is not supported{advice}."]
    assert list_outcomes(f"{line.split()[0]} 0.0") == {f"{line.split()[0]} 0.0": "exact"}


def test_load_balancing_of_routers_is_passed_on_to_megatron():
    line = "--moe-aux-loss-coeff 1e-3 --moe-router-load-balancing-type seq_aux_loss --moe-router-freeze-gate"
    assert find_problems("--moe-router-freeze-gate") == [
        "--moe-router-freeze-gate asks for a frozen router under --train-backend fsdp, which is not supported; use "
        "--train-backend megatron."
    ]
    context = LaunchContext(uses_sglang=False, uses_megatron=True, checkpoint=None)
    assert rewrite_argv(line.split(), (), context) == line.replace("--moe", "--megatron-moe").split()


def test_flags_of_sglang_become_options_of_the_native_engine():
    words = "--sglang-mem-fraction-static 0.7 --sglang-max-running-requests 32 --sglang-chunked-prefill-size 512 "
    words += (
        "--sglang-context-length 256 --sglang-disable-cuda-graph --sglang-disable-radix-cache --sglang-dtype float "
    )
    words += "--sglang-page-size 8 --sglang-max-total-tokens 4096 --sglang-tp-size 2 --sglang-dp-size 4 "
    words += "--sglang-kv-cache-dtype fp8"
    for backend in ("native", "served"):
        config = plan(f"{words} --rollout-backend {backend}")
        native = config.native
        assert (native.engine_memory_fraction, native.engine_max_running, native.engine_prefill_chunk) == (0.7, 32, 512)
        assert (native.engine_page_size, native.engine_kv_tokens) == (8, 4096)
        assert not native.engine_cuda_graph and not native.engine_prefix_cache
        assert config.rollout.rollout_max_context_len == 256 and config.models.rollout_dtype == "float32"
        assert config.cluster.rollout_num_gpus_per_engine == 2 and config.models.kv_cache_dtype == "fp8_e4m3"
        assert [each.given for each in list_flag_outcomes(config)] == ["--sglang-dp-size 4"]


def test_flags_of_sglang_are_passed_on_to_sglang():
    config = plan(
        "--rollout-backend sglang --sglang-mem-fraction-static 0.7 --sglang-dp-size 1 --sglang-router-policy x"
    )
    assert config.sglang.sglang_flags == ("--mem-fraction-static", "0.7", "--dp-size", "1")
    assert [each.given for each in list_flag_outcomes(config)] == ["--sglang-router-policy x"]


def test_speculative_decoding_of_sglang_is_that_of_the_native_engine():
    words = "--sglang-speculative-algorithm NGRAM --sglang-speculative-num-draft-tokens 4 "
    words += "--sglang-speculative-ngram-max-trie-depth 12"
    for backend in ("native", "served"):
        config = plan(f"{words} --rollout-backend {backend}")
        assert (config.native.speculative_algorithm, config.native.speculative_num_draft_tokens) == ("ngram", 4)
        (outcome,) = list_flag_outcomes(config)
        assert outcome.given == "--sglang-speculative-ngram-max-trie-depth 12" and outcome.outcome == "noted"
    assert list_outcomes("--sglang-speculative-num-draft-tokens 4") == {"--speculative-num-draft-tokens": "noted"}


@pytest.mark.parametrize(
    ("line", "algorithm"),
    [
        ("", None),
        ("--speculative-algorithm ngram", "NGRAM"),
        ("--rollout-backend sglang --sglang-speculative-algorithm EAGLE", "EAGLE"),
        ("--rollout-backend sglang", None),
    ],
)
def test_functions_of_upstream_read_which_algorithm_drafts(line: str, algorithm: str | None):
    assert build_upstream_context(plan(line)).args.sglang_speculative_algorithm == algorithm


@pytest.mark.parametrize(
    ("algorithm", "own", "problem"),
    [
        ("EAGLE", "mtp", None),
        ("EAGLE3", "eagle3", "needs a head"),
        ("NEXTN", "mtp", None),
        ("STANDALONE", "draft-model", "needs engines of one GPU"),
    ],
)
def test_names_of_sglang_s_algorithms_are_those_of_the_engine(algorithm: str, own: str, problem: str | None):
    words = f"--sglang-speculative-algorithm {algorithm} --sglang-speculative-num-steps 3"
    ranks = f"{words} --rollout-num-gpus-per-engine 2"
    if problem is None:
        assert plan(ranks).native.speculative_algorithm == own
    else:
        assert f"--speculative-algorithm {own} {problem}" in " ".join(find_problems(ranks))
    config = plan(f"{words} --rollout-backend sglang")
    assert config.sglang.sglang_flags == ("--speculative-algorithm", algorithm, "--speculative-num-steps", "3")
    assert list_flag_outcomes(config) == []


def test_an_options_own_flag_wins_over_one_that_maps_to_it():
    config = plan("--engine-memory-fraction 0.4 --sglang-mem-fraction-static 0.7")
    assert config.native.engine_memory_fraction == 0.4
    assert [each.text for each in list_flag_outcomes(config)] == ["--engine-memory-fraction is given too"]


def test_flags_of_megatron_are_passed_on_to_megatron():
    line = "--moe-token-dispatcher-type alltoall --no-rope-fusion --attention-softmax-in-fp32"
    assert plan(f"{line} --train-backend megatron").megatron.megatron_flags == (
        "--moe-token-dispatcher-type",
        "alltoall",
    )
    assert plan(f"{line} --train-backend fsdp").megatron.megatron_flags == ()
    implied = "--hf-checkpoint moe --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel "
    implied += "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
    assert plan(f"{implied} {line}").megatron.megatron_flags == ("--moe-token-dispatcher-type", "alltoall")


def test_a_recorded_config_has_the_flags_of_other_programs(tmp_path: Path):
    line = "--rollout-backend sglang --sglang-mem-fraction-static 0.7 --train-backend megatron --num-layers 2 "
    config, _, origins = read("plan", ["good.toml", *f"{line} --moe-token-dispatcher-type alltoall".split()])
    (tmp_path / "config.toml").write_text(to_toml(config, origins))
    again = parse(Config, [], read_layers("config.toml"))
    assert again.problems == () and again.config is not None
    assert again.config.sglang.sglang_flags == ("--mem-fraction-static", "0.7")
    assert again.config.megatron.megatron_flags == ("--moe-token-dispatcher-type", "alltoall")
    assert again.config.upstream.upstream_flags == ("--num-layers", "2")
    changed = read("plan", ["config.toml", "--sglang-mem-fraction-static", "0.6", "--num-layers", "2"])[0]
    assert changed.sglang.sglang_flags == ("--mem-fraction-static", "0.6")
    assert changed.upstream.upstream_flags == ("--num-layers", "2")


def test_a_line_implies_the_backends_it_needs():
    config, _, origins = read(
        "plan", ["good.toml", "--actor-num-gpus-per-node", "4", "--pipeline-model-parallel-size", "2"]
    )
    assert config.train.train_backend == "megatron"
    assert origins["train_backend"] == "--pipeline-model-parallel-size 2"
    assert plan("--rollout-num-gpus 2").sglang.rollout_backend == "served"
    assert plan("--actor-num-nodes 2").ray.runtime == "ray"
    assert plan("--fully-async --rollout-num-gpus 1").schedule.max_weight_staleness == 1
    assert plan("--fully-async --max-weight-staleness 3").schedule.max_weight_staleness == 3
    path = "--rollout-function-path miles.rollout.fully_async_rollout.FullyAsyncRolloutFn"
    assert plan(path).schedule.max_weight_staleness == 1


def test_flags_map_to_ours_and_the_last_of_repeated_ones_wins():
    config = plan(
        "--bf16 --true-on-policy-mode --max-seq-len 128 --rollout-stop-token-ids 1 2 --rollout-stop-token-ids 3"
    )
    assert (config.models.dtype, config.models.parity) == ("bfloat16", "exact")
    assert config.rollout.rollout_max_context_len == 128 and config.rollout.rollout_stop_token_ids == (3,)
    assert plan("--eval-prompt-data data/held.jsonl").rollout.eval_prompt_data == ("held", "data/held.jsonl")


def test_a_conversion_of_the_checkpoint_is_the_checkpoint():
    config = plan("--ref-load elsewhere/model_torch_dist --use-kl-loss")
    assert config.train.ref_load is None
    assert find_problems("--ref-load elsewhere/other_torch_dist --use-kl-loss")


def test_state_is_left_out_only_where_none_is_loaded(tmp_path: Path):
    assert list_outcomes("--no-load-optim --load new --save new")["--no-load-optim"] == "noted"
    (tmp_path / "old").mkdir()
    (problem,) = find_problems("--finetune --load old")
    assert problem.startswith("--finetune asks for loading weights without their optimizer state")


def test_a_model_name_is_a_folder_or_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    snapshot = tmp_path / "hub" / "models--Org--Small-MoE" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(MOE))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "bare.toml").write_text((tmp_path / "good.toml").read_text().replace('hf_checkpoint = "model"', ""))
    for name, folder in (("moe", "moe"), ("small-moe", str(snapshot)), ("Org/Small-MoE", str(snapshot))):
        assert read("plan", ["bare.toml", "--model-name", name])[0].models.hf_checkpoint == folder
    assert list_outcomes("--model-name qwen3-4b") == {"--model-name qwen3-4b": "checkpoint"}
    assert list_outcomes("--model-name mine") == {"--model-name mine": "noted"}
    assert find_problems("--model-name qwen3-30b-a3b") == [
        "--model-name qwen3-30b-a3b is a Qwen3MoeForCausalLM, but --hf-checkpoint is a Qwen3ForCausalLM; "
        "correct one of them."
    ]


def test_a_plan_folds_the_flags_and_lists_them_all(capsys: pytest.CaptureFixture[str]):
    line = f"plan good.toml {DENSE} --attention-dropout 0 --megatron-to-hf-mode bridge --use-swanlab"
    assert main(line.split()) == 0
    out = capsys.readouterr().out
    assert "19 flags restate the checkpoint: agreed" in out and "1 flag restates what a run does anyway" in out
    assert "1 flag has no effect here: --use-swanlab" in out and "nothing is sent" not in out
    assert main([*line.split(), "--all"]) == 0
    assert "nothing is sent to this tracker" in capsys.readouterr().out
    assert main([*line.split(), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["upstream_flags"]) == 22
