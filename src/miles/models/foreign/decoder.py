"""Transformers' own module with the face of our decoder: packed tokens in, hidden states out, memory handed in.

Shapes: T all tokens of a packed batch, D hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from miles.models.foreign.attention import Line
from miles.models.foreign.spec import ForeignSpec
from miles.models.memory import Attend
from miles.models.moe import Routing
from miles.models.recompute import Again, keep_nothing


class ForeignDecoder(nn.Module):
    """A causal language model of transformers. Parameters have transformers' names.

    ``module`` stays in evaluation mode, gradients or not: dropout would tell the planes apart. It is used by one
    thread at a time, each plane having its own (``twin``).
    """

    def __init__(self, module: Any, spec: ForeignSpec, line: Line) -> None:
        super().__init__()
        self.module, self.spec, self._line = module, spec, line
        self.checkpoint_layers = False
        self.again: Again = keep_nothing
        self.again_layers: int | None = None
        head = module.get_output_embeddings().weight
        # A tied head goes by its other name, and adopting new tensors changes what stands under that name alone.
        self._head = next(name for name, parameter in module.named_parameters() if parameter is head)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, routing: Routing | None = None) -> Tensor:
        """Hidden states [T, D]; times ``head()`` transposed, and bounded by the spec's soft-cap, they are logits."""
        assert routing is None, "transformers' own routers are neither recorded nor replayed"
        again = self.checkpoint_layers and torch.is_grad_enabled()
        with self._remembering(attend), self._checkpointed(attend) if again else nullcontext():
            out = self.module.get_decoder()(
                input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, return_dict=True
            )
        hidden_TD: Tensor = out.last_hidden_state[0]
        return hidden_TD if self.spec.hidden_scale == 1.0 else hidden_TD * self.spec.hidden_scale

    def head(self) -> Tensor:
        """The output weight [V, D]: the embedding itself when tied."""
        return self.module.get_parameter(self._head)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """All that is saved: parameters, and the buffers that are part of a checkpoint, which take no gradient."""
        yield from self.module.named_parameters(prefix, recurse, remove_duplicate)
        saved = self.module.state_dict(keep_vars=True)
        for name, buffer in self.module.named_buffers(prefix, recurse, remove_duplicate):
            if name.removeprefix(prefix).removeprefix(".") in saved:
                yield name, cast(nn.Parameter, buffer)

    def get_submodule(self, target: str) -> nn.Module:
        return self.module.get_submodule(target)

    def twin(self) -> ForeignDecoder:
        """Another instance for another plane: its parameters have no storage until it adopts some."""
        empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), False) for p in self.module.parameters()}
        return copy.deepcopy(self, cast(dict[int, Any], empty))

    @contextmanager
    def _remembering(self, attend: Attend) -> Iterator[None]:
        """Attention reaches ``attend`` and, afterwards, holds on to nothing of it: a cache may be given back."""
        self._line.attend = attend
        try:
            yield
        finally:
            self._line.attend = None

    @contextmanager
    def _checkpointed(self, attend: Attend) -> Iterator[None]:
        """Layers keep only their input, and run again in backward with the memory of this very forward."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [module for module in self.module.modules() if isinstance(module, GradientCheckpointingLayer)]
        layers = layers[: self.again_layers]
        for layer in layers:
            layer.forward = partial(self._again, layer.forward, attend)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    def _again(self, forward: Any, attend: Attend, *args: Any, **kwargs: Any) -> Any:
        first = True

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            if first:  # within the forward itself, where the line is up
                first = False
                return forward(*args, **kwargs)
            with self._remembering(attend):
                return forward(*args, **kwargs)

        return self.again(run, *args, **kwargs)
