"""Experts on several ranks are the experts on one: every form of them, whoever gets rows, and whole decoders."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pool import ranks
from tests.tiers import examples
from torch import Tensor

from miles.backends.fsdp import expert_parallel
from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import UsageError
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.models.decoder import Decoder, Routing
from miles.models.parallel.expert_dispatch import _sort_received_by_expert
from miles.models.spec import DecoderSpec, LayerSpec, MlpSpec, MoeSpec

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"num_experts": 6, "experts_per_token": 2, "size": 12}
NORMAL = SIZES | {"norm_topk_prob": True}

FORMS = {
    "plain": MoeSpec(**SIZES, norm_topk_prob=False),
    "normalised, gelu": MoeSpec(**NORMAL, activation="gelu_tanh"),
    "sigmoid, corrected, scaled, shared": MoeSpec(
        **NORMAL, score="sigmoid", correction=True, scale=2.5, shared=MlpSpec(size=8)
    ),
    "groups": MoeSpec(**NORMAL, score="sigmoid", correction=True, groups=3, kept_groups=2, group_top=2),
    "weighs its input": MoeSpec(**SIZES, norm_topk_prob=False, score="sigmoid", weigh_input=True),
    "biases, interleaved": MoeSpec(
        **NORMAL, router_bias=True, expert_bias=True, interleaved=True, activation="swiglu_clamped"
    ),
    "latent, no gates": MoeSpec(
        **NORMAL, wide_router=True, gated=False, activation="relu2", latent=10, latent_bias=True
    ),
    "a gate before the shared one": MoeSpec(**NORMAL, shared=MlpSpec(size=8), shared_gate=True),
}


def of_experts(form: MoeSpec, layers: int = 2) -> DecoderSpec:
    """A decoder of nothing but experts."""
    return DecoderSpec(
        family="test",
        vocab_size=29,
        hidden_size=16,
        norm_eps=1e-6,
        layers=(LayerSpec(mixer=None, ffn=form),) * layers,
        tie_embeddings=True,
        max_positions=64,
        eos_token_ids=(),
    )


def filled(spec: DecoderSpec, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder no parameter of which is zero or one."""
    decoder = Decoder(spec, device="cpu", dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.25 * noise)
    return decoder


def tokens_of(count: int, vocab: int = 29) -> Tensor:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(1))


def dispatch_row(hidden_TD: Tensor, at: int) -> Tensor:
    """A loss to which every channel of every token adds its own share."""
    weight_TD = torch.randn(64, hidden_TD.shape[1], generator=torch.Generator().manual_seed(2)).to(hidden_TD)
    return (hidden_TD.sin() * weight_TD[at : at + len(hidden_TD)]).sum()


def read(decoder: Decoder, tokens_T: Tensor, at: int, routing: Routing | None) -> Tensor:
    return decoder(tokens_T, torch.arange(at, at + len(tokens_T)), VarlenAttentionBackend((1,), CPU), routing)


Outcome = tuple[Any, dict[str, Any]]  # a rank's hidden states, and whole gradients


