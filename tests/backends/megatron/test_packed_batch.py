"""How a micro-batch is cut over context ranks: every token is somewhere once, and sees what it should."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import UsageError
from miles.kernels.attention.params import AttentionInputs, AttentionParams
from miles.kernels.attention.tree import TreeAttentionBackend
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.models.families import spec_from_config

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

LENGTHS = st.lists(st.integers(1, 17), min_size=1, max_size=5)


@given(lengths=LENGTHS, context=st.integers(2, 4), multiple=st.integers(1, 4))
def test_every_token_is_on_one_rank_and_all_ranks_have_as_many_slots(lengths, context, multiple):
    from miles.backends.megatron.packed_batch import build_slots

    found = [build_slots(lengths, rank=r, context=context, multiple=multiple) for r in range(context)]
    sizes = {len(slots.source_t) for slots in found}
    assert len(sizes) == 1 and not sizes.pop() % multiple
    real = np.concatenate([slots.source_t[slots.source_t >= 0] for slots in found])
    assert sorted(real.tolist()) == list(range(sum(lengths)))
    registry = np.concatenate([np.arange(n) for n in lengths])
    for slots in found:
        here = slots.source_t >= 0
        assert np.array_equal(slots.place_t[here], registry[slots.source_t[here]])


@given(lengths=LENGTHS, context=st.integers(2, 3))
def test_a_rank_attends_to_its_tokens_as_one_that_has_all(lengths, context):
    from miles.backends.megatron.packed_batch import build_segments, build_slots

    torch.manual_seed(0)
    total, params = sum(lengths), AttentionParams(scale=0.5)
    q_THd, k_TGd, v_TGd = torch.randn(total, 2, 4), torch.randn(total, 1, 4), torch.randn(total, 1, 4)
    wanted = VarlenAttentionBackend(lengths, "cpu")(0, AttentionInputs(q_THd, k_TGd, v_TGd, params))
    found = [build_slots(lengths, rank=r, context=context, multiple=1) for r in range(context)]
    every = torch.from_numpy(np.concatenate([slots.source_t for slots in found])).clamp(min=0)
    for rank, slots in enumerate(found):
        attend = TreeAttentionBackend(build_segments(slots, rank=rank, context=context), "cpu", keys=len(every))
        source_t = torch.from_numpy(slots.source_t)
        out = attend(0, AttentionInputs(q_THd[source_t.clamp(min=0)], k_TGd[every], v_TGd[every], params))
        assert torch.allclose(out[source_t >= 0], wanted[source_t[source_t >= 0]], atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "sizes", "said"),
    [
        ("qwen3_moe", {"tensor": 2}, "--sequence-parallel"),
        ("qwen3", {"context": 2, "expert": 2}, "no experts"),
        ("qwen3", {"tensor": 8}, "attention heads"),
    ],
)
def test_what_megatron_cannot_lay_out_is_refused(kind: str, sizes: dict, said: str):
    from tests.backends.megatron.cases import KINDS
    from tests.backends.megatron.test_model import layout

    from miles.backends.megatron.transformer_config import build_transformer_config

    with pytest.raises(UsageError, match=said):
        build_transformer_config(
            spec_from_config(KINDS[kind]), layout(sizes), {}, dtype=torch.float32, device=torch.device("cpu")
        )


def test_megatrons_own_refusal_is_passed_on():
    from tests.backends.megatron.cases import KINDS

    from miles.backends.megatron.transformer_config import build_transformer_config

    with pytest.raises(UsageError, match="Megatron-Core rejects"):
        flags = {"recompute_granularity": "full"}
        build_transformer_config(
            spec_from_config(KINDS["qwen3"]), ParallelDims(), flags, dtype=torch.float32, device=torch.device("cpu")
        )
