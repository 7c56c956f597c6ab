"""The last product of both planes keeps all its digits."""

import pytest
import torch

from miles.kernels.fused.lm_head import compute_logits
from miles.kernels.numerics import FAST

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_the_exact_product_up_to_float32(device, dtype):
    hidden, head = (torch.randn(n, 64, device=device).to(dtype) for n in (5, 37))
    exact = hidden.double() @ head.double().T
    got = compute_logits(hidden, head, numerics=FAST)
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), exact, atol=1e-4, rtol=1e-5)
    rounded = (hidden @ head.T).double()
    assert dtype is torch.float32 or (rounded - exact).abs().max() > 10 * (got.double() - exact).abs().max()


def test_float64_stays_float64():
    assert (
        compute_logits(
            torch.ones(1, 2, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64), numerics=FAST
        ).dtype
        == torch.float64
    )
