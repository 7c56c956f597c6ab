"""The transport ``delta``: servers of ours that have the last version are sent what changed since, the others all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from torch import Tensor

from miles.backends.sglang.buckets import Bucket
from miles.backends.sglang.carriers import Each
from miles.backends.sglang.client import Refused
from miles.backends.sglang.fleet import label_of
from miles.backends.sglang.lines import Line, Staged
from miles.core.types import Version
from miles.sync.changes import difference


class Delta:
    """A carrier that is told, before each publication, what was committed last (``since``)."""

    def __init__(self) -> None:
        self._base: Version | None = None
        self._before: Mapping[str, Tensor] = {}
        self._behind: set[Line] = set()
        self._whole = False
        self.sent = 0
        """Bytes of changes that were made to be sent, since the start."""

    def since(self, version: Version | None, tensors: Mapping[str, Tensor]) -> None:
        """The version servers should have, and its tensors."""
        self._base, self._before = (None, {}) if self._whole else (version, tensors)
        self._whole = False

    def again(self) -> bool:
        """A publication failed: is it worth another try, in which everyone is sent everything?"""
        self._whole = self._base is not None
        return self._whole

    async def begin(self, lines: Sequence[Line], each: Each) -> None:
        self._behind = {line for line in lines if not isinstance(line, Staged) or line.seat.version != self._base}

    async def carry(self, bucket: Bucket, lines: Sequence[Line], each: Each) -> None:
        body = b""
        if self._base is not None and any(line not in self._behind for line in lines):
            body = await asyncio.to_thread(difference, label_of(self._base), self._before, bucket.tensors)
            self.sent += len(body)

        async def tell(line: Line) -> None:
            if body and line not in self._behind and isinstance(line, Staged):
                try:
                    await line.changes(body)
                    return
                except Refused:  # its chain is broken: it gets this and all that follows whole
                    self._behind.add(line)
            await line.bucket(bucket)

        await each(lines, tell)

    async def end(self, lines: Sequence[Line], each: Each) -> None: ...

    async def close(self) -> None:
        self._before = {}
