"""The critic, held by several ranks together; its folder is that of ``value.FsdpValue``.

``_T`` packed input tokens, ``_R`` some of them, ``_r`` those of these that are this rank's, ``D`` hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from miles.backends.fsdp.headed import Headed
from miles.backends.fsdp.packed import Text, packed_of
from miles.backends.fsdp.sharded import ShardedModel
from miles.backends.fsdp.value import HEAD, fill_head
from miles.models.files import void, write_whole
from miles.models.outline import Outline, lone_unit

_WEIGHT, _BIAS = "value_head.weight", "value_head.bias"


class ShardedValue(Headed):
    """A ValueModel: one linear on the decoder's hidden states, in float32 whatever they are."""

    def __init__(self, trunk: ShardedModel) -> None:
        super().__init__(trunk, {_WEIGHT: (1, trunk.spec.hidden_size), _BIAS: (1,)})

    def values(self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int], at_R: Tensor) -> Tensor:
        text = Text(lengths=lengths, tokens_T=tokens_T, positions_T=positions_T, before_R=at_R)
        packed = packed_of(text, self.mesh, self._trunk.spec)
        hidden_rD = self._trunk.read(packed).float()
        values_r = F.linear(hidden_rD, self._head[_WEIGHT], self._head[_BIAS]).squeeze(1)
        return values_r if packed.tokens is None else packed.tokens.join(values_r)

    def save(self, folder: Path) -> None:
        self._trunk.save(folder)
        if self.mesh.peers.lead:
            blob = save({name: value.detach().cpu() for name, value in self._head.items()})
            write_whole(folder / HEAD, lambda file: void(file.write(blob)))
        self._trunk.wait()

    def outline(self) -> Outline | None:
        head = tuple(lone_unit(name, value) for name, value in self._head.items())
        return replace(self._trunk.outline(), apart={HEAD: head})

    def load(self, folder: Path) -> None:
        self._trunk.load(folder)
        self.load_head(folder)

    def load_head(self, folder: Path) -> None:
        """Fill the head alone."""
        fill_head(folder, self._head)
