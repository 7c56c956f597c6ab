"""Grouped-query attention; keys and values are cached by the attention backend that is passed in.

Shapes: T tokens, D hidden, H query heads, G key-value heads, N = H + G, d head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.kernels.attention.gpu_backend import TritonAttentionBackend
from miles.kernels.batch_invariant import qk_norm_rope as invariant_qk
from miles.kernels.batch_invariant.activation import sigmoid
from miles.kernels.fused.qk_norm_rope import QKNormRopeParams, QKVShape
from miles.kernels.fused.qk_norm_rope_autograd import qk_norm_rope_training
from miles.kernels.numerics import Numerics
from miles.kernels.runtime.triton_compat import use_triton, use_triton_training
from miles.models.layers.attention_backend import AttentionBackend, AttentionInputs, AttentionParams
from miles.models.layers.block_indexer import BlockIndexer
from miles.models.layers.linear import Linear
from miles.models.layers.norm import RMSNorm, unit_rms_norm
from miles.models.layers.pool_indexer import PoolIndexer
from miles.models.layers.rope import Positions, apply_rotary
from miles.models.spec import AttentionSpec, DecoderSpec, PoolIndexerSpec
from miles.precision.kv_cache import round_kv
from miles.precision.quantized_tensor import QuantizedActivation


class Attention(nn.Module):
    """Project, apply QK-norm if the family has one, apply RoPE, attend, project back.

    Keys and values are rounded as an FP8 KV cache rounds them, if the numerics have one: the engine's cache, which
    rounds them itself, then changes nothing. ``input_size`` is the width of its input if it is not the model's.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        model: DecoderSpec,
        layer: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
        input_size: int | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.spec = spec
        self.eps = model.norm_eps
        self.numerics = numerics
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self.params = AttentionParams(
            scale=scale, window=spec.window, chunk=spec.chunk, softcap=spec.softcap, ignores_spans=spec.ignores_spans
        )
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        width = queries * (2 if spec.gated else 1) + keys * (1 if spec.value_from_key else 2)
        width = queries if spec.kv_source is not None else width
        others = (layer.mixer for layer in model.layers)
        self._is_source = any(isinstance(mixer, AttentionSpec) and mixer.kv_source == layer for mixer in others)
        self.qkv = Linear(input_size or model.hidden_size, width, bias=spec.qkv_bias, **factory)
        self.output = Linear(queries, model.hidden_size, bias=spec.output_bias, **factory)
        self.gate: Linear | None = None
        if spec.head_gate:
            self.gate = Linear(input_size or model.hidden_size, spec.num_heads, bias=False, **factory)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.qk_norm in ("head", "all", "head_after_rope"):
            sizes = (queries, keys) if spec.qk_norm == "all" else (spec.head_dim, spec.head_dim)
            norms = (RMSNorm(n, model.norm_eps, offset=model.norm_offset, **factory) for n in sizes)
            self.q_norm, self.k_norm = norms
        if spec.kv_source is not None:
            self.k_norm = None
        self.sinks = nn.Parameter(torch.empty(spec.num_heads, device=device, dtype=dtype)) if spec.sinks else None
        self.indexer: BlockIndexer | PoolIndexer | None = None
        if spec.indexer is not None:
            indexer_class = PoolIndexer if isinstance(spec.indexer, PoolIndexerSpec) else BlockIndexer
            self.indexer = indexer_class(spec, model, **factory)
        # The fused kernel covers QK-norm per head and then RoPE; nothing else may be between projection and attention.
        is_plain = not (spec.gated or spec.value_norm or spec.value_from_key) and spec.temperature is None
        is_plain &= spec.indexer is None
        has_own_kv = spec.kv_source is None and not self._is_source
        self._fusable = is_plain and has_own_kv and spec.qk_norm in ("none", "head")

    def forward(
        self, x_TD: Tensor | QuantizedActivation, positions: Positions, attn_backend: AttentionBackend
    ) -> Tensor:
        if (
            self._fusable
            and isinstance(attn_backend, TritonAttentionBackend)
            and (heads := self._qk_norm_rope_params(positions)) is not None
        ):
            out_TX = attn_backend.forward_qkv(self.layer, self.qkv(x_TD), heads, self.params, self.sinks)
            if self.gate is not None:
                out_TX = self._apply_gate(out_TX.unflatten(-1, (-1, self.spec.head_dim)), None, x_TD).flatten(1)
            return self.output(out_TX)
        is_quantized = isinstance(x_TD, QuantizedActivation)
        use_fused = use_triton if self.numerics.batch_invariant else use_triton_training
        if self._fusable and not is_quantized and use_fused(x_TD):
            out_THd = self._fused_attention(x_TD, positions, attn_backend)
            return self.output(self._apply_gate(out_THd, None, x_TD).flatten(1))
        if self.spec.kv_source is not None:
            return self._attend_to_source(x_TD, positions, attn_backend)
        return self._attend(x_TD, positions, attn_backend)

    def _attend(
        self, x_TD: Tensor | QuantizedActivation, positions: Positions, attn_backend: AttentionBackend
    ) -> Tensor:
        """Attention step by step, with whatever the spec asks for."""
        gate_THd, qk_TNd, v_TGd = self._project(x_TD)
        if self.spec.value_norm:
            v_TGd = unit_rms_norm(v_TGd, self.eps, self.numerics)
        qk_TNd = self._norm_and_rotate(qk_TNd, positions)
        q_THd, k_TGd = qk_TNd.split((self.spec.num_heads, self.spec.num_kv_heads), dim=1)
        if self.spec.temperature is not None:
            q_THd = (q_THd * positions.temperature(*self.spec.temperature)).to(q_THd.dtype)
        if self.numerics.fp8_kv_cache:
            k_TGd, v_TGd = round_kv(k_TGd), round_kv(v_TGd)
        if self._is_source:
            positions.shared_kv[self.layer] = k_TGd, v_TGd
        selection = None if self.indexer is None else self.indexer(_wide_input(x_TD), positions)
        inputs = AttentionInputs(q_THd, k_TGd, v_TGd, self.params, self.sinks, selection)
        out_THd = attn_backend(self.layer, inputs)
        return self.output(self._apply_gate(out_THd, gate_THd, x_TD).flatten(1))

    def _norm_and_rotate(self, qk_TNd: Tensor, positions: Positions) -> Tensor:
        """Apply QK-norm and RoPE, in the order of the spec."""
        if self.spec.qk_norm in ("head", "all"):
            qk_TNd = self._normalise(qk_TNd)
        rope = self.spec.rope
        if rope is not None:
            cos_sin = positions.cos_sin(rope, self.spec.head_dim)
            qk_TNd = apply_rotary(qk_TNd, cos_sin, interleaved=rope.interleaved, numerics=self.numerics)
        if self.spec.qk_norm == "head_after_rope":
            qk_TNd = self._normalise(qk_TNd)
        elif self.spec.qk_norm == "unit":
            qk_TNd = unit_rms_norm(qk_TNd, self.eps, self.numerics)
        return qk_TNd

    def _apply_gate(self, out_THd: Tensor, gate_THd: Tensor | None, x_TD: Tensor | QuantizedActivation) -> Tensor:
        """Multiply the output by the sigmoid of its gate, if it has one of each channel or of each head."""
        if self.gate is not None:
            gate_THd = self.gate(_wide_input(x_TD)).unsqueeze(-1)
        if gate_THd is None:
            return out_THd
        return out_THd * (sigmoid(gate_THd) if self.numerics.batch_invariant else gate_THd.sigmoid())

    def _attend_to_source(
        self, x_TD: Tensor | QuantizedActivation, positions: Positions, attn_backend: AttentionBackend
    ) -> Tensor:
        """Attend to the keys and values of an earlier layer, of which an engine keeps a copy in this layer's cache."""
        assert self.spec.kv_source is not None
        k_TGd, v_TGd = positions.shared_kv[self.spec.kv_source]
        q_THd = self.qkv(x_TD).unflatten(-1, (-1, self.spec.head_dim))
        q_THd = q_THd if self.q_norm is None else self.q_norm(q_THd)
        rope = self.spec.rope
        if rope is not None:
            cos_sin = positions.cos_sin(rope, self.spec.head_dim)
            q_THd = apply_rotary(q_THd, cos_sin, interleaved=rope.interleaved, numerics=self.numerics)
        out_THd = attn_backend(self.layer, AttentionInputs(q_THd, k_TGd, v_TGd, self.params, self.sinks))
        return self.output(out_THd.flatten(1))

    def _fused_attention(self, x_TD: Tensor, positions: Positions, attn_backend: AttentionBackend) -> Tensor:
        """Attention in training: one fused kernel from the projection to the heads, and one for its backward."""
        spec, rope = self.spec, self.spec.rope
        shape = QKVShape(
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            interleaved=rope is not None and rope.interleaved,
            eps=self.eps,
            offset=0.0 if self.q_norm is None else self.q_norm.offset,
        )
        weights = (
            (None, None) if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)
        )
        if self.numerics.batch_invariant:
            cos_sin = positions.cos_sin_table(spec.rope, spec.head_dim)
            q_THd, k_TGd, v_TGd = invariant_qk.qk_norm_rope(self.qkv(x_TD), *cos_sin, *weights, shape)
        else:
            cos_sin_T2r = None if rope is None else positions.cos_sin(rope, spec.head_dim)
            q_THd, k_TGd, v_TGd = qk_norm_rope_training(self.qkv(x_TD), cos_sin_T2r, *weights, shape)
        if self.numerics.fp8_kv_cache:
            k_TGd, v_TGd = round_kv(k_TGd), round_kv(v_TGd)
        return attn_backend(self.layer, AttentionInputs(q_THd, k_TGd, v_TGd, self.params, self.sinks))

    def _qk_norm_rope_params(self, positions: Positions) -> QKNormRopeParams | None:
        """Return the arguments of the fused QK-norm + RoPE kernel; None if it does not apply."""
        spec = self.spec
        rotation, positions_T = positions.cos_sin_table(spec.rope, spec.head_dim)
        if spec.rope is not None and positions_T is None and not self.numerics.batch_invariant:
            return None
        return QKNormRopeParams(
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotation=rotation,
            positions_T=positions_T,
            interleaved=spec.rope is not None and spec.rope.interleaved,
            q_weight_d=None if self.q_norm is None else self.q_norm.weight,
            k_weight_d=None if self.k_norm is None else self.k_norm.weight,
            eps=self.eps,
            offset=0.0 if self.q_norm is None else self.q_norm.offset,
        )

    def _project(self, x_TD: Tensor | QuantizedActivation) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return gates (if gated), queries and keys side by side, and values."""
        num_q, num_k, d = self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim
        qkv_TNd = self.qkv(x_TD).unflatten(-1, (-1, d))
        if self.spec.value_from_key:
            return None, qkv_TNd, qkv_TNd[:, num_q:]
        if not self.spec.gated:
            qk_TNd, v_TGd = qkv_TNd.split((num_q + num_k, num_k), dim=1)
            return None, qk_TNd, v_TGd
        q_THd, gate_THd = qkv_TNd[:, : 2 * num_q].unflatten(1, (num_q, 2)).unbind(2)
        k_TGd, v_TGd = qkv_TNd[:, 2 * num_q :].split((num_k, num_k), dim=1)
        return gate_THd, torch.cat((q_THd, k_TGd), 1), v_TGd

    def _normalise(self, qk_TNd: Tensor) -> Tensor:
        assert self.q_norm is not None and self.k_norm is not None
        num_q, num_k = self.spec.num_heads, self.spec.num_kv_heads
        if self.spec.qk_norm == "all":
            q_THd, k_TGd = qk_TNd.split((num_q, num_k), dim=1)
            q_THd = self.q_norm(q_THd.flatten(1)).view(q_THd.shape)
            return torch.cat((q_THd, self.k_norm(k_TGd.flatten(1)).view(k_TGd.shape)), 1)
        if self.numerics.batch_invariant:
            q_THd, k_TGd = qk_TNd.split((num_q, num_k), dim=1)
            return torch.cat((self.q_norm(q_THd), self.k_norm(k_TGd)), 1)
        # Queries and keys in one pass: for small models the number of kernel launches dominates.
        scale_Nd = torch.cat((self.q_norm.scale().expand(num_q, -1), self.k_norm.scale().expand(num_k, -1)))
        wide_TNd = qk_TNd.to(torch.promote_types(qk_TNd.dtype, scale_Nd.dtype))
        return (F.rms_norm(wide_TNd, self.q_norm.shape, None, self.eps) * scale_Nd).to(qk_TNd.dtype)


def _wide_input(x_TD: Tensor | QuantizedActivation) -> Tensor:
    """Return the input before it is quantized, which an indexer reads."""
    if isinstance(x_TD, Tensor):
        return x_TD
    assert x_TD.wide is not None, "the indexer reads the input before it is quantized"
    return x_TD.wide
