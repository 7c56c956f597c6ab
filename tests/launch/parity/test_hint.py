"""A run whose parity is red, or that stops for it, says which ``miles parity`` command finds the operation."""

import shlex
from dataclasses import replace

import pytest
from tests.launch.small_run import flags, write_inputs

from miles.core.errors import ParityError
from miles.core.events import StepFinished
from miles.core.types import Version
from miles.launch.commands.train import ParityHint, add_parity_command, format_parity_command
from miles.launch.main import main
from miles.launch.read_config import read


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def config_of(inputs, run, *more):
    return read("train", flags(inputs, run, *more, steps=2))[0]


def test_the_command_names_the_run_its_planes_and_its_arithmetic(inputs, tmp_path):
    run = tmp_path / "run"
    plain = format_parity_command(config_of(inputs, run), run, 3)
    assert shlex.split(plain)[:2] == ["miles", "parity"] and "--step" not in plain  # there is no checkpoint yet
    assert "--a native --b fsdp" in plain and "--device cpu" in plain
    other = config_of(inputs, run)
    sglang = replace(other.sglang, rollout_backend="sglang", sglang_python="there/python")
    other = replace(other, sglang=sglang, train=replace(other.train, train_backend="megatron"))
    assert "--a sglang --b megatron --sglang-python there/python" in format_parity_command(other, run)
    other = replace(other, sglang=replace(other.sglang, rollout_external_engine_addrs=("here:30000",)))
    assert "--a http://here:30000 --b megatron" in format_parity_command(other, run)
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    write_inputs(run / "checkpoints" / "step-000002")
    assert f"miles parity {run} --step 3 --a" in format_parity_command(config_of(inputs, run), run, 3)
    assert format_parity_command(config_of(inputs, run, "--parity", "exact"), run).endswith("--parity exact --exact")


def test_it_is_said_once_when_the_light_turns_red(inputs, tmp_path):
    said: list[str] = []
    hint = ParityHint(config_of(inputs, tmp_path / "run"), tmp_path / "run", said.append)
    for step, gap in enumerate((1e-6, 5e-3, 0.02, 0.5), 1):
        hint(StepFinished(step=step, version=Version(), metrics={"parity_mean_abs": gap}))
    hint(StepFinished(step=9, version=Version(), metrics={}))
    (sentence,) = said
    assert (
        sentence.startswith("Parity is red at step 3 (mean difference 2.00e-02)")
        and "first differ with: miles parity" in sentence
    )


def test_an_error_of_parity_says_it_too(inputs, tmp_path):
    config = config_of(inputs, tmp_path / "run")
    wanted = r"they differ; miles parity .* --a native --b fsdp .* finds the operation in which they first differ"
    with pytest.raises(ParityError, match=wanted), add_parity_command(config, tmp_path / "run"):
        raise ParityError("they differ")


def test_the_command_of_a_red_run_runs(inputs, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", *flags(inputs, run, "--parity-tolerance", "1e-12", steps=2)]) == 0
    said = capsys.readouterr().out
    (command,) = [
        line.partition("first differ with: ")[2] for line in said.splitlines() if line.startswith("Parity is red")
    ]
    assert main(shlex.split(command)[1:]) == 0
    assert "native and fsdp are within 0.0001 in all" in capsys.readouterr().out
