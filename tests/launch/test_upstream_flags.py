"""Flags of upstream's training loop, each seen in a small run."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.launch.small_run import everything, flags, write_inputs

from miles.core.errors import UsageError
from miles.launch.main import main
from miles.launch.read_config import read


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("world"))


def read_metrics(run: Path, name: str) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows if name in row]


def test_every_checkpoint_is_also_a_plain_model(world: Path, tmp_path: Path):
    run, models = tmp_path / "run", tmp_path / "models"
    more = ("--save-hf", f"{models}/{{rollout_id}}", "--keep-checkpoints", "1")
    assert main(["train", *flags(world, run, *more, steps=4)]) == 0
    assert sorted(folder.name for folder in models.iterdir()) == ["2", "4"]
    files = {file.name for file in (models / "2").iterdir()}
    assert files == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    last = run / "checkpoints" / "step-000004" / "model.safetensors"
    assert (models / "4" / "model.safetensors").read_bytes() == last.read_bytes()


def test_a_run_ended_early_on_purpose_continues_as_if_it_had_not(world: Path, tmp_path: Path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert main(["train", *flags(world, whole, steps=4)]) == 0
    assert main(["train", *flags(world, parted, "--debug-exit-after-rollout", "2", steps=4)]) == 0
    assert len(read_metrics(parted, "reward")) == 2
    assert main(["train", *flags(world, parted, steps=4)]) == 0
    assert everything(whole) == everything(parted)


def test_moments_are_forgotten_after_every_rollout_step(world: Path, tmp_path: Path):
    from safetensors import safe_open

    run = tmp_path / "run"
    assert main(["train", *flags(world, run, "--reset-optimizer-states", steps=2)]) == 0
    with safe_open(str(run / "checkpoints" / "step-000002" / "optimizer.safetensors"), "pt") as file:
        assert not [name for name in file.keys() if not name.startswith("master")]  # noqa: SIM118
    state = json.loads((run / "checkpoints" / "step-000002" / "trainer.json").read_text())
    assert state["updates"] == 4


def test_the_reference_follows_the_policy_also_when_resumed(world: Path, tmp_path: Path):
    still, whole, parted = tmp_path / "still", tmp_path / "whole", tmp_path / "parted"
    assert main(["train", *flags(world, still, "--save-interval", "1", steps=4)]) == 0
    line = ("--ref-update-interval", "2", "--save-interval", "1")
    assert main(["train", *flags(world, whole, *line, steps=4)]) == 0
    assert main(["train", *flags(world, parted, *line, "--debug-exit-after-rollout", "3", steps=4)]) == 0
    assert main(["train", *flags(world, parted, *line, steps=4)]) == 0
    assert everything(whole) == everything(parted)
    kl, drift = read_metrics(whole, "kl"), read_metrics(still, "kl")
    assert kl[:2] == drift[:2] and abs(kl[2]) < abs(drift[2])


def test_rewards_are_trained_on_as_they_are(world: Path, tmp_path: Path):
    run = tmp_path / "run"
    assert main(["train", *flags(world, run, "--disable-rewards-normalization", steps=2)]) == 0
    assert min(read_metrics(run, "advantage_mean")) > 0.1


def test_environment_variables_reach_the_trainer(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MILES_TEST_SEEN", "before")
    (tmp_path / "hook.py").write_text(
        "import os\nfrom pathlib import Path\n"
        f"def show(model):\n    Path({str(tmp_path / 'seen')!r}).write_text(os.environ['MILES_TEST_SEEN'])\n"
    )
    more = ("--train-env-vars", '{"MILES_TEST_SEEN": 7}', "--custom-megatron-init-path", f"{tmp_path / 'hook.py'}:show")
    assert main(["train", *flags(world, tmp_path / "run", *more, steps=2)]) == 0
    assert (tmp_path / "seen").read_text() == "7"


def test_an_engine_that_keeps_its_memory_samples_the_same(world: Path, tmp_path: Path):
    runs = {"--no-offload-rollout": tmp_path / "kept", "--offload": tmp_path / "released"}
    for flag, run in runs.items():
        assert main(["train", *flags(world, run, flag, steps=2)]) == 0
    assert everything(runs["--no-offload-rollout"]) == everything(runs["--offload"])


def test_balancing_by_flops_is_an_option(world: Path, tmp_path: Path):
    assert read("plan", flags(world, tmp_path, "--balance-by-flops"))[0].train.balance_by == "flops"


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (
            "--offload-rollout --max-weight-staleness 1",
            "--offload-rollout is for engines and a trainer that take turns",
        ),
        ("--offload --no-offload-rollout", "--no-offload-rollout contradicts it"),
        ("--save-hf models/{step}", "--save-hf models/{step} has a placeholder"),
        ('--train-env-vars {"A":[1]}', "--train-env-vars A must be a text or a number"),
        ("--disable-rewards-normalization --advantage-estimator rloo", "--disable-rewards-normalization is for grpo"),
        ("--ref-update-interval 3", "give a --save-interval that divides it"),
        ("--ref-update-interval 4 --keep-checkpoints 1", "raise --keep-checkpoints to 3"),
        ("--balance-by-flops 1", "--balance-by-flops takes no value"),
    ],
)
def test_what_does_not_go_together_is_refused(world: Path, tmp_path: Path, more: str, problem: str):
    with pytest.raises(UsageError) as error:
        read("plan", flags(world, tmp_path, *more.split()))
    assert any(problem in one for one in error.value.problems), error.value.problems


def write_dump(path: Path, rollout_id: int, *, groups: int = 4, size: int = 4, **more: Any) -> None:
    """A file as upstream writes it."""
    import torch

    samples = [
        {
            "group_index": rollout_id * groups + group,
            "index": index,
            "prompt": "abc",
            "tokens": [5, 6, 7, 8, 9, 10],
            "response": "xyz",
            "response_length": 3,
            "label": "c",
            "reward": float(index % 2),
            "loss_mask": [1, 0, 1],
            "rollout_log_probs": [-1.0, -2.0, -3.0],
            "weight_versions": ["1"],
            "status": "completed",
            "metadata": {"level": 1},
            **more,
        }
        for group in range(groups)
        for index in range(size)
    ]
    torch.save({"rollout_id": rollout_id, "samples": samples}, path)


def replay_flags(world: Path, run: Path, dumps: str, *more: str) -> list[str]:
    line = flags(world, run, "--load-debug-rollout-data", dumps, "--no-eval-interval", *more, steps=2)
    return [*line, "--no-dynamic-sampling-filter-path"]


def test_a_run_trains_on_dumps_of_upstream(world: Path, tmp_path: Path):
    import torch

    for rollout_id in range(2):
        write_dump(tmp_path / f"{rollout_id}.pt", rollout_id)
    data = ("--save-debug-train-data", f"{tmp_path}/train-{{rollout_id}}.pt", "--log-correct-samples")
    assert main(["train", *replay_flags(world, tmp_path / "run", f"{tmp_path}/{{rollout_id}}.pt", *data)]) == 0
    assert read_metrics(tmp_path / "run", "correct_ratio") == [0.5, 0.5]
    assert read_metrics(tmp_path / "run", "correct_response_length") == [2.0, 2.0]
    assert read_metrics(tmp_path / "run", "trained_tokens") == [32.0, 32.0]
    written = torch.load(tmp_path / "train-2.pt", weights_only=True)
    assert written["rollout_id"] == 2
    assert written["rollout_data"]["loss_masks"][0].tolist() == [False, False, False, True, False, True]


def test_a_share_of_recorded_groups_is_trained_on(world: Path, tmp_path: Path):
    for rollout_id in range(2):
        write_dump(tmp_path / f"{rollout_id}.pt", rollout_id, groups=8)
    share = ("--load-debug-rollout-data-subsample", "0.5")
    assert main(["train", *replay_flags(world, tmp_path / "run", f"{tmp_path}/{{rollout_id}}.pt", *share)]) == 0
    assert read_metrics(tmp_path / "run", "samples") == [16.0, 16.0]


class Exploit:
    """An object whose pickle would run code when it is read."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.mkdir, (str(self._target),)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"rollout_log_probs": None}, "rollout_log_probs must have a log-prob"),
        ({"reward": {"a": 1.0, "b": 0.0}}, "name one with --reward-key"),
        ({"response_length": 9}, "cannot be trained on"),
    ],
)
def test_a_dump_that_cannot_be_trained_on_is_refused(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: dict[str, Any], problem: str
):
    for rollout_id in range(2):
        write_dump(tmp_path / f"{rollout_id}.pt", rollout_id, **more)
    assert main(["train", *replay_flags(world, tmp_path / "run", f"{tmp_path}/{{rollout_id}}.pt")]) != 0
    assert problem in capsys.readouterr().err


def test_a_dump_runs_no_code(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for rollout_id in range(2):
        write_dump(tmp_path / f"{rollout_id}.pt", rollout_id, metadata={"x": Exploit(tmp_path / "pwned")})
    assert main(["train", *replay_flags(world, tmp_path / "run", f"{tmp_path}/{{rollout_id}}.pt")]) != 0
    assert "cannot be read without running code of the file" in capsys.readouterr().err
    assert not (tmp_path / "pwned").exists()
