"""The docs say what is there: links lead somewhere, flags exist, recipes are read, examples fit their doors."""

import importlib
import importlib.util
import json
import re
import shlex
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.models.small_vision import draw_png, write_processor

from miles.algo.loss_aggregation import Reducer
from miles.algo.policy_loss import Correction, LossFn
from miles.config.cli import index_flags
from miles.config.files import SUFFIXES
from miles.config.schema import flag_from_name, get_options, get_passthroughs
from miles.core.protocols import AdvantageEstimator, AdvantageFn, Curriculum, Filter, Generate, GroupRewardFn, RewardFn
from miles.hooks.load import format_signature, load_hook
from miles.hooks.registry import HOOK_POINTS
from miles.launch.commands import demo_task
from miles.launch.config import Config
from miles.launch.main import COMMANDS, main
from miles.launch.read_config import read
from miles.launch.runtime.run_directory import MAY_CHANGE
from miles.launch.upstream.table import load_upstream_flags
from miles.models.accounting.known_models import find_known_config
from miles.models.families.registry import FAMILIES
from miles.rollout.reward.registry import GRADERS, RANDOM

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
EXAMPLES = sorted((ROOT / "examples").glob("*/README.md"))
RECIPES = sorted(f for f in (ROOT / "recipes").rglob("*") if f.suffix in SUFFIXES)
VISION = ROOT / "recipes" / "grpo_geometry_vl.toml"
# Those that take any model and data; tests/launch/recipes has the others.
WHOLE = [f for f in RECIPES if f.parent == ROOT / "recipes" and f.name != "base.toml" and f != VISION]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]\n]*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*")
# flags of the commands themselves, and of other programs
OTHERS = {
    "--parts",
    "--cases",
    *("--workloads", "--targets", "--attention", "--hidden", "--layers", "--modes"),
    *("--seeds", "--at-once", "--also", "--bar", "--rates", "--requests", "--prompt-len", "--response-len"),
    *("--kills", "--ray", "--namespaces", "--deterministic", "--keep", "--only"),
    *("--help", "--version", "--all", "--json", "--flags", "--no-NAME", "--rounds", "--threads", "--seconds"),
    *(
        "--models",
        "--sides",
        "--sglang",
        "--profile",
        "--regenerate",
        "--gpu",
        "--disable-fast-image-processor",
        "--disable-overlap-schedule",
        "--enable-return-hidden-states",
        "--enable-return-routed-experts",
        "--enable-deterministic-inference",
        *("--address", "--head", "--labels", "--entrypoint-resources", "--entrypoint-num-gpus"),
        *("--working-dir", "--runtime-env-json"),
        *("--build-arg", "--rm", "--gpus", "--shm-size", "--frozen", "--extra", "--repo"),
        *("--network", "--ipc", "--read-only", "--tmpfs", "--read-only-tmpfs"),
        *("--cap-drop", "--security-opt", "--user"),
        *("--memory", "--memory-swap", "--pids-limit", "--ulimit", "--log-driver"),
    ),
}


def named(file: Path) -> str:
    return str(file.relative_to(ROOT))


def prose(file: Path) -> str:
    """A page without its code."""
    return FENCE.sub("", file.read_text(encoding="utf-8"))


def blocks(file: Path, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(file.read_text(encoding="utf-8")) if kind == language]


