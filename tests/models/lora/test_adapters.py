"""Adapters: what they add to a matrix, where gradients go, and the PEFT library as a witness.

Shapes: I inputs, O outputs, r rank.
"""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.models.oracle import KINDS, hf_model, our_logits, relative, tokens_of, twin
from tests.models.small_families.small import SMALL
from tests.models.vision.small_vision import our_vision_logits, prompts_of, vision_model, vision_twin
from tests.tiers import examples

from miles.core.errors import UsageError
from miles.models.checkpoint import param_map, peft
from miles.models.families import spec_from_config
from miles.models.lora import adapters as adapted
from miles.models.lora.adapters import LoraAdapters, merge
from miles.models.lora.targets import LoraSpec, list_targets, peft_target_modules, select_targets

SOME = [
    *("qwen3", "qwen2", "phi3", "gemma2", "llama linear rope and biases", "qwen3 moe", "qwen2 moe", "deepseek v3"),
    *("deepseek v3.2", "glm-4.5", "gpt-oss", "hybrid qwen3 next", "hybrid qwen3.5 moe", "hybrid nemotron h"),
]


def spec_for(kind):
    config = KINDS[kind].config(**(SMALL | KINDS[kind].own)).to_dict()
    return spec_from_config(config | {"architectures": [KINDS[kind].model.__name__]})


def lora_for(spec, rank=4, alpha=8.0, wanted=None, unwanted=None):
    return LoraSpec(rank=rank, alpha=alpha, targets=select_targets(spec, wanted, unwanted))


def filled(lora, seed=0):
    adapters = LoraAdapters(lora, device=torch.device("cpu"), seed=seed)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapters.parameters.values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random))
    return adapters


def merged_into(decoder, adapters):
    """The decoder with adapters in its weights and behind its projections."""
    weights = dict(decoder.named_parameters())
    with torch.no_grad():
        for ours in adapters.targets_by_param:
            adapters.merge(ours, weights[ours], weights[ours].clone())
    adapters.attach(decoder)


def test_all_kinds_that_are_told_of_here_are_there():
    assert set(SOME) <= set(KINDS)


# -- the sum --------------------------------------------------------------------------------


@settings(max_examples=examples(30), deadline=None)
@given(outputs=st.integers(1, 40), inputs=st.integers(1, 40), rank=st.integers(1, 9), dtype=st.sampled_from(["f", "b"]))
def test_a_merged_matrix_is_base_plus_scaled_product_rounded_once(outputs, inputs, rank, dtype):
    kind = torch.float32 if dtype == "f" else torch.bfloat16
    random = torch.Generator().manual_seed(outputs + 41 * inputs)
    base_OI, b_Or, a_rI = (
        torch.randn(shape, generator=random) for shape in ((outputs, inputs), (outputs, rank), (rank, inputs))
    )
    base_OI = base_OI.to(kind)
    out_OI = torch.empty_like(base_OI)
    merge(out_OI, base_OI, b_Or, a_rI, 0.5)
    exactly = base_OI.double() + 0.5 * (b_Or.double() @ a_rI.double())
    step = torch.finfo(kind).eps
    assert bool(((out_OI.double() - exactly).abs() <= step * (exactly.abs() + 4)).all())


def test_rows_come_out_as_they_do_among_all_however_few_are_merged_at_once(monkeypatch):
    base_OI, b_Or, a_rI = torch.randn(37, 20), torch.randn(37, 4), torch.randn(4, 20)
    whole, some, few = (torch.empty_like(base_OI) for _ in range(3))
    merge(whole, base_OI, b_Or, a_rI, 2.0)
    merge(some[5:18], base_OI[5:18], b_Or[5:18], a_rI, 2.0)
    monkeypatch.setattr(adapted, "_CHUNK_VALUES", 60)
    merge(few, base_OI, b_Or, a_rI, 2.0)
    assert torch.equal(some[5:18], whole[5:18]) and torch.equal(few, whole)


def test_a_new_adapter_leaves_every_bit_of_the_base():
    base_OI, a_rI = torch.randn(8, 6), torch.randn(2, 6)
    base_OI[0, 0], base_OI[1, 1] = -0.0, 0.0
    out_OI = torch.empty_like(base_OI)
    merge(out_OI, base_OI, torch.zeros(8, 2), a_rI, 4.0)
    assert torch.equal(out_OI.view(torch.int32), base_OI.view(torch.int32))


