"""DoRA on routed experts: what it writes into their matrices, the gradients of its parts, and its files.

Shapes: I inputs, O outputs, E experts.
"""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from tests.models.lora.test_adapters import filled, lora_for, merged_into, spec_for, written
from tests.models.oracle import hf_model, our_logits, relative, tokens_of, twin

from miles.core.errors import UsageError
from miles.models.checkpoint import peft
from miles.models.lora import adapters as adapted

FORMS = [(kind, shared) for kind in ("qwen3 moe", "gpt-oss", "deepseek v3") for shared in (False, True)]


def build(spec, shared=False):
    """Adapters of all experts, whose magnitudes are positive."""
    lora = replace(lora_for(spec, wanted="experts"), use_dora=True, shared_outer=shared)
    adapters = filled(lora)
    with torch.no_grad():
        for target in lora.targets:
            adapters.parameters[peft.magnitude_name(target)].abs_().add_(0.5)
    return adapters


@pytest.mark.parametrize(("kind", "shared"), FORMS)
def test_matrices_and_gradients_are_those_of_the_definition(kind, shared):
    """The oracle is W' = m / |V| V, V = W + s B A, in float64, and the gradient that autograd gives W'."""
    decoder = twin(hf_model(kind))
    adapters = build(decoder.spec, shared)
    bases = {name: decoder.get_parameter(name).detach().double() for name in adapters.targets_by_param}
    merged_into(decoder, adapters)
    (our_logits(decoder, tokens_of([7, 3])).square() * 1e-2).mean().backward()
    for target in adapters.lora.targets:
        a, b = (factor.detach().double() for factor in adapters.factors(target))
        magnitude_EO = adapters.parameters[peft.magnitude_name(target)]
        rows = slice(*target.rows)
        v_EOI = bases[target.param_name][:, rows] + adapters.lora.scale * b @ a
        norm_EO = v_EOI.norm(dim=-1)
        scale_EO1 = (magnitude_EO.detach() / norm_EO).unsqueeze(-1)
        weight = decoder.get_parameter(target.param_name)
        assert relative(weight.detach()[:, rows].double(), scale_EO1 * v_EOI) < 1e-6
        grad_EOI = weight.grad[:, rows].double()
        wanted = [
            adapters.lora.scale * b.mT @ (scale_EO1 * grad_EOI),
            adapters.lora.scale * (scale_EO1 * grad_EOI) @ a.mT,
            (grad_EOI * v_EOI).sum(-1) / norm_EO,
        ]
        for parameter, grad in zip((*adapters.factors(target), magnitude_EO), wanted, strict=True):
            grad = grad.sum(0, keepdim=True) if len(parameter) < len(grad) else grad
            assert float(grad.abs().max()) > 0
            assert relative(parameter.grad.double(), grad) < 1e-4, target.module


def test_new_magnitudes_are_the_lengths_of_every_expert_s_rows_and_change_no_bit():
    decoder = twin(hf_model("qwen3 moe"))
    lora = replace(lora_for(decoder.spec, wanted="experts"), use_dora=True)
    adapters = adapted.LoraAdapters(lora, device=torch.device("cpu"), seed=0)
    weights = {name: decoder.get_parameter(name).detach().clone() for name in adapters.targets_by_param}
    for name, base in weights.items():
        adapters.merge(name, torch.empty_like(base), base)
    adapters.reset_magnitudes()
    for name, base in weights.items():
        out = torch.empty_like(base)
        adapters.merge(name, out, base)
        assert torch.equal(out, base)


@pytest.mark.parametrize(("kind", "shared"), FORMS)
def test_an_adapter_is_read_as_it_was_written(tmp_path, kind, shared):
    spec = spec_for(kind)
    adapters = build(spec, shared)
    folder = written(tmp_path / "adapter", adapters, spec)
    found = peft.find_adapter(folder, spec, shared_outer=shared)
    assert found.lora == adapters.lora
    read = adapted.read_adapter(folder, found.lora)
    assert all(torch.equal(read[name], parameter) for name, parameter in adapters.parameters.items())
    with safe_open(folder / peft.WEIGHTS, "pt") as file:
        magnitudes = [name for name in file.keys() if "magnitude" in name]  # noqa: SIM118
        target = adapters.lora.targets[0]
        if target.is_stacked:
            assert len(magnitudes) == len(adapters.lora.targets)
        else:
            assert all(
                file.get_slice(name).get_shape() in ([t.outputs] for t in adapters.lora.targets) for name in magnitudes
            )
            assert peft.peft_tensor_name(f"{target.modules[2]}.lora_magnitude_vector") in magnitudes


def test_peft_takes_the_magnitudes_of_an_expert_as_those_of_a_linear_layer(tmp_path):
    """An expert of the checkpoint as the module that PEFT's names stand for: a linear layer with DoRA."""
    library = pytest.importorskip("peft")
    decoder = twin(hf_model("qwen3 moe"))
    adapters = build(decoder.spec)
    target = next(t for t in adapters.lora.targets if t.short_name == "down_proj")
    expert = 2
    base = decoder.get_parameter(target.param_name).detach().clone()
    out = torch.empty_like(base)
    adapters.merge(target.param_name, out, base)
    model = torch.nn.ModuleDict({"down_proj": torch.nn.Linear(target.inputs, target.outputs, bias=False)})
    model["down_proj"].weight.data.copy_(base[expert])
    config = library.LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules=["down_proj"])
    theirs = library.get_peft_model(model, config)
    tensors = adapters.export()
    state = theirs.state_dict()
    for name in ("lora_A.default.weight", "lora_B.default.weight", "lora_magnitude_vector.default.weight"):
        ours = f"{target.modules[expert]}.{name.replace('.default', '')}".removesuffix(".weight")
        value = tensors.get(f"{ours}.weight", tensors.get(ours))
        state[f"base_model.model.down_proj.{name}"].copy_(value)
    x_TI = torch.randn(5, target.inputs)
    with torch.no_grad():
        assert relative(x_TI @ out[expert].T, theirs.base_model.model["down_proj"](x_TI)) < 1e-5


def test_an_adapter_without_the_magnitudes_of_an_expert_is_refused_in_a_sentence(tmp_path):
    spec = spec_for("qwen3 moe")
    folder = written(tmp_path / "adapter", filled(lora_for(spec, wanted="experts")), spec, use_dora=True)
    with pytest.raises(UsageError, match=r"experts\.0\..*lora_magnitude_vector is missing"):
        peft.find_adapter(folder, spec)
