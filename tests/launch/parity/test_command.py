"""``miles parity``: it finds where two programs part, and finds nothing where they do not."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.launch.small_run import flags, write_inputs
from tests.models.oracle import hf_model

from miles.kernels.numerics import FAST
from miles.launch.main import main
from miles.launch.parity.backend import ParityModel
from miles.launch.parity.backends import get_backend
from miles.launch.parity.diff import ParityDiff, compare, describe_difference
from miles.models.activation_hooks import OPERATIONS
from miles.models.checkpoint import hf
from miles.models.resolve import resolve_spec

CPU = torch.device("cpu")
LENGTHS = (19, 5, 8)


def model_of(folder: Path, **how) -> ParityModel:
    spec = resolve_spec(folder, "native")
    return ParityModel(folder=folder, spec=spec, device=CPU, dtype=torch.float32, prefill_chunk=5, **how, numerics=FAST)


def compared(folder: Path, a: str, b: str, other: Path | None = None) -> ParityDiff:
    one, two = model_of(folder), model_of(other or folder)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, one.spec.vocab_size, n).astype(np.int32) for n in LENGTHS]
    return compare(get_backend(a)(one, sequences), get_backend(b)(two, sequences), layers=one.spec.num_layers)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("models") / kind.replace(" ", "-")
            hf_model(kind).save_pretrained(made[kind])
        return made[kind]

    return folder_of


KINDS = ("llama 3.1", "qwen3", "qwen3 moe normalised", "gemma3", "gemma2", "gpt-oss", "deepseek v3")


@pytest.mark.parametrize("kind", KINDS)
def test_engine_and_trainer_agree_in_every_operation(saved, kind):
    found = compared(saved(kind), "native", "fsdp")
    assert found.first(1e-5) is None, describe_difference(found, a="native", b="fsdp", tolerance=1e-5)
    assert {gap.place[1] for gap in found.gaps} >= {"embedding", "norm", "output", "mlp", "residual", "log-probs"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_agrees_with_transformers_in_every_operation(saved, kind):
    found = compared(saved(kind), "native", "transformers")
    assert found.first(5e-5) is None, describe_difference(found, a="native", b="transformers", tolerance=5e-5)
    reported = {gap.place[1] for gap in found.gaps}
    wanted = set(OPERATIONS) - (set() if "moe" in kind else {"router", "experts", "gates"})
    if kind in KINDS[:5]:
        assert reported == wanted


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("embedding.weight", (-1, "embedding")),
        ("layers.1.attention_norm.weight", (1, "norm")),
        ("layers.1.attention.qkv.weight", (1, "qkv")),
        ("layers.1.attention.q_norm.weight", (1, "rotation")),
        ("layers.0.attention.output.weight", (0, "output")),
        ("layers.1.mlp_norm.weight", (1, "mlp norm")),
        ("layers.0.moe.router.weight", (0, "router")),
        ("layers.1.moe.down", (1, "mlp")),
        ("norm.weight", (2, "final norm")),
    ],
)
@pytest.mark.parametrize("sides", [("native", "fsdp"), ("native", "transformers")], ids=["trainer", "transformers"])
def test_a_weight_that_is_off_is_found_at_its_operation(saved, tmp_path, name, place, sides):
    folder, other = saved("qwen3 moe normalised"), tmp_path / "nudged"
    decoder = hf.load(folder, device=CPU, dtype=torch.float32)
    with torch.no_grad():
        decoder.get_parameter(name).mul_(1.01)
    hf.export(decoder, other, like=folder)
    found = compared(folder, *sides, other=other)
    first = found.first(1e-4)
    assert first is not None and first.place == place
    assert compared(other, *sides).first(1e-4) is None


def test_the_exit_code_and_one_sentence_say_it(saved, tmp_path, capsys):
    folder, other = saved("qwen3"), tmp_path / "nudged"
    assert main(["parity", str(folder), "--device", "cpu"]) == 0
    assert "native and fsdp are within 0.0001 in all" in capsys.readouterr().out
    assert main(["parity", str(folder), "--device", "cpu", "--exact", "--parity", "exact"]) == 0
    assert "equal bit for bit" in capsys.readouterr().out
    decoder = hf.load(folder, device=CPU, dtype=torch.float32)
    with torch.no_grad():
        decoder.get_parameter("layers.1.attention.output.weight")[3, 3] += 1
    hf.export(decoder, other, like=folder)
    assert main(["parity", str(folder), "--device", "cpu", "--other", str(other)]) == 1
    said = capsys.readouterr().out
    assert "differ at layer 1: output:" in said and "<- first" in said


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--b", "vllm"], "vllm is not a backend; there are native, sglang, transformers, fsdp, megatron, or the URL"),
        (
            ["--b", "http://127.0.0.1:9", "--other", "x"],
            "--other is a checkpoint for --b to load, but --b is a server",
        ),
        (["--sglang-python", "x"], "--sglang-python and flags of SGLang need --a sglang or --b sglang; add that"),
        (["--b", "sglang", "--sglang-dtype", "half"], "--sglang-dtype is set by --rollout-dtype, or --dtype"),
        (
            ["--a", "transformers", "--b", "transformers", "--parity", "exact"],
            "of which none is compared",
        ),
        (["--b", "http://127.0.0.1:9"], "http://127.0.0.1:9/generate request failed"),
        (["--tokens", "1", "2", "999"], "token 999 is outside the vocabulary of 53 tokens"),
        (["--tokens", "1"], "1 tokens are too few: give at least two"),
        (["--tokens", "1", "2", "--step", "3"], "--step and --tokens each set the tokens; keep one of them"),
        (["--sample", "3"], "--sample needs --step; add that, or remove --sample"),
        (["--step", "3"], "does not exist; --step needs the folder of a run that saved its rollouts"),
        (["--prompt-file", "nowhere.txt"], "--prompt-file nowhere.txt cannot be read"),
        (["--length", "1"], "--length must be at least 2"),
    ],
)
def test_bad_input_is_told_in_one_sentence(saved, capsys, flags, complaint):
    folder = str(saved("qwen3"))
    capsys.readouterr()  # transformers draws a progress bar when it saves
    assert main(["parity", folder, "--device", "cpu", *flags]) in (1, 2)
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1


def test_a_model_must_be_named_and_be_there(capsys):
    assert main(["parity"]) == 2
    assert "takes one model or run before its flags, but was given 0" in capsys.readouterr().err
    assert main(["parity", "nowhere"]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err


def test_a_trajectory_of_a_run_is_read_again(tmp_path, capsys):
    inputs, run = write_inputs(tmp_path / "inputs", moe=True), tmp_path / "run"
    assert main(["train", *flags(inputs, run, steps=2)]) == 0
    capsys.readouterr()
    assert main(["parity", str(run), "--step", "2", "--sample", "3", "--device", "cpu"]) == 0
    assert "experts" in capsys.readouterr().out
    assert main(["parity", str(run), "--step", "2", "--sample", "999", "--device", "cpu"]) == 2
    assert "--sample 999 does not exist: step 2" in capsys.readouterr().err
