"""N-gram embeddings: rows of a table, looked up by hashes of a token and of those before it, gated and convolved.

The past is the ids of the last few tokens and the last inputs of a dilated causal convolution. It is a recurrent state,
kept beside that of the layer's mixer.

Shapes: T tokens, B sequences, S streams, D hidden, X = S * D, E channels of all n-gram heads, h heads of one order, n
tokens of the longest n-gram, c = n - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from miles.kernels.batch_invariant.elementwise import accumulation_dtype, tree_sum
from miles.kernels.linear_attention.causal_conv1d import build_row_indices, causal_conv1d
from miles.kernels.linear_attention.chunked_scan import is_decode_step
from miles.kernels.numerics import Numerics
from miles.models.accounting.kv_cache import ngram_state_key
from miles.models.layers.attention_backend import AttentionBackend, SequenceShard
from miles.models.layers.gated_residual import StreamNorm
from miles.models.layers.linear import Embedding, Linear
from miles.models.layers.recurrent_ops import sigmoid, silu
from miles.models.layers.recurrent_scan import scan_tokens
from miles.models.residual_spec import NgramSpec
from miles.models.spec import DecoderSpec

# Integers of the hash, which are parameters.
NGRAM_CONSTANTS = ("multipliers", "sizes", "offsets")
# The smallest gate before its root, which has no slope at zero; part of the architecture.
_SMALLEST_GATE = 1e-6


class NgramEmbedding(nn.Module):
    """What a layer adds to each residual stream: a projected embedding, gated by the stream, and its convolution.

    The constants of the hash are parameters that are not trained, since checkpoints have them.
    """

    def __init__(
        self,
        spec: NgramSpec,
        model: DecoderSpec,
        layer: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        self.spec, self.numerics = spec, numerics
        self.state_key = ngram_state_key(model, layer)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {**factory, "numerics": numerics}
        heads, width = len(spec.head_sizes), model.streams * model.hidden_size
        self.table = Embedding(spec.rows, spec.dim // heads, **factory)

        def constant(size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, device=device, dtype=torch.int64), requires_grad=False)

        self.multipliers, self.sizes, self.offsets = constant(spec.order), constant(heads), constant(heads)
        self.key = Linear(spec.dim, width, bias=False, **options)
        self.value = Linear(spec.dim, model.hidden_size, bias=False, **options)
        self.key_norm = StreamNorm(model.streams, model, **options)
        self.query_norm = StreamNorm(model.streams, model, **options)
        self.conv_norm = StreamNorm(model.streams, model, **options)
        self.conv = nn.Parameter(torch.empty(width, 1, spec.kernel, **factory))

    def constants(self) -> dict[str, Tensor]:
        """Return the constants that the spec says, for a model without a checkpoint."""
        sizes = self.spec.head_sizes
        numbers = (self.spec.multipliers, sizes, tuple(accumulate((0, *sizes[:-1]))))
        return {name: torch.tensor(each) for name, each in zip(NGRAM_CONSTANTS, numbers, strict=True)}

    def forward(self, x_TSD: Tensor, tokens_T: Tensor, attn_backend: AttentionBackend) -> Tensor:
        return scan_tokens(attn_backend.recurrent_state(self.state_key), self._scan, (tokens_T, x_TSD))

    def _scan(
        self,
        inputs_T: Sequence[Tensor],
        lengths: Sequence[int],
        before: tuple[Tensor, ...] | None,
        shard: SequenceShard | None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Compute what is added, from the convolution's last inputs and the ids of the last tokens."""
        tokens_T, x_TSD = inputs_T
        inputs, earlier = (None, None) if before is None else before
        if shard is not None:
            ids_T1 = (tokens_T + 1).to(torch.float32).unsqueeze(-1)
            earlier = shard.read_earlier(ids_T1, self.spec.order - 1).squeeze(1)
        rows_TH, earlier = self._hash(tokens_T, lengths, earlier)
        embeds_TE = self.table(rows_TH).flatten(1)
        keys_TSD = self.key_norm(self.key(embeds_TE).view(x_TSD.shape))
        gate_TS = self._sum_channels(keys_TSD * self.query_norm(x_TSD)) * x_TSD.shape[-1] ** -0.5
        gate_TS = sigmoid(gate_TS.abs().clamp_min(_SMALLEST_GATE).sqrt() * gate_TS.sign(), self.numerics)
        gated_TSD = gate_TS.unsqueeze(-1) * self.value(embeds_TE).unsqueeze(1)
        normed_TX = self.conv_norm(gated_TSD).flatten(1)
        if shard is not None:
            inputs = shard.read_earlier(normed_TX, (self.conv.shape[-1] - 1) * self.spec.order)
        convolved_TX, inputs = causal_conv1d(
            normed_TX,
            self.conv.squeeze(1),
            None,
            lengths,
            inputs,
            numerics=self.numerics,
            dilation=self.spec.order,
        )
        out_TSD = gated_TSD + silu(convolved_TX, self.numerics).view(x_TSD.shape)
        if inputs is None or earlier is None or shard is not None:
            return out_TSD, None
        return out_TSD, (inputs, earlier)

    def _sum_channels(self, x_TSD: Tensor) -> Tensor:
        """Return the sum of each stream, [T, S]."""
        if not self.numerics.batch_invariant:
            return x_TSD.sum(-1)
        return tree_sum(x_TSD.to(accumulation_dtype(x_TSD.dtype))).squeeze(-1).to(x_TSD.dtype)

    @torch.no_grad()
    def _hash(
        self, tokens_T: Tensor, lengths: Sequence[int], earlier_Bc: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the row of each token and head, [T, H], and the ids of the last tokens."""
        spec = self.spec
        shifted, earlier_Bc = shift_tokens(tokens_T, lengths, earlier_Bc, count=spec.order - 1, end=spec.end_token_id)
        sizes, offsets = (x.chunk(spec.order - 1) for x in (self.sizes, self.offsets))
        mixed_T = shifted[0] * self.multipliers[0]
        rows: list[Tensor] = []
        for i, (size_h, offset_h) in enumerate(zip(sizes, offsets, strict=True), start=1):
            mixed_T = mixed_T ^ (shifted[i] * self.multipliers[i])
            rows.append(mixed_T.unsqueeze(-1) % size_h + offset_h)
        return torch.cat(rows, -1), earlier_Bc


def shift_tokens(
    tokens_T: Tensor, lengths: Sequence[int], earlier_Bc: Tensor | None, *, count: int, end: int
) -> tuple[list[Tensor], Tensor | None]:
    """Return each token, the one before it, and so on up to ``count`` before it, each [T]; and the last ids.

    At and before a token ``end``, and before a sequence, they are ``end``. ``earlier_Bc`` are the ids of the tokens
    before these, plus one: zero is none. They are floats, which hold the ids of every vocabulary exactly.
    """
    tokens_T = tokens_T.long()
    if earlier_Bc is not None and is_decode_step(lengths, len(tokens_T)):
        window_Bx = torch.cat((earlier_Bc.long(), (tokens_T + 1)[:, None]), 1)
        before = [torch.where(ids_B == 0, end, ids_B - 1) for ids_B in window_Bx[:, :-1].flip(1).unbind(1)]
        return _stop_at_end(tokens_T, before, end), window_Bx[:, 1:].to(earlier_Bc.dtype)
    index_T, head_X, tail_X = build_row_indices(tuple(lengths), count, tokens_T.device)
    rows_L = tokens_T.new_full((len(tokens_T) + len(lengths) * count,), end).index_copy_(0, index_T, tokens_T)
    last_Bc = None
    if earlier_Bc is not None:
        known_Bc = earlier_Bc.long() - 1
        rows_L.index_copy_(0, head_X, torch.where(known_Bc < 0, end, known_Bc).flatten())
        last_Bc = (rows_L.index_select(0, tail_X) + 1).view(earlier_Bc.shape).to(earlier_Bc.dtype)
    before = [rows_L.index_select(0, index_T - distance) for distance in range(1, count + 1)]
    return _stop_at_end(tokens_T, before, end), last_Bc


def _stop_at_end(tokens_T: Tensor, before: Sequence[Tensor], end: int) -> list[Tensor]:
    """Return each token and those ``before`` it, nearest first, with ``end`` in place of all from the first one on."""
    shifted, is_behind_T = [tokens_T], torch.zeros_like(tokens_T, dtype=torch.bool)
    for before_T in before:
        is_behind_T = is_behind_T | (before_T == end)
        shifted.append(torch.where(is_behind_T, end, before_T))
    return shifted
