"""Routing: recorded, replayed, and what a layer of experts computes."""

import pytest
import torch
from tests.models.oracle import hf_model, our_logits, relative, tokens_of, twin
from torch.nn import functional as F

from miles.models.moe import MoeMlp, Routing
from miles.models.spec import MoeSpec

T, D, E, K = 23, 16, 5, 2


def layer(norm_topk_prob=True, dtype=torch.float64):
    spec = MoeSpec(num_experts=E, experts_per_token=K, intermediate_size=12, norm_topk_prob=norm_topk_prob, layers=(0,))
    made = MoeMlp(D, spec, 0, device="cpu", dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.5)
    return made


def inputs(dtype=torch.float64):
    return torch.randn(T, D, generator=torch.Generator().manual_seed(4), dtype=dtype)


def by_hand(moe, x_TD, experts_Tk):
    """Token by token, as the formula reads."""
    rows = []
    for x, experts in zip(x_TD, experts_Tk.tolist(), strict=True):
        probs = F.softmax((moe.router.weight @ x).float(), -1)
        weights = torch.stack([probs[e] for e in experts])
        if moe.norm_topk_prob:
            weights = weights / weights.sum()
        outs = []
        for e in experts:
            gate, up = (moe.gate_up[e] @ x).chunk(2)
            outs.append(moe.down[e] @ (F.silu(gate) * up))
        rows.append(sum(w.to(x.dtype) * o for w, o in zip(weights, outs, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_replayed_experts_are_used_with_gate_weights_of_the_current_router(norm_topk_prob):
    moe, x_TD = layer(norm_topk_prob), inputs()
    experts_Tk = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(i))[:K] for i in range(T)])
    out = moe(x_TD, Routing(replay_TLk=experts_Tk[:, None]))
    wanted = by_hand(moe, x_TD, experts_Tk)
    assert relative(out, wanted) <= 1e-12
    weight = torch.randn(T, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    ours = torch.autograd.grad((out * weight).sum(), list(moe.parameters()))
    theirs = torch.autograd.grad((wanted * weight).sum(), list(moe.parameters()))
    assert all(relative(a, b) <= 1e-7 for a, b in zip(ours, theirs, strict=True))
    assert ours[0].abs().max() > 0


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


def test_experts_without_tokens_get_a_zero_gradient():
    moe, x_TD = layer(), inputs()
    experts_Tk = torch.tensor([1, 3]).expand(T, K)
    moe(x_TD, Routing(replay_TLk=experts_Tk[:, None])).sum().backward()
    busy = moe.down.grad.abs().amax((1, 2)) > 0
    assert busy.tolist() == [False, True, False, True, False]
