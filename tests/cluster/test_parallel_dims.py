"""Parallel dimensions: every rank has its coordinates and groups, and errors say what does not fit."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import UsageError
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MambaSpec, MlpSpec, MoeSpec, RopeSpec

SIZE = st.integers(1, 3)


@st.composite
def layouts(draw) -> ParallelDims:
    r, s, c, t, p = (draw(SIZE) for _ in range(5))
    expert = draw(st.sampled_from([n for n in range(1, s * c + 1) if s * c % n == 0]))
    return ParallelDims(world=r * s * c * t * p, replicate=r, shard=s, context=c, tensor=t, pipeline=p, expert=expert)


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
@settings(max_examples=examples(60), deadline=None)
def test_every_rank_has_its_own_coordinates_and_one_group_of_each_kind(layout):
    assert len({layout.coords(rank) for rank in range(layout.world)}) == layout.world
    kinds = {
        ("tensor",): layout.tensor,
        ("context",): layout.context,
        ("shard", "context"): layout.shard_group_size,
        ("replicate",): layout.replicate,
        ("replicate", "shard"): layout.data_parallel_size,
        ("expert",): layout.expert,
        ("expert_data",): layout.shard_group_size // layout.expert,
        ("expert", "expert_data"): layout.shard_group_size,
        ("pipeline",): layout.pipeline,
    }
    for along, size in kinds.items():
        groups = layout.groups(*along)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
        assert all(len(group) == size and group == sorted(group) for group in groups)
        # What a device mesh is made of: the members stand evenly apart.
        assert all(len({b - a for a, b in pairwise(group)}) <= 1 for group in groups)
    assert {layout.data_parallel_rank(rank) for rank in range(layout.world)} == set(range(layout.data_parallel_size))


@given(layouts())
@settings(max_examples=examples(30), deadline=None)
def test_ranks_of_one_part_differ_in_tokens_heads_and_layers_alone(layout):
    for group in layout.groups("context", "tensor", "pipeline"):
        assert len({layout.data_parallel_rank(rank) for rank in group}) == 1


def test_tensor_ranks_are_neighbours():
    assert ParallelDims(world=8, shard=2, context=2, tensor=2).groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"world": 6, "tensor": 4}, "4 tensor needs 4 ranks, but there are 6"),
        ({"world": 2}, "needs 1 ranks, but there are 2"),
        ({"world": 4, "tensor": 0}, "at least 1"),
        ({"world": 4, "shard": 4, "expert": 3}, "does not divide the 4 ranks"),
        ({"world": 4, "tensor": 4, "expert_tensor": 3}, "does not divide the tensor parallel size 4"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(sizes, said):
    with pytest.raises(UsageError, match=said):
        ParallelDims(**sizes)


@pytest.mark.parametrize(
    ("layout", "model", "said"),
    [
        (ParallelDims(world=3, tensor=3), spec(), "4 attention heads"),
        (ParallelDims(world=2, sequence=True, shard=2), spec(), "sequence parallel"),
        (ParallelDims(world=2, shard=2, expert=2), spec(), "no experts"),
        (ParallelDims(world=2, shard=2, expert=2), spec(experts=3), "3 experts cannot be distributed evenly"),
    ],
)
def test_a_model_that_does_not_fit_is_told_why(layout, model, said):
    problem = layout.find_model_problem(model)
    assert problem is not None and said in problem and problem.endswith(".")


def test_what_fits_is_not_complained_about():
    assert ParallelDims(world=2, context=2).find_model_problem(spec(mamba=True)) is None
    assert ParallelDims(world=8, shard=2, tensor=4, sequence=True).find_model_problem(spec()) is None
    assert ParallelDims(world=4, shard=2, context=2, expert=4).find_model_problem(spec(experts=8)) is None