def alone(spec: DecoderSpec, count: int, replay_TLk: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    decoder = filled(spec)
    hidden_TD = read(decoder, tokens_of(count), 0, Routing(replay_TLk=replay_TLk))
    dispatch_row(hidden_TD, 0).backward()
    return hidden_TD.detach(), {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


def together(
    rank: int, world: int, specs: list[DecoderSpec], counts: tuple[int, ...], replay: list | None, recompute: bool
) -> list[Outcome]:
    """What a rank has of the hidden states, and of whole gradients."""
    mesh = FsdpMesh(ParallelDims(world=world, shard=world, expert=world), CPU)
    first = sum(counts[:rank])
    out: list[Outcome] = []
    for spec in specs:
        decoder = filled(spec)
        expert_parallel.shard_experts(decoder, mesh.ep_group)
        decoder.checkpoint_layers = recompute
        replay_TLk = None if replay is None else torch.tensor(replay)[first : first + counts[rank]]
        tokens_T = tokens_of(sum(counts))[first : first + counts[rank]]
        hidden_TD = read(decoder, tokens_T, first, Routing(replay_TLk=replay_TLk))
        dispatch_row(hidden_TD, first).backward()
        grads: dict[str, Any] = {}
        for name, parameter in decoder.named_parameters():
            grad = parameter.grad
            if name in expert_parallel.expert_param_names(spec):
                assert grad is not None, f"{name} has no gradient on rank {rank}"
                grads[name] = expert_parallel.gather_experts(mesh.ep_group.gather(grad)).numpy()
            elif parameter.requires_grad:
                grads[name] = mesh.ep_group.sum(torch.zeros_like(parameter) if grad is None else grad).numpy()
        out.append((hidden_TD.detach().numpy(), grads))
    return out


def compare(results: list[Outcome], hidden_TD: Tensor, grads: dict[str, Tensor]) -> None:
    ours_TD = torch.cat([torch.from_numpy(hidden) for hidden, _ in results])
    assert (ours_TD - hidden_TD).abs().max() <= 1e-6 * hidden_TD.abs().max()
    assert results[0][1].keys() == grads.keys()
    for name, grad in grads.items():
        ours = torch.from_numpy(results[0][1][name])
        assert (ours - grad).norm() <= 1e-5 * grad.norm(), name


@pytest.mark.parametrize("counts", [(14, 9), (11, 0, 12)])
def test_every_form_of_experts_is_the_same_on_several_ranks(counts):
    specs = [of_experts(form) for form in FORMS.values()]
    for recompute in (False, True):
        results = ranks(len(counts), together, specs, counts, None, recompute)
        for i, spec in enumerate(specs):
            compare([result[i] for result in results], *alone(spec, sum(counts)))


def test_a_rank_whose_experts_nobody_wants_has_gradients_of_zero():
    counts, spec = (5, 8), of_experts(FORMS["biases, interleaved"])
    replay_TLk = torch.tensor([[[0, 2], [1, 0]]]).expand(13, 2, 2)
    results = ranks(2, together, [spec], counts, replay_TLk.tolist(), False)
    compare([result[0] for result in results], *alone(spec, 13, replay_TLk))
    for name in expert_parallel.expert_param_names(spec):
        assert not results[0][0][1][name][3:].any(), name


class Slot:
    """A place among ranks that are not there."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def all_to_all(self, x, sent, received):
        raise AssertionError("nobody is there")


def test_experts_that_do_not_divide_are_refused_with_a_mend():
    decoder = Decoder(of_experts(FORMS["plain"]), device="meta", dtype=torch.float32)
    with pytest.raises(UsageError, match=r"4 ranks: layer 0 has 6 experts; choose an --expert-model-parallel-size"):
        expert_parallel.shard_experts(decoder, Slot(0, 4))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_expert_parameters_are_those_that_have_a_row_for_each_expert(form):
    spec = of_experts(form)
    whole = dict(filled(spec).named_parameters())
    cut = filled(spec)
    expert_parallel.shard_experts(cut, Slot(1, 3))
    smaller = {name for name, parameter in cut.named_parameters() if parameter.shape != whole[name].shape}
    assert smaller == expert_parallel.expert_param_names(spec)
    for name in smaller:
        parts = [expert_parallel.slice_experts(whole[name], rank, 3) for rank in range(3)]
        assert torch.equal(parts[1], cut.get_parameter(name))
        assert torch.equal(expert_parallel.gather_experts(parts), whole[name])


@given(
    counts_We=st.integers(1, 4).flatmap(
        lambda e: st.lists(st.lists(st.integers(0, 3), min_size=e, max_size=e), min_size=1, max_size=4)
    )
)
@settings(max_examples=examples(50), deadline=None)
def test_rows_that_arrive_are_sorted_by_expert_and_then_by_the_rank_they_came_from(counts_We):
    came = [(e, w, i) for w, counts in enumerate(counts_We) for e, n in enumerate(counts) for i in range(n)]
    rows = _sort_received_by_expert(torch.tensor(counts_We), len(came))
    assert [came[at] for at in rows.order_R.tolist()] == sorted(came)
    assert rows.place_R[rows.order_R].tolist() == list(range(len(came)))
    assert rows.ends_E.tolist() == [sum(row[0] <= e for row in came) for e in range(len(counts_We[0]))]
