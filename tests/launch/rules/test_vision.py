"""Options of vision towers: accepted where they have an effect, and refused with a sentence elsewhere."""

import json
from pathlib import Path

import pytest
from tests.launch.small_config import furnish

from miles.config.cli import parse
from miles.config.files import read_layers
from miles.launch.config import Config
from miles.launch.plan.layout_memory import get_frozen_vision
from miles.launch.plan.memory import estimate_kv_tokens, estimate_memory
from miles.launch.plan.plan import build_plan
from miles.launch.rules.check import check_rules
from miles.launch.rules.paths import read_spec_or_none
from miles.models.accounting.params import vision_parameter_count

TOWER = ("--hf-checkpoint", "vision")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    for name in ("model", "vision"):
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("miles.launch.rules.training.find_spec", lambda _: object())


def list_problems(*words: str) -> list[str]:
    result = parse(Config, words, read_layers("good.toml"))
    return [*result.problems, *(p for p in check_rules(result, "plan") if "weights" not in p)]


@pytest.mark.parametrize(
    "flags",
    ["--freeze-vision-tower", "--freeze-vision-projector", "--vision-lr 1e-6", "--max-patches-per-gpu 4096"],
)
def test_an_option_of_the_vision_tower_needs_one(flags: str) -> None:
    words = flags.split()
    assert not [p for p in list_problems(*TOWER, *words) if words[0] in p]
    (problem,) = [p for p in list_problems(*words) if words[0] in p]
    assert problem == f"{words[0]} has no effect, because the model has no vision tower; remove it."


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--freeze-vision-tower --freeze-vision-projector --vision-lr 1e-6", "--vision-lr has no effect with"),
        ("--lora-rank 4 --vision-lr 1e-6", "--vision-lr has no effect with LoRA"),
        ("--lora-rank 4 --freeze-vision-tower", "--freeze-vision-tower has no effect with LoRA"),
        ("--max-patches-per-gpu 9 --micro-batch-size 1", "--max-patches-per-gpu has no effect with --micro-batch-size"),
    ],
)
def test_combinations_without_effect_are_refused(flags: str, sentence: str) -> None:
    assert [p for p in list_problems(*TOWER, *flags.split()) if sentence in p]


IMAGES = ("--multimodal-keys", '{"image": "images"}', "--apply-chat-template")


def write_image_processor(folder: str) -> None:
    Path(folder, "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--hf-checkpoint model", "of qwen3 models the text part alone is (docs/models.md)"),
        ("--use-opd --opd-type sglang --opd-teacher-urls x http://t:1", "--opd-teacher-urls cannot be used with"),
        ("--use-opd --opd-teacher-load model", "--opd-teacher-load model has no vision tower, and --multimodal-keys"),
        ("--use-opd --opd-teacher-load vision", None),
        ("", None),
    ],
)
def test_images_that_a_model_or_teacher_would_not_see_are_refused(flags: str, sentence: str | None) -> None:
    for folder in ("model", "vision"):
        write_image_processor(folder)
    problems = list_problems(*TOWER, *IMAGES, *flags.split())
    about = [problem for problem in problems if "--multimodal-keys" in problem]
    assert not about if sentence is None else [problem for problem in about if sentence in problem], problems


def write_gemma3(folder: str) -> None:
    text = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    vision = {"model_type": "siglip_vision_model", "num_hidden_layers": 2, "image_size": 64, "patch_size": 16}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 4}
    Path(folder, "config.json").write_text(json.dumps(config | {"text_config": text, "vision_config": vision}))


def test_images_that_attend_in_both_directions_are_refused_with_context_parallelism() -> None:
    ranks = ("--context-parallel-size", "2", "--actor-num-gpus-per-node", "2")

    def about(*words: str) -> list[str]:
        return [p for p in list_problems(*TOWER, *words) if "--context-parallel-size" in p and "directions" in p]

    write_image_processor("vision")
    assert not about(*ranks, *IMAGES)
    write_gemma3("vision")
    assert not about(*ranks) and not about(*IMAGES)
    assert len(about(*ranks, *IMAGES)) == 1


@pytest.mark.parametrize("limit", [None, 100, 10**9])
def test_the_planned_kv_cache_holds_sequences_of_the_context_limit(limit: int | None) -> None:
    words = () if limit is None else ("--rollout-max-context-len", str(limit))
    config = parse(Config, (*TOWER, "--engine-max-running", "3", *words), read_layers("good.toml")).config
    spec = read_spec_or_none("vision", "native")
    assert spec is not None
    longest = min(limit or spec.max_positions, spec.max_positions)
    tokens, why = estimate_kv_tokens(config, build_plan(config), spec)
    page = config.native.engine_page_size
    assert tokens == 3 * (-(-longest // page) * page) and f"3 requests of {longest:,} positions" in why


def test_lora_takes_the_limit_of_patches() -> None:
    assert not [p for p in list_problems(*TOWER, "--lora-rank", "4", "--max-patches-per-gpu", "9") if "patches" in p]


def test_options_reach_the_models_and_the_memory_plan() -> None:
    def shares(*words: str) -> dict[str, int]:
        config = parse(Config, (*TOWER, *words), read_layers("good.toml")).config
        spec = read_spec_or_none("vision", "native")
        assert spec is not None and spec.vision is not None
        return {share.name: share.bytes for share in estimate_memory(config, build_plan(config), spec)}

    patches = ("--max-patches-per-gpu", "8192")
    assert "vision tower" not in shares()
    # Without a limit of patches, as many as the tokens of a micro-batch can hold.
    bound, wide = shares(*IMAGES, "--max-tokens-per-gpu", "2048"), shares(*IMAGES, "--max-tokens-per-gpu", "9999")
    assert bound["vision tower"] == shares(*patches)["vision tower"] < wide["vision tower"]
    assert shares(*IMAGES, *patches, "--max-tokens-per-gpu", "9999")["vision tower"] == bound["vision tower"]
    trained, recomputed = shares(*patches), shares(*patches, "--gradient-checkpointing")
    assert trained["vision tower"] > recomputed["vision tower"] > 0
    frozen = shares(*patches, "--freeze-vision-tower", "--freeze-vision-projector")
    assert "vision tower" not in frozen
    spec = read_spec_or_none("vision", "native")
    assert spec is not None
    count = vision_parameter_count(spec)
    assert trained["weights"] == frozen["weights"]
    assert trained["gradients"] - frozen["gradients"] == 4 * count
    assert trained["optimizer"] - frozen["optimizer"] in (8 * count, 12 * count)
    config = parse(Config, (*TOWER, "--freeze-vision-projector"), read_layers("good.toml")).config
    assert not get_frozen_vision(config.train).tower and get_frozen_vision(config.train).projector


def test_a_tower_has_a_rate_of_its_own_with_megatrons_optimizer() -> None:
    words = ("--vision-lr", "1e-6", "--train-backend", "megatron", "--megatron-use-distributed-optimizer")
    assert not [p for p in list_problems(*TOWER, *words) if "--vision-lr" in p]


def test_adapters_of_a_tower_are_accepted_in_every_layout() -> None:
    adapters = (*TOWER, "--lora-rank", "4", "--target-modules", "all-linear,vision", "--actor-num-gpus-per-node", "2")
    tensor = ("--tensor-model-parallel-size", "2")
    for more in ((), tensor, (*tensor, "--sequence-parallel")):
        for backend in ("fsdp", "megatron"):
            found = list_problems(*adapters, *more, "--train-backend", backend)
            assert not [p for p in found if "vision" in p or "--tensor-model-parallel-size" in p], found
