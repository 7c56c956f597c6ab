"""The out-of-memory report: found behind any wrapper, with the planned shares and flags that a resumed run accepts."""

import re

import pytest
import torch
from tests.launch.small_run import flags, write_inputs

from miles.cluster.oom_kill import OOM_KILLED
from miles.core.errors import TrainerError
from miles.launch.main import main
from miles.launch.read_config import read
from miles.launch.runtime.oom_report import OutOfMemoryError, find_allocation_failure, report_out_of_memory
from miles.launch.runtime.run_directory import MAY_CHANGE


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def test_an_allocation_of_torch_that_fails_is_found_behind_its_wrappers():
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 60)  # what torch raises here is the oracle
    try:
        try:
            raise real.value
        except RuntimeError as error:
            raise TrainerError("rank 0 failed") from error
    except TrainerError as error:
        wrapped = ExceptionGroup("tasks", [ValueError("other"), error])
    assert find_allocation_failure(wrapped) is real.value
    assert find_allocation_failure(ValueError("no memory of this")) is None
    killed = f"rank 1 of 2 ended with SIGKILL: {OOM_KILLED} the cgroup's memory limit of 4 GiB was reached"
    assert find_allocation_failure(TrainerError(killed)) is not None
    assert find_allocation_failure(TrainerError("rank 1 of 2 ended with SIGKILL, which another process sent")) is None
    assert find_allocation_failure(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")) is not None


def test_a_step_that_runs_out_of_memory_ends_with_a_ledger_and_is_resumed_with_the_advice(
    inputs, tmp_path, capsys, monkeypatch
):
    argv = flags(inputs, tmp_path / "run", steps=4)
    argv[argv.index("--custom-rm-path") + 1] = f"{__name__}:reward"
    from miles.train.policy_trainer import PolicyTrainer

    step, steps = PolicyTrainer.step, []

    async def fail(self, batch):
        steps.append(batch)
        if len(steps) == 3:
            torch.empty(1 << 60)
        return await step(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(PolicyTrainer, "step", fail)
        assert main(["train", *argv]) == 1
    printed = capsys.readouterr().err
    assert "the host ran out of memory" in printed and "Traceback" not in printed
    assert re.search(r"MiB +optimizer", printed) and "What would help: " in printed
    assert "--max-tokens-per-gpu 8192 (now 16384)" in printed and "--gradient-checkpointing" in printed
    assert main(["train", *argv, "--max-tokens-per-gpu", "8192", "--gradient-checkpointing"]) == 0


async def reward(prompt, trajectory):
    from miles.core.types import Reward

    return Reward(value=float(trajectory.index))


def test_advice_for_a_resumed_run_is_accepted_by_it(inputs, tmp_path):
    config, plan, _ = read("train", flags(inputs, tmp_path / "run"))
    with pytest.raises(OutOfMemoryError) as raised, report_out_of_memory(config, plan):
        raise MemoryError("no memory")
    text = str(raised.value)
    advised = set(re.findall(r"--([a-z-]+)", text.partition("What would help")[2].partition("Nothing was lost")[0]))
    fixed = set(re.findall(r"--([a-z-]+)", text.partition("Nothing was lost")[2]))
    assert advised and {name.replace("-", "_") for name in advised - fixed} <= MAY_CHANGE
