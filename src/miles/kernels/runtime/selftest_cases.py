"""Cases of the on-device self-test: each runs a Triton kernel and returns pairs of its result and torch's.

Inputs have a fixed seed and are as the engine would pass them; the same functions in float64 are computed by torch.
Shapes: T tokens, D features, E experts, k of them per token, B rows, H query heads, G key-value heads, d channels of a
head, V vocabulary, S slots of a cache, P pages of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from miles.kernels.activation_kinds import limited_swiglu
from miles.kernels.attention.decode_bs1 import allocate_scratch, decode_bs1_attention
from miles.kernels.attention.mla import (
    count_head_tiles,
    mla_decode_attention,
    mla_decode_reference,
    mla_prefill_attention,
    mla_prefill_reference,
)
from miles.kernels.attention.paged_decode import decode_attention, decode_reference
from miles.kernels.attention.paged_prefill import build_prefill_tiles, prefill_attention, prefill_reference
from miles.kernels.attention.params import PagedAttentionParams
from miles.kernels.attention.split_kv import SplitKVPlan
from miles.kernels.fused.activation import gated_activation_inference
from miles.kernels.fused.gemv import gated_linear, gemv_fp32, linear
from miles.kernels.fused.qk_norm_rope import QKNormRopeParams, qk_norm_rope_write_kv
from miles.kernels.fused.rms_norm import add_rms_norm, rms_norm
from miles.kernels.lora.experts import ExpertFactors, ExpertLora
from miles.kernels.lora.grouped import LoraPlan, LoraSlots, add_grouped_lora, build_tiles, split_columns
from miles.kernels.moe.fused_moe import moe_forward
from miles.kernels.moe.topk_router import route_topk
from miles.kernels.numerics import FAST
from miles.kernels.runtime.graph_inputs import unpack_graph_inputs
from miles.kernels.runtime.kv_cache import Ints, KVScales
from miles.kernels.runtime.triton_compat import count_sms
from miles.kernels.sampling.sample import sample_tokens
from miles.precision.kv_cache import quantize_kv

Pairs = Iterable[tuple[Tensor, Tensor]]

_EPS, _PAGE = 1e-6, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestShapes:
    """Shapes of the layers that kernels are tested on, and of their inputs."""

    features: int = 1280
    inner: int = 768
    products: tuple[tuple[int, int], ...] = ((1280, 300), (9728, 96))
    experts: int = 8
    # Token counts, with two experts each, that cover every tile configuration.
    tokens: tuple[int, ...] = (2, 12, 32, 64, 128)
    routed: int = 128
    heads: int = 8
    kv_heads: int = 2
    widths: tuple[int, ...] = (64, 128, 256)
    # Heads, channels of a key, and how many of these are its value.
    latent: tuple[int, int, int] = (16, 576, 512)
    lengths: tuple[int, ...] = (900, 700, 1, 130, 37)
    shared: int = 512
    window: int = 200
    vocabulary: int = 20_000


# Float32 is rarely used for sampling: one shape of each.
FP32_SHAPES = SelfTestShapes(products=((1280, 300),), tokens=(12,), widths=(128,))


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestContext:
    """Device, dtype and shapes of a self-test."""

    device: torch.device
    dtype: torch.dtype
    shapes: SelfTestShapes
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def sms(self) -> int:
        """The number of SMs that work is split for."""
        return count_sms(self.device)

    def random(self, *shape: int) -> Tensor:
        """Normal numbers, generated on the CPU so that they are the same everywhere."""
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def run(self, kernel: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Run a kernel after all its inputs are complete: with PDL kernels may read weights and tables early."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return kernel(*inputs, **options)

    def permutation(self, num_new: int) -> Tensor:
        """The integers below ``count`` in random order."""
        return torch.randperm(num_new, generator=self.generator).to(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestCase:
    """A kernel by name, its pairs of result and expected result, and the factor by which it rounds more than usual."""

    name: str
    run: Callable[[SelfTestContext], Pairs]
    slack: float = 1.0


def list_cases(shapes: SelfTestShapes) -> Iterator[SelfTestCase]:
    """All cases, those that every model needs first."""
    middle = shapes.widths[len(shapes.widths) // 2]
    yield SelfTestCase(name="norm", run=_norm)
    yield SelfTestCase(name="graph inputs", run=_graph_inputs)
    yield SelfTestCase(name="activation", run=_activation, slack=2)
    yield SelfTestCase(name="qk-norm and rope", run=partial(_qk_norm_rope_case, width=middle))
    for width in shapes.widths:
        yield SelfTestCase(name=f"decode attention, head dim {width}", run=partial(_decode, width=width))
        yield SelfTestCase(name=f"prefill attention, head dim {width}", run=partial(_prefill, width=width))
        yield SelfTestCase(
            name=f"batch-1 decode attention, head dim {width}", run=partial(_decode_bs1, width=width), slack=2
        )
    yield SelfTestCase(name="decode attention, shared prefix", run=partial(_decode, width=middle, shared=shapes.shared))
    yield SelfTestCase(name="decode attention, window", run=partial(_decode, width=middle, windowed=True))
    yield SelfTestCase(name="prefill attention, window", run=partial(_prefill, width=middle, windowed=True))
    yield SelfTestCase(name="mla decode attention", run=_mla_decode)
    yield SelfTestCase(name="mla prefill attention", run=_mla_prefill)
    for width in shapes.widths:
        yield SelfTestCase(name=f"decode attention, FP8, head dim {width}", run=partial(_decode, width=width, fp8=True))
        yield SelfTestCase(
            name=f"prefill attention, FP8, head dim {width}", run=partial(_prefill, width=width, fp8=True)
        )
    yield SelfTestCase(
        name="decode attention, FP8, shared prefix", run=partial(_decode, width=middle, shared=shapes.shared, fp8=True)
    )
    yield SelfTestCase(name="batch-1 decode attention, FP8", run=partial(_decode_bs1_fp8, width=middle), slack=2)
    yield SelfTestCase(name="mla decode attention, FP8", run=partial(_mla_decode, fp8=True))
    yield SelfTestCase(name="mla prefill attention, FP8", run=partial(_mla_prefill, fp8=True))
    yield SelfTestCase(name="KV write, FP8", run=partial(_write_fp8, width=middle))
    yield SelfTestCase(name="gemv", run=_gemv)
    yield SelfTestCase(name="gated gemv", run=_gated_gemv)
    yield SelfTestCase(name="gemv logits", run=_gemv_logits)
    yield SelfTestCase(name="grouped lora", run=_grouped_lora, slack=2)
    yield SelfTestCase(name="router", run=_routes)
    yield SelfTestCase(name="fused moe", run=partial(_experts, tokens=shapes.tokens), slack=2)
    yield SelfTestCase(name="fused moe with lora", run=partial(_expert_lora, tokens=shapes.tokens), slack=3)
    yield SelfTestCase(name="moe gemv", run=partial(_experts, tokens=(1,)), slack=2)
    yield SelfTestCase(name="sampling", run=partial(_sampling, filters=False))
    yield SelfTestCase(name="sampling with filters", run=partial(_sampling, filters=True))


def _wide(*tensors: Tensor) -> list[Tensor]:
    """The same numbers in float64, for torch."""
    return [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]


# -- row kernels -----------------------------------------------------------------------------


def _graph_inputs(g: SelfTestContext) -> Pairs:
    inputs_4n = torch.stack([g.permutation(9)[:7] for _ in range(4)]).int()
    inputs_4n[0, ::2] = -1
    last_tokens_S = g.permutation(9)
    pages_N = g.permutation(80).int()
    block_table_RM = g.permutation(99).int().view(9, 11)
    table_index_N, tokens_n = (
        g.permutation(98)[:80].int(),
        torch.where(inputs_4n[0] < 0, last_tokens_S[inputs_4n[3].long()], inputs_4n[0]),
    )
    expected_RM = block_table_RM.view(-1).index_put((table_index_N.long(),), pages_N).view(9, 11)
    begun = g.run(
        unpack_graph_inputs,
        *inputs_4n,
        last_tokens_S=last_tokens_S,
        table_index_N=table_index_N,
        pages_N=pages_N,
        block_table_RM=block_table_RM,
    )
    yield from zip((*begun, block_table_RM), (tokens_n, *inputs_4n[1:].long(), expected_RM), strict=True)


def _norm(g: SelfTestContext) -> Pairs:
    x_TD, delta_TD = 3 * g.random(5, g.shapes.features), g.random(5, g.shapes.features)
    weight_D = g.random(g.shapes.features)
    x, delta, weight = _wide(x_TD, delta_TD, weight_D)
    yield g.run(rms_norm, x_TD, weight_D, _EPS, numerics=FAST), rms_norm(x, weight, _EPS, numerics=FAST)
    results = g.run(add_rms_norm, x_TD, delta_TD, weight_D, _EPS, offset=1.0, numerics=FAST)
    yield from zip(results, add_rms_norm(x, delta, weight, _EPS, offset=1.0, numerics=FAST), strict=True)


def _activation(g: SelfTestContext) -> Pairs:
    inner_R2I = 4 * g.random(5, 2 * g.shapes.inner)
    limited = (limited_swiglu(2.5), limited_swiglu(2.5, behind=True))
    for kind in ("silu", "gelu_tanh", "relu2", "swiglu_clamped", *limited):
        yield g.run(gated_activation_inference, inner_R2I, kind), gated_activation_inference(inner_R2I.double(), kind)
    yield (
        g.run(gated_activation_inference, inner_R2I, "silu", interleaved=True),
        gated_activation_inference(inner_R2I.double(), "silu", interleaved=True),
    )


def _gemv(g: SelfTestContext) -> Pairs:
    for in_features, out_features in g.shapes.products:
        inputs = g.random(1, in_features), g.random(out_features, in_features), g.random(out_features)
        yield g.run(linear, *inputs, numerics=FAST), linear(*_wide(*inputs), numerics=FAST)
        yield g.run(linear, *inputs[:2], numerics=FAST), linear(*_wide(*inputs[:2]), numerics=FAST)


def _grouped_lora(g: SelfTestContext) -> Pairs:
    inputs, outputs = g.shapes.features, g.shapes.inner
    spans = ((0, outputs // 2), (outputs // 2, outputs))
    slots = LoraSlots(
        a_SPRI=inputs**-0.5 * g.random(2, 2, 24, inputs),
        b_SOR=0.2 * g.random(2, outputs, 24),
        ranks_SP=torch.tensor([[24, 24], [3, 0]], dtype=torch.int32, device=g.device),
        scales_SP=torch.tensor([[2.0, 0.5], [1.0, 1.0]], device=g.device),
        columns_C4=torch.from_numpy(split_columns(spans)).to(g.device),
        spans=spans,
    )
    wide = replace(slots, a_SPRI=slots.a_SPRI.double(), b_SOR=slots.b_SOR.double())
    for adapters in ([1], [0, -1, 1, 1, 0], [0] * 20 + [1] * 15):
        rows, tiles = (torch.from_numpy(each).to(g.device) for each in build_tiles(np.array(adapters), 16))
        plan = LoraPlan(rows_T=rows, tiles_G3=tiles, tile_rows=16)
        x_TI, y_TN = g.random(len(adapters), inputs), g.random(len(adapters), outputs)
        expected_TN = add_grouped_lora(y_TN.double(), x_TI.double(), wide, plan, numerics=FAST)
        yield g.run(add_grouped_lora, y_TN.clone(), x_TI, slots, plan, numerics=FAST), expected_TN


def _gated_gemv(g: SelfTestContext) -> Pairs:
    for in_features, out_features in g.shapes.products:
        x_1K, weight_NK = g.random(1, in_features), in_features**-0.5 * g.random(out_features, in_features)
        expected = gated_linear(x_1K.double(), weight_NK.double(), None, "silu", numerics=FAST)
        yield g.run(gated_linear, x_1K, weight_NK, None, "silu", numerics=FAST), expected


def _gemv_logits(g: SelfTestContext) -> Pairs:
    for in_features, out_features in g.shapes.products:
        inputs = g.random(1, in_features), g.random(out_features, in_features)
        yield g.run(gemv_fp32, *inputs), linear(*_wide(*inputs), numerics=FAST)


def _experts(g: SelfTestContext, tokens: Sequence[int]) -> Pairs:
    num_experts, width, inner = g.shapes.experts, g.shapes.features, g.shapes.inner
    first_EFD, down_EDI = (
        width**-0.5 * g.random(num_experts, 2 * inner, width),
        inner**-0.5 * g.random(num_experts, width, inner),
    )
    for rows in tokens:
        experts_Tk = torch.stack([g.permutation(num_experts)[:2] for _ in range(rows)])
        inputs = g.random(rows, width), g.random(rows, 2).softmax(-1), experts_Tk, first_EFD, down_EDI
        options: dict[str, Any] = {"activation": "silu", "numerics": FAST}
        yield g.run(moe_forward, *inputs, **options), moe_forward(*_wide(*inputs), **options)


def _expert_lora(g: SelfTestContext, tokens: tuple[int, ...]) -> Pairs:
    """Adapters of two slots, of which tokens have either or none, against experts that they are merged into."""
    width, size = g.shapes.features, g.shapes.inner // 4
    count = g.shapes.experts
    first_EFD, down_EDI = g.random(count, 2 * size, width), g.random(count, width, size)
    factors = [
        ExpertFactors(
            a_SPXRI=i**-0.5 * g.random(2, p, count, 24, i),
            b_SPXOR=0.2 * g.random(2, p, count, o, 24),
            first_column=0,
            ranks_SP=torch.full((2, p), 24, dtype=torch.int32, device=g.device),
            scales_SP=torch.full((2, p), 0.5, device=g.device),
        )
        for p, i, o in ((2, width, size), (1, size, width))
    ]
    for rows in tokens:
        experts_Tk = torch.stack([g.permutation(count)[:2] for _ in range(rows)])
        slots_T = torch.arange(rows, device=g.device, dtype=torch.int32) % 3 - 1
        inputs = g.random(rows, width), g.random(rows, 2).softmax(-1), experts_Tk
        options: dict[str, Any] = {"activation": "silu", "numerics": FAST}
        lora = ExpertLora(first=factors[0], down=factors[1], slots_T=slots_T)
        result_TD = g.run(moe_forward, *inputs, first_EFD, down_EDI, **options, lora=lora)
        expected_TD = torch.empty_like(result_TD, dtype=torch.float64)
        for slot in (-1, 0, 1):
            own = slots_T == slot
            weights = [
                _merge_experts(weight, factor, slot)
                for weight, factor in zip((first_EFD, down_EDI), factors, strict=True)
            ]
            chosen = [each[own] for each in _wide(*inputs)]
            expected_TD[own] = moe_forward(*chosen, *weights, **options)
        yield result_TD, expected_TD


def _merge_experts(weight_ENI: Tensor, factors: ExpertFactors, slot: int) -> Tensor:
    if slot < 0:
        return weight_ENI.double()
    delta_PEOI = 0.5 * (factors.b_SPXOR[slot].double() @ factors.a_SPXRI[slot].double())
    return weight_ENI.double() + torch.cat(delta_PEOI.unbind(), 1)


def _routes(g: SelfTestContext) -> Pairs:
    # All distinct in any precision, so that there is one answer.
    ranks_TE = torch.stack([g.permutation(g.shapes.routed) for _ in range(7)]) - g.shapes.routed / 2
    logits_TE = (ranks_TE / 16).to(g.dtype)
    for normalise in (False, True):
        options: dict[str, Any] = {"normalise": normalise, "scale": 1.5}
        expected = route_topk(logits_TE.double(), 3, **options, dtype=torch.float64)
        yield from zip(g.run(route_topk, logits_TE, 3, **options, dtype=g.dtype), expected, strict=True)


def _sampling(g: SelfTestContext, filters: bool) -> Pairs:
    heat_B, uniform_B = torch.tensor([[0, 1, 0.7, 1, 1.3, 1], [0.5, 0.1, 0.3, 0.55, 0.75, 0.95]], device=g.device)
    top_k_B = torch.tensor([0, 0, 4, 0, 0, 6], device=g.device)
    top_p_B, min_p_B = torch.tensor([[1, 1, 1, 0.8, 1, 0.9], [0, 0, 0, 0, 0.2, 0.1]], device=g.device)
    # A few tokens have nearly all the probability, each far more than the rounding error of sums.
    likely_BL = torch.stack([g.permutation(g.shapes.vocabulary)[:12] for _ in heat_B])
    logits_BV = g.random(len(heat_B), g.shapes.vocabulary).float() - 20
    logits_BV.scatter_(1, likely_BL, torch.linspace(3, 0.25, 12, device=g.device).expand_as(likely_BL))
    limits: dict[str, Any] = {"top_k_B": top_k_B, "top_p_B": top_p_B, "min_p_B": min_p_B, "filters": filters}
    results: list[tuple[Tensor, Tensor]] = []
    for x_BV in (logits_BV, logits_BV.double()):
        tokens_B, logprobs_B = torch.full_like(top_k_B, -1), torch.full_like(heat_B, torch.nan)
        g.run(sample_tokens, x_BV, heat_B, uniform_B, **limits, tokens_out_B=tokens_B, logprobs_out_B=logprobs_B)
        results.append((tokens_B, logprobs_B))
    yield from zip(*results, strict=True)


# -- attention ------------------------------------------------------------------------------


class _CachedSequences(NamedTuple):
    """Sequences in scattered pages of a cache; unused slots are NaN."""

    lengths_B: Ints
    k_SGd: Tensor
    v_SGd: Tensor
    block_table_SP: Tensor
    req_slots_B: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k_SGd, self.v_SGd, self.block_table_SP, self.req_slots_B

    def lengths_on(self, device: torch.device) -> Tensor:
        return torch.from_numpy(self.lengths_B).to(device)


def _build_cache(
    g: SelfTestContext, lengths: Sequence[int], groups: int, width: int, shared: int = 0
) -> _CachedSequences:
    """Build a cache; the first ``shared`` tokens (whole pages) of the first two sequences are the same."""
    length_B = np.array(lengths)
    counts_B = -(-length_B // _PAGE)
    total, rows = int(counts_B.sum()), len(length_B)
    free = iter(g.permutation(total).tolist())
    pages_BP = np.full((rows, int(counts_B.max()) + 1), total, np.int32)
    used = np.zeros((total + 1, _PAGE), bool)
    for row, (length, num_new) in enumerate(zip(length_B.tolist(), counts_B.tolist(), strict=True)):
        pages_BP[row, :num_new] = [next(free) for _ in range(num_new)]
        if row == 1:
            pages_BP[row, : shared // _PAGE] = pages_BP[0, : shared // _PAGE]
        used[pages_BP[row, np.arange(length) // _PAGE], np.arange(length) % _PAGE] = True
    k_SGd, v_SGd = (g.random(used.size, groups, width) for _ in range(2))
    for caches in (k_SGd, v_SGd):
        caches[torch.from_numpy(~used.ravel()).to(g.device)] = torch.nan
    req_slots_B = np.arange(rows)[::-1].astype(np.int32)
    return _CachedSequences(
        length_B, k_SGd, v_SGd, *(torch.from_numpy(x.copy()).to(g.device) for x in (pages_BP[req_slots_B], req_slots_B))
    )


def _build_plan(
    g: SelfTestContext, cache: _CachedSequences, shape: tuple[int, int], queries: int, shared: int = 0
) -> SplitKVPlan:
    """Split-KV plan of one new token per row; ``shape`` is key-value heads and query heads of each."""
    rows = len(cache.lengths_B)
    group_B, shared_B = np.maximum(np.arange(rows), 1), np.zeros(rows, np.int64)
    shared_B[:2] = shared
    plan = SplitKVPlan(rows, 2 * rows + 512, g.device, prefix_queries=queries)
    plan.fill(cache.lengths_B, group_B, shared_B, kv_heads=shape[0], queries_per_kv=shape[1], sms=g.sms)
    plan.copy_to_device()
    assert plan.has_prefixes == bool(shared)
    return plan


def _build_params(g: SelfTestContext, width: int, windowed: bool = False) -> PagedAttentionParams:
    """Full attention, or a window with softcap and sinks."""
    if not windowed:
        return PagedAttentionParams(_PAGE, width**-0.5)
    sinks_H = g.random(g.shapes.heads)
    return PagedAttentionParams(_PAGE, width**-0.5, window=g.shapes.window, softcap=3.0, sinks_H=sinks_H)


def _to_fp8(
    cache: _CachedSequences, params: PagedAttentionParams, value_dim: int | None = None
) -> tuple[_CachedSequences, PagedAttentionParams]:
    """The cache in FP8, and parameters with its scales; for MLA with ``value_dim``, whose other channels are RoPE's."""
    codes: list[Tensor] = []
    scales: list[Tensor] = []
    for x_SGd in (cache.k_SGd, cache.v_SGd):
        width = x_SGd.shape[-1]
        parts = [quantize_kv(x) for x in x_SGd.split((value_dim, width - value_dim) if value_dim else (width,), -1)]
        codes.append(torch.cat([data.view(torch.uint8) for data, _ in parts], -1))
        scales.append(torch.cat([scale for _, scale in parts], -1).unflatten(0, (-1, _PAGE)).mT.contiguous())
    narrow = cache._replace(k_SGd=codes[0], v_SGd=codes[1])
    return narrow, params._replace(kv_scales=KVScales(scales[0], scales[0] if value_dim else scales[1]))


