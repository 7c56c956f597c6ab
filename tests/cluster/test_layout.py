"""Layouts seat every rank once, group those who belong together, and say in a sentence what does not fit."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.cluster.layout import Layout
from miles.core.errors import UsageError
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MambaSpec, MlpSpec, MoeSpec, RopeSpec

SIZE = st.integers(1, 3)


@st.composite
def layouts(draw) -> Layout:
    r, s, c, t, p = (draw(SIZE) for _ in range(5))
    expert = draw(st.sampled_from([n for n in range(1, s * c + 1) if s * c % n == 0]))
    return Layout(world=r * s * c * t * p, replicate=r, shard=s, context=c, tensor=t, pipeline=p, expert=expert)


def spec(*, heads: int = 4, kv_heads: int = 2, experts: int = 0, mamba: bool = False) -> DecoderSpec:
    rope = RopeSpec(theta=1e4)
    attention = AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=8, rope=rope)
    state = MambaSpec(num_heads=4, head_dim=8, groups=4, state_dim=8, kernel=4, conv_bias=False, bias=False)
    ffn = (
        MoeSpec(num_experts=experts, experts_per_token=1, size=8, norm_topk_prob=False) if experts else MlpSpec(size=16)
    )
    return DecoderSpec(
        family="qwen3",
        vocab_size=32,
        hidden_size=16,
        norm_eps=1e-6,
        layers=(LayerSpec(mixer=state if mamba else attention, ffn=ffn),),
        tie_embeddings=False,
        max_positions=64,
        eos_token_ids=(),
    )


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_every_rank_has_one_seat_and_one_group_of_each_kind(layout):
    assert [layout.rank(layout.place(rank)) for rank in range(layout.world)] == list(range(layout.world))
    kinds = {
        ("tensor",): layout.tensor,
        ("context",): layout.context,
        ("shard", "context"): layout.pieces,
        ("replicate",): layout.replicate,
        ("replicate", "shard"): layout.parts,
        ("expert",): layout.expert,
        ("apart",): layout.pieces // layout.expert,
        ("expert", "apart"): layout.pieces,
        ("pipeline",): layout.pipeline,
    }
    for along, size in kinds.items():
        groups = layout.groups(*along)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
        assert all(len(group) == size and group == sorted(group) for group in groups)
        # What a device mesh is made of: the members stand evenly apart.
        assert all(len({b - a for a, b in pairwise(group)}) <= 1 for group in groups)
    assert {layout.part(rank) for rank in range(layout.world)} == set(range(layout.parts))


@given(layouts())
@settings(max_examples=30, deadline=None)
def test_ranks_of_one_part_differ_in_tokens_heads_and_layers_alone(layout):
    for group in layout.groups("context", "tensor", "pipeline"):
        assert len({layout.part(rank) for rank in group}) == 1


def test_tensor_ranks_are_neighbours():
    assert Layout(world=8, shard=2, context=2, tensor=2).groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"world": 6, "tensor": 4}, "4 tensor makes 4 ranks, and there are 6"),
        ({"world": 2}, "makes 1 ranks, and there are 2"),
        ({"world": 4, "tensor": 0}, "at least 1"),
        ({"world": 4, "shard": 4, "expert": 3}, "do not divide the 4 ranks"),
        ({"world": 4, "tensor": 4, "expert_tensor": 3}, "do not divide the 4 tensor ranks"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(sizes, said):
    with pytest.raises(UsageError, match=said):
        Layout(**sizes)


@pytest.mark.parametrize(
    ("layout", "model", "said"),
    [
        (Layout(world=3, tensor=3), spec(), "4 attention heads"),
        (Layout(world=2, sequence=True, shard=2), spec(), "sequence parallel"),
        (Layout(world=2, context=2), spec(mamba=True), "carries a state"),
        (Layout(world=2, shard=2, expert=2), spec(), "no experts"),
        (Layout(world=2, shard=2, expert=2), spec(experts=3), "3 experts cannot be dealt out evenly"),
    ],
)
def test_a_model_that_does_not_fit_is_told_why(layout, model, said):
    problem = layout.misfit(model)
    assert problem is not None and said in problem and problem.endswith(".")


def test_what_fits_is_not_complained_about():
    assert Layout(world=8, shard=2, tensor=4, sequence=True).misfit(spec()) is None
    assert Layout(world=4, shard=2, context=2, expert=4).misfit(spec(experts=8)) is None
