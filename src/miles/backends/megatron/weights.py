"""Weights of a Megatron model straight from a Hugging Face checkpoint and back, a tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from miles.core.errors import CheckpointError
from miles.models import hub, loading
from miles.models.decoder import Decoder
from miles.models.families import spec_of
from miles.models.files import read_config, stored_tensors
from miles.models.pieces import shape_of
from miles.models.reader import Reader
from miles.models.sources import quantised, sources

if TYPE_CHECKING:
    from miles.backends.megatron.model import MegatronModel


def load(model: MegatronModel, folder: Path) -> None:
    """Fill this rank's parts: only its stage's tensors are read, and only its own experts."""
    config = read_config(folder)
    plan = sources(spec_of(config), stored_tensors(folder), quantised(config), folder)
    table = model.homes
    shapes = {name: shape_of(tuple(fill.piece for fill in fills)) for name, fills in plan.items()}
    odd = plan.keys() ^ table.keys() or {n for n in table if shapes[n] != table[n].shape}
    if odd:
        raise CheckpointError(f"{folder} holds another model than the one in training (see {min(odd)}).")
    parameters, ring = model.parameters(), model.rings.expert
    wanted = {n: torch.empty(table[n].shape, device="meta", dtype=parameters[n].dtype) for n in plan}
    for expert, rank, world in ((False, 0, 1), (True, ring.rank, ring.world)):
        mine = {n: fills for n, fills in plan.items() if n in model.held and table[n].expert is expert}
        where: dict[str, Any] = {"rank": rank, "world": world, "device": model.device, "reader": Reader()}
        for name, tensor in loading.slices(mine, wanted, **where):
            parameters[name].copy_(model.cut_channels(name, tensor))


def save(model: MegatronModel, folder: Path, *, config: Mapping[str, Any] | None, like: Path | None) -> None:
    """Write a folder that transformers loads; every rank calls, and the first, whose host holds all of it, writes.

    A training checkpoint is written by all ranks, a tensor at a time: see ``train.checkpoint`` and ``outline``.
    """
    local, found = model.parameters(), {}
    decoder = Decoder(model.spec, device="meta", dtype=model.shape.params_dtype)
    for name, wanted in decoder.named_parameters():
        whole = model.gather(name, local[name].detach())
        if model.peers.lead:
            found[name] = whole.to(device="cpu", dtype=wanted.dtype)
    if model.peers.lead:
        decoder.load_state_dict(found, assign=True)
        hub.export(decoder, folder, like=like, config=config)
    model.rings.everyone.sum(torch.zeros((), device=model.device))  # nobody goes on before the files are there
