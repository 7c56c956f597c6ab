"""A decoder that Megatron-Core computes, as the training plane wants it.

A rank holds its pipeline stage's layers, of these its tensor rank's channels and its expert rank's experts. Gradients
are plain sums: whatever lies as summands on several ranks is added up once, in ``settle``.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from miles.backends.megatron import flags as own_flags
from miles.backends.megatron import forward, patches, weights
from miles.backends.megatron.buffers import Buffers
from miles.backends.megatron.dealt import Dealt
from miles.backends.megatron.layout import Rings, join
from miles.backends.megatron.modules import Trunk, trunk_of
from miles.backends.megatron.names import TIED, Home, homes
from miles.backends.megatron.places import Places
from miles.backends.megatron.shape import Shape, shape_of
from miles.cluster.layout import Layout
from miles.models.matrices import Matrices, matrices
from miles.models.outline import Outline, outline
from miles.models.spec import DecoderSpec
from miles.train.config import TrainConfig
from miles.train.optim import Updates
from miles.train.peers import Peers
from miles.train.rates import Schedule
from miles.train.roles import Judge, Kept
from miles.train.rows import Rows
from miles.train.stopwatch import Stopwatch


def open_megatron(
    folder: Path | str,
    spec: DecoderSpec,
    layout: Layout,
    *,
    dtype: torch.dtype,
    flags: Sequence[str] = (),
    frozen: bool = False,
    device: torch.device | None = None,
    config: Mapping[str, Any] | None = None,
    like: Path | None = None,
) -> MegatronModel:
    """The model of the Hugging Face ``folder`` over the ranks of torch's default group; every rank calls it.

    ``flags`` are Megatron's own, as on a command line. ``device`` is this rank's; without one its current accelerator,
    or the CPU where there is none. Saved weights are accompanied by ``config`` and the tokenizer files of ``like``,
    which are those of ``folder`` when not given.
    """
    told = own_flags.read(flags)
    dealt = bool(told.pop(own_flags.DEALT, False))
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Megatron makes its tensors on the current device
    shape = shape_of(spec, layout, told, dtype=dtype, device=device)
    rings = join(layout, virtual=shape.virtual_pipeline_model_parallel_size)
    patches.router_without_transformer_engine()
    patches.latent_without_transformer_engine()
    patches.optimizer_without_transformer_engine()
    like = Path(folder) if like is None else like
    model = MegatronModel(shape, rings, frozen=frozen, dealt=dealt, config=config, like=like)
    model.load(Path(folder))
    return model


class MegatronModel:
    """A TrainModel over Megatron's modules, to be filled by ``load``; a ``frozen`` one takes no gradient.

    With ``dealt`` its optimizer is Megatron's distributed one: see ``optimizer``.
    """

    def __init__(
        self,
        shape: Shape,
        rings: Rings,
        *,
        frozen: bool = False,
        dealt: bool = False,
        config: Mapping[str, Any] | None = None,
        like: Path | None = None,
    ) -> None:
        self.shape, self.rings, self.spec = shape, rings, shape.decoder
        self._config, self._like = config, like
        self._watch, self._tokens = Stopwatch(shape.home), 0
        self._chunks = _chunks(shape, rings)
        self.homes: Mapping[str, Home] = homes(shape.decoder, engine=shape.engine)
        dealt = dealt and not frozen
        self._places = Places(self._chunks, shape, rings, trained=not frozen, buffers=dealt)
        self._buffers = Buffers(self._chunks, shape, self._places, self.homes) if dealt else None

    @property
    def device(self) -> torch.device:
        return self.shape.home

    @property
    def peers(self) -> Peers:
        """The ranks with the other parts of a batch."""
        return self.rings.peers

    def parameters(self) -> Mapping[str, Tensor]:
        """In float32 where trained; empty where the parameter is another stage's."""
        return self._places.parameters

    def each(self, plan: Sequence[Rows], judge: Judge) -> list[Kept]:
        self._tokens += sum(len(rows.tokens_T) for rows in plan)
        how: dict[str, Any] = {"trained": self._places.trained, "watch": self._watch}
        return forward.run(self._chunks, self.shape, self.rings, plan, judge, **how)

    def pace(self) -> float | None:
        """Of the forward of this rank's stages."""
        seconds, tokens, self._tokens = self._watch.taken(), self._tokens, 0
        return seconds / tokens if tokens else None

    # -- gradients --------------------------------------------------------------------------

    def settle(self) -> None:
        rings, table, sequence = self.rings, self.homes, self.shape.sequence_parallel
        own = self._places.grads() if self._buffers is None else self._buffers.grads()
        rings.tensor.add([own[n] for n in own if table[n].summed or (sequence and table[n].by_token)])
        if self._buffers is not None:
            self._buffers.reduce()
        else:
            rings.expert_rows.add([own[n] for n in own if table[n].expert])
            rings.rows.add([own[n] for n in own if not table[n].expert])
        # Last, and of the same run of numbers on both stages: so that both come to the same bits.
        if self.spec.tie_embeddings and rings.pipeline.world > 1 and rings.ends is not None and TIED in own:
            rings.ends.add([own[TIED]])
        if self._buffers is None:
            self._places.give(own)

    def optimizer(self, train: TrainConfig, schedule: Schedule, *, rate: str) -> Updates | None:
        """Megatron's distributed optimizer where that was chosen, once a model; otherwise none."""
        if self._buffers is None:
            return None
        return Dealt(self._buffers, self._places, self.homes, self.rings, train, schedule, rate=rate)

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        parts = [grad for name, grad in grads.items() if self._counts(name)]
        norms = torch._foreach_norm(parts) if parts else []  # pyright: ignore[reportPrivateImportUsage]
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for each in norms:
            square += each.to(device=self.device, dtype=torch.float64).square()
        return self.rings.everyone.sum(square).sqrt().to(torch.float32)

    def _counts(self, name: str) -> bool:
        """Is this the rank that counts its part of a gradient, of all that have the same?"""
        home, rings = self.homes[name], self.rings
        if not self._places.owns(name) or not (home.share.parts or rings.tensor.rank == 0):
            return False
        same = rings.expert_rows if home.expert else rings.rows
        return same.rank == 0

    # -- parts and wholes -------------------------------------------------------------------

    def gather(self, name: str, local: Tensor) -> Tensor:
        home, ring = self.homes[name], self.rings.pipeline
        whole = self._joined(home, local) if self._places.owns(name) else local.new_empty(home.shape)
        return ring.from_rank(whole.contiguous(), self._places.stage(name))

    def _joined(self, home: Home, local: Tensor) -> Tensor:
        if home.expert:
            part = home.share.gathered(self.rings.expert_tensor.gather(local))
            found = self.rings.expert.gather(part)
            return found[0] if len(found) == 1 else torch.cat(found)
        if not home.share.parts:
            return local
        return home.restored(home.share.gathered(self.rings.tensor.gather(local)))

    def cut(self, name: str, whole: Tensor) -> Tensor:
        if name not in self._places.held:
            return whole.new_empty((0, *whole.shape[1:]))
        home, rings = self.homes[name], self.rings
        if not home.expert:
            return self.cut_channels(name, whole)
        each = len(whole) // rings.expert.world
        return self.cut_channels(name, whole[rings.expert.rank * each : (rings.expert.rank + 1) * each])

    def matrices(self) -> Mapping[str, Matrices]:
        return matrices(self.spec)

    def cut_channels(self, name: str, experts: Tensor) -> Tensor:
        """This rank's part of a parameter, or of the experts that are this rank's."""
        home, rings = self.homes[name], self.rings
        ring = rings.expert_tensor if home.expert else rings.tensor
        return home.share.of(home.arranged(experts), ring.rank, ring.world)

    # -- the rest ---------------------------------------------------------------------------

    def updated(self) -> None:
        self._places.publish()

    def move(self, device: torch.device) -> None:
        self._places.move(device)
        if self._buffers is not None:
            self._buffers.move(device)

    def outline(self) -> Outline:
        return outline(self.spec, dtype=self.shape.params_dtype, like=self._like, config=self._config)

    def save(self, folder: Path) -> None:
        weights.save(self, folder, config=self._config, like=self._like)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        weights.load(self, folder)
        self._places.publish()

    def chunks(self) -> dict[str, Trunk]:
        """This rank's runs of layers as Megatron names them in its own checkpoints."""
        if len(self._chunks) == 1:
            return {"model": self._chunks[0]}
        return {f"model{number}": chunk for number, chunk in enumerate(self._chunks)}

    def adopt(self) -> None:
        """Megatron's modules were written to: let the parameters be what these are."""
        self._places.adopt()

    @property
    def held(self) -> frozenset[str]:
        """The parameters this rank's stage has."""
        return self._places.held


def _chunks(shape: Shape, rings: Rings) -> list[Trunk]:
    """This pipeline rank's runs of layers."""
    count, rank, last = shape.virtual_pipeline_model_parallel_size, rings.pipeline.rank, rings.pipeline.world - 1
    if count is None:
        return [trunk_of(shape, first=rank == 0, last=rank == last, stage=None, rank=rank).to(shape.home)]
    made: list[Trunk] = []
    for stage in range(count):
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        first, end = rank == 0 and stage == 0, rank == last and stage == count - 1
        made.append(trunk_of(shape, first=first, last=end, stage=stage, rank=rank).to(shape.home))
    return made
