"""One parameter's running means, in whatever form and wherever they are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from miles.train.low_bit import Chance, Form, Raw
from miles.train.masters import Home, Weight, taken


class Moments:
    """Running means of a weight's gradient by name, each held in its form; zero at first."""

    def __init__(self, weight: Weight, kinds: Mapping[str, Form], home: Home) -> None:
        self._weight, self._forms = weight, dict(kinds)
        count = weight.parameter.numel()
        self._raws = {key: form.zeros(count, home.device, pinned=home.pinned) for key, form in kinds.items()}

    def cut(self, start: int, stop: int) -> Raw:
        """What is held of a stretch: of all means, one after the other."""
        return tuple(t for key, form in self._forms.items() for t in form.cut(self._raws[key], start, stop))

    def decode(self, held: Raw) -> list[Tensor]:
        """The means of what ``cut`` gave, or of copies of it, in the precision of the master."""
        dtype = self._weight.master.dtype
        return [form.decode(raw).to(dtype) for form, raw in self._split(held)]

    def encode(self, held: Raw, values: list[Tensor], chance: Chance | None) -> None:
        """Write means back."""
        for (form, raw), value in zip(self._split(held), values, strict=True):
            form.encode(raw, value, chance)

    def makers(self) -> dict[str, Callable[[], Tensor]]:
        """What makes each entry of a state: a float32 tensor shaped like the parameter, whatever the form."""

        def maker(key: str) -> Callable[[], Tensor]:
            return lambda: self._forms[key].decode(self._raws[key]).view(self._weight.parameter.shape)

        return {f"{key}.{self._weight.name}": maker(key) for key in self._forms}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take these out of ``state``."""
        for key, form in self._forms.items():
            found = taken(state, f"{key}.{self._weight.name}", self._weight.parameter)
            raw = self._raws[key]
            form.encode(raw, found.to(raw[0].device, torch.float32).flatten(), None)

    def move(self, device: torch.device) -> None:
        """Hold them on ``device``."""
        self._raws = {key: tuple(t.to(device) for t in raw) for key, raw in self._raws.items()}

    @property
    def bytes(self) -> int:
        """How much they take."""
        return sum(t.nbytes for raw in self._raws.values() for t in raw)

    def _split(self, held: Raw) -> list[tuple[Form, Raw]]:
        out: list[tuple[Form, Raw]] = []
        at = 0
        for key, form in self._forms.items():
            size = len(self._raws[key])
            out.append((form, held[at : at + size]))
            at += size
        return out
