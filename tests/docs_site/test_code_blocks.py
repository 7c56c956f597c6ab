"""Code on pages: Python compiles and marked blocks run, commands become plans, thresholds are the dashboard's."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.test_docs import DOCS, ROOT, blocks, named

from miles.core.protocols import RewardFn
from miles.hooks.load import load_hook
from miles.launch.commands import demo_task
from miles.launch.read_config import read
from miles.observe.dashboard import health

RUNS = re.compile(r"<!-- runs -->\n```python\n(.*?)```", re.DOTALL)
MARKED = [(page, body) for page in DOCS for body in RUNS.findall(page.read_text(encoding="utf-8"))]
COMMAND = re.compile(r"(?:^|(?<=\n))miles (?:train|plan|check) .*?[^\\](?=\n|$)", re.DOTALL)
WITH_COMMANDS = [
    *sorted((ROOT / "docs" / "quick_start").glob("*.md")),
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    *sorted((ROOT / "docs").glob("migrate_*.md")),
]
MODELS = re.compile(r"(?<=--hf-checkpoint )\S+|\bTEACHER\b|(?<=--reward-model-tokenizer )\S+")
SKIPPED = "grpo_geometry_vl"  # planned with published shapes by tests/test_docs.py


def list_commands(page: Path) -> list[str]:
    found = [command for body in blocks(page, "bash") for command in COMMAND.findall(body)]
    return [command for command in found if SKIPPED not in command and not re.match(r"miles plan [A-Z]", command)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the commands of the pages name, and a checkpoint for models with room for long contexts."""
    folder = tmp_path_factory.mktemp("world")
    demo_task.write_task(folder, demo_task.Task(warmup_words=64, train_words=320, heldout_words=4), seed=0)
    demo_task.write_checkpoint(folder, moe=False, seed=0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40960}))
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    rows = [{"input": row["input"], "label": row["label"], "prompt": row["input"]} for row in rows]
    pairs = [{"input": row["input"], "chosen": row["label"], "rejected": row["input"]} for row in rows]
    shown = [
        {"input": [{"role": "user", "content": row["input"]}, {"role": "assistant", "content": row["label"]}]}
        for row in rows
    ]
    documents = [{"text": row["input"]} for row in rows]
    files = {"train": rows, "heldout": rows, "problems": rows, "pairs": pairs, "demonstrations": shown}
    for name, content in (files | {"documents": documents}).items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    reward = next(body for page, body in MARKED if page.name == "custom.md" and "def score" in body)
    (folder / "reward.py").write_text(reward)
    agent = next(body for body in blocks(ROOT / "docs" / "tutorials" / "agents.md", "python") if "def agent" in body)
    (folder / "agents.py").write_text(agent)
    (folder / "recipes").symlink_to(ROOT / "recipes")
    return folder


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=named)
def test_every_command_of_a_page_becomes_a_plan(page: Path, world: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(world)
    for command in list_commands(page):
        argv = shlex.split(MODELS.sub(str(world), command.replace("\\\n", " ")), comments=True)[2:]
        _, plan, _ = read("plan", argv)
        assert plan.steps > 0, command


def test_the_reward_of_the_tutorial_fits_its_hook(world: Path):
    load_hook(f"{world / 'reward.py'}:score", RewardFn)


def test_the_pages_have_commands():
    assert sum(len(list_commands(page)) for page in WITH_COMMANDS) > 25


def test_every_python_block_compiles():
    broken = []
    for page in DOCS:
        for body in blocks(page, "python"):
            try:
                compile(body, named(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            except SyntaxError as error:
                broken.append(f"{named(page)}: {error}")
    assert not broken


def test_every_marked_block_runs(world: Path, tmp_path: Path):
    """In one process, since most of its time is the import of torch."""
    assert len(MARKED) >= 4
    program = [
        f"exec(compile({body!r}, {named(page)!r}, 'exec'), {{'MODEL': {str(world)!r}}})" for page, body in MARKED
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(program)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_thresholds_of_what_to_watch_are_the_dashboards():
    text = (ROOT / "docs" / "what_to_watch.md").read_text(encoding="utf-8")
    rows = {cells[1].strip(): cells for line in text.splitlines() if len(cells := line.split("|")) == 7}
    for rule in health._SHARES:
        _, _, metric, warn, bad, *_ = (cell.strip() for cell in rows[rule.name])
        assert (metric, warn, bad) == (
            f"`{rule.metric}`",
            f"{rule.warn:.0%}".replace("%", " %"),
            f"{rule.bad:.0%}".replace("%", " %"),
        )
    source = Path(health.__file__).read_text(encoding="utf-8")
    names = {*re.findall(r'name="([^"]+)"', source), "KL of an update"}
    assert not [name for name in names if name not in rows]
