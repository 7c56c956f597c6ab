"""Runs, plans and servers of models and data that are named by their place on the hub."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load, load_file
from tests.fake_hub import FakeHub, serving, use_hub
from tests.launch.small_run import flags, write_inputs

from miles.cluster.hub_client import HubError
from miles.launch.commands.serve import read_serve_config
from miles.launch.hub.upload import push_to_hub
from miles.launch.main import main
from miles.launch.read_config import read


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("world"))


@pytest.fixture
def hub(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving() as found:
        use_hub(monkeypatch, found.url, tmp_path / "hub")
        found.commit_folder("model", "org/tiny", world)
        words = {"data/train.jsonl": (world / "train.jsonl"), "data/test.jsonl": (world / "heldout.jsonl")}
        found.commit("dataset", "org/words", {name: file.read_bytes() for name, file in words.items()})
        yield found


def hub_flags(world: Path, run: Path, *more: str) -> list[str]:
    """A small run with every path replaced by a name."""
    names = {str(world): "org/tiny", str(world / "train.jsonl"): "org/words@train@[:20]"}
    names[str(world / "heldout.jsonl")] = "org/words@test"
    return [names.get(word, word) for word in flags(world, run, *more, steps=2)]


def test_a_run_of_names_records_their_revisions_and_resumes_with_them(
    hub: FakeHub, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *hub_flags(world, run)]) == 0
    model, data = hub.refs["model", "org/tiny"]["main"], hub.refs["dataset", "org/words"]["main"]
    stored = tomllib.loads((run / "config.toml").read_text())
    assert stored["models"]["hf_checkpoint"] == f"hf://org/tiny@{model}"
    assert stored["rollout"]["prompt_data"] == [f"org/words@train@{data}@[:20]"]
    assert stored["rollout"]["eval_prompt_data"] == ["heldout", f"org/words@test@{data}"]
    inputs = json.loads((run / "inputs.json").read_text())
    assert f"hf://org/tiny@{model}/config.json" in inputs["tokenizer or config"]

    hub.commit("model", "org/tiny", {"README.md": b"newer"})
    hub.commit("dataset", "org/words", {"README.md": b"newer"})
    capsys.readouterr()
    assert main(["train", *hub_flags(world, run)]) == 0  # complete, with the revisions it was started with
    newer = hub.refs["model", "org/tiny"]["main"]
    again = [word if word != "org/tiny" else f"org/tiny@{newer}" for word in hub_flags(world, run)]
    assert main(["train", *again]) != 0
    assert f"hf_checkpoint was 'hf://org/tiny@{model}' and is now 'hf://org/tiny@{newer}'" in capsys.readouterr().err


def test_a_plan_says_what_would_be_downloaded_and_downloads_no_weights(
    hub: FakeHub, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [word for word in hub_flags(world, tmp_path / "run") if word not in ("--save", str(tmp_path / "run"))]
    assert main(["plan", *argv]) == 0
    shown = capsys.readouterr().out
    sha = hub.refs["model", "org/tiny"]["main"]
    assert f"hf://org/tiny@{sha}: " in shown
    assert "of weights, before training starts" in shown
    assert not list((tmp_path / "hub").rglob("*.safetensors"))
    assert not any(line.endswith(".safetensors") for line in hub.requests)
    assert main(["plan", "--json", *argv]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["options"]["hf_checkpoint"]["value"] == f"hf://org/tiny@{sha}"
    assert found["plan"]["run_dir"] == "runs/tiny-grpo"
    assert found["plan"]["downloads"][0]["size"] == (world / "model.safetensors").stat().st_size


def test_names_that_cannot_be_resolved_are_reported_together(
    hub: FakeHub, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"org/tiny": "org/none", "org/words@test": "org/words@dev"}
    argv = [wrong.get(word, word) for word in hub_flags(world, tmp_path / "run", "--ref-load", "org/absent")]
    assert main(["plan", *argv]) == 2
    said = capsys.readouterr().err
    assert "--hf-checkpoint org/none: There is no model org/none" in said
    assert "--ref-load org/absent: There is no model org/absent" in said
    assert "--eval-prompt-data org/words@dev: org/words@dev does not name a split" in said
    assert said.count("\nmiles: ") == 3


def test_a_recipe_takes_names_too(
    hub: FakeHub, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text('hf_checkpoint = "org/tiny"\nprompt_data = ["org/words@train"]\n')
    dropped = ("--hf-checkpoint", "org/tiny", "--prompt-data", "org/words@train@[:20]")
    argv = [word for word in hub_flags(world, tmp_path / "run") if word not in dropped]
    assert main(["plan", str(recipe), *argv]) == 0
    assert "hf://org/tiny@" in capsys.readouterr().out


def test_other_commands_take_a_name(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served = read_serve_config(["org/tiny"])
    assert served.serve.served_model_name == "org/tiny"
    assert Path(str(served.models.hf_checkpoint)).is_relative_to(tmp_path / "hub")
    assert main(["plan", "org/tiny"]) == 0
    assert "tiny" in capsys.readouterr().out
    assert main(["doctor", "org/none"]) == 2
    assert main(["parity", "org/none"]) == 2
    assert main(["chat", "org/none"]) == 2
    assert capsys.readouterr().err.count("There is no model org/none") == 3


def test_a_check_reads_data_and_grader_without_the_weights(
    hub: FakeHub, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *hub_flags(world, tmp_path / "run")]) == 0
    assert "download     hf://org/tiny@" in capsys.readouterr().out
    assert not list((tmp_path / "hub").rglob("*.safetensors"))


def test_a_finished_run_is_uploaded_with_its_card(
    hub: FakeHub, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.commit("model", "org/tiny", {"README.md": b"---\nlicense: apache-2.0\n---\n"})
    argv = hub_flags(world, tmp_path / "run", "--push-to-hub", "me/reverser", "--hub-private", "--hub-revision", "v1")
    assert main(["train", *argv]) == 2
    assert "--push-to-hub needs a token that may write to me/reverser: set HF_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "mine")
    hub.token = "mine"
    hub.refuses_commits = True
    assert main(["train", *argv]) == 3
    assert "The run itself is complete; the same command tries again." in capsys.readouterr().err
    hub.refuses_commits = False
    assert main(["train", *argv]) == 0
    assert "Uploaded to" in capsys.readouterr().out
    files = hub.files("me/reverser", "v1")
    saved = tmp_path / "run" / "checkpoints" / "step-000002"
    assert files["model.safetensors"] == (saved / "model.safetensors").read_bytes()
    assert "config.json" in files
    assert not any(name.startswith(("optimizer", "trainer", "cursor", "manifest")) for name in files)
    assert "me/reverser" in hub.private
    card = files["README.md"].decode()
    header = yaml.safe_load(card.split("---")[1])
    assert header["base_model"] == "org/tiny"
    assert header["license"] == "apache-2.0"
    assert header["datasets"] == ["org/words"]
    assert "| `--lr` | `0.01` |" in card
    assert "| step | mean reward |" in card
    assert str(tmp_path) not in card


def test_a_checkpoint_of_megatron_is_uploaded_as_a_hugging_face_folder(
    hub: FakeHub, world: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert main(["convert", str(world), str(tmp_path / "dist"), "--format", "torch_dist"]) == 0
    (run / "checkpoints").mkdir(parents=True)
    (tmp_path / "dist" / "release").rename(run / "checkpoints" / "step-000002")
    (run / "metrics.jsonl").touch()
    more = ("--push-to-hub", "me/distributed", "--train-backend", "megatron", "--ckpt-format", "torch_dist")
    config, *_ = read("plan", flags(world, run, *more))
    hub.token = "mine"
    push_to_hub(config, run, "mine")
    files = hub.files("me/distributed", "main")
    assert {"config.json", "model.safetensors", "README.md"} <= files.keys()
    assert not any(name.endswith((".distcp", ".pt")) or name in (".metadata", "metadata.json") for name in files)
    own, uploaded = load_file(world / "model.safetensors"), load(files["model.safetensors"])
    assert own.keys() == uploaded.keys() and all(torch.equal(own[name], uploaded[name]) for name in own)
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []
    (run / "checkpoints" / "step-000002" / ".metadata").unlink()
    with pytest.raises(HubError, match=r"could not be uploaded to me/distributed: .*\.metadata is missing"):
        push_to_hub(config, run, "mine")
