"""Every option has an effect or is refused: under each backend, and in the source."""

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
from tests.launch.small_config import MOE, furnish

import miles
from miles.backends.megatron.config import build_recompute_flags
from miles.backends.native.config import NativeConfig
from miles.config.cli import parse
from miles.config.files import read_layers
from miles.config.schema import Option, get_options, get_passthroughs
from miles.hooks import registry
from miles.launch.config import Config
from miles.launch.main import main
from miles.launch.plan.layout_memory import get_recompute_layers, get_recompute_mode
from miles.launch.plan.topology import build_resource_request, count_engines, get_engine_devices
from miles.launch.read_config import read
from miles.launch.rules.check import check_rules
from miles.models.accounting.known_models import find_known_config

OPTIONS = get_options(Config)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("miles.launch.rules.training.find_spec", lambda _: object())
    monkeypatch.setattr("miles.launch.rules.engines.find_spec", lambda _: object())
    monkeypatch.setattr("miles.launch.rules.trackers.find_spec", lambda _: object())


def find_problems(*words: str) -> list[str]:
    result = parse(Config, words, read_layers("good.toml"))
    return [*result.problems, *check_rules(result, "plan")]


# -- backends -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backends:
    engine: str
    trainer: str
    ranks: int
    staleness: int

    @property
    def words(self) -> list[str]:
        external = ["--rollout-external-engine-addrs", "http://host:30000"]
        engine = external if self.engine == "external" else ["--rollout-backend", self.engine]
        trainer = ["--train-backend", self.trainer, "--actor-num-gpus-per-node", str(self.ranks)]
        return [*engine, *trainer, "--max-weight-staleness", str(self.staleness)]

    @property
    def is_remote(self) -> bool:
        return self.engine != "native"

    @property
    def is_distributed(self) -> bool:
        return self.ranks > 1 or self.trainer == "megatron"


COMBINATIONS = [
    Backends(engine, trainer, ranks, staleness)
    for engine, (trainer, ranks), staleness in product(
        ("native", "served", "sglang", "external"), (("fsdp", 1), ("fsdp", 4), ("megatron", 4)), (0, 1)
    )
]


def is_remote(b: Backends) -> bool:
    return b.is_remote


# Options whose meaning depends on the backends: words that set them, and where they have an effect.
EFFECTIVE: dict[str, tuple[str, Callable[[Backends], bool]]] = {
    **{name: ("", lambda b: b.engine in ("native", "served")) for name in NativeConfig.__dataclass_fields__},
    "speculative_draft_model_path": (
        "--speculative-algorithm draft-model --speculative-draft-model-path model",
        lambda b: b.engine in ("native", "served"),
    ),
    "colocate": ("--colocate", lambda b: b.engine != "external" and b.staleness == 0),
    "rollout_num_gpus": ("--rollout-num-gpus 2", lambda b: b.engine in ("served", "sglang")),
    "rollout_num_gpus_per_engine": ("--rollout-num-gpus-per-engine 2", lambda b: b.engine != "external"),
    "rollout_num_engines": ("--rollout-num-engines 2", lambda b: b.engine in ("served", "sglang")),
    "sglang_python": ("--sglang-python sh", lambda b: b.engine == "sglang"),
    "rollout_engine_token_env": ("--rollout-engine-token-env PATH", is_remote),
    "update_weight_timeout": ("", is_remote),
    "rollout_start_timeout": ("", is_remote),
    "rollout_max_restarts": ("", is_remote),
    "pause_generation_mode": ("--pause-generation-mode abort", lambda b: b.staleness > 0),
    "distributed_timeout_minutes": ("", lambda b: b.is_distributed),
    "trainer_max_restarts": ("", lambda b: b.is_distributed),
    "fsdp_cpu_offload": ("", lambda b: b.trainer == "fsdp" and b.ranks > 1),
    "share_prefix": ("", lambda b: b.trainer == "fsdp"),
    "data_parallel_replicate_size": ("", lambda b: b.trainer == "fsdp" and b.ranks > 1),
    "tensor_model_parallel_size": ("", lambda b: b.ranks > 1),
    "context_parallel_size": ("", lambda b: b.ranks > 1),
    "pipeline_model_parallel_size": ("", lambda b: b.trainer == "megatron"),
    "megatron_flags": ("--megatron-moe-token-dispatcher-type alltoall", lambda b: b.trainer == "megatron"),
    "recompute_granularity": ("", lambda b: True),
    "recompute_num_layers": (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
        lambda b: True,
    ),
    "muon_momentum": ("", lambda b: False),
    "ray_placement_timeout": ("", lambda b: False),
}


