"""Rules of low precision: what is refused, each with one sentence, and what a plan says of the rest."""

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from tests.launch.small_config import QWEN3, furnish

from miles.config.cli import parse
from miles.config.files import read_layers
from miles.core.errors import UsageError
from miles.launch.commands.serve import read_serve_config
from miles.launch.config import Config
from miles.launch.main import main
from miles.launch.plan.memory import estimate_memory
from miles.launch.plan.plan import build_plan, choose_parity_tolerance
from miles.launch.rules.check import check_rules
from miles.models.accounting.params import packed_weight_bytes
from miles.models.resolve import resolve_spec
from miles.precision.formats import FORMATS, FormatName, QuantizationSpec


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    (tmp_path / "blocks").mkdir()
    sizes = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 2}
    (tmp_path / "blocks" / "config.json").write_text(json.dumps(QWEN3 | sizes))
    monkeypatch.chdir(tmp_path)


def list_problems(line: str) -> list[str]:
    reading = parse(Config, line.split(), read_layers("good.toml"))
    return [*reading.problems, *check_rules(reading, "plan")]


def test_the_flags_take_every_format():
    assert get_args(FormatName) == tuple(FORMATS)


@pytest.mark.parametrize(
    "line",
    [
        "--train-precision fp8",
        "--train-precision fp8 --rollout-precision fp8",
        "--train-precision fp8 --fp8-format hybrid --parity exact",
        "--train-precision int4_g32 --lora-rank 4",
        "--rollout-precision fp8 --rollout-backend served",
        "--hf-checkpoint moe --train-precision fp8 --quantize-experts-only",
        "--train-backend megatron --train-precision fp8",
        "--hf-checkpoint blocks --train-precision fp8 --rollout-backend sglang --kv-cache-dtype fp8_e4m3",
        "--hf-checkpoint blocks --rollout-precision fp8_pow2 --rollout-backend sglang --lora-rank 4",
        "--hf-checkpoint blocks --train-precision fp8 --rollout-backend sglang --check-weight-update-equal",
    ],
)
def test_what_works_is_accepted(line):
    assert list_problems(line) == []


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--train-precision int4_g32 --rollout-precision fp8", "would sample from other weights than"),
        ("--fp8-format e4m3", "--fp8-format e4m3 is about training in FP8"),
        ("--train-precision int4_g32 --fp8-format e4m3", "--fp8-format e4m3 is about training in FP8"),
        ("--train-precision fp8 --quantize-experts-only", "quantizes no weight of this model"),
        ("--rollout-precision fp8 --parity exact", "use --train-precision fp8"),
        (
            "--rollout-precision int4_g32 --rollout-backend sglang",
            "SGLang, which takes weight updates in fp8 and fp8_pow2 only; use one of these, or --rollout-backend",
        ),
        (
            "--train-precision fp8_channel --rollout-backend sglang",
            "--train-precision fp8_channel does not work with SGLang, which takes weight updates in fp8 and fp8_pow2",
        ),
        (
            "--rollout-precision fp8 --rollout-backend sglang",
            "SGLang: model.layers.0.self_attn.q_proj.weight has 96 input channels, which are not whole blocks of 128",
        ),
        (
            "--hf-checkpoint blocks --rollout-precision fp8 --rollout-backend sglang --rollout-dtype float32",
            "needs bfloat16 in SGLang, which has no FP8 in float32; use --rollout-dtype bfloat16",
        ),
        (
            "--hf-checkpoint blocks --train-precision fp8 --rollout-backend sglang --rollout-num-gpus 2 "
            "--rollout-num-gpus-per-engine 2",
            "each of 2 GPUs would have 64 rows of model.layers.0.self_attn.q_proj.weight, not whole blocks of 128",
        ),
        (
            "--hf-checkpoint blocks --train-precision fp8 --rollout-backend sglang --kv-cache-dtype fp8_e4m3 "
            "--check-weight-update-equal",
            "--check-weight-update-equal would overwrite the scales of SGLang's FP8 KV cache",
        ),
        ("--train-backend megatron --train-precision int4_g32", "is not one of Transformer Engine's"),
        (
            "--train-precision fp8 --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2",
            "blocks of 128 rows that 2 ranks would divide",
        ),
        (
            "--train-precision fp8 --lora-rank 4 --train-backend megatron --actor-num-gpus-per-node 2 "
            "--tensor-model-parallel-size 2",
            "blocks of 128 rows that 2 ranks would divide",
        ),
        ("--train-precision fp8 --lora-rank 4 --fp8-format e4m3", "--fp8-format e4m3 does not work with --lora-rank"),
        (
            "--train-precision fp8 --lora-rank 4 --save-hf out --save-hf-precision rollout",
            "would round the adapters away",
        ),
        (
            "--rollout-precision fp8_channel --rollout-num-gpus-per-engine 2",
            "fp8_channel has one scale for all inputs of a token, of which 2 tensor-parallel ranks",
        ),
    ],
)
def test_what_does_not_work_is_refused_with_one_sentence(line, complaint):
    (problem,) = list_problems(line)
    assert complaint in problem


