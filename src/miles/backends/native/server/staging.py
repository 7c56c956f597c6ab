"""A publication that comes over HTTP: a manifest, tensors in buckets, digests; nothing changes before the commit.

Names, shapes and digests are those of Hugging Face tensors, as the sender has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from miles.backends.native.engine import NativeEngine
from miles.backends.native.server.fields import Fields
from miles.backends.native.server.landing import Landed, Landing
from miles.backends.native.server.weights import all_by_name, by_name, from_bytes, index_of
from miles.backends.native.server.writing import Writing
from miles.core.errors import SyncError
from miles.models import names
from miles.models.foreign.spec import ForeignSpec
from miles.sync.changes import applied
from miles.sync.manifest import Entry, folded
from miles.sync.manifest import digests as digests_over

ACTIONS = ("where", "begin", "load", "open", "copy", "map", "write", "verify", "commit", "rollback")


class Staging:
    """What has come of one publication. The engine goes on with the weights it has until it is ``taken``."""

    def __init__(self, engine: NativeEngine, ranks: int = 1) -> None:
        self._engine = engine
        self._ranks = ranks
        self.landing = Landing(engine, ranks)
        self.writing = Writing(engine, ranks)
        self._laid: set[str] = set()
        self._stayed: set[str] = set()
        self._entries: dict[str, Entry] | None = None
        self._keeps = False
        self._tensors: dict[str, Tensor] = {}
        self._verified = False

    def step(self, action: str, fields: Fields) -> dict[str, Any]:
        """One of ``ACTIONS`` but the commit: what the sender is told beside that it was done."""
        match action:
            case "where":
                return self.landing.where()
            case "begin":
                self.begin(entries_of(fields), whole=fields.flag("whole"), keeps=fields.flag("keeps"))
            case "load":
                self.load(Path(fields.needed_text("folder")))
            case "open":
                self.landing.open(fields.array("windows") or [])
            case "copy":
                self.copy(fields)
                if fields.flag("last"):
                    self.landing.close()
            case "map" | "write":
                return self.writing.step(action, fields)
            case "verify":
                digests = digests_of(fields)
                if (other := self.kept_otherwise(digests)) is not None:
                    return {"kept_otherwise": other}
                return {"verified": self.verify(digests)}
            case _:
                self.rollback()
        return {}

    def begin(self, entries: Sequence[Entry], *, whole: bool, keeps: bool = False) -> None:
        """Refuse names and shapes that are not this model's; and, of a ``whole`` one, that it leaves any out.

        ``keeps``: of what is announced only what has changed will come, and the rest stays as it is here.
        """
        self.rollback()
        shapes, optional = self._expected()
        given = {entry.name: entry for entry in entries}
        for name, entry in given.items():
            if name not in shapes:
                if self._ignorable(name):
                    continue
                raise SyncError(f"{name} is not a tensor of this model.")
            if entry.shape != shapes[name]:
                raise SyncError(f"{name} has shape {entry.shape}, but this model's has {shapes[name]}.")
        missing = [name for name in shapes if name not in given and name not in optional] if whole else []
        if missing:
            more = f", and {len(missing) - 1} others with it" if missing[1:] else ""
            raise SyncError(f"{missing[0]} is missing{more}.")
        self._entries, self._keeps = given, keeps

    def receive(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors for the flip; refuse what was not announced so."""
        entries = self._begun()
        for name, tensor in tensors.items():
            entry = entries.get(name)
            if entry is None:
                raise SyncError(f"{name} was not announced.")
            if name in self._tensors:
                raise SyncError(f"{name} came twice.")
            told = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if told != (entry.shape, entry.dtype):
                raise SyncError(
                    f"{name} is {told[1]} of shape {told[0]}, announced was {entry.dtype} of {entry.shape}."
                )
            self._tensors[name] = tensor
            self._verified = False

    def copy(self, fields: Fields) -> None:
        """Receive what lies in a window of the sender's now; when this returns, the sender may write there again."""
        entries = self._begun()
        views = self.landing.views(fields, entries)
        twice = next((name for name in views if name in self._tensors), None)
        if twice is not None:
            raise SyncError(f"{twice} came twice.")
        if not self.landing.fits(entries):
            self.receive({name: view.clone() for name, view in views.items()})
            return
        self._tensors |= self.landing.lay(views, entries)
        self._laid |= views.keys()
        self._verified = False

    def change(self, body: bytes, label: str, limit: int) -> None:
        """Receive what has changed since the version called ``label``, which is the one there is."""
        current = self._engine.weights()

        def there(name: str) -> Tensor:
            tensor = by_name(self._engine.spec, current, name)
            if tensor is None:
                raise SyncError(f"{name} is not a tensor of this model.")
            return tensor

        self.receive(applied(body, label, there, limit))

    def load(self, folder: Path) -> None:
        """Receive what the safetensors files of a folder hold."""
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise SyncError(f"{folder} holds no safetensors file that this server can see.")
        for file in files:
            self.receive(from_bytes(file.read_bytes()))

    def kept_otherwise(self, digests: Mapping[str, int]) -> str | None:
        """What was to stay as it is here, and is not what the sender has; the rest is staged with what came."""
        entries = self._begun()
        staying = [name for name in entries if name not in self._tensors] if self._keeps else []
        if not staying:
            return None
        there = all_by_name(self._engine.spec, self._engine.weights(), staying)
        found = digests_over(there)
        for name in staying:
            if found.get(name) != digests.get(name):
                return name
        self.landing.fill(there)
        self._tensors |= there
        self._stayed |= there.keys()
        return None

    def verify(self, digests: Mapping[str, int]) -> int:
        """Refuse unless all came with the bits the sender has; how many tensors that are."""
        entries = self._begun()
        for name in entries:
            if name not in self._tensors:
                raise SyncError(f"{name} did not come.")
        # Of a version that came in part, the rest must be what the sender has too.
        missing = [name for name in digests if name not in entries]
        rest = all_by_name(self._engine.spec, self._engine.weights(), missing) if missing else {}
        counted = {name: folded(sums) for name, sums in self.landing.sums().items()}
        known = counted.keys() | self._stayed
        unread = {name: tensor for name, tensor in self._tensors.items() if name not in known}
        for name, found in {**counted, **digests_over({**unread, **rest})}.items():
            if found != digests.get(name):
                raise SyncError(f"{name} has digest {found}, and the sender's is {digests.get(name)}.")
        self._verified = True
        return len(self._tensors) + len(rest)

    def taken(self) -> tuple[dict[str, Tensor], Landed]:
        """All that was verified, that which is in place already apart; it is no longer kept here."""
        if not self._verified:
            raise SyncError("There is nothing verified to commit.")
        there = self._laid | self._stayed
        tensors = {name: tensor for name, tensor in self._tensors.items() if name not in there}
        landed = self.landing.landed()
        self.rollback()
        return tensors, landed

    def rollback(self) -> None:
        """Forget what came."""
        self._entries, self._keeps, self._tensors, self._verified = None, False, {}, False
        self._laid, self._stayed = set(), set()
        self.landing.forget()

    def _begun(self) -> dict[str, Entry]:
        if self._entries is None:
            raise SyncError("There is no publication under way; begin one first.")
        return self._entries

    def _expected(self) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
        """The shape of every tensor, and which of them are other words for some of the others."""
        spec = self._engine.spec
        if isinstance(spec, ForeignSpec):
            return {name: tuple(tensor.shape) for name, tensor in self._engine.weights().items()}, frozenset()
        return {name: piece.shape for name, (_, piece) in index_of(spec).items()}, frozenset(
            names.stacked(spec).values()
        )

    def _ignorable(self, name: str) -> bool:
        spec = self._engine.spec
        return not isinstance(spec, ForeignSpec) and names.ignorable(spec, name)


def entries_of(fields: Fields) -> list[Entry]:
    """The manifest in a body: ``entries`` of a name, a shape and a dtype each. Digests come with ``verify``."""
    found = [_entry(value) for value in fields.array("entries") or []]
    if len({entry.name for entry in found}) != len(found):
        raise fields.refuse("entries", "a list of tensors of different names")
    return found


def _entry(value: Any) -> Entry:
    one = Fields(value, "entries")
    dtype = one.needed_text("dtype").removeprefix("torch.")
    return Entry(name=one.needed_text("name"), shape=tuple(one.integers("shape")), dtype=dtype, digest=0)


def digests_of(fields: Fields) -> dict[str, int]:
    """What ``verify`` is to find: the digest of each tensor, a number of 64 bits as a decimal text."""
    given = fields.object("digests")
    found: dict[str, int] = {}
    for name in given if given is not None else ():
        assert given is not None
        text = given.needed_text(name)
        if not text.isascii() or not text.isdigit() or len(text) > 20:
            raise fields.refuse("digests", "whole numbers as texts")
        found[name] = int(text)
    return found