def set_option(option: Option) -> str:
    """Words that set an option to something else than its default."""
    kind, default = option.value_type, option.default
    if kind.scalar is bool:
        return str(option.negation if default else option.flag)
    if kind.choices:
        return f"{option.flag} {next(choice for choice in kind.choices if choice != default)}"
    if kind.scalar is int:
        return f"{option.flag} {2 * (default or 1)}"
    return f"{option.flag} {(default or 0.5) / 2}"


@pytest.mark.parametrize("name", EFFECTIVE)
def test_an_option_is_accepted_exactly_where_the_backends_use_it(name: str):
    passthrough = {field: prefix for prefix, (_, field) in get_passthroughs(Config).items()}
    words, is_effective = EFFECTIVE[name]
    if name == "engine_return_indexer_topk":  # a run has no use for it otherwise
        words = "--engine-return-indexer-topk --use-rollout-indexer-replay"
    flag = f"--{passthrough[name]}-" if name in passthrough else OPTIONS[name].flag
    for backends in COMBINATIONS:
        given = (words or set_option(OPTIONS[name])).split()
        problems = [problem for problem in find_problems(*backends.words, *given) if flag in problem]
        assert bool(problems) != is_effective(backends), (backends, problems)


# -- the source -----------------------------------------------------------------------------

# Options that no code reads since a rule allows only what the run does anyway, and the rule.
RESTATED = {
    "opd_type": "check_teacher_location",
    "debug_train_only": "check_debug_modes",
    "custom_config_path": "extract_hook_arguments",
    "eval_config": "read_eval_config",
}


def list_unread(names: set[str]) -> set[str]:
    """Those of ``names`` that are no attribute read by any module but the rules."""
    root = Path(miles.__path__[0])
    for file in sorted(root.rglob("*.py"), key=lambda file: "launch" not in file.parts):
        text = file.read_text(encoding="utf-8")
        if "rules" not in file.parts and any(f".{name}" in text for name in names):
            nodes = ast.walk(ast.parse(text))
            names -= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    return names


def test_every_option_is_read_outside_the_rules():
    hooks = [hook for hook in vars(registry).values() if isinstance(hook, registry.HookPoint)]
    loaded = {hook.flag.removeprefix("--").replace("-", "_") for hook in hooks}
    assert list_unread(set(OPTIONS) - loaded) == set(RESTATED)


# -- what the flags do ------------------------------------------------------------------------


def test_colocate_puts_engines_on_the_devices_of_the_trainer():
    line = "good.toml --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --rollout-backend served --device cuda"
    for more, first in (("--colocate", 0), ("", 8)):
        config, _, _ = read("plan", f"{line} {more}".split())
        devices = [gpu for index in range(count_engines(config)) for gpu in get_engine_devices(config, index)]
        assert devices == list(range(first, first + 8))
        assert build_resource_request(config).shared == (first == 0)
        assert build_resource_request(config).total == 8 + first


def test_the_plan_names_the_devices_of_trainer_and_engines(capsys: pytest.CaptureFixture[str]):
    line = "plan good.toml --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --rollout-backend served --device cuda"
    assert main(line.split()) == 0
    assert "trainer 0 to 7; engines 8 to 15, their own" in capsys.readouterr().out
    assert main([*line.split(), "--colocate"]) == 0
    assert "trainer 0 to 7; engines 0 to 7, shared with the trainer, in turns" in capsys.readouterr().out


