"""Compressed attention: a sliding window of tokens, and one key for each window of a compressor over all earlier ones.

Shapes: T tokens, D hidden, H query heads (h of the indexer), d their channels (i of the indexer), r rotated ones, R
query rank, G output groups of g channels, o channels of a group's output; M windows that read L tokens each, x channels
of a token's state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.kernels.attention.compressed import (
    CompressedAttentionBackend,
    CompressorInputs,
    WindowIndexerInputs,
    pool_windows,
)
from miles.kernels.batch_invariant.linear import linear as invariant_linear
from miles.kernels.numerics import Numerics
from miles.models.layers.attention_backend import AttentionBackend, AttentionInputs, AttentionParams
from miles.models.layers.linear import Linear
from miles.models.layers.norm import RMSNorm, unit_rms_norm
from miles.models.layers.rope import Positions, apply_rotary, compute_cos_sin
from miles.models.spec import CompressedAttentionSpec, CompressorSpec, DecoderSpec, RopeSpec, WindowIndexerSpec
from miles.precision.kv_cache import round_kv


def rotate_last(
    x_TNd: Tensor, cos_sin_T2r: Tensor, rope: RopeSpec, numerics: Numerics, *, back: bool = False
) -> Tensor:
    """Rotate the last channels of each head by their position's angles, or ``back``."""
    dim = cos_sin_T2r.shape[-1]
    if back:
        cos_T1r, sin_T1r = cos_sin_T2r.split(1, 1)
        cos_sin_T2r = torch.cat((cos_T1r, -sin_T1r), 1)
    kept_TNk, rotated_TNr = x_TNd.split((x_TNd.shape[-1] - dim, dim), -1)
    rotated_TNr = apply_rotary(rotated_TNr, cos_sin_T2r, interleaved=rope.interleaved, numerics=numerics)
    return torch.cat((kept_TNk, rotated_TNr), -1)


class Compressor(nn.Module):
    """Projects what tokens add to windows, and computes the windows' keys."""

    def __init__(
        self,
        spec: CompressorSpec,
        head_dim: int,
        rope: RopeSpec,
        model: DecoderSpec,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.rope = rope
        self.numerics = numerics
        self.max_positions = model.max_positions
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}
        self.head_dim, self.channels = head_dim, head_dim * (2 if spec.overlap else 1)
        self.kv_gate = Linear(model.hidden_size, 2 * self.channels, bias=False, **factory)
        self.position_bias = nn.Parameter(torch.empty(spec.rate, self.channels, device=device, dtype=dtype))
        self.norm = RMSNorm(head_dim, model.norm_eps, **factory)

    def compress(self, states_MLx: Tensor, numbers_M: Tensor) -> Tensor:
        """Return the keys of windows, [M, d], from what ``kv_gate`` projected of their tokens."""
        pooled_Md = pool_windows(states_MLx, numbers_M, self.position_bias, self.spec.overlap, self.numerics)
        positions_M = numbers_M * self.spec.rate
        dim = self.rope.dim or self.head_dim
        cos_sin_M2r = compute_cos_sin(
            self.rope, dim, self.max_positions, positions_M, states_MLx.dtype, numerics=self.numerics
        )
        return rotate_last(self.norm(pooled_Md).unsqueeze(1), cos_sin_M2r, self.rope, self.numerics).squeeze(1)


class WindowIndexer(nn.Module):
    """Queries from the attention's query latent, a weight per head, and a compressor of keys of windows.

    The selection has no gradient, so nothing here is trained.
    """

    def __init__(
        self,
        spec: WindowIndexerSpec,
        attention: CompressedAttentionSpec,
        model: DecoderSpec,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        assert attention.compressor is not None
        self.spec = spec
        self.rope = attention.rope
        self.numerics = numerics
        self.scale = (spec.head_dim * spec.num_heads) ** -0.5
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}
        self.wq_b = Linear(attention.query_rank, spec.num_heads * spec.head_dim, bias=False, **factory)
        self.weights_proj = Linear(model.hidden_size, spec.num_heads, bias=False, **factory)
        self.compressor = Compressor(attention.compressor, spec.head_dim, attention.rope, model, **factory)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x_TD: Tensor, query_TR: Tensor, positions: Positions) -> WindowIndexerInputs:
        q_Thi = self.wq_b(query_TR).unflatten(-1, (-1, self.spec.head_dim))
        q_Thi = rotate_last(q_Thi, positions.cos_sin(self.rope, self.spec.head_dim), self.rope, self.numerics)
        # The selection depends on small differences: the weights are not rounded to a low-precision dtype.
        fp32 = torch.promote_types(x_TD.dtype, torch.float32)
        linear = invariant_linear if self.numerics.batch_invariant else F.linear
        weights_Th = linear(x_TD.to(fp32), self.weights_proj.weight.to(fp32)) * self.scale
        return WindowIndexerInputs(q_Thi, weights_Th, self.spec.top)