def _decode(g: SelfTestContext, width: int, *, shared: int = 0, windowed: bool = False, fp8: bool = False) -> Pairs:
    heads, groups = g.shapes.heads, g.shapes.kv_heads
    cache = _build_cache(g, g.shapes.lengths, groups, width, shared)
    plan, params = _build_plan(g, cache, (groups, heads // groups), 64, shared), _build_params(g, width, windowed)
    if fp8:
        cache, params = _to_fp8(cache, params)
    q_BHd = g.random(len(cache.lengths_B), heads, width)
    q, k, v = _wide(q_BHd, cache.k_SGd, cache.v_SGd)
    expected = decode_reference(q, k, v, cache.block_table_SP, cache.req_slots_B, cache.lengths_on(g.device), params)
    yield g.run(decode_attention, q_BHd, *cache.tensors, plan, params), expected


def _build_tiles(g: SelfTestContext, cache: _CachedSequences) -> tuple[int, Tensor]:
    """The second half of each sequence is new: the number of tokens, and their tiles."""
    starts_B = cache.lengths_B // 2
    counts_B = cache.lengths_B - starts_B
    tiles = build_prefill_tiles(starts_B, counts_B, cache.req_slots_B.cpu().numpy(), 0)
    return int(counts_B.sum()), torch.from_numpy(tiles).to(g.device)


def _prefill(g: SelfTestContext, width: int, *, windowed: bool = False, fp8: bool = False) -> Pairs:
    cache, params = _build_cache(g, g.shapes.lengths, g.shapes.kv_heads, width), _build_params(g, width, windowed)
    if fp8:
        cache, params = _to_fp8(cache, params)
    num_new, tiles = _build_tiles(g, cache)
    q_THd = g.random(num_new, g.shapes.heads, width)
    q, k, v = _wide(q_THd, cache.k_SGd, cache.v_SGd)
    tensors = q_THd, cache.k_SGd, cache.v_SGd, cache.block_table_SP, tiles
    yield (
        g.run(prefill_attention, *tensors, params),
        prefill_reference(q, k, v, cache.block_table_SP, tiles, params),
    )


def _mla_decode(g: SelfTestContext, *, fp8: bool = False) -> Pairs:
    heads, width, value_dim = g.shapes.latent
    cache, params = _build_cache(g, g.shapes.lengths, 1, width), _build_params(g, width)
    if fp8:
        cache, params = _to_fp8(cache, params, value_dim)
    plan = _build_plan(g, cache, (count_head_tiles(heads), heads), 64 if g.dtype.itemsize == 2 else 16)
    q_BHd = g.random(len(cache.lengths_B), heads, width)
    pages = cache.block_table_SP
    req_slots_B = cache.req_slots_B
    q, k = _wide(q_BHd, cache.k_SGd)
    expected = mla_decode_reference(q, k, pages, req_slots_B, cache.lengths_on(g.device), params, value_dim=value_dim)
    yield (
        g.run(mla_decode_attention, q_BHd, cache.k_SGd, pages, req_slots_B, plan, params, value_dim=value_dim),
        expected,
    )


def _mla_prefill(g: SelfTestContext, *, fp8: bool = False) -> Pairs:
    heads, width, value_dim = g.shapes.latent
    cache, params = _build_cache(g, g.shapes.lengths, 1, width), _build_params(g, width)
    if fp8:
        cache, params = _to_fp8(cache, params, value_dim)
    num_new, tiles = _build_tiles(g, cache)
    q_THd, pages = g.random(num_new, heads, width), cache.block_table_SP
    q, k = _wide(q_THd, cache.k_SGd)
    expected = mla_prefill_reference(q, k, pages, tiles, params, value_dim=value_dim)
    yield g.run(mla_prefill_attention, q_THd, cache.k_SGd, pages, tiles, params, value_dim=value_dim), expected


def _heads(
    g: SelfTestContext, width: int, positions_T: Tensor, *, norm: bool = True, interleaved: bool = False
) -> QKNormRopeParams:
    turns_Pr = g.random(int(positions_T.max()) + 1, width // 2).float()
    cos, sin = turns_Pr.cos(), turns_Pr.sin()
    rotation = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(g.dtype).contiguous()
    weights = (g.random(width), g.random(width)) if norm else (None, None)
    return QKNormRopeParams(
        heads=g.shapes.heads,
        kv_heads=g.shapes.kv_heads,
        head_dim=width,
        rotation=rotation,
        positions_T=positions_T,
        interleaved=interleaved,
        q_weight_d=weights[0],
        k_weight_d=weights[1],
        eps=_EPS,
        offset=0.0,
    )


def _qk_norm_rope(
    qkv_TN: Tensor,
    heads: QKNormRopeParams,
    k_SGd: Tensor,
    v_SGd: Tensor,
    slots_T: Tensor,
    scales: KVScales | None = None,
) -> Tensor:
    if qkv_TN.dtype == torch.float64:
        fields = {name: getattr(heads, name) for name in QKNormRopeParams.__dataclass_fields__}
        tensors = {name: x for name, x in fields.items() if isinstance(x, Tensor) and x.is_floating_point()}
        heads = replace(heads, **{name: x.double() for name, x in tensors.items()})
    return qk_norm_rope_write_kv(
        qkv_TN, heads, key_slots=k_SGd, value_slots=v_SGd, slots_T=slots_T, numerics=FAST, scales=scales
    )


def _qk_norm_rope_case(g: SelfTestContext, width: int) -> Pairs:
    slots_T = g.permutation(9)[:4]
    slots_T[2] = -1
    for plain in (False, True):
        heads = _heads(g, width, g.permutation(60)[:4], norm=not plain, interleaved=plain)
        qkv_TN = g.random(4, (heads.heads + 2 * heads.kv_heads) * width)
        caches = [g.random(9, heads.kv_heads, width) for _ in range(2)]
        k_SGd, v_SGd = _wide(*caches)
        expected_THd = _qk_norm_rope(qkv_TN.double(), heads, k_SGd, v_SGd, slots_T)
        yield g.run(_qk_norm_rope, qkv_TN, heads, *caches, slots_T), expected_THd
        yield from zip(caches, (k_SGd, v_SGd), strict=True)


def _decode_bs1(g: SelfTestContext, width: int) -> Pairs:
    groups, queries_per_kv = g.shapes.kv_heads, g.shapes.heads // g.shapes.kv_heads
    scratch = allocate_scratch(groups, queries_per_kv, width, sms=g.sms, device=g.device)
    for length in (g.shapes.lengths[0], g.shapes.lengths[-1]):
        cache = _build_cache(g, [length], groups, width)
        position = length - 1
        params = _build_params(g, width)
        heads = _heads(g, width, torch.tensor([position], device=g.device))
        qkv_1N = g.random(1, (heads.heads + 2 * groups) * width)
        slot_1 = (cache.block_table_SP[cache.req_slots_B.long(), position // _PAGE] * _PAGE + position % _PAGE).long()
        k_SGd, v_SGd = _wide(cache.k_SGd, cache.v_SGd)
        q_1Hd = _qk_norm_rope(qkv_1N.double(), heads, k_SGd, v_SGd, slot_1)
        tensors = q_1Hd, k_SGd, v_SGd, cache.block_table_SP, cache.req_slots_B
        expected_1Hd = decode_reference(*tensors, cache.lengths_on(g.device), params)
        yield (
            g.run(decode_bs1_attention, qkv_1N, heads, *cache.tensors, slot_1, params, scratch),
            expected_1Hd.flatten(1),
        )
        for results, expected in ((cache.k_SGd, k_SGd), (cache.v_SGd, v_SGd)):
            yield results.nan_to_num(9.0), expected.nan_to_num(9.0)
    yield scratch.done_G, torch.zeros_like(scratch.done_G)


# -- FP8 KV cache -----------------------------------------------------------------------------


def _write_fp8(g: SelfTestContext, width: int) -> Pairs:
    """Bytes and scales are those of the keys and values that the same kernel writes without FP8, bit for bit."""
    slots_T = g.permutation(2 * _PAGE)[:6]
    slots_T[2] = -1
    written = slots_T[slots_T >= 0]
    heads = _heads(g, width, g.permutation(60)[:6])
    qkv_TN = g.random(6, (heads.heads + 2 * heads.kv_heads) * width)
    wide = [torch.zeros(2 * _PAGE, heads.kv_heads, width, dtype=g.dtype, device=g.device) for _ in range(2)]
    codes = [torch.zeros_like(x, dtype=torch.uint8) for x in wide]
    scales = KVScales(*(torch.zeros(2, heads.kv_heads, _PAGE, device=g.device) for _ in range(2)))
    expected_THd = g.run(_qk_norm_rope, qkv_TN, heads, *wide, slots_T)
    yield g.run(_qk_norm_rope, qkv_TN, heads, *codes, slots_T, scales), expected_THd
    for x_SGd, code_SGd, scale_PGp in zip(wide, codes, scales, strict=True):
        data_TGd, scale_TG = quantize_kv(x_SGd[written])
        yield code_SGd[written], data_TGd.view(torch.uint8)
        yield scale_PGp.mT.flatten(0, 1)[written].view(torch.int32), scale_TG.view(torch.int32)


def _decode_bs1_fp8(g: SelfTestContext, width: int) -> Pairs:
    """Against the KV write and the reference over the cache it leaves."""
    groups, queries_per_kv = g.shapes.kv_heads, g.shapes.heads // g.shapes.kv_heads
    scratch = allocate_scratch(groups, queries_per_kv, width, sms=g.sms, device=g.device)
    for length in (g.shapes.lengths[0], g.shapes.lengths[-1]):
        position = length - 1
        cache, params = _to_fp8(_build_cache(g, [length], groups, width), _build_params(g, width))
        assert params.kv_scales is not None
        heads = _heads(g, width, torch.tensor([position], device=g.device))
        qkv_1N = g.random(1, (heads.heads + 2 * groups) * width)
        slot_1 = (cache.block_table_SP[cache.req_slots_B.long(), position // _PAGE] * _PAGE + position % _PAGE).long()
        codes = [cache.k_SGd.clone(), cache.v_SGd.clone()]
        scales = KVScales(*(x.clone() for x in params.kv_scales))
        q_1Hd = g.run(_qk_norm_rope, qkv_1N, heads, *codes, slot_1, scales)
        expected_1Hd = decode_reference(
            q_1Hd.double(),
            codes[0],
            codes[1],
            cache.block_table_SP,
            cache.req_slots_B,
            cache.lengths_on(g.device),
            params._replace(kv_scales=scales),
        )
        out_1N = g.run(decode_bs1_attention, qkv_1N, heads, *cache.tensors, slot_1, params, scratch)
        yield out_1N, expected_1Hd.flatten(1)
        yield cache.v_SGd, codes[1]
        yield params.kv_scales.values_PGp, scales.values_PGp
    yield scratch.done_G, torch.zeros_like(scratch.done_G)