def anchors(file: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(file), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


# -- links ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=named)
def test_every_link_leads_somewhere(page: Path):
    broken = []
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_every_page_is_in_the_index():
    listed = set(LINK.findall(prose(ROOT / "docs" / "index.md")))
    pages = [str(page.relative_to(ROOT / "docs")) for page in DOCS]
    assert not [page for page in pages if page != "index.md" and page not in listed]


def test_every_test_and_source_file_that_is_named_exists():
    named_files = {
        path
        for page in PAGES
        for path in re.findall(r"`((?:tests|src|recipes|examples|benchmarks)/[\w./-]+)`", prose(page))
    }
    assert named_files
    assert not [path for path in named_files if not (ROOT / path).exists()]


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 90


# -- flags and knobs ------------------------------------------------------------------------


def test_every_flag_that_is_written_exists():
    roots = {command.root for command in COMMANDS.values() if command.root is not None}
    known = {*OTHERS, *(flag.rstrip("*") for flag in load_upstream_flags())}
    known |= {*(flag for root in roots for flag in index_flags(get_options(root)))}
    unknown = {
        f"{named(page)}: {flag}"
        for page in [*PAGES, *EXAMPLES, *RECIPES]
        for flag in FLAG.findall(page.read_text(encoding="utf-8"))
        if flag not in known and not flag.startswith(tuple(f"--{prefix}-" for prefix in get_passthroughs(Config)))
    }
    assert not unknown


def test_every_command_that_is_written_exists():
    written = {
        word
        for page in PAGES
        for body in [*re.findall(r"`([^`\n]+)`", prose(page)), *blocks(page, "bash")]
        for word in re.findall(r"(?:^|\n)miles ([a-z]+)", body)
    }
    assert written == set(COMMANDS)


def test_the_page_on_training_lists_the_options_that_may_change():
    text = prose(ROOT / "docs" / "train.md")
    listed = re.search(r"\*\*Changing options\.\*\*(.*?)\n\n", text, re.DOTALL)
    assert listed is not None
    assert set(FLAG.findall(listed[1])) == {flag_from_name(name) for name in MAY_CHANGE}


# -- tables that must be whole --------------------------------------------------------------


def test_every_hook_is_on_its_page_with_its_signature():
    text = prose(ROOT / "docs" / "hooks.md")
    for point in HOOK_POINTS:
        assert f"`{point.flag}`" in text
        assert f"`{format_signature(point.protocol())}`" in text, format_signature(point.protocol())


def test_every_family_and_every_reward_is_on_its_page():
    models, rewards = prose(ROOT / "docs" / "models.md"), prose(ROOT / "docs" / "rewards.md")
    architectures = {architecture for family in FAMILIES for architecture in family.architectures}
    assert not [architecture for architecture in architectures if f"`{architecture}`" not in models]
    assert not [name for name in (*GRADERS, RANDOM) if f"`{name}`" not in rewards]


def test_every_dependency_earns_its_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    names = {re.split(r"[\[<>=]", line)[0] for line in (*project["dependencies"], *extras)} - {project["name"]}
    text = prose(ROOT / "docs" / "dependencies.md")
    assert not [name for name in names if f"| `{name}` |" not in text]


# -- what can be run ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and prompts such as a user would bring."""
    folder = tmp_path_factory.mktemp("world")
    demo_task.write_task(folder, demo_task.Task(warmup_words=64, train_words=64, heldout_words=4), seed=0)
    demo_task.write_checkpoint(folder, moe=False, seed=0)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    pairs = [row | {"chosen": row["label"], "rejected": row["input"]} for row in rows]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return folder


@pytest.mark.parametrize("recipe", WHOLE, ids=named)
def test_every_recipe_becomes_a_plan(recipe: Path, world: Path):
    small = ["--rollout-max-prompt-len", "16", "--rollout-max-response-len", "16", "--rollout-max-context-len", "32"]
    flags = ["--hf-checkpoint", str(world), "--prompt-data", str(world / "train.jsonl"), "--label-key", "label"]
    config, plan, origins = read("plan", [str(recipe), *flags, *small])
    assert plan.steps > 0
    assert {Path(origin).name for origin in origins.values()} >= {recipe.name, "base.toml"}
    assert config.models.hf_checkpoint == str(world)


def with_world(words: list[str], folder: Path, world: Path) -> list[str]:
    """A command's flags with the small checkpoint and its prompts, and with hooks of the example's own folder."""
    flags = [f"{folder / word}" if (folder / word.partition(":")[0]).is_file() else word for word in words]
    start = flags.index("--prompt-data") + 1
    end = next(place for place in range(start, len(flags)) if flags[place].startswith("--"))
    data = [str(world / "train.jsonl")]
    flags = [*flags[:start], *data, *flags[end:]]
    if "--multimodal-keys" in flags:  # of a model that reads images
        place = flags.index("--multimodal-keys")
        flags = [*flags[:place], *flags[place + 2 :]]
    return [*flags, "--hf-checkpoint", str(world), "--input-key", "input", "--label-key", "label"]


@pytest.mark.parametrize("page", [page for page in EXAMPLES if page.parent.name != "smollm2"], ids=named)
def test_the_command_for_a_real_model_becomes_a_plan(page: Path, world: Path, monkeypatch):
    """Every example but the one that has no other model says how; models and data are replaced by small ones."""
    monkeypatch.chdir(ROOT)
    (section,) = page.read_text(encoding="utf-8").split("## With a real model\n")[1:]
    commands = [body for kind, body in FENCE.findall(section) if kind == "bash"]
    assert commands
    small = ["--rollout-max-prompt-len", "16", "--rollout-max-response-len", "16", "--rollout-max-context-len", "32"]
    for command in commands:
        miles, train, *words = shlex.split(command.replace("\\\n", " "))
        assert (miles, train) == ("miles", "train")
        _, plan, _ = read("plan", [*with_world(words, page.parent, world), *small])
        assert plan.steps > 0


@pytest.mark.parametrize(
    ("model", "kind", "parameters"),
    [("Qwen2.5-VL-7B-Instruct", "qwen2_5_vl", "8,292.17M"), ("Qwen3-VL-8B-Instruct", "qwen3_vl", "8,767.12M")],
)
def test_the_geometry_recipe_becomes_a_plan_of_the_published_models(model, kind, parameters, tmp_path, capsys):
    """With rows as the data set has them: a list of images, the problem, the answer."""
    folder = write_processor(tmp_path / model, kind)
    (folder / "config.json").write_text(json.dumps({**(find_known_config(model) or {}), "dtype": "bfloat16"}))
    row = {"images": [{"bytes": draw_png(0), "path": None}], "problem": "<image>Find $x$.", "answer": "\\sqrt{3}"}
    rows = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(64 * [row]), rows)
    data = ["--prompt-data", str(rows), "--eval-prompt-data", "test", str(rows)]
    assert main(["plan", str(VISION), "--hf-checkpoint", str(folder), "--device", "cuda", *data]) == 0
    shown = capsys.readouterr().out
    assert f"{kind}, {parameters} parameters" in shown
    assert "64 × n_samples_per_prompt 8 = 512 = global_batch_size 256 × num_steps_per_rollout 2" in shown
    assert "trainer 0 to 7; engines 0 to 7, shared with the trainer, in turns" in shown


