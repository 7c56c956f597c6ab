"""The decoder: the same lines sample a token in the engine and train on it in the trainer.

Shapes: T all tokens of a packed batch, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from miles.models.attention import Attention
from miles.models.delta import Delta
from miles.models.linear import Embedding, Linear
from miles.models.mamba import Mamba
from miles.models.memory import Attend
from miles.models.mla import Mla
from miles.models.mlp import Mlp
from miles.models.moe import MoeMlp, Routing
from miles.models.norm import RMSNorm
from miles.models.recompute import Again, keep_nothing
from miles.models.rope import Positions
from miles.models.spec import AttentionSpec, DecoderSpec, DeltaSpec, MambaSpec, MlaSpec, MlpSpec, MoeSpec

__all__ = ["Again", "Attend", "Decoder", "Layer", "Routing", "keep_nothing"]

# What a mixer is called in a layer, and the module it is.
MIXERS: Mapping[type, tuple[str, Callable[..., nn.Module]]] = {
    AttentionSpec: ("attention", Attention),
    MlaSpec: ("mla", Mla),
    DeltaSpec: ("delta", Delta),
    MambaSpec: ("mamba", Mamba),
}


class Layer(nn.Module):
    """A mixer and a feed-forward part, each behind its norm and beside the residual stream; either may be absent."""

    def __init__(self, spec: DecoderSpec, index: int, *, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        layer = spec.layers[index]
        made: dict[str, Any] = {"device": device, "dtype": dtype}

        def norm(there: bool) -> RMSNorm | None:
            return RMSNorm(spec.hidden_size, spec.norm_eps, offset=spec.norm_offset, **made) if there else None

        self.attention_norm = norm(layer.mixer is not None)
        self._mixer = ""
        if layer.mixer is not None:
            self._mixer, make = MIXERS[type(layer.mixer)]
            self.add_module(self._mixer, make(layer.mixer, spec, index, **made))
        self.attention_post_norm = norm(layer.mixer is not None and layer.post_norms)
        self.mlp_norm = norm(layer.ffn is not None)
        self.mlp = Mlp(spec.hidden_size, layer.ffn, **made) if isinstance(layer.ffn, MlpSpec) else None
        self.moe: MoeMlp | None = None
        if isinstance(layer.ffn, MoeSpec):
            self.moe = MoeMlp(spec.hidden_size, layer.ffn, spec.moe_layers.index(index), **made)
        self.mlp_post_norm = norm(layer.ffn is not None and layer.post_norms)
        # Where ranks share a layer, what its parts give is a summand: ``reduce`` adds the ranks' up. In training a
        # gradient that leaves a part is one too: ``enter``, before the part, does the same on the way back.
        self.enter: Callable[[Tensor], Tensor] | None = None
        self.reduce: Callable[[Tensor], Tensor] | None = None

    def forward(
        self, x_TD: Tensor, at: Positions, attend: Attend, routing: Routing | None, again: Again | None = None
    ) -> Tensor:
        """The residual stream behind this layer; what of it backward has computed ``again`` is not kept."""
        return (
            self._whole(x_TD, at, attend, routing) if again is None else again(self._whole, x_TD, at, attend, routing)
        )

    def pending(
        self, x_TD: Tensor, late_TD: Tensor | None, at: Positions, attend: Attend, routing: Routing | None
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream, and what is still to be added to it: the next norm does both in one pass."""
        return self._through(x_TD, late_TD, at, attend, routing)

    def _whole(self, x_TD: Tensor, at: Positions, attend: Attend, routing: Routing | None) -> Tensor:
        x_TD, late_TD = self._through(x_TD, None, at, attend, routing)
        return x_TD if late_TD is None else x_TD + late_TD

    def _through(
        self, x_TD: Tensor, late_TD: Tensor | None, at: Positions, attend: Attend, routing: Routing | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.attention_norm is not None:
            x_TD, y_TD = self.attention_norm.after(x_TD, late_TD)
            late_TD = self._summed(self.get_submodule(self._mixer)(self._entered(y_TD), at, attend))
            if self.attention_post_norm is not None:
                late_TD = self.attention_post_norm(late_TD)
        if self.mlp_norm is not None:
            x_TD, y_TD = self.mlp_norm.after(x_TD, late_TD)
            y_TD = self._entered(y_TD)
            if self.mlp is not None:
                late_TD = self._summed(self.mlp(y_TD))
            else:
                assert self.moe is not None
                late_TD = self._summed(self.moe(y_TD, routing))
            if self.mlp_post_norm is not None:
                late_TD = self.mlp_post_norm(late_TD)
        return x_TD, late_TD

    def _entered(self, y_TD: Tensor) -> Tensor:
        return y_TD if self.enter is None else self.enter(y_TD)

    def _summed(self, part_TD: Tensor) -> Tensor:
        return part_TD if self.reduce is None else self.reduce(part_TD)


class Decoder(nn.Module):
    """Tokens to hidden states. Parameters are made uninitialised: ``hub.load`` and ``hub.random`` fill them.

    ``checkpoint_layers`` trades time for memory: layers keep what ``again`` keeps and run again in backward; the first
    ``again_layers`` of them alone, where that is given.
    """

    def __init__(self, spec: DecoderSpec, *, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.checkpoint_layers = False
        self.again: Again = keep_nothing
        self.again_layers: int | None = None
        made = {"device": device, "dtype": dtype}
        self.embedding = Embedding(spec.vocab_size, spec.hidden_size, **made)
        self.layers = nn.ModuleList(Layer(spec, i, device=device, dtype=dtype) for i in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, offset=spec.norm_offset, device=device, dtype=dtype)
        self.lm_head: Linear | None = None
        if not spec.tie_embeddings:
            self.lm_head = Linear(spec.hidden_size, spec.vocab_size, bias=False, **made)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, routing: Routing | None = None) -> Tensor:
        """Hidden states after the final norm, [T, D]; times ``head()`` transposed they are logits.

        Logits are then to be bounded by the spec's ``logit_softcap``, where it has one.
        """
        x_TD = self.embedding(tokens_T)
        if self.spec.embedding_scale != 1.0:
            x_TD = x_TD * _rounded(self.spec.embedding_scale, x_TD.dtype)
        at = Positions(positions_T, self.spec.max_positions, x_TD.dtype)
        again = self.again if self.checkpoint_layers and torch.is_grad_enabled() else None
        late_TD: Tensor | None = None
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            if again is not None and (self.again_layers is None or number < self.again_layers):
                x_TD = layer(x_TD, at, attend, routing, again)
            else:
                x_TD, late_TD = layer.pending(x_TD, late_TD, at, attend, routing)
        return self.norm.after(x_TD, late_TD)[1]

    def head(self) -> Tensor:
        """The output weight [V, D]: the embedding itself when tied."""
        return self.embedding.weight if self.lm_head is None else self.lm_head.weight


@cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    """A scale as models were trained with it: rounded to their dtype first."""
    return torch.tensor(scale, dtype=dtype).item()
