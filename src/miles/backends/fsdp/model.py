"""A decoder held whole by this process, as the training plane wants it.

``_T`` packed input tokens, ``D`` hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles.backends.fsdp.routing import Told, routing_of, told_by
from miles.core.errors import CheckpointError, MilesError
from miles.kernels.segments_rows import pick
from miles.models import impl
from miles.models.decoder import Decoder
from miles.models.door import Model
from miles.models.lora import Adapters
from miles.models.matrices import Matrices, matrices
from miles.models.outline import Outline
from miles.models.spec import DecoderSpec
from miles.train.experts import Used
from miles.train.logits import Output
from miles.train.optim import whole_norm
from miles.train.prefix import Stretch, attend_of, refuse
from miles.train.roles import Judge, Kept
from miles.train.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(Told):
    """What a model made of a packed batch. ``flips`` counts the replayed experts its own router would not
    have chosen, out of ``replayed``; both None where nothing was replayed."""

    hidden_TD: Tensor


class FsdpModel:
    """A TrainModel over ``decoder``; a ``frozen`` one takes no gradient.

    Saved weights are accompanied by the tokenizer files of the folder ``like`` and by ``config``, else
    ``like``'s config, else one made from the decoder's spec.
    """

    def __init__(
        self,
        decoder: Model,
        *,
        config: Mapping[str, Any] | None = None,
        like: Path | None = None,
        gradient_checkpointing: bool = False,
        frozen: bool = False,
    ) -> None:
        self._decoder, self._config, self._like = decoder, config, like
        if frozen:
            decoder.requires_grad_(False)
        decoder.checkpoint_layers = gradient_checkpointing
        self._parameters: dict[str, Tensor] = dict(decoder.named_parameters())

    @property
    def device(self) -> torch.device:
        return self._decoder.head().device

    def parameters(self) -> Mapping[str, Tensor]:
        return self._parameters

    def head(self) -> Tensor:
        """The output weight [V, D]."""
        return self._decoder.head()

    def settle(self) -> None:
        """Gradients are whole as they come."""

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        return whole_norm(grads)

    def updated(self) -> None:
        """There are no copies of the parameters."""

    def gather(self, name: str, local: Tensor) -> Tensor:
        return local

    def cut(self, name: str, whole: Tensor) -> Tensor:
        return whole

    def matrices(self) -> Mapping[str, Matrices]:
        return matrices(self._decoder.spec)

    def adapt(self, adapters: Adapters) -> None:
        """Let gradients reach these factors; before the first forward."""
        assert isinstance(self._decoder, Decoder), "adapters are for our own decoder"
        adapters.attach(self._decoder)

    def first_row(self, name: str) -> int:
        """Which row of the whole this rank's part of a matrix begins with."""
        return 0

    def added(self, grad: Tensor) -> Tensor:
        """What all ranks' tokens give together, of what each rank's own gave."""
        return grad

    @property
    def spec(self) -> DecoderSpec:
        return self._decoder.spec

    def move(self, device: torch.device) -> None:
        for parameter in self._parameters.values():
            parameter.data = parameter.data.to(device)

    def each(self, plan: Sequence[Rows], judge: Judge) -> list[Kept]:
        kept: list[Kept] = []
        for number, rows in enumerate(plan):
            loss, found = judge(number, self._output(rows))
            if loss is not None:
                loss.backward()
            kept.append(found)
        return kept

    def _output(self, rows: Rows) -> Output:
        spec = self._decoder.spec
        refuse(spec, rows.stretches)
        read = self.read(rows.tokens_T, rows.positions_T, rows.lengths, rows.replay_TLk, rows.stretches, rows.used)
        return Output(
            hidden_RD=pick(read.hidden_TD, rows.before_R, repeated=bool(rows.stretches)),
            head_VD=self.head(),
            softcap=spec.logit_softcap,
            flips=read.flips,
            replayed=read.replayed,
            load_LE=read.load_LE,
        )

    def read(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        replay_TLk: Tensor | None,
        stretches: Sequence[Stretch] = (),
        used: Used | None = None,
    ) -> Read:
        """The hidden states that the head turns into logits, sequence after sequence without padding, or those of a
        tree of ``stretches``."""
        longest, most = max(lengths), self._decoder.spec.max_positions
        if longest > most:
            raise MilesError(f"a sample of {longest} tokens is longer than the {most} positions of the model's config.")
        routing = None
        if isinstance(self._decoder, Decoder):  # transformers' own routers are neither recorded nor replayed
            routing = routing_of(self._decoder.spec, replay_TLk, used, device=self.device)
        hidden_TD = self._decoder(tokens_T, positions_T, attend_of(lengths, stretches, self.device), routing)
        told = told_by(routing, used)
        return Read(hidden_TD=hidden_TD, flips=told.flips, replayed=told.replayed, load_LE=told.load_LE)

    def save(self, folder: Path) -> None:
        impl.export(self._decoder, folder, like=self._like, config=self._config)

    def outline(self) -> Outline | None:
        return impl.outline(self._decoder, like=self._like, config=self._config)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        left = dict(self._parameters)
        for name, tensor in impl.tensors(self._decoder, folder):
            live = left.pop(name, None)
            if live is None or tensor.shape != live.shape:
                raise CheckpointError(f"{folder} holds another model than the one in training (see {name}).")
            live.copy_(tensor)
        if left:
            raise CheckpointError(f"{folder} holds another model than the one in training (see {min(left)}).")
