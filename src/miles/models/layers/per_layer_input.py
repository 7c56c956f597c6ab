"""Per-layer embeddings: an input of its own for each layer, from the token and from its embedding.

Shapes: T tokens, D hidden, L layers, P channels of a layer's input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.kernels.batch_invariant.activation import gated_activation as exact_gate
from miles.kernels.fused.activation import gated_activation
from miles.kernels.numerics import Numerics
from miles.models.layers.linear import Embedding, Linear
from miles.models.layers.norm import RMSNorm
from miles.models.spec import PerLayerInputSpec


class PerLayerEmbedding(nn.Module):
    """The inputs of all layers: the mean, times the root of two, of an embedding and a projected hidden state."""

    def __init__(
        self,
        spec: PerLayerInputSpec,
        num_layers: int,
        width: int,
        *,
        eps: float,
        offset: float,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        self.spec = spec
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}
        self.table = Embedding(spec.vocab_size, num_layers * spec.size, device=device, dtype=dtype)
        self.projection = Linear(width, num_layers * spec.size, bias=False, **factory)
        self.norm = RMSNorm(spec.size, eps, offset=offset, **factory)

    def forward(self, tokens_T: Tensor, x_TD: Tensor, placeholder_I: Tensor | None) -> Tensor:
        """Return the input of each layer, [T, L, P]; tokens ``placeholder_I`` have features for an embedding."""
        pad = self.spec.pad_token_id
        if placeholder_I is not None:
            assert pad is not None, "images need the token whose embedding stands for them"
            tokens_T = tokens_T.index_fill(0, placeholder_I, pad)
        if self.spec.beyond_token_id is not None:
            tokens_T = tokens_T.masked_fill(tokens_T >= self.spec.vocab_size, self.spec.beyond_token_id)
        scale = torch.tensor(self.spec.size**0.5, dtype=x_TD.dtype).item()  # rounded, as the models were trained
        token_TLP = (F.embedding(tokens_T, self.table.weight, pad) * scale).unflatten(-1, (-1, self.spec.size))
        hidden_TLP = (self.projection(x_TD) * x_TD.shape[-1] ** -0.5).unflatten(-1, (-1, self.spec.size))
        return (self.norm(hidden_TLP) + token_TLP) * 2.0**-0.5


class PerLayerInput(nn.Module):
    """What a layer adds to the residual stream: its input, gated by the residual stream, projected and normalized."""

    def __init__(
        self,
        width: int,
        size: int,
        *,
        eps: float,
        offset: float,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        self.numerics = numerics
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}
        self.gate = Linear(width, size, bias=False, **factory)
        self.projection = Linear(size, width, bias=False, **factory)
        self.norm = RMSNorm(width, eps, offset=offset, **factory)

    def forward(self, x_TD: Tensor, input_TP: Tensor) -> Tensor:
        both_T2P = torch.cat((self.gate(x_TD), input_TP), -1)
        activate = exact_gate if self.numerics.batch_invariant else gated_activation
        return self.norm(self.projection(activate(both_T2P, "gelu_tanh")))
