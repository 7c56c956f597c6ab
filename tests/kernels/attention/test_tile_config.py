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
    *(f"prefill {width} 4" for width in (64, 96, 128, 256, 512)),
    *("decode 512 16", "decode 512 32 fp8", "prefill 512 4 fp8"),
    *(f"latent 576 {heads}" for heads in (16, 128)),
    *("decode 128 4 fp8", "decode 256 32 fp8", "prefill 128 4 fp8", "latent 576 128 fp8", "exact 128 4 fp8"),
    *("exact 128 4", "one 128 4", "one 128 4 fp8"),
)
PROGRAM = f"""
import sys
import numpy as np, torch
FP8 = "fp8" in sys.argv
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
    plain = self.fn.__name__ in ("reduce_splits_kernel", "reduce_chunks_kernel", "qk_norm_rope_kernel")
    pipelined = self.fn.__name__ == "decode_bs1_kernel" or "cp.async" in kernel.asm["ptx"]
    assert plain or "mma" in kernel.asm["ptx"] and pipelined
    assert ("e4m3x2" in kernel.asm["ptx"]) == (FP8 and not plain)
    return kernel

JITFunction.run = compile_only
from miles.kernels.attention.paged_decode import decode_attention
from miles.kernels.attention.mla import mla_decode_attention, mla_prefill_attention
from miles.kernels.attention.paged_prefill import prefill_attention, build_prefill_tiles
from miles.kernels.attention.params import PagedAttentionParams
from tests.kernels.paged_case import case
from miles.kernels.attention import decode_bs1, tile_config
from miles.kernels.batch_invariant import attention_paged as exact
from miles.kernels.batch_invariant.attention_split_kv import BatchInvariantSplitKVPlan
from miles.kernels.fused.qk_norm_rope import QKNormRopeParams, launch_qk_norm_rope
from miles.kernels.runtime.kv_cache import KVScales

kind, width, heads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
made = case([200, 180, 150, 9], [(0, 3, 96)], heads=1, width=width, dtype=torch.bfloat16)
q = torch.zeros(4, heads, width, dtype=torch.bfloat16)
tiles = torch.from_numpy(build_prefill_tiles(np.array([5]), np.array([4]), np.array([0]), 0))
params = PagedAttentionParams(16, 1.0)
scales = None
if FP8:
    tile_config.has_native_e4m3 = lambda device: True
    scale = torch.zeros(len(made.k_SGd) // 16, 2 if kind == "latent" else 1, 16)
    scales = KVScales(scale, scale)
    params = params._replace(kv_scales=scales)
    made.k_SGd.data, made.v_SGe.data = (x.to(torch.float8_e4m3fn).view(torch.uint8) for x in (made.k_SGd, made.v_SGe))
keys, slots = (made.k_SGd, made.v_SGe, made.block_table_SP), made.req_slots_B
if kind == "decode":
    decode_attention(q, *keys, slots, made.work(heads, sms=132), params, has_prefixes=True)
elif kind == "prefill":
    prefill_attention(q, *keys, tiles, params)
elif kind == "exact":
    plan = BatchInvariantSplitKVPlan(6, 64, torch.device("cpu"), prefix_queries=32)
    plan.fill(made.lengths, made.group, made.shared, kv_heads=1, queries_per_kv=heads, sms=132)
    exact.decode_attention(q, *keys, slots, plan, params, has_prefixes=True)
    exact.prefill_attention(q, *keys, tiles, params)
elif kind == "one":
    zero, weight = torch.zeros(1, dtype=torch.int64), torch.zeros(width, dtype=torch.bfloat16)
    rotation = torch.zeros(300, 2, width, dtype=torch.bfloat16)
    shape = QKNormRopeParams(heads=heads, kv_heads=1, head_dim=width, rotation=rotation, positions_T=zero,
        interleaved=False, q_weight_d=weight, k_weight_d=weight, eps=1e-6, offset=0.0)
    qkv = torch.zeros(1, (heads + 2) * width, dtype=torch.bfloat16)
    launch_qk_norm_rope(qkv, shape, *keys[:2], zero, False, {{"PDL": False}}, scales)
    room = decode_bs1.allocate_scratch(1, heads, width, sms=132, device=torch.device("cpu"))
    decode_bs1.decode_bs1_attention(qkv, shape, *keys, zero.int(), zero, params, room)
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
