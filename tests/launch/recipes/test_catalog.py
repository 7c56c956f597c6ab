"""The recipes: each is described, passes the rules of a plan, and fits its hardware with the published shape."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from miles.core.errors import UsageError
from miles.launch.read_config import read
from miles.launch.recipes.catalog import (
    PLANNED_ONLY,
    Recipe,
    find_recipe,
    list_recipes,
    parse_recipe,
    read_recipe,
    select_recipes,
)
from miles.launch.recipes.fit import plan_recipe, write_published_config
from miles.models.accounting.known_models import find_known_config, load_known_models
from miles.models.families import spec_from_config
from miles.models.families.registry import FAMILIES
from miles.models.spec import DecoderSpec

RECIPES = list_recipes()
PLANNED = [recipe for recipe in RECIPES if recipe.hardware is not None and recipe.hardware.gpus_per_node]
ROW = {
    "input": "a?",
    "question": "a?",
    "prompt": [{"role": "user", "content": "a?"}],
    "problem": "a?",
    "label": "1",
    "answer": "#### 1",
    "chosen": "b",
    "rejected": "c",
    "messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}],
    "images": [],
}
# Without a published size: the text model of another family's checkpoints alone, or the same model by another name.
ALONE = {
    "gemma3n", "gemma4_text", "inkling_text", "kimi_k2", "llama4_text", "qwen3_5_text", "qwen3_5_moe_text",
    "qwen4_exp_text",
}  # fmt: skip
HARDWARE = {
    "1x24GB", "1x80GB", "8xH100", "8xH200", "8xMI300X", "2x8xH100", "2x8xH200", "2x8xMI300X", "16x8xH100", "16x8xH200",
    "16x8xMI300X",
}  # fmt: skip
TASKS = {
    "math GRPO", "math DAPO", "math GSPO", "code in the sandbox", "multi-turn tools", "search", "multi-agent",
    "distillation", "SFT to RL", "reward model", "DPO", "adapters", "FP8", "images",
}  # fmt: skip


def name_recipe(recipe: Recipe) -> str:
    return recipe.name


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with every column that a recipe names, enough for a step."""
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_text((json.dumps(ROW) + "\n") * 128)
    return file


# -- what there is --------------------------------------------------------------------------


def test_there_is_a_recipe_for_every_family_that_has_a_published_size():
    planned = {read_shape(recipe).family for recipe in PLANNED}
    assert {family.model_type for family in FAMILIES} - planned == ALONE
    published = {spec_from_config(config).family for config in load_known_models().values()}
    assert not ALONE & published


def test_there_is_a_recipe_for_every_hardware_and_task():
    assert {recipe.hardware.name for recipe in PLANNED if recipe.hardware} >= HARDWARE
    assert not [task for task in TASKS if not select_recipes(RECIPES, family=None, hardware=None, task=task)]


def test_a_family_with_dense_and_moe_models_has_recipes_for_both():
    families = (
        *("qwen2", "qwen3", "qwen3_5", "qwen3_6", "qwen3_vl", "glm", "deepseek", "llama", "mistral", "nemotron"),
        *("gemma", "ernie", "hunyuan", "lfm"),
    )
    for family in families:
        sparse = {read_shape(recipe).moe is not None for recipe in PLANNED if recipe.family == family}
        assert sparse == {True, False}, family


def read_shape(recipe: Recipe) -> DecoderSpec:
    known = find_known_config(recipe.shape or "")
    assert known is not None, recipe.name
    return spec_from_config(known)


def test_a_recipe_says_that_it_was_run_only_with_a_curve():
    for recipe in RECIPES:
        assert (recipe.tried == PLANNED_ONLY) == (recipe.curve is None), recipe.name
        assert recipe.curve is None or recipe.curve.is_file()


# -- each of them ---------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", PLANNED, ids=name_recipe)
def test_every_recipe_fits_its_hardware(recipe: Recipe):
    assert recipe.hardware is not None
    fit = plan_recipe(recipe)
    assert fit.list_problems(recipe.hardware) == []


