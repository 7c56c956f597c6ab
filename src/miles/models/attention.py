"""Grouped-query attention without a memory of its own: whoever remembers keys and values is handed in.

Shapes: T tokens, D hidden, H query heads, G key-value heads, N = H + G, d head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.kernels.arithmetic import exact
from miles.kernels.card import CardAttend
from miles.kernels.device_code import trained
from miles.kernels.exact import heads as exact_heads
from miles.kernels.exact import rows as exact_rows
from miles.kernels.exact.gate import sigmoid
from miles.kernels.prepare import Heads
from miles.kernels.train_heads import Shape, heads_in_training
from miles.models.linear import Linear
from miles.models.memory import Attend, Terms
from miles.models.norm import RMSNorm
from miles.models.rope import Positions, rotate
from miles.models.spec import AttentionSpec, DecoderSpec


class Attention(nn.Module):
    """Project, normalise queries and keys where the family does, rotate, attend, project back."""

    def __init__(
        self, spec: AttentionSpec, model: DecoderSpec, layer: int, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer, self.spec, self.eps = layer, spec, model.norm_eps
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self.terms = Terms(scale=scale, window=spec.window, chunk=spec.chunk, softcap=spec.softcap)
        made = {"device": device, "dtype": dtype}
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        width = queries * (2 if spec.gated else 1) + 2 * keys
        self.qkv = Linear(model.hidden_size, width, bias=spec.qkv_bias, **made)
        self.output = Linear(queries, model.hidden_size, bias=spec.output_bias, **made)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.qk_norm in ("head", "all"):
            sizes = (spec.head_dim, spec.head_dim) if spec.qk_norm == "head" else (queries, keys)
            norms = (RMSNorm(n, model.norm_eps, offset=model.norm_offset, device=device, dtype=dtype) for n in sizes)
            self.q_norm, self.k_norm = norms
        self.sinks = nn.Parameter(torch.empty(spec.num_heads, **made)) if spec.sinks else None
        # Nothing between the projection and attention but what one kernel does: norms of heads, and a rotation.
        self._plain = not spec.gated and spec.qk_norm in ("none", "head") and spec.temperature is None

    def forward(self, x_TD: Tensor, at: Positions, attend: Attend) -> Tensor:
        if self._plain and isinstance(attend, CardAttend) and (heads := self._heads(at)) is not None:
            return self.output(attend.straight(self.layer, self.qkv(x_TD), heads, self.terms, sinks_H=self.sinks))
        if self._plain and (exact_heads.on_card(x_TD) if exact() else trained(x_TD)):
            return self.output(self._attended(x_TD, at, attend).flatten(1))
        gate_THd, qk_TNd, v_TGd = self._project(x_TD)
        qk_TNd = self._normalise(qk_TNd)
        rope = self.spec.rope
        if rope is not None:
            qk_TNd = rotate(qk_TNd, at.rotation(rope, self.spec.head_dim), interleaved=rope.interleaved)
        if self.spec.qk_norm == "unit":
            qk_TNd = self._unit(qk_TNd)
        q_THd, k_TGd = qk_TNd.split((self.spec.num_heads, self.spec.num_kv_heads), dim=1)
        if self.spec.temperature is not None:
            q_THd = (q_THd * at.temperature(*self.spec.temperature)).to(q_THd.dtype)
        out_THd = attend(self.layer, q_THd, k_TGd, v_TGd, self.terms, sinks_H=self.sinks)
        if gate_THd is not None:
            out_THd = out_THd * (sigmoid(gate_THd) if exact() else gate_THd.sigmoid())
        return self.output(out_THd.flatten(1))

    def _attended(self, x_TD: Tensor, at: Positions, attend: Attend) -> Tensor:
        """What heads make of each other, in training: one pass from the projection to them, and one back."""
        spec, rope = self.spec, self.spec.rope
        shape = Shape(
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
        if exact():
            turned = self._turned(at)
            q_THd, k_TGd, v_TGd = exact_heads.heads_of(self.qkv(x_TD), *turned, *weights, shape)
        else:
            rotation_T2r = None if rope is None else at.rotation(rope, spec.head_dim)
            q_THd, k_TGd, v_TGd = heads_in_training(self.qkv(x_TD), rotation_T2r, *weights, shape)
        return attend(self.layer, q_THd, k_TGd, v_TGd, self.terms, sinks_H=self.sinks)

    def _heads(self, at: Positions) -> Heads | None:
        """How queries and keys are made ready, where one kernel can do all of it."""
        spec = self.spec
        rotation, positions_T = self._turned(at)
        if spec.rope is not None and positions_T is None and not exact():
            return None
        return Heads(
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

    def _turned(self, at: Positions) -> tuple[Tensor | None, Tensor | None]:
        """A table of rotations and the positions to look up; or a rotation for every token, and none."""
        rope, dim = self.spec.rope, self.spec.head_dim
        if rope is None:
            return None, at.positions_T
        table_P2d = at.table(rope, dim)
        return (at.rotation(rope, dim).contiguous(), None) if table_P2d is None else (table_P2d, at.positions_T)

    def _unit(self, qk_TNd: Tensor) -> Tensor:
        if exact():
            return exact_rows.rms_norm(qk_TNd, None, self.eps)
        return F.rms_norm(qk_TNd, (self.spec.head_dim,), None, self.eps)

    def _project(self, x_TD: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Gates where there are any, queries and keys side by side, values."""
        num_q, num_k, d = self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim
        qkv_TNd = self.qkv(x_TD).unflatten(-1, (-1, d))
        if not self.spec.gated:
            qk_TNd, v_TGd = qkv_TNd.split((num_q + num_k, num_k), dim=1)
            return None, qk_TNd, v_TGd
        q_THd, gate_THd = qkv_TNd[:, : 2 * num_q].unflatten(1, (num_q, 2)).unbind(2)
        k_TGd, v_TGd = qkv_TNd[:, 2 * num_q :].split((num_k, num_k), dim=1)
        return gate_THd, torch.cat((q_THd, k_TGd), 1), v_TGd

    def _normalise(self, qk_TNd: Tensor) -> Tensor:
        if self.q_norm is None or self.k_norm is None:
            return qk_TNd
        num_q, num_k = self.spec.num_heads, self.spec.num_kv_heads
        if self.spec.qk_norm == "all":
            q_THd, k_TGd = qk_TNd.split((num_q, num_k), dim=1)
            q_THd = self.q_norm(q_THd.flatten(1)).view(q_THd.shape)
            return torch.cat((q_THd, self.k_norm(k_TGd.flatten(1)).view(k_TGd.shape)), 1)
        if exact():
            q_THd, k_TGd = qk_TNd.split((num_q, num_k), dim=1)
            return torch.cat((self.q_norm(q_THd), self.k_norm(k_TGd)), 1)
        # Queries and keys in one pass: on small models the number of operations is the cost.
        scale_Nd = torch.cat((self.q_norm.scale().expand(num_q, -1), self.k_norm.scale().expand(num_k, -1)))
        wide_TNd = qk_TNd.to(torch.promote_types(qk_TNd.dtype, scale_Nd.dtype))
        return (F.rms_norm(wide_TNd, self.q_norm.shape, None, self.eps) * scale_Nd).to(qk_TNd.dtype)
