"""How a micro-batch is cut over context ranks: every token is somewhere once, and sees what it should."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.cluster.layout import Layout
from miles.core.errors import UsageError
from miles.kernels.segments import SegmentAttend
from miles.kernels.terms import Terms
from miles.kernels.varlen import PackedAttend
from miles.models.families import spec_of

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

LENGTHS = st.lists(st.integers(1, 17), min_size=1, max_size=5)


@given(lengths=LENGTHS, context=st.integers(2, 4), multiple=st.integers(1, 4))
def test_every_token_is_on_one_rank_and_all_ranks_have_as_many_slots(lengths, context, multiple):
    from miles.backends.megatron.packed import slots_of

    found = [slots_of(lengths, rank=r, context=context, multiple=multiple) for r in range(context)]
    sizes = {len(slots.source_t) for slots in found}
    assert len(sizes) == 1 and not sizes.pop() % multiple
    real = np.concatenate([slots.source_t[slots.source_t >= 0] for slots in found])
    assert sorted(real.tolist()) == list(range(sum(lengths)))
    places = np.concatenate([np.arange(n) for n in lengths])
    for slots in found:
        here = slots.source_t >= 0
        assert np.array_equal(slots.place_t[here], places[slots.source_t[here]])


@given(lengths=LENGTHS, context=st.integers(2, 3))
def test_a_rank_attends_to_its_tokens_as_one_that_has_all(lengths, context):
    from miles.backends.megatron.packed import segments_of, slots_of

    torch.manual_seed(0)
    total, terms = sum(lengths), Terms(scale=0.5)
    q_THd, k_TGd, v_TGd = torch.randn(total, 2, 4), torch.randn(total, 1, 4), torch.randn(total, 1, 4)
    wanted = PackedAttend(lengths, "cpu")(0, q_THd, k_TGd, v_TGd, terms)
    found = [slots_of(lengths, rank=r, context=context, multiple=1) for r in range(context)]
    every = torch.from_numpy(np.concatenate([slots.source_t for slots in found])).clamp(min=0)
    for rank, slots in enumerate(found):
        attend = SegmentAttend(segments_of(slots, rank=rank, context=context), "cpu", keys=len(every))
        source_t = torch.from_numpy(slots.source_t)
        out = attend(0, q_THd[source_t.clamp(min=0)], k_TGd[every], v_TGd[every], terms)
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

    from miles.backends.megatron.shape import shape_of

    with pytest.raises(UsageError, match=said):
        shape_of(spec_of(KINDS[kind]), layout(sizes), {}, dtype=torch.float32, device=torch.device("cpu"))


def test_megatrons_own_refusal_is_passed_on():
    from tests.backends.megatron.cases import KINDS

    from miles.backends.megatron.shape import shape_of

    with pytest.raises(UsageError, match="Megatron-Core refuses"):
        flags = {"recompute_granularity": "full"}
        shape_of(spec_of(KINDS["qwen3"]), Layout(), flags, dtype=torch.float32, device=torch.device("cpu"))
