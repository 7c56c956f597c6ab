"""Optimizer moments of one parameter, in any storage format and on any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from miles.train.optim.master_weights import StateDevice, TrainedParam, pop_state
from miles.train.optim.quantized_state import RandomFn, RawState, StateFormat

# Of raw tensors in memory that they share, in bytes; as torch's allocator.
_ALIGNMENT = 512


class OptimizerMoments:
    """Moments of a parameter's gradient by name, each in its storage format; initially zero."""

    def __init__(self, param: TrainedParam, formats: Mapping[str, StateFormat], device: StateDevice) -> None:
        self._param = param
        self._formats = dict(formats)
        count = param.parameter.numel()
        self._raws = {key: form.zeros(count, device.device, pinned=device.pinned) for key, form in formats.items()}

    def slice(self, start: int, stop: int) -> RawState:
        """Return the raw tensors of a slice of all moments, concatenated."""
        return tuple(t for key, form in self._formats.items() for t in form.slice(self._raws[key], start, stop))

    def decode(self, raws: RawState) -> list[Tensor]:
        """Return the moments of what ``cut`` returned (or copies of it), in the dtype of the master."""
        dtype = self._param.master.dtype
        return [form.decode(raw).to(dtype) for form, raw in self._split(raws)]

    def encode(self, raws: RawState, values: list[Tensor], random: RandomFn | None) -> None:
        """Write moments back."""
        for (form, raw), value in zip(self._split(raws), values, strict=True):
            form.encode(raw, value, random)

    def state_factories(self) -> dict[str, Callable[[], Tensor]]:
        """Return a factory for each entry of the state: float32 and shaped like the parameter, whatever the format."""

        def factory(key: str) -> Callable[[], Tensor]:
            return lambda: self._formats[key].decode(self._raws[key]).view(self._param.parameter.shape)

        return {f"{key}.{self._param.name}": factory(key) for key in self._formats}

    def load(self, state: dict[str, Tensor]) -> None:
        """Load these and remove them from ``state``."""
        for key, form in self._formats.items():
            value = pop_state(state, f"{key}.{self._param.name}", self._param.parameter)
            raw = self._raws[key]
            form.encode(raw, value.to(raw[0].device, torch.float32).flatten(), None)

    def list_raws(self) -> dict[str, Tensor]:
        """Return the raw tensors, each under a name that no other parameter has."""
        return {
            f"{key}.{self._param.name}.{number}": tensor
            for key, raw in self._raws.items()
            for number, tensor in enumerate(raw)
        }

    @property
    def bytes(self) -> int:
        """Bytes of the moments."""
        return sum(t.nbytes for raw in self._raws.values() for t in raw)

    def place(self, memory: Tensor) -> None:
        """Have them in zeroed ``memory``, bytes of which there are at least ``spread_bytes``."""
        start = 0
        for key, raw in self._raws.items():
            placed: list[Tensor] = []
            for tensor in raw:
                placed.append(memory[start : start + tensor.nbytes].view(tensor.dtype))
                start += _align(tensor.nbytes)
            self._raws[key] = tuple(placed)

    @property
    def spread_bytes(self) -> int:
        """Bytes of the moments, each of which begins at a multiple of the alignment."""
        return sum(_align(tensor.nbytes) for raw in self._raws.values() for tensor in raw)

    def _split(self, raws: RawState) -> list[tuple[StateFormat, RawState]]:
        out: list[tuple[StateFormat, RawState]] = []
        start = 0
        for key, form in self._formats.items():
            size = len(self._raws[key])
            out.append((form, raws[start : start + size]))
            start += size
        return out


def allocate_together(moments: Sequence[OptimizerMoments], device: torch.device) -> None:
    """Allocate moments that were created on the meta device, zeroed and as one piece of memory.

    They come when gradients and activations are there. Allocated one by one they would be spread over memory that was
    of activations, which could then not be given to an engine.
    """
    sizes = [each.spread_bytes for each in moments]
    try:
        parts = torch.zeros(sum(sizes), dtype=torch.uint8, device=device).split(sizes)
    except torch.OutOfMemoryError:  # there is not as much in one piece
        parts = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    for each, part in zip(moments, parts, strict=True):
        each.place(part)


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
