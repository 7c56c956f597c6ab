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
    *("deepseek v3.2", "glm-4.5", "gpt-oss", "step 3.7", "hybrid qwen3 next", "hybrid qwen3.5 moe"),
    *("hybrid nemotron h", "hybrid kimi linear", "lfm2 moe", "hunyuan moe", "hybrid qwen4"),
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
    adapters = filled(lora_for(decoder.spec, wanted="*"))
    check_gradients(decoder, adapters, tokens_of([7, 3]))


def check_gradients(decoder, adapters, sequences):
    merged_into(decoder, adapters)
    loss = (our_logits(decoder, sequences).square() * 1e-2).mean()
    loss.backward()  # the matrices want their gradient too: one pass gives what is to be compared
    weights, scale = dict(decoder.named_parameters()), adapters.lora.scale
    for target in adapters.lora.targets:
        grad = weights[target.param_name].grad[..., slice(*target.rows), :]
        a, b = adapters.factors(target)
        assert a.grad is not None and b.grad is not None
        grad_a, grad_b = scale * b.detach().mT @ grad, scale * grad @ a.detach().mT
        if target.num_experts and len(a) == 1:
            grad_a = grad_a.sum(0, keepdim=True)
        if target.num_experts and len(b) == 1:
            grad_b = grad_b.sum(0, keepdim=True)
        assert relative(a.grad, grad_a) < 2e-4, target.module
        assert relative(b.grad, grad_b) < 2e-4, target.module


@pytest.mark.parametrize("kind", ["qwen3 moe", "gpt-oss", "step 3.7", "deepseek v3"])
def test_experts_share_the_outer_factor_if_asked(kind):
    decoder = twin(hf_model(kind))
    lora = replace(lora_for(decoder.spec, wanted="experts"), shared_outer=True)
    for target in lora.targets:
        shape_a, shape_b = lora.factor_shapes(target)
        own = target.num_experts
        assert (shape_a[0], shape_b[0]) == ((own, 1) if target.param_name.endswith(".down") else (1, own))
    assert lora.num_parameters == sum(p.numel() for p in filled(lora).parameters.values())
    check_gradients(decoder, filled(lora), tokens_of([7, 3]))


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
    modules = [target.module.removesuffix(".unembed") for target in found]  # Inkling's output layer
    assert not any(word in module for module in modules for word in ("norm", "router", "embed"))
    stored = {piece.hf_name for pieces in param_map.build_param_map(spec).values() for piece in pieces}
    assert [target.param_name for target in found if target.is_head] == ["lm_head.weight"]
    for target in found:
        if target.is_head and spec.tie_embeddings:
            assert (target.outputs, target.inputs) == (spec.vocab_size, spec.hidden_size)
            continue
        names = (target.piece.hf_name,) if target.is_stacked else [f"{module}.weight" for module in target.modules]
        assert stored.issuperset(names), target.module
    experts = {target.param_name for target in found if target.group == "experts"}
    assert len(experts) == 2 * len(spec.moe_layers)
    assert not any(t.group == "experts" or t.is_head for t in select_targets(spec, "all-linear", None))