@pytest.mark.parametrize("recipe", PLANNED, ids=name_recipe)
def test_every_recipe_passes_the_rules_of_a_plan(recipe: Recipe, data: Path, tmp_path: Path):
    """With rows of its columns and the published shape in the place of downloads."""
    config = parse_recipe(recipe)
    words = ["--hf-checkpoint", str(write_published_config(recipe.shape or "", tmp_path)), "--prompt-data", str(data)]
    if config.rollout.eval_prompt_data:
        words += ["--eval-prompt-data", "heldout", str(data)]
    if config.train.opd_teacher_load:
        words += ["--opd-teacher-load", str(write_published_config(config.train.opd_teacher_load, tmp_path))]
    if "search" in config.tools.generate_tools:
        (tmp_path / "documents.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
        words += ["--search-documents", str(tmp_path / "documents.jsonl")]
    if config.rollout.multimodal_keys:
        words += ["--multimodal-keys", "{}"]  # the processor of the checkpoint is not here
    read_config, plan, _ = read("plan", [str(recipe.path), *words])
    assert plan.steps > 0 and plan.device == "cuda" and plan.dtype == "bfloat16"
    assert config.rollout.rollout_batch_size == read_config.rollout.rollout_batch_size


# -- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("smaller", "sentence"),
    [
        ({"gpu_gb": 40}, "training takes 58 GB of a GPU, but 36 GB of 8xH100 are usable"),
        ({"gpus_per_node": 4}, "it uses 8 GPUs, but 8xH100 has 4"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(smaller: dict[str, int], sentence: str):
    recipe = find_recipe("qwen3/8b_dapo_8xh100")
    assert recipe.hardware is not None
    hardware = replace(recipe.hardware, **smaller)
    assert sentence in plan_recipe(replace(recipe, hardware=hardware)).list_problems(hardware)


def test_an_engine_without_room_for_a_few_sequences_is_refused(tmp_path: Path):
    recipe = find_recipe("qwen3/8b_dapo_8xh100")
    file = tmp_path / "long.toml"
    file.write_text(
        f'include = "{recipe.path}"\n[rollout]\nrollout_max_response_len = 39936\nrollout_max_context_len = 40960\n'
    )
    long = read_recipe(file, tmp_path)
    assert long.hardware is not None
    (problem,) = plan_recipe(long).list_problems(long.hardware)
    assert problem.startswith("the KV cache has room for") and problem.endswith("and 8 is the least")


def test_offloading_more_than_the_host_has_is_refused():
    recipe = find_recipe("qwen3_5/27b_math_8xh200")
    assert recipe.hardware is not None
    small = replace(recipe.hardware, host_gb=100)
    (problem,) = plan_recipe(recipe).list_problems(small)
    assert "to the host of a node, but 8xH200 has 100 GB" in problem


def test_a_shape_that_is_not_known_is_named():
    recipe = replace(find_recipe("qwen3/8b_dapo_8xh100"), shape="Qwen9-1B")
    with pytest.raises(UsageError, match="Qwen9-1B is not a published model"):
        plan_recipe(recipe)


def test_a_description_that_is_wrong_or_incomplete_is_refused(tmp_path: Path):
    file = tmp_path / "a.toml"
    file.write_text('[recipe]\ntitel = "x"\nnodes = "two"\n')
    with pytest.raises(UsageError) as caught:
        read_recipe(file, tmp_path)
    assert "[recipe] has no key titel" in caught.value.problems[0]
    assert "nodes of [recipe] must be a whole number, not 'two'" in caught.value.problems[1]
    file.write_text('[recipe]\ntitle = "x"\n')
    with pytest.raises(UsageError, match="does not say family, task, data, expect, tried"):
        read_recipe(file, tmp_path)
    file.write_text("recipe = 3\n")
    with pytest.raises(UsageError, match="make it a table"):
        read_recipe(file, tmp_path)
