"""The demo's model with random weights, words to reverse, and the options of a small run."""

from pathlib import Path

import pytest
import transformers.models.auto.tokenization_auto  # noqa: F401  imported here, so that no test pays for it

import miles.api.policy  # noqa: F401
from miles.launch.commands import demo_task, train

WORDS = ("abc", "bcd", "cde", "xyz", "fgh", "ijk", "lmn", "opq")
ROWS = [{"input": word, "label": word[::-1], "number": i} for i, word in enumerate(WORDS)]
SMALL = {
    "label_key": "label",
    "apply_chat_template": True,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "rollout_max_response_len": 6,
    "lr": 1e-2,
    "device": "cpu",
    "num_threads": 1,
    "view": "none",
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the demo's checkpoint."""
    folder = tmp_path_factory.mktemp("model")
    demo_task.write_checkpoint(folder, moe=False, seed=1)
    return str(folder)


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs are written under the test's own folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves are not drawn, which takes longer than these runs."""
    monkeypatch.setattr(train, "plot_curves", lambda metrics, png, title: False)


def shared_letters(response: str, label: str) -> int:
    """How many of the wanted letters a response has: something even a random model earns now and then."""
    return len(set(response) & set(label))