def test_targets_are_named_by_group_by_name_or_in_full():
    spec = spec_for("qwen3")
    assert {t.short_name for t in select_targets(spec, "attn", None)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {t.short_name for t in select_targets(spec, "all-linear", "mlp, q_proj")} == {"k_proj", "v_proj", "o_proj"}
    assert [t.module for t in select_targets(spec, "model.layers.1.mlp.up_proj", None)] == [
        "model.layers.1.mlp.up_proj"
    ]
    assert {t.short_name for t in select_targets(spec, "layers.*.self_attn.*_proj", None)} == {
        *("q_proj", "k_proj", "v_proj", "o_proj")
    }
    assert [t.module for t in select_targets(spec, "layers.1.*", "*.mlp.*, o_proj")] == [
        f"model.layers.1.self_attn.{name}_proj" for name in "qkv"
    ]
    for word in ("lm_head", "output_layer"):
        assert [t.module for t in select_targets(spec, word, None)] == ["lm_head"]
    assert "lm_head" not in {t.module for t in select_targets(spec, "*", None)}
    with pytest.raises(UsageError, match=r"--target-modules c_attn names no projection .*choose among attn, q_proj"):
        select_targets(spec, "c_attn", None)
    with pytest.raises(UsageError, match="leaves no projection"):
        select_targets(spec, "q_proj", "attn")


def test_a_regular_expression_matches_full_names_as_in_peft():
    library = pytest.importorskip("peft.tuners.tuners_utils")
    from peft import LoraConfig

    spec = spec_for("qwen3")
    for pattern in (
        r".*\.(q|v)_proj",
        r"model\.layers\.[1]\.mlp\..*",
        r".*layers\.\d+\.self_attn\.o_proj",
        r".*down_proj",
    ):
        ours = [t.module for t in select_targets(spec, pattern, None)]
        config = LoraConfig(target_modules=pattern)
        assert ours == [t.module for t in list_targets(spec) if library.check_target_module_exists(config, t.module)]
    with pytest.raises(UsageError, match=r"is no valid regular expression"):
        select_targets(spec, "(q_proj", None)


def test_megatron_names_select_the_same_matrices():
    for kind in ("qwen3", "deepseek v3", "qwen3 moe"):
        spec = spec_for(kind)

        def names(words, spec=spec):
            return {target.short_name for target in select_targets(spec, words, None)}

        assert names("linear_proj") == {"o_proj"}
        assert names("linear_fc1,linear_fc2") == {"gate_proj", "up_proj", "down_proj"}
        if kind == "deepseek v3":
            assert names("linear_q_down_proj,linear_kv_up_proj") == {"q_a_proj", "kv_b_proj"}
        else:
            assert names("linear_qkv") == {"q_proj", "k_proj", "v_proj"}


def test_all_experts_of_a_layer_are_named_at_once():
    spec = spec_for("qwen3 moe")
    expected = ["model.layers.1.mlp.experts.*.down_proj"]
    for words in (expected[0], r"model\.layers\.1\.mlp\.experts\.\d+\.down_proj", "1.mlp.experts.*.down_proj"):
        assert [t.module for t in select_targets(spec, words, None)] == expected
    with pytest.raises(UsageError, match=r"experts.0.up_proj names some experts of .* only"):
        select_targets(spec, "model.layers.1.mlp.experts.0.up_proj", None)


def test_peft_is_told_short_names_only_where_these_are_clear():
    spec = spec_for("qwen3")
    assert peft_target_modules(spec, select_targets(spec, "q_proj", None)) == ["q_proj"]
    assert peft_target_modules(spec, select_targets(spec, "layers.1.self_attn.q_proj", None)) == [
        "model.layers.1.self_attn.q_proj"
    ]


# -- PEFT's format --------------------------------------------------------------------------


def written(folder, adapters, spec, **changes):
    folder.mkdir()
    save_file({peft.peft_tensor_name(n): t for n, t in adapters.export().items()}, folder / peft.WEIGHTS)
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
        ({"fan_in_fan_out": True}, "has fan_in_fan_out in its adapter_config.json"),
        ({"use_dora": True}, "lora_magnitude_vector is missing"),
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


PEFT_KINDS = [
    *(("qwen3", None), ("qwen3 moe", "*"), ("qwen3 moe", "experts"), ("deepseek v3", "attn,experts"), ("gpt-oss", "*")),
    *(("gpt-oss", "experts"), ("gpt-oss", "*.down_proj")),
]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("kind", "wanted"), PEFT_KINDS)
def test_peft_gives_the_logits_of_the_merged_model(tmp_path, kind, wanted, shared):
    library = pytest.importorskip("peft")
    model = hf_model(kind)
    decoder = twin(model)
    lora = replace(lora_for(decoder.spec, wanted=wanted), shared_outer=shared)
    if shared and not any(target.num_experts for target in lora.targets):
        pytest.skip("no experts")
    adapters = filled(lora)
    folder = written(tmp_path / "adapter", adapters, decoder.spec)
    merged_into(decoder, adapters)
    (tokens,) = tokens_of([9])
    with torch.no_grad():
        bare = model(tokens[None]).logits[0]
        theirs = library.PeftModel.from_pretrained(model, folder)(tokens[None]).logits[0]
        assert relative(our_logits(decoder, [tokens]), theirs) < 1e-5
        assert relative(bare, theirs) > 1e-2
    found = peft.find_adapter(folder, decoder.spec, shared_outer=shared)
    assert found.lora == adapters.lora
    read = adapted.read_adapter(folder, found.lora)
    assert all(torch.equal(read[name], parameter) for name, parameter in adapters.parameters.items())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3", {"target_modules": "all-linear"}),
        ("deepseek v3", {"target_modules": r".*\.(kv_b_proj|o_proj)"}),
        ("gpt-oss", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}),
        ("gpt-oss", {"target_modules": [], "target_parameters": ["experts.down_proj", "experts.gate_up_proj"]}),
    ],
)
def test_an_adapter_that_peft_writes_gives_its_logits_here(tmp_path, kind, options):
    library = pytest.importorskip("peft")
    model = hf_model(kind)
    decoder = twin(model)
    config = library.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **options)
    theirs = library.get_peft_model(model, config)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random))
    theirs.save_pretrained(tmp_path / "adapter")
    found = peft.find_adapter(tmp_path / "adapter", decoder.spec)
    adapters = LoraAdapters(found.lora, device=torch.device("cpu"), seed=0)
    adapters.load(adapted.read_adapter(tmp_path / "adapter", found.lora))
    merged_into(decoder, adapters)
    (tokens,) = tokens_of([9])
    with torch.no_grad():
        assert relative(our_logits(decoder, [tokens]), theirs(tokens[None]).logits[0]) < 1e-5