class GroupedLinear(nn.Module):
    """A projection of each group of channels by a matrix of its own, without bias."""

    def __init__(
        self,
        groups: int,
        inputs: int,
        outputs: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        self.groups, self.numerics = groups, numerics
        self.weight = nn.Parameter(torch.empty(groups * outputs, inputs, device=device, dtype=dtype))

    def forward(self, x_TGg: Tensor) -> Tensor:
        weight_Gog = self.weight.unflatten(0, (self.groups, -1))
        if self.numerics.batch_invariant:
            pairs = zip(x_TGg.unbind(1), weight_Gog.unbind(0), strict=True)
            return torch.stack([invariant_linear(x_Tg.contiguous(), weight_og) for x_Tg, weight_og in pairs], 1)
        weight_Ggo = weight_Gog.transpose(1, 2)
        return torch.bmm(x_TGg.transpose(0, 1), weight_Ggo).transpose(0, 1)


class CompressedAttention(nn.Module):
    """Attention with one shared head of keys that are values too, and an output projection in groups of heads."""

    def __init__(
        self,
        spec: CompressedAttentionSpec,
        model: DecoderSpec,
        layer: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.numerics = numerics
        self.norm_eps = model.norm_eps
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}
        width, queries = model.hidden_size, spec.num_heads * spec.head_dim
        self.params = AttentionParams(scale=spec.head_dim**-0.5, window=spec.window)
        self.q_a = Linear(width, spec.query_rank, bias=False, **factory)
        self.q_a_norm = RMSNorm(spec.query_rank, model.norm_eps, **factory)
        self.q_b = Linear(spec.query_rank, queries, bias=False, **factory)
        self.kv = Linear(width, spec.head_dim, bias=False, **factory)
        self.kv_norm = RMSNorm(spec.head_dim, model.norm_eps, **factory)
        self.sinks = nn.Parameter(torch.empty(spec.num_heads, device=device, dtype=dtype))
        sizes = (spec.output_groups, queries // spec.output_groups, spec.output_rank)
        self.output_groups = GroupedLinear(*sizes, **factory)
        self.output = Linear(spec.output_groups * spec.output_rank, width, bias=False, **factory)
        self.compressor: Compressor | None = None
        self.indexer: WindowIndexer | None = None
        if spec.compressor is not None:
            self.compressor = Compressor(spec.compressor, spec.head_dim, spec.rope, model, **factory)
            if spec.compressor.indexer is not None:
                self.indexer = WindowIndexer(spec.compressor.indexer, spec, model, **factory)

    def forward(self, x_TD: Tensor, positions: Positions, attn_backend: AttentionBackend) -> Tensor:
        spec, numerics = self.spec, self.numerics
        cos_sin_T2r = positions.cos_sin(spec.rope, spec.head_dim)
        query_TR = self.q_a_norm(self.q_a(x_TD))
        q_THd = unit_rms_norm(self.q_b(query_TR).unflatten(-1, (-1, spec.head_dim)), self.norm_eps, numerics)
        q_THd = rotate_last(q_THd, cos_sin_T2r, spec.rope, numerics)
        k_T1d = rotate_last(self.kv_norm(self.kv(x_TD)).unsqueeze(1), cos_sin_T2r, spec.rope, numerics)
        if numerics.fp8_kv_cache and not attn_backend.latent:  # round what the engine caches
            parts = k_T1d.split((spec.head_dim - cos_sin_T2r.shape[-1], cos_sin_T2r.shape[-1]), -1)
            k_T1d = torch.cat([round_kv(part) for part in parts], -1)
        inputs = AttentionInputs(q_THd, k_T1d, k_T1d, self.params, self.sinks)
        if self.compressor is None:
            out_THd = attn_backend(self.layer, inputs)
        else:
            assert isinstance(attn_backend, CompressedAttentionBackend), "the attention backend has no compressed keys"
            compressor = self._compressor_inputs(x_TD, query_TR, positions)
            out_THd = attn_backend.attend_compressed(self.layer, inputs, compressor)
        out_THd = rotate_last(out_THd, cos_sin_T2r, spec.rope, numerics, back=True)
        out_TGo = self.output_groups(out_THd.flatten(1).unflatten(-1, (spec.output_groups, -1)))
        return self.output(out_TGo.flatten(1))

    def _compressor_inputs(self, x_TD: Tensor, query_TR: Tensor, positions: Positions) -> CompressorInputs:
        compressor, indexer = self.compressor, self.indexer
        assert compressor is not None
        states_Tx = compressor.kv_gate(x_TD)
        size, start = states_Tx.shape[-1], compressor.channels - compressor.head_dim
        common: dict[str, Any] = {"rate": compressor.spec.rate, "overlap": compressor.spec.overlap, "key_start": start}
        if indexer is None:
            return CompressorInputs(
                states_Tx=states_Tx,
                compress=lambda states, numbers: (compressor.compress(states, numbers), None),
                **common,
            )
        with torch.no_grad():
            index_Tx = indexer.compressor.kv_gate(x_TD)

        def compress(states_MLx: Tensor, numbers_M: Tensor) -> tuple[Tensor, Tensor]:
            keys_Md = compressor.compress(states_MLx[..., :size], numbers_M)
            with torch.no_grad():
                return keys_Md, indexer.compressor.compress(states_MLx[..., size:], numbers_M)

        return CompressorInputs(
            states_Tx=torch.cat((states_Tx, index_Tx), -1),
            compress=compress,
            index_start=size + indexer.compressor.channels - indexer.compressor.head_dim,
            indexer=indexer(x_TD, query_TR, positions),
            **common,
        )
