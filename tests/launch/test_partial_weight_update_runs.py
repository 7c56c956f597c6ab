"""A run that trains part of its model: after the first weight update servers are sent that part alone."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from tests.launch.small_run import flags, miles, write_inputs

from miles.models.base import CausalLM

PROVIDED = ("--parity", "exact", "--custom-model-provider-path", f"{__name__}:last_layer")


def last_layer(model: CausalLM) -> CausalLM:
    """All but the last layer is frozen."""
    last = max(int(name.split(".")[1]) for name, _ in model.named_parameters() if name.startswith("layers."))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(f"layers.{last}."))
    return model


def sizes(checkpoint: Path) -> tuple[int, int]:
    """The bytes of all tensors of a checkpoint, and of those of its last layer."""
    with safe_open(checkpoint, "pt") as file:
        found = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
    last = max(int(name.split(".")[2]) for name in found if name.startswith("model.layers."))
    return sum(found.values()), sum(size for name, size in found.items() if f".layers.{last}." in name)


@pytest.mark.parametrize(
    "transport", ["tensor", *(pytest.param(each, marks=pytest.mark.slow) for each in ("auto", "distributed", "disk"))]
)
def test_servers_are_sent_what_is_trained_and_the_run_is_the_one_with_the_engine_inside(tmp_path, transport):
    inputs, run, inside = write_inputs(tmp_path / "inputs"), tmp_path / "run", tmp_path / "inside"
    more = ("--rollout-backend", "served", "--rollout-num-engines", "2", "--update-weight-transport", transport)
    served = miles("train", *flags(inputs, run, *PROVIDED, *more, "--update-weight-buffer-size", "20000", steps=2))
    assert served.returncode == 0, served.stderr
    plain = miles("train", *flags(inputs, inside, *PROVIDED, steps=2))
    assert plain.returncode == 0, plain.stderr
    assert (run / "metrics.jsonl").read_text() == (inside / "metrics.jsonl").read_text()
    ends = [max((each / "checkpoints").iterdir()) / "model.safetensors" for each in (run, inside)]
    assert ends[0].read_bytes() == ends[1].read_bytes()
    timings = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    sent = [row["seconds"]["publish/bytes"] for row in timings if row["kind"] == "train"]
    everything, trained = sizes(ends[0])
    assert len(sent) == 2 and all(0 < size <= trained for size in sent) and trained < everything
