"""The decoder: the same lines sample a token in the engine and train on it in the trainer.

Shapes: T all tokens of a packed batch, D hidden, I intermediate, V vocabulary, d head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from miles.models.attention import Attend, Attention
from miles.models.linear import Embedding, Linear
from miles.models.moe import MoeMlp, Routing
from miles.models.norm import RMSNorm
from miles.models.rope import rotation
from miles.models.spec import DecoderSpec

__all__ = ["Attend", "Decoder", "Layer", "Mlp", "Routing"]


class Mlp(nn.Module):
    """A gated MLP with gate and up fused into one projection."""

    def __init__(self, spec: DecoderSpec, *, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        made = {"bias": spec.mlp_bias, "device": device, "dtype": dtype}
        self.gate_up = Linear(spec.hidden_size, 2 * spec.intermediate_size, **made)
        self.down = Linear(spec.intermediate_size, spec.hidden_size, **made)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TI, up_TI = self.gate_up(x_TD).chunk(2, dim=-1)
        return self.down(F.silu(gate_TI) * up_TI)


class Layer(nn.Module):
    """Attention and an MLP (or experts), each behind its norm and beside the residual stream."""

    def __init__(self, spec: DecoderSpec, index: int, *, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps, device=device, dtype=dtype)
        self.attention = Attention(spec, index, device=device, dtype=dtype)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.norm_eps, device=device, dtype=dtype)
        self.mlp: Mlp | None = None
        self.moe: MoeMlp | None = None
        if spec.moe is not None and index in spec.moe.layers:
            slot = spec.moe.layers.index(index)
            self.moe = MoeMlp(spec.hidden_size, spec.moe, slot, device=device, dtype=dtype)
        else:
            self.mlp = Mlp(spec, device=device, dtype=dtype)

    def forward(self, x_TD: Tensor, rotation_T2d: Tensor, attend: Attend, routing: Routing | None) -> Tensor:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), rotation_T2d, attend)
        if self.mlp is not None:
            return x_TD + self.mlp(self.mlp_norm(x_TD))
        assert self.moe is not None
        return x_TD + self.moe(self.mlp_norm(x_TD), routing)


class Decoder(nn.Module):
    """Tokens to hidden states. Parameters are made uninitialised: ``hub.load`` and ``hub.random`` fill them.

    ``checkpoint_layers`` trades time for memory: layers keep only their input and run again in backward.
    """

    def __init__(self, spec: DecoderSpec, *, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.checkpoint_layers = False
        made = {"device": device, "dtype": dtype}
        self.embedding = Embedding(spec.vocab_size, spec.hidden_size, **made)
        self.layers = nn.ModuleList(Layer(spec, i, device=device, dtype=dtype) for i in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, device=device, dtype=dtype)
        self.lm_head: Linear | None = None
        if not spec.tie_embeddings:
            self.lm_head = Linear(spec.hidden_size, spec.vocab_size, bias=False, **made)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, routing: Routing | None = None) -> Tensor:
        """Hidden states after the final norm, [T, D]; times ``head()`` transposed they are logits."""
        spec = self.spec
        x_TD = self.embedding(tokens_T)
        rotation_T2d = rotation(spec.rope, spec.head_dim, spec.max_positions, positions_T, x_TD.dtype)
        again = self.checkpoint_layers and torch.is_grad_enabled()
        for layer in self.layers:
            if again:
                x_TD = checkpoint(
                    layer, x_TD, rotation_T2d, attend, routing, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x_TD = layer(x_TD, rotation_T2d, attend, routing)
        return self.norm(x_TD)

    def head(self) -> Tensor:
        """The output weight [V, D]: the embedding itself when tied."""
        return self.embedding.weight if self.lm_head is None else self.lm_head.weight
