"""A trainer's checkpoint: a Hugging Face model, and beside it the optimizer and a page of numbers.

The folder is itself a model that anything which reads Hugging Face format can load. Every tensor in it is whole, so any
number of ranks, however they cut the model, reads what any other wrote:

    all ranks      gather a tensor; whoever it is dealt to copies it to the host          training waits
    every rank     writes, hashes, flushes and rereads its files, and leaves a note       in a thread
    the lead       adds the index, the config, the tokenizer and the numbers              in its thread

``save`` waits for the threads unless it saves in the background. Making the folder appear all at once, and not before
every rank has left its note (``core.notes``), is the caller's part.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from miles.core import notes
from miles.core.errors import CheckpointError
from miles.core.types import Version
from miles.models.files import ITEM_BYTES, WEIGHTS, Described, index_of, write_json
from miles.models.files import Stored as OnDisk
from miles.models.outline import CODES, DTYPES, Outline, Unit
from miles.models.saving import SHARD_BYTES
from miles.train.config import TrainConfig
from miles.train.optim import Updates
from miles.train.peers import ALONE, Peers
from miles.train.roles import Stored
from miles.train.shards import File, Load, files_of, index_for
from miles.train.snapshot import Blocks
from miles.train.tensor_files import FileWriter, read_tensors

OPTIMIZER = "optimizer.safetensors"
NUMBERS = "trainer.json"
# 2 is an optimizer in several files; what is in one file, any Miles reads.
_FORMATS = (1, 2)
_MASTER = "master"
# Seconds without a word or a byte from another rank.
_PATIENCE = 600.0

# Of an optimizer's entry: its dtype as safetensors names it, and its value where it is a mere number.
_Kind = tuple[str, float | None]


class Saving:
    """How one model's checkpoints are written, the host memory they pass through, and the one still under way.

    In the ``background`` files are written while training goes on, out of a copy on the host: as many bytes as this
    rank's files have. With ``verify`` they are read again and held against what was in memory.
    """

    def __init__(self, *, background: bool = False, verify: bool = True) -> None:
        self.background, self.verify = background, verify
        self._blocks: Blocks | None = None
        self._writer: FileWriter | None = None

    def writer(self, folder: Path, device: torch.device) -> FileWriter:
        """The writer of a new checkpoint; the one before is waited for."""
        self.wait()
        if self._blocks is None:
            self._blocks = Blocks(pinned=device.type == "cuda")
        self._writer = FileWriter(folder, self._blocks, bounded=not self.background, verify=self.verify)
        return self._writer

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._writer is not None:
            self._writer.wait()
            self._writer = None


def saving_of(config: TrainConfig) -> Saving:
    """How the knobs say checkpoints are written."""
    return Saving(background=config.async_save, verify=config.verify_checkpoints)


def save(
    folder: Path,
    model: Stored,
    optimizer: Updates,
    version: Version,
    peers: Peers = ALONE,
    saving: Saving | None = None,
) -> None:
    """Write everything an exact continuation needs into an existing ``folder``; all ranks call at once.

    Returns when the files are complete and on disk, or, in the background, when nothing more of the model is needed.
    Where a rank cannot write, the lead says so, here or in its note; the others have nothing to raise.
    """
    saving = saving or Saving()
    rank, ranks = _place(peers)
    if peers.lead:
        notes.announce(folder, ranks)
    outline = model.outline()
    if outline is None:
        assert ranks == 1, "a model that is cut over ranks has an outline"
        model.save(folder)
    parts = _parts(model, optimizer, outline, ranks)
    # Everything the thread will write is fixed here: the next step changes the optimizer's count too.
    numbers = _told(parts, optimizer, version)
    writer = saving.writer(folder, model.device)
    try:
        for part in parts:
            _feed(writer, part, rank)
    except BaseException as error:
        stopped = f"rank {rank} stopped saving ({type(error).__name__})"
        writer.close(lambda _: notes.tell_failure(folder, rank, stopped))
        raise
    add = partial(_accompany, folder, parts, outline, numbers) if peers.lead else None
    writer.close(partial(_leave_note, folder, rank, add))
    if not saving.background:
        saving.wait()
        _conclude(folder, rank, writer, peers)


def load(folder: Path, model: Stored, optimizer: Updates, peers: Peers = ALONE) -> Version:
    """Put weights and optimizer back as ``save`` found them, whoever wrote them; gives the version they are."""
    numbers = _numbers(folder)
    try:
        found = read_tensors(folder, OPTIMIZER)
    except (CheckpointError, OSError) as cause:
        raise CheckpointError(f"{folder / OPTIMIZER} cannot be read ({cause}); use an older checkpoint.") from cause
    model.load(folder)
    state = dict(_cut(model, found))
    optimizer.load(state, updates=int(numbers["updates"]))
    model.updated()
    return Version(str(numbers["version"]["policy"]), int(numbers["version"]["number"]))


def _place(peers: Peers) -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if peers is not ALONE else (0, 1)


# -- what there is to write -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """Loads that lie in the file ``lone``, or in several with an index."""

    lone: str
    loads: Sequence[Load]
    files: Sequence[File]


def _parts(model: Stored, optimizer: Updates, outline: Outline | None, ranks: int) -> list[_Part]:
    parts: list[_Part] = []
    if outline is not None:
        weights = [*_of_units(model, outline.units), *map(_spare, outline.spare)]
        parts.append(_Part(WEIGHTS, weights, files_of(WEIGHTS, weights, ranks, SHARD_BYTES)))
        for name, units in outline.apart.items():
            few = _of_units(model, units)
            parts.append(_Part(name, few, files_of(name, few, 1, None)))
    state = _of_optimizer(model, optimizer, outline, ranks)
    limit = None if ranks == 1 else SHARD_BYTES  # of several ranks one is seen to go on by files that come to an end
    parts.append(_Part(OPTIMIZER, state, files_of(OPTIMIZER, state, ranks, limit)))
    return parts


def _of_units(model: Stored, units: Sequence[Unit]) -> list[Load]:
    local = model.parameters()
    return [
        Load(
            tensors=u.described(), bring=partial(_whole, model, u.name, lambda name=u.name: local[name]), views=u.views
        )
        for u in units
    ]


def _spare(entry: tuple[str, OnDisk]) -> Load:
    name, stored = entry
    return Load(tensors=(Described(name, stored.dtype, stored.shape, stored.stop - stored.start),), stored=stored)


def _of_optimizer(model: Stored, optimizer: Updates, outline: Outline | None, ranks: int) -> list[Load]:
    """The optimizer's state, and the float32 weights where those of the model's folder are rounded."""
    local, state = model.parameters(), optimizer.state()
    known: dict[str, tuple[str, float | None]] = {}
    for name in state:
        value = state[name]
        known[name] = CODES[value.dtype], None if value.dim() else float(value)
    shapes = {name: tuple(p.shape) for name, p in local.items()}
    if outline is not None:
        shapes = outline.whole_shapes()
        for name, dtype in outline.dtypes().items():
            if local[name].requires_grad and local[name].dtype != dtype:
                known[f"{_MASTER}.{name}"] = CODES[local[name].dtype], None
    loads: list[Load] = []
    for name, (code, scalar) in _agreed(known, ranks).items():
        param = name.partition(".")[2]
        if scalar is not None:
            bring, shape = partial(torch.tensor, scalar, dtype=DTYPES[code]), ()
        else:
            bring, shape = partial(_whole, model, param, partial(_entry, state, local, name, code)), shapes[param]
        size = prod(shape) * ITEM_BYTES[code]
        loads.append(Load(tensors=(Described(name, code, shape, size),), bring=bring))
    return loads


def _agreed(known: dict[str, _Kind], ranks: int) -> dict[str, _Kind]:
    """What any rank knows, in one order: an optimizer may have nothing for a parameter of which its rank has no row."""
    if ranks == 1:
        return known
    tables: list[dict[str, _Kind] | None] = [None] * ranks
    dist.all_gather_object(tables, known)
    return {name: kind for table in tables if table is not None for name, kind in table.items()}


def _entry(state: Mapping[str, Tensor], local: Mapping[str, Tensor], name: str, code: str) -> Tensor:
    if name in state:
        return state[name]
    key, _, param = name.partition(".")
    parameter = local[param].detach()
    if key == _MASTER:
        return parameter
    assert not parameter.numel(), f"the optimizer has no {name} here, and others have"
    return parameter.to(DTYPES[code])


def _whole(model: Stored, name: str, local: Callable[[], Tensor]) -> Tensor:
    part = local().detach()
    alone = not dist.is_initialized()
    return model.gather(name, part if alone else part.to(model.device))  # ranks speak through their devices


# -- writing --------------------------------------------------------------------------------


def _feed(writer: FileWriter, part: _Part, rank: int) -> None:
    """Bring every load together, on all ranks in the same order; this rank keeps those of its files."""
    first = {file.loads[0]: file for file in part.files if file.loads and file.rank == rank}
    last = {file.loads[-1] for file in first.values()}
    mine = {number for file in first.values() for number in file.loads}
    for number, load in enumerate(part.loads):
        if number in first:
            inside = first[number].loads
            writer.begin(first[number].name, [tensor for n in inside for tensor in part.loads[n].tensors])
        whole = None if load.bring is None else load.bring()
        if number in mine:
            _hand(writer, load, whole)
        if number in last:
            writer.end()
    if not part.loads and rank == 0:
        writer.begin(part.lone, ())
        writer.end()


def _hand(writer: FileWriter, load: Load, whole: Tensor | None) -> None:
    if whole is None:
        assert load.stored is not None
        writer.copy(load.tensors[0].name, load.stored)
        return
    for view, described in zip(load.views(whole), load.tensors, strict=True):
        assert tuple(view.shape) == described.shape, f"{described.name}: {tuple(view.shape)}, not {described.shape}"
        writer.tensor(view)


def _told(parts: Sequence[_Part], optimizer: Updates, version: Version) -> dict[str, Any]:
    several = any(part.lone == OPTIMIZER and len(part.files) > 1 for part in parts)
    return {
        "format": 2 if several else 1,
        "version": {"policy": version.policy, "number": version.number},
        "updates": optimizer.updates,
    }


def _accompany(folder: Path, parts: Sequence[_Part], outline: Outline | None, numbers: Mapping[str, Any]) -> None:
    """What the lead adds to the tensors."""
    for part in parts:
        if len(part.files) > 1:
            write_json(folder / index_of(part.lone), index_for(part.files, part.loads))
    if outline is not None:
        outline.accompany(folder)
    write_json(folder / NUMBERS, numbers)


def _leave_note(folder: Path, rank: int, add: Callable[[], None] | None, writer: FileWriter) -> None:
    """In the writer's thread, at its end: add what is the lead's, and tell whoever waits."""
    try:
        if writer.failure is None and add is not None:
            add()
    except Exception as cause:
        writer.failure = "what is no tensor", cause
    with contextlib.suppress(OSError):  # who waits will hear nothing, and say so
        if writer.failure is None:
            notes.tell(folder, rank, writer.files)
        else:
            notes.tell_failure(folder, rank, _sentence(rank, *writer.failure))


def _sentence(rank: int, name: str, cause: Exception) -> str:
    said = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause) or repr(cause)
    return f"rank {rank} could not write {name}: {said}"


def _conclude(folder: Path, rank: int, writer: FileWriter, peers: Peers) -> None:
    """Raise what went wrong anywhere, on the lead; elsewhere only what could not be told."""
    if writer.failure is not None and rank in notes.missing(folder):
        raise CheckpointError(_sentence(rank, *writer.failure)) from writer.failure[1]
    if peers.lead:
        notes.wait_for_all(folder, lambda: _PATIENCE)
        notes.outcome(folder)


# -- reading --------------------------------------------------------------------------------


@torch.no_grad()
def _cut(model: Stored, found: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """This rank's part of every tensor of the optimizer; a master goes into the weight where that is its own."""
    local = model.parameters()
    for name, whole in found:
        key, _, param = name.partition(".")
        if param not in local:
            raise CheckpointError(f"the optimizer state holds {name}, which this model does not have.")
        part = whole if not whole.dim() else model.cut(param, whole)
        if key == _MASTER and local[param].dtype == whole.dtype:
            local[param].copy_(part)
        else:
            yield name, part


def _numbers(folder: Path) -> dict[str, Any]:
    path = folder / NUMBERS
    try:
        numbers = json.loads(path.read_text())
    except FileNotFoundError as cause:
        raise CheckpointError(
            f"{path} is missing, so this is no training checkpoint; "
            "to start from its weights alone use --hf-checkpoint."
        ) from cause
    except (OSError, ValueError) as cause:
        raise CheckpointError(f"{path} cannot be read ({cause}); use an older checkpoint.") from cause
    if numbers.get("format") not in _FORMATS:
        raise CheckpointError(
            f"{path} is of format {numbers.get('format')}, and this Miles reads formats up to {_FORMATS[-1]}."
        )
    return numbers