VARIANTS = [
    ("qwen3", {"use_rslora": True, "target_modules": "all-linear"}),
    ("qwen3", {"use_dora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]}),
    ("llama linear rope and biases", {"use_dora": True, "use_rslora": True, "target_modules": "all-linear"}),
    ("deepseek v3", {"use_dora": True, "target_modules": ["kv_b_proj", "q_a_proj", "o_proj"]}),
]


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_rslora_and_dora_have_the_logits_and_gradients_of_peft(tmp_path, kind, options):
    library = pytest.importorskip("peft")
    model = hf_model(kind)
    decoder = twin(model)
    theirs = library.get_peft_model(model, library.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **options))
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.rand(parameter.shape, generator=random))
            elif "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random))
    theirs.save_pretrained(tmp_path / "adapter")
    found = peft.find_adapter(tmp_path / "adapter", decoder.spec)
    assert (found.lora.use_rslora, found.lora.use_dora) == (bool(options.get("use_rslora")), "use_dora" in options)
    adapters = LoraAdapters(found.lora, device=torch.device("cpu"), seed=0)
    adapters.load(adapted.read_adapter(tmp_path / "adapter", found.lora))
    merged_into(decoder, adapters)
    (tokens,) = tokens_of([9])
    wanted_logits = theirs(tokens[None]).logits[0]
    logits = our_logits(decoder, [tokens])
    assert relative(logits.detach(), wanted_logits.detach()) < 1e-5
    logits.square().mean().backward()
    wanted_logits.square().mean().backward()
    wanted = {
        n.replace(".default", "").removesuffix(".weight"): p.grad for n, p in theirs.named_parameters() if "lora_" in n
    }
    assert len(wanted) == len(adapters.parameters)
    for name, parameter in adapters.parameters.items():
        assert relative(parameter.grad, wanted[peft.peft_tensor_name(name).removesuffix(".weight")]) < 2e-4, name
    config = peft.build_peft_config(adapters.lora, decoder.spec, "base")
    assert (config["use_rslora"], config["use_dora"]) == (found.lora.use_rslora, found.lora.use_dora)
    other = written(tmp_path / "ours", adapters, decoder.spec)
    kept = {name: value.detach().clone() for name, value in theirs.state_dict().items()}
    again = library.PeftModel.from_pretrained(hf_model(kind), other).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in kept.items() if "lora_" in name)


