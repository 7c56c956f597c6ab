"""A resumed run notices inputs that were replaced on disk."""

import json
import shutil
from pathlib import Path

import pytest
from tests.launch.small_run import flags, write_inputs

from miles.core.errors import ResumeError
from miles.launch.read_config import read
from miles.launch.runtime.input_fingerprint import FILE, check_inputs


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("source"))


@pytest.fixture
def source(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "source"))


def check(source: Path, run: Path, *more: str, resumes: bool) -> list[str]:
    run.mkdir(exist_ok=True)
    config, plan, _ = read("train", flags(source, run, *more))
    return check_inputs(run, config, plan, newest=run / "checkpoints" / "step-000002" if resumes else None)


def replace_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-100_000:] = bytes(100_000)
    path.write_bytes(data)


def test_unchanged_inputs_are_accepted(source, tmp_path):
    assert check(source, tmp_path / "run", resumes=False) == []
    assert check(source, tmp_path / "run", resumes=True) == []


def test_a_replaced_reference_model_ends_the_resumed_run(source, tmp_path):
    check(source, tmp_path / "run", resumes=False)
    replace_weights(source)
    with pytest.raises(ResumeError, match=r"the reference model of .*: .*model\.safetensors has changed; restore it"):
        check(source, tmp_path / "run", resumes=True)
    assert check(source, tmp_path / "run", resumes=False) == [], "a run without a checkpoint starts anew"


def test_a_replaced_separate_reference_model_ends_the_resumed_run(original, source, tmp_path):
    reference = Path(shutil.copytree(original, tmp_path / "reference"))
    check(source, tmp_path / "run", "--ref-load", str(reference), resumes=False)
    replace_weights(source)  # only the start of the policy, which its checkpoints replace
    assert check(source, tmp_path / "run", "--ref-load", str(reference), resumes=True) == []
    replace_weights(reference)
    with pytest.raises(ResumeError, match=r"reference/model\.safetensors has changed"):
        check(source, tmp_path / "run", "--ref-load", str(reference), resumes=True)


def test_another_chat_template_ends_the_resumed_run(source, tmp_path):
    check(source, tmp_path / "run", resumes=False)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ResumeError, match=r"chat_template\.jinja has changed"):
        check(source, tmp_path / "run", resumes=True)


def test_the_base_model_of_lora_is_compared(source, tmp_path):
    lora = ("--lora-rank", "2")
    check(source, tmp_path / "run", *lora, resumes=False)
    replace_weights(source)
    with pytest.raises(ResumeError, match="the base model of"):
        check(source, tmp_path / "run", *lora, resumes=True)


def test_another_grader_is_a_note(source, tmp_path):
    run = tmp_path / "run"
    check(source, run, resumes=False)
    stored = json.loads((run / FILE).read_text())
    stored["graders"] = dict.fromkeys(stored["graders"], "another")
    (run / FILE).write_text(json.dumps(stored))
    (note,) = check(source, run, resumes=True)
    assert note.startswith("The graders are not those this run was started with: ") and "small_run.py" in note
    assert check(source, run, resumes=True) == []


@pytest.mark.parametrize("text", ["", "[]", "{", '{"reference model": 3}'])
def test_a_damaged_file_of_fingerprints_is_a_sentence(source, tmp_path, text):
    check(source, tmp_path / "run", resumes=False)
    (tmp_path / "run" / FILE).write_text(text)
    with pytest.raises(ResumeError, match=r"inputs\.json is damaged .*; remove it to resume"):
        check(source, tmp_path / "run", resumes=True)