@pytest.mark.parametrize("precision", ["int4_g32", "fp8 --quantize-experts-only --hf-checkpoint moe", "fp8_channel"])
@pytest.mark.parametrize("more", ["", "--parity exact"])
def test_a_packed_base_under_adapters_is_not_transformer_engines(precision, more):
    line = f"--train-backend megatron --train-precision {precision} {more}"
    assert list_problems(f"{line} --lora-rank 4") == []
    assert list_problems(f"{line} --lora-rank 4 --megatron-use-distributed-optimizer") == []
    assert list_problems(line) != []


def test_the_plan_says_what_sglang_servers_load_and_are_sent(capsys):
    line = "--hf-checkpoint blocks --train-precision fp8 --rollout-backend sglang --device cpu"
    assert main(["plan", "good.toml", *line.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    (found,) = [
        i
        for i, each in enumerate(lines)
        if each.strip().startswith("precision  engine and trainer fp8, the same bytes")
    ]
    assert "SGLang servers load a copy in rollout_checkpoints/ and are sent weights" in lines[found + 1]
    line += " --rollout-external-engine-addrs http://localhost:30000"
    assert main(["plan", "good.toml", *line.split()]) == 0
    assert "SGLang servers are sent weights in its layout" in capsys.readouterr().out


def test_a_server_refuses_a_format_that_does_not_fit():
    with pytest.raises(UsageError, match="--rollout-precision fp8 quantizes no weight"):
        read_serve_config(["model", "--rollout-precision", "fp8", "--quantize-experts-only"])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--lora-rank 4", "are applied beside the weights here; add --no-lora-merge"),
        ("--rollout-precision fp8 --lora-rank 4 --target-modules nothing", "names no projection of this model"),
        ("--rollout-precision fp8 --lora-adapter-path data", "is not a PEFT adapter"),
    ],
)
def test_a_server_refuses_adapters_that_it_cannot_apply(flags, sentence):
    with pytest.raises(UsageError, match=sentence):
        read_serve_config(["model", *flags.split()])


def test_the_memory_plan_counts_the_packed_base_once_for_both_planes():
    def held(line: str) -> dict[str, int]:
        config = parse(Config, line.split(), read_layers("good.toml")).config
        assert config is not None and config.models.hf_checkpoint is not None
        spec = resolve_spec(config.models.hf_checkpoint, "auto")
        return {share.name: share.bytes for share in estimate_memory(config, build_plan(config), spec)}

    wide, packed = held("--lora-rank 1"), held("--lora-rank 1 --train-precision int4_g32")
    spec = replace(
        resolve_spec("model", "auto"), quantization=QuantizationSpec(format=FORMATS["int4_g32"], packed=True)
    )
    assert packed["weights"] == packed_weight_bytes(spec, "float32") < wide["weights"]
    assert "base" not in packed and wide["base"] > 0
    assert packed["engine"] == packed["adapters"] == wide["adapters"]  # its factors; the base is the trainer's
    assert packed["optimizer"] == wide["optimizer"]


@pytest.mark.parametrize(
    ("line", "tolerance"),
    [
        ("", 0.01),
        ("--train-precision int4_g32", 0.01),
        ("--rollout-precision fp8", 0.05),
        ("--rollout-precision nvfp4", 0.2),
        ("--train-precision fp8", 0.01),
        ("--train-precision fp8 --rollout-backend served", 0.01),
        ("--train-precision fp8 --rollout-backend sglang", 0.05),
        ("--rollout-precision fp8 --parity-tolerance 0.02", 0.02),
    ],
)
def test_the_parity_light_allows_for_the_rounding_of_an_engine(line, tolerance):
    config = parse(Config, line.split(), read_layers("good.toml")).config
    assert config is not None and choose_parity_tolerance(config) == tolerance
