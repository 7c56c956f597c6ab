"""Products of one row as device code against torch in float64."""

import pytest
import torch
from tests.kernels.device import CARD, DTYPES, apart, needs_triton, random
from torch.nn import functional as F

from miles.kernels.fused import activation as gates
from miles.kernels.fused import gemv as module
from miles.kernels.fused.activation import apply_activation
from miles.kernels.fused.gemv import gated_linear, gemv_fp32, linear
from miles.kernels.numerics import FAST

SHAPES = [(16, 1), (40, 6), (600, 18)] + ([(1024, 6144), (2560, 19456), (9728, 2560), (4096, 2560)] if CARD else [])
# Sums of float32 products, rounded once.
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@pytest.fixture
def on_device(monkeypatch, poisoned):
    monkeypatch.setattr(module, "use_triton_inference", lambda x: True)
    monkeypatch.setattr(gates, "use_triton_inference", lambda x: True)


@needs_triton
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_row_times_a_weight_is_torchs(on_device, shape, dtype, bias):
    inputs, outputs = shape
    x, weight = random(1, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype)
    added = random(outputs, dtype=dtype) if bias else None
    wanted = F.linear(x.double(), weight.double(), None if added is None else added.double())
    assert apart(linear(x, weight, added, numerics=FAST), wanted) < CLOSE[dtype]
    if not bias:
        wide = gemv_fp32(x, weight)
        assert wide.dtype == torch.float32 and apart(wide, wanted) < 1e-5


@needs_triton
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "swiglu_clamped"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(40, 6), (600, 18)] + ([(2560, 19456)] if CARD else []))
def test_a_gated_product_is_the_activation_of_one_half_times_the_other(on_device, shape, kind, bias):
    inputs, outputs = shape
    x, weight = random(1, inputs), random(outputs, inputs)
    added = random(outputs) if bias else None
    both = F.linear(x.double(), weight.double(), None if added is None else added.double())
    assert apart(gated_linear(x, weight, added, kind, numerics=FAST), apply_activation(*both.chunk(2, -1), kind)) < 1e-4


@needs_triton
def test_several_rows_go_to_the_library(on_device):
    x, weight = random(3, 32), random(8, 32)
    assert torch.equal(linear(x, weight, numerics=FAST), F.linear(x, weight))