@pytest.mark.parametrize("page", DOCS, ids=named)
def test_every_toml_example_holds_only_keys(page: Path):
    knobs = get_options(Config)
    for body in blocks(page, "toml"):
        values = tomllib.loads(body)
        values.pop("include", None)
        values.pop("recipe", None)
        tables = [value if isinstance(value, dict) and name not in knobs else [name] for name, value in values.items()]
        keys = [key for table in tables for key in table]
        assert not [key for key in keys if key not in knobs]


@pytest.mark.parametrize(
    ("name", "door"),
    [
        ("score", RewardFn),
        ("shortest_wins", GroupRewardFn),
        ("neither_easy_nor_hopeless", Filter),
        ("harder_when_ready", Curriculum),
        ("think_again", Generate),
        ("gently_bounded", Correction),
        ("ranked", AdvantageFn),
        ("later_tokens_count_less", AdvantageEstimator),
        ("softly_bounded", LossFn),
        ("square_root", Reducer),
    ],
)
def test_every_hook_in_the_docs_fits_its_door(name: str, door: type, tmp_path: Path):
    body = next(body for body in blocks(ROOT / "docs" / "hooks.md", "python") if f"def {name}(" in body)
    (tmp_path / f"{name}.py").write_text(body)
    load_hook(f"{tmp_path / name}.py:{name}", door)


def test_modules_of_upstreams_that_the_docs_list_have_the_names_they_list():
    text = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1:3] for row in text.splitlines() if row.startswith("| `miles.")]
    assert len(rows) > 15
    for where, names in rows:
        first, *others = re.findall(r"`([\w.]+)`", where)
        modules = [importlib.import_module(first)]
        for other in others:
            parent = first if "its" in where else first.rpartition(".")[0]
            full = other if other.startswith("miles.") else f"{parent}.{other.removeprefix('...')}"
            parents = [full, full.replace("training_utils", "megatron_utils")]
            modules += [importlib.import_module(name) for name in parents if importlib.util.find_spec(name)]
        found = re.findall(r"`(\w+)`", names)
        assert found and not [name for name in found if not any(hasattr(module, name) for module in modules)], where
