"""``miles parity`` with Megatron-Core on one side: every operation is held side by side, and a nudge is found."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.launch.parity.test_command import CPU, compared
from tests.models.oracle import hf_model

from miles.launch.main import main
from miles.launch.parity.diff import describe_difference
from miles.models.activation_hooks import OPERATIONS
from miles.models.checkpoint import hf

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

EXPERTS = {"router", "experts", "gates"}
KINDS = {
    "qwen3": set(OPERATIONS) - EXPERTS,
    "qwen3_moe": set(OPERATIONS),
    "llama": set(OPERATIONS) - EXPERTS,
    "qwen2": set(OPERATIONS) - EXPERTS,
    "deepseek_v3": set(OPERATIONS) - {"qkv", "rotation"},
}
FAMILIES = {"gpt-oss": set(OPERATIONS), "gemma3": set(OPERATIONS) - EXPERTS, "minimax-m2": set(OPERATIONS)}
"""Families of whose layers some modules are the decoder's."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    from tests.backends.megatron import cases, family_cases

    made: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("models") / kind
            (family_cases.write_family if kind in FAMILIES else cases.written)(made[kind], kind)
        return made[kind]

    return folder_of


@pytest.fixture(autouse=True)
def _megatron_on_this_processor(request):
    from tests.backends.megatron.shim import on_cpu

    if "as_it_is" in request.fixturenames:
        yield
        return
    with on_cpu():
        yield


@pytest.fixture
def as_it_is() -> None:
    """Megatron without what lets it run on a CPU."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", ["native", "fsdp", "transformers"])
def test_megatron_agrees_with_every_other_in_every_operation(saved, kind, other):
    found = compared(saved(kind), other, "megatron")
    assert found.first(5e-5) is None, describe_difference(found, a=other, b="megatron", tolerance=5e-5)
    wanted = KINDS[kind] - ({"experts", "gates"} if kind == "deepseek_v3" and other == "transformers" else set())
    assert {gap.place[1] for gap in found.gaps} >= wanted
    layers = {gap.place[0] for gap in found.gaps if gap.place[1] == "residual"}
    assert layers == set(range(found.layers))


@pytest.mark.parametrize("kind", FAMILIES)
def test_operations_of_the_decoders_modules_are_those_of_the_fsdp_trainer(saved, kind):
    found = compared(saved(kind), "fsdp", "megatron")
    assert found.first(5e-5) is None, describe_difference(found, a="fsdp", b="megatron", tolerance=5e-5)
    assert {gap.place[1] for gap in found.gaps} >= FAMILIES[kind]


@pytest.mark.parametrize(
    ("kind", "name", "place"),
    [
        ("qwen3_moe", "embedding.weight", (-1, "embedding")),
        ("qwen3_moe", "layers.1.attention_norm.weight", (1, "norm")),
        ("qwen3_moe", "layers.2.attention.qkv.weight", (2, "qkv")),
        ("qwen3_moe", "layers.1.attention.q_norm.weight", (1, "rotation")),
        ("qwen3_moe", "layers.0.attention.output.weight", (0, "output")),
        ("qwen3_moe", "layers.3.mlp_norm.weight", (3, "mlp norm")),
        ("qwen3_moe", "layers.0.moe.router.weight", (0, "router")),
        ("qwen3_moe", "layers.1.moe.down", (1, "mlp")),
        ("qwen3_moe", "norm.weight", (4, "final norm")),
        ("qwen3_moe", "lm_head.weight", (4, "logits")),
        ("llama", "layers.2.mlp.down.bias", (2, "mlp")),
        ("llama", "layers.1.attention.output.bias", (1, "output")),
        ("deepseek_v3", "layers.3.mla.kv_b.weight", (3, "rotation")),
        ("deepseek_v3", "layers.3.moe.correction", (3, "experts")),
    ],
)
def test_a_weight_that_is_off_is_found_at_its_operation(saved, tmp_path, kind, name, place):
    folder, other = saved(kind), tmp_path / "nudged"
    decoder = hf.load(folder, device=CPU, dtype=torch.float32)
    with torch.no_grad():
        held = dict(decoder.named_parameters()) | dict(decoder.named_buffers())
        held[name].mul_(torch.linspace(0.5, 1.5, len(held[name])).view(-1, *[1] * (held[name].ndim - 1)))
    hf.export(decoder, other, like=folder)
    found = compared(folder, "fsdp", "megatron", other=other)
    first = found.first(1e-4)
    assert first is not None and first.place == place, describe_difference(
        found, a="fsdp", b="megatron", tolerance=1e-4
    )
    assert compared(other, "fsdp", "megatron").first(1e-4) is None


def test_without_an_accelerator_it_is_refused_in_one_sentence(saved, capsys, as_it_is):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["parity", str(saved("qwen3")), "--b", "megatron", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "megatron needs an accelerator, which this machine does not have" in said and said.count("\n") == 1


MECHANISMS = (
    *("ernie 4.5", "mistral windowed", "ministral 3", "phi3 tied, part of a head turned", "smollm3", "glm", "mixtral"),
    *("qwen2 moe", "deepseek v2 lite", "kimi k2", "glm-4.5"),
)


@pytest.mark.extended
@pytest.mark.parametrize("kind", MECHANISMS)
def test_exact_holds_for_every_mechanism_that_megatron_trains(tmp_path, capsys, kind):
    hf_model(kind).save_pretrained(tmp_path)
    words = ["parity", str(tmp_path), "--b", "megatron", "--device", "cpu", "--dtype", "bfloat16"]
    assert main([*words, "--parity", "exact", "--exact"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_every_operation_is_the_engines_to_the_last_bit(saved, capsys, kind, dtype):
    words = ["parity", str(saved(kind)), "--b", "megatron", "--device", "cpu", "--dtype", dtype, "--exact"]
    assert main([*words, "--parity", "exact"]) == 0, capsys.readouterr().out
    assert main(words) == 1  # fast kernels are not