def test_colocated_engines_cannot_have_more_devices_than_the_trainer():
    problems = find_problems(
        *["--colocate", "--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "8", "--rollout-backend", "served"]
    )
    assert problems == [
        "--colocate runs engines on the trainer's 4 GPUs, but --rollout-num-gpus is 8; use at most 4, or remove "
        "--colocate."
    ]


def test_block_recomputation_is_passed_to_megatron_as_given():
    line = "good.toml --train-backend megatron --recompute-granularity full --recompute-method block"
    config, _, _ = read("plan", [*line.split(), "--recompute-num-layers", "2"])
    flags = build_recompute_flags(get_recompute_mode(config.train), get_recompute_layers(config.train))
    assert " ".join(flags) == "--recompute-granularity full --recompute-method block --recompute-num-layers 2"


def test_experts_over_tensor_ranks_are_planned_under_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    wide = MOE | {"num_experts": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
    (tmp_path / "moe" / "config.json").write_text(json.dumps(wide))
    line = "plan good.toml --hf-checkpoint moe --train-backend megatron --actor-num-gpus-per-node 8 --json "
    line += "--tensor-model-parallel-size 4 --sequence-parallel --expert-tensor-parallel-size 1 "
    weights = {}
    for experts in (1, 2, 8):
        assert main([*line.split(), "--expert-model-parallel-size", str(experts)]) == 0
        memory = json.loads(capsys.readouterr().out)["memory"]
        weights[experts] = next(share["bytes"] for share in memory if share["name"] == "weights")
    # Experts that are not split over tensor ranks are whole on each rank of their group: more groups, fewer on each.
    assert weights[1] > weights[2] > weights[8]


def test_a_layout_that_megatron_cannot_train_is_refused_by_the_plan(tmp_path: Path):
    config = find_known_config("Qwen3.8-Flash-Next")
    assert config is not None
    (tmp_path / "moe" / "config.json").write_text(json.dumps(config))
    line = ("--hf-checkpoint", "moe", "--train-backend", "megatron", "--actor-num-gpus-per-node", "2")
    assert find_problems(*line, "--expert-model-parallel-size", "2") == []
    assert find_problems(*line, "--tensor-model-parallel-size", "2", "--sequence-parallel") == []
    problems = find_problems(*line, "--tensor-model-parallel-size", "2")
    assert any("experts under tensor parallelism only with --sequence-parallel" in each for each in problems), problems


@pytest.mark.parametrize("model", ["gpt-oss-20b", "MiniMax-M3", "Gemma-3-1B", "Llama-4-Scout-17B-16E"])
def test_models_with_modules_of_the_decoder_are_accepted_but_not_in_transformer_engines_formats(
    tmp_path: Path, model: str
):
    config = find_known_config(model)
    assert config is not None
    if "Llama" in model:
        config = config["text_config"] | {"architectures": ["Llama4ForCausalLM"]}
    (tmp_path / "moe" / "config.json").write_text(json.dumps(config))
    line = ("--hf-checkpoint", "moe", "--train-backend", "megatron")
    assert find_problems(*line) == []
    assert find_problems(*line, "--ckpt-format", "torch_dist") == []
    assert any(
        "is Transformer Engine's, which has no form" in p for p in find_problems(*line, "--train-precision", "fp8")
    )


def test_drafts_of_a_recurrent_model_are_accepted(tmp_path: Path):
    config = find_known_config("Qwen3-Next-80B-A3B")
    assert config is not None
    (tmp_path / "moe" / "config.json").write_text(json.dumps(config))
    assert find_problems("--hf-checkpoint", "moe") == []
    assert find_problems("--hf-checkpoint", "moe", "--speculative-algorithm", "ngram") == []


def test_recomputation_is_chosen_in_one_way_under_megatron():
    line = "--train-backend megatron --recompute-granularity full --megatron-recompute-granularity selective"
    (problem,) = find_problems(*line.split())
    assert problem.startswith("--megatron-recompute-granularity and Miles' own recomputation flags both choose")
