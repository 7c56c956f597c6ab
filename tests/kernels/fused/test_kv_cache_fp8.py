"""FP8 of the KV cache in device code: the bytes and scales of the torch reference, to the bit."""

import pytest
import torch
from tests.kernels.device import CARD, DEVICE, DTYPES, needs_triton, random
from tests.kernels.fused.test_qk_norm_rope import case, run

from miles.kernels.fused import qk_norm_rope as module
from miles.kernels.fused.kv_cache_fp8 import decode_e4m3, has_native_e4m3, quantize_rows
from miles.kernels.runtime import kv_cache
from miles.kernels.runtime.kv_cache import KVScales, KvShape, PagedKVCache
from miles.kernels.runtime.triton_compat import jit, tl
from miles.precision.kv_cache import dequantize_kv, quantize_kv

pytestmark = needs_triton


@jit
def _decode_kernel(codes, out, NATIVE: tl.constexpr):
    at = tl.arange(0, 256)
    x = decode_e4m3(tl.load(codes + at), out.dtype.element_ty, NATIVE)
    tl.store(out + at, x)


@jit
def _quantize_kernel(x, codes, scales, rounded, N: tl.constexpr, D: tl.constexpr):
    at_N1 = tl.arange(0, N)[:, None]
    at_ND = at_N1 * D + tl.arange(0, D)[None, :]
    code_ND, scale_N1, rounded_ND = quantize_rows(tl.load(x + at_ND))
    tl.store(codes + at_ND, code_ND)
    tl.store(scales + at_N1, scale_N1)
    tl.store(rounded + at_ND, rounded_ND)


@pytest.mark.parametrize("native", [False, True] if CARD and has_native_e4m3(torch.device("cuda", 0)) else [False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_byte_is_the_number_it_stands_for(dtype, native):
    codes, out = torch.arange(256, dtype=torch.uint8, device=DEVICE), torch.empty(256, dtype=dtype, device=DEVICE)
    _decode_kernel[(1,)](codes, out, native)
    wanted = codes.view(torch.float8_e4m3fn).to(dtype)
    assert torch.equal(out.isnan(), wanted.isnan()) and torch.equal(out.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_bytes_and_scales_of_the_reference(dtype):
    x = random(512, 64) * torch.exp2(torch.arange(512, device=DEVICE)[:, None] / 40 - 8)
    x[0] = 0
    x[1:9, 0] = torch.tensor([448.0, 449.0, 1.75, 1.7501, 2.0, 1.0, 2.0**-10, -3.5], device=DEVICE)
    x[9:] *= torch.exp2(-torch.randint(0, 12, (503, 64), device=DEVICE).float())
    x = x.to(dtype)
    codes, scales = torch.empty(512, 64, dtype=torch.uint8, device=DEVICE), torch.empty(512, device=DEVICE)
    rounded = torch.empty(512, 64, device=DEVICE)
    _quantize_kernel[(1,)](x, codes, scales, rounded, 512, 64)
    data, scale = quantize_kv(x)
    assert torch.equal(scales, scale) and torch.equal(codes, data.view(torch.uint8))
    assert torch.equal(rounded, dequantize_kv(data, scale, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 2, 16, 16), (3, 1, 24, 8), (6, 2, 12, 0)])
@pytest.mark.parametrize("norm", [False, True])
def test_keys_and_values_are_written_as_the_reference_writes_them(monkeypatch, poisoned, shape, dtype, norm):
    page = 4
    qkv, given = case(9, shape, dtype, norm=norm)
    slots = (len(qkv) + 7, given["kv_heads"], given["head_dim"])
    results, wide = [], torch.zeros(2, *slots, dtype=dtype, device=DEVICE)
    monkeypatch.setattr(module, "use_triton_inference", lambda x: True)
    wide_q = run(qkv, given, key_slots=wide[0], value_slots=wide[1])
    for fast in (False, True):
        monkeypatch.setattr(module, "use_triton_inference", lambda x, fast=fast: fast)
        codes = torch.zeros(2, *slots, dtype=torch.uint8, device=DEVICE)
        scales = torch.zeros(2, slots[0] // page, slots[1], page, device=DEVICE)
        q = run(qkv, given, key_slots=codes[0], value_slots=codes[1], scales=KVScales(*scales))
        results.append((q, codes, scales))
    q, codes, scales = results[1]
    assert torch.equal(q, wide_q)  # queries are not touched
    written = given["slots_T"][given["slots_T"] >= 0]
    data, scale = quantize_kv(wide[:, written])
    assert torch.equal(codes[:, written], data.view(torch.uint8))
    assert torch.equal(scales.mT.reshape(2, slots[0], slots[1])[:, written], scale)
    unwritten = torch.ones(slots[0], dtype=torch.bool).index_fill(0, written.cpu(), False)
    assert not codes[:, unwritten].any() and not scales.mT.reshape(2, slots[0], slots[1])[:, unwritten].any()
    assert torch.equal(codes[1], results[0][1][1]) and torch.equal(scales[1], results[0][2][1])  # values: no norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [KvShape(1, 40, 0, 0, 16), KvShape(1, 24, 0), KvShape(3, 16, 12)], ids=str)
def test_tokens_are_written_in_one_launch_as_torch_writes_them(monkeypatch, shape, dtype):
    """MLA's latent and RoPE channels, one vector, and several heads; tokens strided, slots in no order."""
    slots = torch.tensor([9, 2, 14, 3, 0], device=DEVICE)
    x = (
        random(5, 2, shape.heads, shape.key_dim)
        * torch.exp2(torch.arange(5, device=DEVICE) * 4.0 - 9)[:, None, None, None]
    )
    x[3] = 0
    written = []
    for fast in (False, True):
        monkeypatch.setattr(kv_cache, "use_triton_inference", lambda x, fast=fast: fast)
        cache = PagedKVCache([shape], pages=4, page_size=4, device=DEVICE, dtype=dtype, kv_dtype="fp8_e4m3")
        keys = cache.layers[0].keys
        keys.write(slots, x.to(dtype)[:, 1])
        written.append((keys.slots, keys.scales, keys.read_slots(slots)))
    for ours, wanted in zip(*written, strict=True):
        assert torch.equal(ours, wanted)
    parts = written[1][2].split((shape.key_dim - shape.rope_dim, shape.rope_dim), -1)
    for part, source in zip(parts, x.to(dtype)[:, 1].split([each.shape[-1] for each in parts], -1), strict=True):
        if part.numel():
            assert torch.equal(part, dequantize_kv(*quantize_kv(source), dtype))