def test_adapters_start_alike_whatever_else_is_trained():
    spec = spec_for("qwen3")
    one, two = (LoraAdapters(lora_for(spec), device=torch.device("cpu"), seed=3) for _ in range(2))
    other = LoraAdapters(lora_for(spec), device=torch.device("cpu"), seed=4)
    first = next(iter(one.parameters))
    assert all(torch.equal(one.parameters[name], two.parameters[name]) for name in one.parameters)
    assert not torch.equal(one.parameters[first], other.parameters[first])


# -- gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SOME)
def test_the_factors_get_the_gradient_that_autograd_gives_the_merged_matrix(kind):
    decoder = twin(hf_model(kind))
    adapters = filled(lora_for(decoder.spec))
    sequences = tokens_of([7, 3])
    merged_into(decoder, adapters)
    loss = (our_logits(decoder, sequences).square() * 1e-2).mean()
    loss.backward()  # the matrices want their gradient too: one pass gives what is to be compared
    weights, scale = dict(decoder.named_parameters()), adapters.lora.scale
    for target in adapters.lora.targets:
        grad_OI = target.piece.view(weights[target.param_name].grad)
        a_rI, b_Or = adapters.factors(target)
        assert a_rI.grad is not None and b_Or.grad is not None
        assert relative(a_rI.grad, scale * b_Or.detach().T @ grad_OI) < 2e-4, target.module
        assert relative(b_Or.grad, scale * grad_OI @ a_rI.detach().T) < 2e-4, target.module


def test_a_frozen_model_computes_as_before_and_only_factors_have_gradients():
    decoder = twin(hf_model("qwen3")).requires_grad_(False)
    sequences = tokens_of([5, 6])
    before = our_logits(decoder, sequences)
    adapters = LoraAdapters(lora_for(decoder.spec), device=torch.device("cpu"), seed=0)
    merged_into(decoder, adapters)
    after = our_logits(decoder, sequences)
    assert torch.equal(before, after) and after.requires_grad
    after.sum().backward()
    assert all(p.grad is None for p in decoder.parameters())
    assert all(p.grad is not None for p in adapters.parameters.values())
    with torch.no_grad():
        assert not our_logits(decoder, sequences).requires_grad


# -- which ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_model_has_projections_and_each_is_a_matrix_of_its_checkpoint(kind):
    spec = spec_for(kind)
    found = list_targets(spec)
    assert found and len({target.module for target in found}) == len(found)
    assert not any(word in target.module for target in found for word in ("norm", "router", ".experts.", "embed"))
    stored = {piece.hf_name for pieces in param_map.build_param_map(spec).values() for piece in pieces}
    assert all(f"{target.module}.weight" in stored and len(target.piece.shape) == 2 for target in found)


def test_targets_are_named_by_group_by_name_or_in_full():
    spec = spec_for("qwen3")
    assert {t.short_name for t in select_targets(spec, "attn", None)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {t.short_name for t in select_targets(spec, "all-linear", "mlp, q_proj")} == {"k_proj", "v_proj", "o_proj"}
    assert [t.module for t in select_targets(spec, "model.layers.1.mlp.up_proj", None)] == [
        "model.layers.1.mlp.up_proj"
    ]
    with pytest.raises(UsageError, match=r"--target-modules c_attn names no projection .*choose among attn, q_proj"):
        select_targets(spec, "c_attn", None)
    with pytest.raises(UsageError, match="leaves no projection"):
        select_targets(spec, "q_proj", "attn")


def test_peft_is_told_short_names_only_where_these_are_clear():
    spec = spec_for("qwen3")
    assert peft_target_modules(spec, select_targets(spec, "q_proj", None)) == ["q_proj"]
    assert peft_target_modules(spec, select_targets(spec, "layers.1.self_attn.q_proj", None)) == [
        "model.layers.1.self_attn.q_proj"
    ]


# -- PEFT's format --------------------------------------------------------------------------


def written(folder, adapters, spec, **changes):
    folder.mkdir()
    save_file({peft.peft_tensor_name(n): p.detach() for n, p in adapters.parameters.items()}, folder / peft.WEIGHTS)
    (folder / peft.CONFIG).write_text(json.dumps(peft.build_peft_config(adapters.lora, spec, "base") | changes))
    return folder


def test_an_adapter_is_found_as_it_was_written(tmp_path):
    spec = spec_for("qwen3")
    adapters = filled(lora_for(spec, wanted="q_proj,down_proj"))
    found = peft.find_adapter(written(tmp_path / "adapter", adapters, spec), spec)
    assert found.lora == adapters.lora and found.stored.keys() == adapters.parameters.keys()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_dora": True}, "has use_dora in its adapter_config.json"),
        ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern"),
        ({"peft_type": "IA3"}, "an adapter of type IA3"),
        ({"r": 8}, r"lora_A.weight has shape \(4, 32\), but this model needs \(8, 32\)"),
        ({"lora_alpha": None}, "must have r and lora_alpha"),
    ],
)
def test_an_adapter_of_another_kind_or_shape_is_refused_in_a_sentence(tmp_path, changes, expected):
    spec = spec_for("qwen3")
    with pytest.raises(UsageError, match=expected):
        peft.find_adapter(written(tmp_path / "adapter", filled(lora_for(spec)), spec, **changes), spec)


