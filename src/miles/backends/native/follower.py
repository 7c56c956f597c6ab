"""One rank's share of the steps, and the process that does it when told.

A rank runs the orders the engine would run alone, over its part of the model. Logits are gathered to the first rank,
which draws; then all take over what it drew.

Shapes: R rows, D hidden, V vocabulary, S seats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from miles.backends.native.order import Flight, Order
from miles.backends.native.ring import Ring
from miles.backends.native.runner import Runner
from miles.cluster.platform import Platform, find
from miles.cluster.team import Line, Place
from miles.kernels import arithmetic
from miles.kernels.arithmetic import Arithmetic
from miles.models.rank import decoder_of_rank
from miles.models.shard import spec_of_rank
from miles.models.spec import DecoderSpec
from miles.sync.manifest import digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What all ranks of an engine must know to make their runners; ``spec`` is the whole model's."""

    spec: DecoderSpec
    page_size: int
    seats: int
    record_routing: bool
    dtype: torch.dtype
    arithmetic: Arithmetic = "fast"


class RankRunner(Runner):
    """The runner of one rank: ``pages`` and seats are those of all ranks, heads and rows of the vocabulary its own."""

    def __init__(self, work: Work, ring: Ring, pages: int) -> None:
        self.ring = ring
        # Everything that is not the decoder's own speaks of the whole vocabulary.
        small = replace(spec_of_rank(work.spec, ring.world), vocab_size=work.spec.vocab_size)
        super().__init__(
            small,
            pages=pages,
            page_size=work.page_size,
            seats=work.seats,
            record_routing=work.record_routing,
            device=ring.device,
            dtype=work.dtype,
            model=decoder_of_rank(work.spec, ring, device="meta", dtype=work.dtype),
        )

    def launch(self, order: Order) -> Flight:
        """Begin a step; every rank begins the same ones, in the same order."""
        flight = super().launch(order)
        if len(order.seats_D):
            with torch.inference_mode():
                self.drawn_S.copy_(self.ring.broadcast(self.drawn_S))
        return flight

    def _logits(self, hidden_RD: Tensor) -> Tensor:
        part_RV = super()._logits(hidden_RD)
        parts = self.ring.gather(part_RV) if part_RV.numel() else [part_RV] * self.ring.world
        if self.ring.rank == 0:
            return torch.cat(parts, 1)[:, : self.spec.vocab_size]
        # Whatever is drawn from these, the first rank's draw takes its place.
        return part_RV.new_zeros((len(part_RV), self.spec.vocab_size))


def platform_of(device: torch.device) -> Platform:
    """The device of a rank, which is not always the first of its kind."""
    if device.type != "cpu":
        torch.cuda.set_device(device)
    return replace(find(device.type), device=device)


def follow(place: Place, line: Line, *, work: Work) -> None:
    """A follower's whole life: say what memory there is, be told how much to take, obey until told to end."""
    torch.set_num_threads(1)
    arithmetic.use(work.arithmetic)
    platform = platform_of(torch.device(place.device))
    line.say("here", platform.free_bytes())
    _, pages = line.hear()
    if pages is None:
        return
    ring = Ring(
        place.folder, place.rank, place.world, device=platform.device, apart=place.apart, patience=place.patience
    )
    follower = _Follower(RankRunner(work, ring, pages), platform)
    line.say("open")
    while True:
        verb, content = line.hear()
        if verb == "close":
            return
        reply = follower.verbs[verb](content)
        if reply is not None:
            line.say(verb, reply)


class _Follower:
    """What a follower can be told; those verbs that give something are answered."""

    def __init__(self, runner: RankRunner, platform: Platform) -> None:
        self._runner = runner
        self._platform = platform
        self._staged: dict[str, Tensor] = {}
        self._wrong: list[str] = []
        self.verbs: Mapping[str, Callable[[Any], Any]] = {
            "launch": self._launch,
            "free": self._free,
            "allocate": self._allocate,
            "take": self._take,
            "verify": lambda _: tuple(self._wrong),
            "commit": self._commit,
            "show": self._show,
            "rollback": self._rollback,
        }

    def _launch(self, order: Order) -> None:
        self._runner.launch(order)

    def _free(self, _: None) -> None:
        self._runner.free()
        self._platform.give_back()

    def _allocate(self, _: None) -> bool:
        self._runner.allocate()
        return True

    def _take(self, given: Mapping[str, Any]) -> None:
        """Stage a slice that comes over the ring, and check that it came as it left."""
        name = given["name"]
        like = self._runner.expected()[name]
        self._staged[name] = take(self._runner.ring, [], like)
        if digest(self._staged[name]) != given["digests"][self._runner.ring.rank]:
            self._wrong.append(name)

    def _show(self, name: str) -> None:
        show(self._runner.ring, self._runner.weights()[name])

    def _commit(self, _: None) -> None:
        self._runner.adopt(self._staged)
        self._rollback(None)

    def _rollback(self, _: None) -> None:
        self._staged, self._wrong = {}, []


def take(ring: Ring, slices: Sequence[Tensor], like: Tensor) -> Tensor:
    """This rank's of the ``slices`` that the first rank has."""
    into = torch.empty(like.numel() * like.element_size(), dtype=torch.uint8, device=ring.device)
    return ring.scatter([_bytes(part) for part in slices], into).view(like.dtype).view(like.shape)


def show(ring: Ring, tensor: Tensor) -> list[Tensor]:
    """On the first rank, what each rank has in place of ``tensor``."""
    return [part.view(tensor.dtype).view(tensor.shape) for part in ring.gather(_bytes(tensor))]


def _bytes(tensor: Tensor) -> Tensor:
    """Every dtype travels alike."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
