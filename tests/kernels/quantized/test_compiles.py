"""The kernels of quantized layers are compiled for GPUs that are not there: Hopper, Blackwell and MI300."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles.kernels.runtime.triton_compat import HAVE_TRITON

TARGETS = {"hopper": ("cuda", 90, 32), "blackwell": ("cuda", 100, 32), "mi300": ("hip", "gfx942", 64)}
# The most shared memory of a program.
LIMITS = {"hopper": 227 * 1024, "blackwell": 227 * 1024, "mi300": 64 * 1024}
PROGRAM = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

family, arch, wave, limit, what = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]

class Card:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget(family, int(arch) if family == "cuda" else arch, wave)

driver.set_active(Card())
launch = JITFunction.run

def compile_only(self, *args, grid, warmup, **more):
    kernel = launch(self, *args, grid=grid, warmup=True, **more)
    assert kernel.metadata.shared <= limit, kernel.metadata
    text = kernel.asm["ptx"] if family == "cuda" else kernel.asm["amdgcn"]
    # Values of E2M1 pass through subnormal numbers.
    assert ".ftz" not in text
    names.append(self.fn.__name__)
    texts.append(text)
    return kernel

names, texts = [], []
JITFunction.run = compile_only
from miles.kernels.runtime import triton_compat
if family == "cuda":
    triton_compat.pdl_options = lambda device: {"PDL": True, "launch_pdl": True}
from miles.kernels.quantized import dot_scaled, quantize_triton, weight_only_gemm, weight_only_gemv
from miles.precision.formats import FORMATS
from miles.precision.quantize import quantize

format = FORMATS[what]
weight = quantize(torch.randn(512, 1024, dtype=torch.bfloat16), format)
stack = quantize(torch.randn(2, 512, 1024, dtype=torch.bfloat16), format)
bias = torch.zeros(512, dtype=torch.bfloat16)
x = torch.randn(20, 1024, dtype=torch.bfloat16)
experts = torch.zeros(20, 1, dtype=torch.int64)
if what.startswith("fp8"):
    quantize_triton.quantize_weight(x, format)
elif format.quantizes_activations:
    quantize_triton.quantize_rows_mxfp8(x)
    dot_scaled.dot_scaled_linear(dot_scaled.quantize_rows_microscaling(x, format), weight, bias)
else:
    weight_only_gemv.weight_only_gemv(x[:1], weight, bias)
    weight_only_gemv.weight_only_gemv(x[:1], weight, None, "silu")
    weight_only_gemv.expert_gemv(x[:1], stack, None, experts[:2, 0], "silu", interleaved=True)
    weight_only_gemm.weight_only_gemm(x, weight, bias)
    weight_only_gemm.weight_only_gemm(x, weight, None, "silu")
    weight_only_gemm.expert_gemm(x, stack, None, experts)
    assert any(("mma" if family == "cuda" else "mfma") in text for text in texts)
if format.element == "e2m1" and arch == "100":
    dot_scaled.dot_scaled_linear(dot_scaled.quantize_rows_microscaling(x, format), weight, bias)
if arch == "100" and "_dot_scaled_kernel" in names:
    assert "tcgen05.mma" in texts[-1] and "block_scale" in texts[-1], "the scales are not applied by tensor cores"
print(names)
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAVE_TRITON, reason="needs Triton")
@pytest.mark.parametrize(
    "name", ["int4", "int4_g32_asym", "mxfp4", "nvfp4", "int8", "mxfp8", "fp8_pow2", "fp8_channel"]
)
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_and_fit(target, name, tmp_path):
    if (name == "mxfp8" and target != "blackwell") or ("fp8" in name and target == "mi300"):
        pytest.skip("this GPU multiplies another format")
    environment = dict(os.environ) | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, TARGETS[target]), str(LIMITS[target]), name],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr[-2000:]