def test_an_adapter_of_another_model_is_refused_in_a_sentence(tmp_path):
    spec = spec_for("qwen3")
    folder = written(tmp_path / "adapter", filled(lora_for(spec)), spec)
    with pytest.raises(UsageError, match="not a LoRA target of this model"):
        peft.find_adapter(folder, replace(spec, layers=spec.layers[:1]))
    with pytest.raises(UsageError, match="is not a PEFT adapter"):
        peft.find_adapter(tmp_path, spec)


def test_peft_gives_the_logits_of_the_merged_model(tmp_path):
    library = pytest.importorskip("peft")
    model = hf_model("qwen3")
    decoder = twin(model)
    adapters = filled(lora_for(decoder.spec))
    folder = written(tmp_path / "adapter", adapters, decoder.spec)
    merged_into(decoder, adapters)
    (tokens,) = tokens_of([9])
    with torch.no_grad():
        theirs = library.PeftModel.from_pretrained(model, folder)(tokens[None]).logits[0]
        assert relative(our_logits(decoder, [tokens]), theirs) < 1e-5


# -- vision towers ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_projections_of_a_vision_tower_have_adapters_only_if_they_are_named_as_such(kind):
    spec = vision_twin(vision_model(kind)).spec

    def chosen(wanted, unwanted=None):
        return {target.param_name.split(".")[0] for target in select_targets(spec, wanted, unwanted)}

    for words in (None, "all-linear", "attn", "mlp", "attn,mlp", "gate_proj,down_proj"):
        assert chosen(words) == {"layers"}, words
    for words in ("vision", "vision.attn", "vision.mlp", "vision.projector"):
        assert chosen(words) == {"vision"}, words
    assert chosen("all-linear,vision.attn") == {"layers", "vision"}
    assert chosen("all-linear,vision", "vision") == {"layers"}
    parts = {target.param_name.split(".")[1] for target in select_targets(spec, "vision.projector", None)}
    assert parts == ({"merger", "deepstack"} if kind == "qwen3_vl" else {"merger"})
    with pytest.raises(UsageError, match=r"names no projection of this model; choose among .*vision\.attn"):
        select_targets(spec, "patch_embed", None)


def test_gradients_reach_the_adapters_of_a_vision_tower():
    decoder, prompts = vision_twin(vision_model("qwen3_vl")), prompts_of("qwen3_vl")
    adapters = filled(lora_for(decoder.spec, wanted="vision,attn"))
    merged_into(decoder, adapters)
    decoder.requires_grad_(False)
    our_vision_logits(decoder, prompts).square().sum().backward()
    bare = vision_twin(vision_model("qwen3_vl"))
    merged_into(bare, filled(lora_for(decoder.spec, wanted="vision,attn")))
    our_vision_logits(bare, prompts).square().sum().backward()
    for name, targets in adapters.targets_by_param.items():
        whole = bare.get_parameter(name).grad
        for target in targets:
            a_rI, b_Or = adapters.factors(target)
            part = whole[target.piece.start : target.piece.stop]
            assert relative(b_Or.grad, adapters.lora.scale * part @ a_rI.detach().T) < 1e-4, name
            assert relative(a_rI.grad, adapters.lora.scale * b_Or.detach().T @ part) < 1e-4, name
