"""Routing: recorded, replayed, and what a layer of experts computes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.oracle import hf_model, our_logits, relative, tokens_of, twin
from tests.tiers import examples
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GptOssConfig, NemotronHConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

from miles.kernels.numerics import FAST
from miles.models.layers.moe import MoeMlp, Routing, imbalance
from miles.models.spec import MlpSpec, MoeSpec

T, D, E, K = 23, 16, 6, 2
SIZES = {"num_experts": E, "experts_per_token": K, "size": 12}

SPECS = {
    "normalised": MoeSpec(**SIZES, norm_topk_prob=True),
    "not normalised": MoeSpec(**SIZES, norm_topk_prob=False),
    "sigmoid, corrected, scaled": MoeSpec(
        **SIZES, norm_topk_prob=True, score="sigmoid", correction=True, scale=2.5, shared=MlpSpec(size=8)
    ),
    "groups": MoeSpec(
        **SIZES, norm_topk_prob=True, score="sigmoid", correction=True, groups=3, kept_groups=2, group_top=2
    ),
    "weighs its input": MoeSpec(**SIZES, norm_topk_prob=False, score="sigmoid", weigh_input=True),
    "biases": MoeSpec(
        **SIZES,
        norm_topk_prob=True,
        router_bias=True,
        expert_bias=True,
        interleaved=True,
        activation="swiglu_clamped",
    ),
    "latent": MoeSpec(
        **SIZES, norm_topk_prob=True, wide_router=True, gated=False, activation="relu2", latent=10, latent_bias=True
    ),
    "a gate before the shared one": MoeSpec(**SIZES, norm_topk_prob=True, shared=MlpSpec(size=8), shared_gate=True),
}


def layer(name="normalised", dtype=torch.float64):
    made = MoeMlp(D, SPECS[name], 0, device="cpu", dtype=dtype, numerics=FAST)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return made


def inputs(dtype=torch.float64):
    return torch.randn(T, D, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(dtype)


def some_experts(seed=0):
    orders = [torch.randperm(E, generator=torch.Generator().manual_seed(seed + i))[:K] for i in range(T)]
    return torch.stack(orders)


def expert(moe, e, x):
    """One expert on one token, as the formula reads."""
    spec = moe.spec
    if not spec.gated:
        return moe.down[e] @ F.relu(moe.up[e] @ x) ** 2
    inner = moe.gate_up[e] @ x
    if not spec.expert_bias:
        gate, up = inner.chunk(2)
        return moe.down[e] @ (F.silu(gate) * up)
    inner = inner + moe.gate_up_bias[e]
    gate, up = inner[::2].clamp(max=7.0), inner[1::2].clamp(-7.0, 7.0)
    return moe.down[e] @ ((up + 1) * gate * torch.sigmoid(1.702 * gate)) + moe.down_bias[e]


def by_hand(moe, x_TD, experts_Tk):
    """Token by token, with given experts."""
    spec, rows = moe.spec, []
    for x, experts in zip(x_TD, experts_Tk.tolist(), strict=True):
        logits = moe.router(x)
        scores = logits.softmax(-1) if spec.score == "softmax" else logits.sigmoid()
        weights = torch.stack([scores[e] for e in experts])
        weights = (weights / weights.sum() if spec.norm_topk_prob else weights) * spec.scale
        inner = x if moe.into is None else moe.into(x)
        if spec.weigh_input:
            out = sum(expert(moe, e, w * inner) for w, e in zip(weights, experts, strict=True))
        else:
            out = sum(w * expert(moe, e, inner) for w, e in zip(weights, experts, strict=True))
        out = out if moe.outof is None else moe.outof(out)
        if moe.shared is not None:
            gate, up = moe.shared.gate_up(x).chunk(2)
            beside = moe.shared.down(F.silu(gate) * up)
            out = out + (beside if moe.shared_gate is None else torch.sigmoid(moe.shared_gate(x)) * beside)
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("name", SPECS)
def test_replayed_experts_are_used_with_gate_weights_of_the_current_router(name):
    moe, x_TD = layer(name), inputs()
    experts_Tk = some_experts()
    out = moe(x_TD, Routing(replay_TLk=experts_Tk[:, None]))
    wanted = by_hand(moe, x_TD, experts_Tk)
    assert relative(out, wanted) <= 1e-12
    weight = torch.randn(T, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    leaves = [p for p in moe.parameters() if p.requires_grad]
    ours = torch.autograd.grad((out * weight).sum(), leaves)
    theirs = torch.autograd.grad((wanted * weight).sum(), leaves)
    assert all(relative(a, b) <= 1e-11 for a, b in zip(ours, theirs, strict=True))
    (router,) = (g for p, g in zip(leaves, ours, strict=True) if p is moe.router.weight)
    assert router.abs().max() > 0


@pytest.mark.parametrize("name", SPECS)
def test_bfloat16_stays_bfloat16_and_near_the_truth(name):
    moe, x_TD, experts_Tk = layer(name), inputs(), some_experts()
    wanted = moe(x_TD, Routing(replay_TLk=experts_Tk[:, None]))
    # The correction is a float32 number whatever the weights are.
    low = MoeMlp(D, SPECS[name], 0, device="cpu", dtype=torch.bfloat16, numerics=FAST)
    low.load_state_dict(moe.state_dict())
    assert low.correction is None or low.correction.dtype == torch.float32
    out = low(x_TD.to(torch.bfloat16), Routing(replay_TLk=experts_Tk[:, None]))
    assert out.dtype == torch.bfloat16
    assert relative(out.double(), wanted) <= 0.03
    out.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in low.parameters() if p.requires_grad)


def test_the_correction_counts_for_choosing_alone_and_takes_no_gradient():
    moe, x_TD = layer("sigmoid, corrected, scaled"), inputs()
    with torch.no_grad():
        moe.correction.copy_(torch.tensor([-9.0, -9.0, 9.0, -9.0, 9.0, -9.0]))
    weights_Tk, experts_Tk = moe.route(x_TD, None)
    assert experts_Tk.sort(-1).values.tolist() == T * [[2, 4]]
    scores_Tk = moe.router(x_TD).sigmoid().gather(-1, experts_Tk)
    assert torch.allclose(weights_Tk, 2.5 * scores_Tk / scores_Tk.sum(-1, keepdim=True), rtol=1e-12)
    assert not moe.correction.requires_grad


@settings(max_examples=examples(30), deadline=None)
@given(groups=st.sampled_from([2, 3, 4, 6]), kept=st.integers(1, 3), top=st.integers(1, 2), seed=st.integers(0, 99))
def test_experts_come_from_the_best_groups_and_are_the_best_of_those(groups, kept, top, seed):
    kept = min(kept, groups)
    sizes = {"num_experts": 12, "experts_per_token": 2, "size": 4, "norm_topk_prob": True}
    spec = MoeSpec(**sizes, score="sigmoid", correction=True, groups=groups, kept_groups=kept, group_top=top)
    moe = MoeMlp(8, spec, 0, device="cpu", dtype=torch.float64, numerics=FAST)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        x_TD = torch.randn(5, 8, generator=generator, dtype=torch.float64)
        _, experts_Tk = moe.route(x_TD, None)
        marks_TE = moe.router(x_TD).sigmoid() + moe.correction
    each = 12 // groups
    for marks, experts in zip(marks_TE.tolist(), experts_Tk.tolist(), strict=True):
        worth = [sum(sorted(marks[g * each : (g + 1) * each])[-top:]) for g in range(groups)]
        best = sorted(range(groups), key=lambda g: -worth[g])[:kept]
        candidates = sorted((e for e in range(12) if e // each in best), key=lambda e: -marks[e])
        assert sorted(experts) == sorted(candidates[:2])


def test_a_sigmoid_that_rounds_to_one_does_not_hide_which_expert_is_best():
    moe = layer("weighs its input", torch.float32)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[:, 0] = torch.tensor([30.0, 31.0, 40.0, 29.0, 35.0, 28.0])
    x_TD = torch.ones(T, D)
    assert moe.router(x_TD).sigmoid().eq(1).all()
    assert moe.route(x_TD, None)[1].tolist() == T * [[2, 4]]


def test_replaying_experts_the_router_would_never_choose_gives_numbers():
    moe, x_TD = layer(dtype=torch.float32), inputs(torch.float32)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[0] = 1000 * x_TD[0]
    out = moe(x_TD[:1], Routing(replay_TLk=torch.tensor([[[1, 2]]])))
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in moe.parameters())


def test_replaying_what_was_recorded_changes_nothing():
    decoder = twin(hf_model("qwen3 moe in some layers"))
    sequences = tokens_of([8, 3, 15])
    with torch.no_grad():
        first = Routing(record=True)
        plain = our_logits(decoder, sequences, first)
        assert [tuple(r.shape) for r in first.recorded] == [(26, 2)]
        replayed = our_logits(decoder, sequences, Routing(replay_TLk=torch.stack(first.recorded, dim=1)))
    assert torch.equal(plain, replayed)


def test_a_negative_row_keeps_the_routers_own_choice():
    moe, x_TD = layer(), inputs()
    own = Routing(record=True)
    moe(x_TD, own)
    replay_Tk = torch.full((T, K), -1)
    replay_Tk[::3] = torch.tensor([4, 0])
    used = Routing(replay_TLk=replay_Tk[:, None], record=True)
    out = moe(x_TD, used)
    wanted_Tk = own.recorded[0].clone()
    wanted_Tk[::3] = torch.tensor([4, 0])
    assert torch.equal(used.recorded[0], wanted_Tk)
    assert relative(out, by_hand(moe, x_TD, wanted_Tk)) <= 1e-12


def test_replay_may_be_small_integers():
    moe, x_TD = layer(), inputs()
    experts_Tk = torch.arange(T * K).view(T, K) % E
    small = moe(x_TD, Routing(replay_TLk=experts_Tk[:, None].to(torch.int16)))
    assert torch.equal(small, moe(x_TD, Routing(replay_TLk=experts_Tk[:, None])))


@pytest.mark.parametrize("name", ["normalised", "biases"])
def test_experts_without_tokens_get_a_zero_gradient(name):
    moe, x_TD = layer(name), inputs()
    experts_Tk = torch.tensor([1, 3]).expand(T, K)
    moe(x_TD, Routing(replay_TLk=experts_Tk[:, None])).sum().backward()
    stacked = [p for p in (moe.gate_up, moe.down, moe.gate_up_bias, moe.down_bias) if p is not None]
    for parameter in stacked:
        busy = parameter.grad.flatten(1).abs().amax(1) > 0
        assert busy.tolist() == [False, True, False, True, False, False]


@given(seed=st.integers(0, 99))
@settings(max_examples=examples(20), deadline=None)
def test_the_load_counts_every_choice_once_even_where_a_layer_runs_twice(seed):
    moe, x_TD, experts_Tk = layer(), inputs(), some_experts(seed)
    load_LE = torch.zeros(1, E, dtype=torch.int64)
    for _ in range(2):
        routing = Routing(replay_TLk=experts_Tk[:, None], load_LE=load_LE)
        checkpoint(moe, x_TD.clone().requires_grad_(), routing, use_reentrant=False).sum().backward()
    assert torch.equal(load_LE[0], 2 * experts_Tk.flatten().bincount(minlength=E))


def test_imbalance_is_the_busiest_experts_share_against_the_mean():
    assert imbalance(torch.full((3, 4), 7)).item() == 1.0
    assert imbalance(torch.tensor([[8, 0, 0, 0], [2, 2, 2, 2]])).item() == (4 + 1) / 2
    assert imbalance(torch.zeros(2, 4, dtype=torch.int64)).item() == 0.0


# -- against transformers' own blocks, on inputs that a small model would not reach ------------------


def filled(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
    return module.double()


def test_clamped_experts_are_those_of_gpt_oss_where_both_clamps_bite():
    config = GptOssConfig(
        hidden_size=D, intermediate_size=12, num_local_experts=E, num_experts_per_tok=K, experts_implementation="eager"
    )
    theirs, ours = filled(GptOssMLP(config)), layer("biases")
    held = theirs.state_dict()
    with torch.no_grad():
        ours.router.load_state_dict({"weight": held["router.weight"], "bias": held["router.bias"]})
        ours.gate_up.copy_(held["experts.gate_up_proj"].mT)
        ours.down.copy_(held["experts.down_proj"].mT)
        ours.gate_up_bias.copy_(held["experts.gate_up_proj_bias"])
        ours.down_bias.copy_(held["experts.down_proj_bias"])
        x_TD = 6 * inputs()
        inner = torch.einsum("td,eid->tei", x_TD, ours.gate_up)
        assert inner[..., ::2].max() > 7
        assert inner[..., 1::2].min() < -7 < 7 < inner[..., 1::2].max()
    out, wanted = ours(x_TD, None), theirs(x_TD[None])[0][0]
    assert relative(out, wanted) <= 1e-12
    (mine,) = torch.autograd.grad(out.square().sum(), ours.gate_up)
    (its,) = torch.autograd.grad(wanted.square().sum(), theirs.experts.gate_up_proj)
    assert relative(mine, its.mT) <= 1e-12


def test_latent_experts_are_those_of_nemotron():
    config = NemotronHConfig(
        hidden_size=D,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=20,
        moe_latent_size=10,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        mlp_hidden_act="relu2",
        experts_implementation="eager",
    )
    theirs = filled(NemotronHMoE(config))
    spec = MoeSpec(
        num_experts=8,
        experts_per_token=3,
        size=12,
        norm_topk_prob=True,
        score="sigmoid",
        correction=True,
        groups=4,
        kept_groups=2,
        group_top=2,
        scale=2.5,
        gated=False,
        activation="relu2",
        latent=10,
        shared=MlpSpec(size=20, gated=False, activation="relu2"),
    )
    ours = MoeMlp(D, spec, 0, device="cpu", dtype=torch.float64, numerics=FAST)
    names = {
        "correction": "gate.e_score_correction_bias",
        "router.weight": "gate.weight",
        "up": "experts.up_proj",
        "down": "experts.down_proj",
        "into.weight": "fc1_latent_proj.weight",
        "outof.weight": "fc2_latent_proj.weight",
        "shared.up.weight": "shared_experts.up_proj.weight",
        "shared.down.weight": "shared_experts.down_proj.weight",
    }
    held = theirs.state_dict()
    assert sorted(names.values()) == sorted(held)
    ours.load_state_dict({mine: held[its] for mine, its in names.items()})
    with torch.no_grad():
        # Their router works in float32 even here.
        assert relative(ours(inputs(), None), theirs(inputs()[None])[0]) <= 1e-6