def test_new_magnitudes_are_the_lengths_of_rows_and_change_no_bit():
    decoder = twin(hf_model("qwen3"))
    weights = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    adapters = LoraAdapters(replace(lora_for(decoder.spec), use_dora=True), device=torch.device("cpu"), seed=0)
    for name in adapters.targets_by_param:
        adapters.merge(name, weights[name].clone(), weights[name])
    adapters.reset_magnitudes()
    for name in adapters.targets_by_param:
        out = torch.empty_like(weights[name])
        adapters.merge(name, out, weights[name])
        assert torch.equal(out, weights[name])
    target = adapters.lora.targets[0]
    rows_OI = target.piece.view(weights[target.param_name])
    assert relative(adapters.parameters[peft.magnitude_name(target)].detach(), rows_OI.norm(dim=1)) < 1e-6


def test_dropped_inputs_reach_output_and_factors_as_a_path_beside_the_base_would():
    """The oracle is the definition, by autograd: W x + s B A drop(x), with the mask that was used."""
    decoder = twin(hf_model("qwen3")).requires_grad_(False)
    lora = replace(lora_for(decoder.spec, wanted="layers.0.self_attn.*"), dropout=0.3)
    base_NI = decoder.get_parameter("layers.0.attention.qkv.weight").detach().clone()
    adapters = filled(lora)
    merged_into(decoder, adapters)
    module = decoder.get_submodule("layers.0.attention.qkv")
    x_TI = torch.randn(50, base_NI.shape[1], requires_grad=True)
    seen = []
    drop = adapters.dropout
    module.adapter._dropout = lambda x, target: seen.append(drop(x, target)) or seen[-1]
    upstream_TN = torch.randn(50, len(base_NI))
    out_TN = module(x_TI)
    (out_TN * upstream_TN).sum().backward()
    grads, grad_x = {n: p.grad for n, p in adapters.parameters.items() if p.grad is not None}, x_TI.grad
    masks = [(each / x_TI).detach() for each in seen]
    assert all(0.5 < float((mask > 0).float().mean()) < 0.9 for mask in masks) and not torch.equal(masks[0], masks[1])
    x_TI.grad = None
    for p in adapters.parameters.values():
        p.grad = None
    pieces = []
    for target, mask_TI in zip(adapters.targets_by_param["layers.0.attention.qkv.weight"], masks, strict=True):
        a_rI, b_Or = adapters.factors(target)
        pieces.append(lora.scale * (x_TI * mask_TI) @ a_rI.T @ b_Or.T)
    wanted_TN = x_TI @ base_NI.T + torch.cat(pieces, -1)
    (wanted_TN * upstream_TN).sum().backward()
    assert relative(out_TN.detach(), wanted_TN.detach()) < 1e-5 and relative(grad_x, x_TI.grad) < 1e-5
    assert len(grads) == 6
    for name, grad in grads.items():
        assert relative(grad, adapters.parameters[name].grad) < 1e-5, name
    with torch.no_grad():
        merged_NI = decoder.get_parameter("layers.0.attention.qkv.weight")
        assert relative(module(x_TI), x_TI @ merged_NI.T) < 1e-6


def test_experts_that_do_not_share_a_factor_are_refused_as_such(tmp_path):
    spec = spec_for("qwen3 moe")
    lora = lora_for(spec, wanted="experts")
    folder = written(tmp_path / "adapter", filled(lora), spec)
    with pytest.raises(UsageError, match="do not share a factor; remove --experts-shared-outer-loras"):
        adapted.read_adapter(folder, replace(lora, shared_outer=True))


def test_an_adapter_of_some_experts_is_refused_in_a_sentence(tmp_path):
    spec = spec_for("qwen3 moe")
    adapters = filled(lora_for(spec, wanted="experts"))
    folder = written(tmp_path / "adapter", adapters, spec)
    kept = {n: t for n, t in adapters.export().items() if ".experts.3." not in n}
    save_file({peft.peft_tensor_name(n): t for n, t in kept.items()}, folder / peft.WEIGHTS)
    with pytest.raises(UsageError, match=r"adapters of some experts only: .*experts.3.* has none"):
        peft.find_adapter(folder, spec)


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
