"""The kernels of vision towers are compiled for a GPU that is not there: Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles.kernels.runtime.triton_compat import HAVE_TRITON

PROGRAM = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Card:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(Card())
launch = JITFunction.run

def compile_only(self, *args, grid, warmup, **more):
    kernel = launch(self, *args, grid=grid, warmup=True, **more)
    # Two programs fit an SM.
    assert 2 * kernel.metadata.shared <= 227 * 1024, kernel.metadata
    compiled.append((self.fn.__name__, kernel.asm["ptx"]))
    return kernel

compiled = []
JITFunction.run = compile_only
from miles.kernels.attention.bidirectional import Segments
from miles.kernels.attention.bidirectional_triton import attend_segments
from miles.kernels.fused import layer_norm
from miles.kernels.fused.vision_rope import rotate_queries_keys
from miles.kernels.numerics import FAST

for dim in (64, 72, 80, 88, 128):
    qkv = torch.zeros(300, 3, 2, dim, dtype=torch.bfloat16)
    attend_segments(*qkv.unbind(1), Segments([200, 100], "cpu").tiles, 0.1)
    name, text = compiled[-1]
    assert "wgmma" in text and "cp.async.bulk.tensor" in text, name
for interleaved, halves in ((False, False), (True, False), (False, True)):
    qkv = torch.zeros(30, 3, 16, 72, dtype=torch.bfloat16, requires_grad=True)
    q, k = rotate_queries_keys(qkv, torch.zeros(30, 2, 72), interleaved=interleaved, halves=halves)
    (q + k).sum().backward()
layer_norm.use_triton_inference = lambda x: True
x = torch.zeros(30, 1152, dtype=torch.bfloat16)
layer_norm.add_layer_norm(x, x, x[0], x[0], 1e-6, numerics=FAST)
print(len(compiled), *sorted({name for name, _ in compiled}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAVE_TRITON, reason="needs Triton")
def test_kernels_of_vision_towers_compile_for_hopper(tmp_path):
    root = Path(__file__).parents[3]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(root / "src"), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["12", "_add_layer_norm_kernel", "_attend_kernel", "_vision_rope_kernel"]
