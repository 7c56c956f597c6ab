"""The examples of docs/library.md: each is under 60 lines, runs, and learns; GRPO is ``miles train`` to the bit."""

import ast
import asyncio
import importlib.util
import inspect
import json
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tests.api.conftest import ROWS, SMALL, WORDS

import miles

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "examples" / "library"
CHAT = {name: SMALL[name] for name in ("apply_chat_template", "device", "num_threads", "lr")}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, LIBRARY / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def words(tmp_path: Path) -> str:
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def list_numbers(text: str, name: str) -> list[float]:
    return [float(number) for number in re.findall(rf"{name} +([-+.\d]+)", text)]


@pytest.mark.parametrize("name", ["grpo", "sft", "self_play"])
def test_an_example_has_at_most_60_lines_and_is_on_the_page(name: str):
    code = (LIBRARY / f"{name}.py").read_text()
    assert len(code.splitlines()) <= 60
    assert code.rstrip() in list_code(ROOT / "docs" / "library.md")


def list_code(page: Path) -> list[str]:
    return [body.rstrip() for body in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


def test_the_short_examples_of_the_page_run(model: str):
    whole = {(LIBRARY / f"{name}.py").read_text().rstrip() for name in ("grpo", "sft", "self_play")}
    short = [code for code in list_code(ROOT / "docs" / "library.md") if code not in whole]
    assert len(short) == 3
    names = {"MODEL": model}
    for code in short:
        exec(code, names)
    assert names["result"].finished and (Path("state") / "step-000001").is_dir()


def test_the_notebook_runs_cell_by_cell_and_learns():
    """As a kernel runs it: one namespace, in a running event loop, with await outside of functions."""
    cells = json.loads((LIBRARY / "grpo.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    names: dict[str, object] = {}

    async def run():
        for cell in cells:
            if cell["cell_type"] == "code":
                source = "".join(cell["source"])
                found = eval(compile(source, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
                if inspect.iscoroutine(found):
                    await found

    asyncio.run(run())
    rewards, curve = names["rewards"], names["curve"]
    assert isinstance(rewards, list) and isinstance(curve, list)
    assert len(rewards) == 6 and len(curve) == 4 and curve[-1] > rewards[0]
    assert len(names["samples"]) == 8  # type: ignore[arg-type]


@pytest.mark.parametrize("parity", ["fast", "exact"])
def test_grpo_from_the_verbs_is_miles_train_to_the_bit(
    model: str, words: str, parity: str, capsys: pytest.CaptureFixture[str]
):
    grpo = load("grpo")
    options = {**CHAT, "label_key": "label", "rollout_max_response_len": 6, "parity": parity, "use_kl_loss": True}
    options["kl_loss_coef"] = 0.01
    folder = grpo.train(model, words, "state", steps=4, prompts_per_step=3, n=4, **options)  # more than one epoch
    printed = capsys.readouterr().out
    run = miles.train(
        model,
        words,
        grpo.shared_letters,
        steps=4,
        rollout_batch_size=3,
        n_samples_per_prompt=4,
        save="run",
        view="none",
        **options,
    )
    assert (folder / "model.safetensors").read_bytes() == (run.checkpoint / "model.safetensors").read_bytes()
    assert (folder / "model.safetensors").read_bytes() != (Path(model) / "model.safetensors").read_bytes()
    assert list_numbers(printed, "reward") == [round(value, 3) for value in run.curve("reward")[1]]
    assert list_numbers(printed, "grad") == [round(value, 2) for value in run.curve("grad_norm")[1]]


def test_sft_learns_the_demonstrations(model: str, words: str, capsys: pytest.CaptureFixture[str]):
    options = {name: value for name, value in CHAT.items() if name != "lr"}
    folder = load("sft").train(model, words, "state", epochs=6, batch_size=4, lr=1e-2, label_key="label", **options)
    losses = list_numbers(capsys.readouterr().out, "loss")
    assert len(losses) == 12 and np.mean(losses[-2:]) < 0.8 * losses[0] and folder.name == "step-000012"


def test_self_play_makes_words_that_win(model: str, capsys: pytest.CaptureFixture[str]):
    example = load("self_play")
    options = {**CHAT, "rollout_max_response_len": 6}
    example.train(model, "state", WORDS[:4], steps=12, games=4, referee=example.more_vowels, **options)
    vowels = list_numbers(capsys.readouterr().out, "vowels")
    assert np.mean(vowels[-3:]) > 1.0 + np.mean(vowels[:3])
