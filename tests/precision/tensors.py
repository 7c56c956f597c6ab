"""Weights for tests of number formats, made by hypothesis: many magnitudes, zeros, ties and subnormal numbers."""

import torch
from hypothesis import strategies as st

SPECIAL = (0.0, -0.0, 1.0, -1.0, 2.5, 5.0, 6.0, -6.0, 448.0, 464.0, 2.0**-9, 1e-40, -1e-38, 7.5, 127.5)


ROWS = st.integers(1, 6)
NO_STACK = st.just(())


@st.composite
def weights(draw, columns, rows=ROWS, stack=NO_STACK):
    """A tensor [*stack, rows, columns] of float32, bfloat16 or float16."""
    shape = (*draw(stack), draw(rows), draw(columns))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    # Each row has its own magnitude, and a part of the values is replaced by special ones.
    exponent = torch.randint(-draw(st.integers(0, 20)), 8, (*shape[:-1], 1), generator=generator)
    weight = torch.randn(shape, generator=generator) * 2.0**exponent
    special = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), shape, generator=generator)]
    share = draw(st.sampled_from([0.0, 0.1, 1.0]))
    weight = torch.where(torch.rand(shape, generator=generator) < share, special, weight)
    if draw(st.booleans()):
        weight[..., : shape[-1] // 2] = 0
    return weight.to(dtype)
