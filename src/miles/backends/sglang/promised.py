"""What a publication promises, in the words servers are told: put together once, however many servers there are."""

from __future__ import annotations

import json
from functools import cached_property

from torch import Tensor

from miles.backends.sglang.buckets import dtype_of


class Shapes(dict[str, Tensor]):
    """Tensors by name, of which only shapes and formats are told; without ``whole``, servers keep all others.

    ``keeps``: of these, only those that have changed will come.
    """

    whole = True
    keeps = False

    @cached_property
    def begin(self) -> bytes:
        entries = [
            {"name": name, "shape": list(tensor.shape), "dtype": dtype_of(tensor)} for name, tensor in self.items()
        ]
        told = {"action": "begin", "whole": self.whole, "keeps": self.keeps, "entries": entries}
        return json.dumps(told).encode()


class Digests(dict[str, int]):
    """What each tensor must be proven to be."""

    @cached_property
    def verify(self) -> bytes:
        return json.dumps({"action": "verify", "digests": {name: str(n) for name, n in self.items()}}).encode()
