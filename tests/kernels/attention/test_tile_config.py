"""The attention kernels are compiled for a card that is not there, and fit on it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles.kernels.runtime.triton_compat import HAVE_TRITON

# The most memory a program may have for its tiles on compute capability 9.0.
LIMIT = 227 * 1024
ENTRIES = (
    *(f"decode {width} {heads}" for width in (64, 96, 128, 256) for heads in (4, 32)),
    *(f"prefill {width} 4" for width in (64, 96, 128, 256)),
    *(f"latent 576 {heads}" for heads in (16, 128)),
)
PROGRAM = f"""
import sys
import numpy as np, torch
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
    assert kernel.metadata.shared <= {LIMIT}, kernel.metadata
    assert self.fn.__name__ == "reduce_splits_kernel" or "mma" in kernel.asm["ptx"] and "cp.async" in kernel.asm["ptx"]
    return kernel

JITFunction.run = compile_only
from miles.kernels.attention.paged_decode import decode_attention
from miles.kernels.attention.mla import mla_decode_attention, mla_prefill_attention
from miles.kernels.attention.paged_prefill import prefill_attention, build_prefill_tiles
from miles.kernels.attention.params import PagedAttentionParams
from tests.kernels.paged_case import case

kind, width, heads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
made = case([200, 180, 150, 9], [(0, 3, 96)], heads=1, width=width, dtype=torch.bfloat16)
q = torch.zeros(4, heads, width, dtype=torch.bfloat16)
tiles = torch.from_numpy(build_prefill_tiles(np.array([5]), np.array([4]), np.array([0]), 0))
params = PagedAttentionParams(16, 1.0)
keys, slots = (made.k_SGd, made.v_SGe, made.block_table_SP), made.req_slots_B
if kind == "decode":
    decode_attention(q, *keys, slots, made.work(heads, sms=132), params, has_prefixes=True)
elif kind == "prefill":
    prefill_attention(q, *keys, tiles, params)
else:
    mla_decode_attention(q, keys[0], keys[2], slots, made.work(heads, sms=132), params, value_dim=512)
    mla_prefill_attention(q, keys[0], keys[2], tiles, params, value_dim=512)
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAVE_TRITON, reason="needs Triton")
@pytest.mark.parametrize("entry", ENTRIES)
def test_the_kernels_compile_for_a_card_and_their_tiles_fit(entry, tmp_path):
    environment = dict(os.environ) | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *entry.split()],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr[-2000:]
