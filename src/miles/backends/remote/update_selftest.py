"""Self-test of weight updates: engines get noise for weights, then the first version, and must hold it to the bit.

An update that skips a tensor, writes it to a copy that is not served, or reaches only one rank leaves the weights that
the server has loaded from the same checkpoint, so that nothing looks wrong before the first training step. After noise,
it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles.backends.remote.client import RequestRejected, UnknownEndpoint
from miles.backends.remote.update_protocols import StagedUpdate, UpdateProtocol
from miles.core.errors import SyncError

_CHECKER_PATH = "/weights_checker"
_MAX_NAMED = 4


class UpdateSelfTest:
    """Runs around a server's first update; ``wanted`` is --check-weight-update-equal, None for miles serve only."""

    def __init__(self, wanted: bool | None, seconds: float, log: Callable[[str], None]) -> None:
        self._wanted = wanted
        self._seconds = seconds
        self._log = log
        self._untested: set[str] = set()

    def covers(self, update: UpdateProtocol) -> bool:
        """Whether this server is tested; stock SGLang only if asked for: it resets buffers that no update sends.

        One that is sent adapters is not: nothing would restore the base under them.
        """
        if update.names_versions:
            return False
        if self._wanted is not None:
            return self._wanted
        return isinstance(update, StagedUpdate) and update.slot.name not in self._untested

    async def overwrite(self, update: UpdateProtocol) -> None:
        """Overwrite the server's weights with noise."""
        if not self.covers(update):
            return
        if not isinstance(update, StagedUpdate):
            await self._act(update, "snapshot")
            await self._act(update, "reset_tensors")
            return
        before = await self._fetch_checksums(update)
        if before is None:
            return
        await self._act(update, "reset_tensors")
        after = await self._fetch_checksums(update) or {}
        _require_none(update, [name for name in before if before[name] == after.get(name)], "stayed as they were")

    async def check(self, update: UpdateProtocol, digests: Mapping[str, int]) -> None:
        """Raise SyncError unless every tensor that the server now serves is the trainer's."""
        if not self.covers(update):
            return
        if not isinstance(update, StagedUpdate):
            await self._act(update, "compare")
            return
        served = await self._fetch_checksums(update)
        if served is None:
            return
        wrong = [name for name, digest in digests.items() if served.get(name) != f"{digest:016x}"]
        _require_none(update, wrong, "are others than the trainer's")

    async def _fetch_checksums(self, update: UpdateProtocol) -> Mapping[str, str] | None:
        """The checksums by tensor; None, with a note, from a server that has none, unless the test is asked for."""
        try:
            return (await self._act(update, "checksum"))["ranks"][0]["checksums"]
        except (UnknownEndpoint, KeyError, IndexError) as error:
            if self._wanted:
                raise SyncError(
                    f"{update.slot.name} reports no checksums of its weights, so they are untested"
                ) from error
            self._untested.add(update.slot.name)
            self._log(f"{update.slot.name} reports no checksums, so its first weight update is not tested.")
            return None

    async def _act(self, update: UpdateProtocol, action: str) -> Mapping[str, Any]:
        try:
            return await update.client.request("POST", _CHECKER_PATH, {"action": action}, seconds=self._seconds)
        except UnknownEndpoint:
            raise
        except RequestRejected as error:
            raise SyncError(
                f"{update.slot.name} failed the self-test of weight updates at {action}: {error}; "
                "--no-check-weight-update-equal turns it off"
            ) from error


def _require_none(update: UpdateProtocol, names: Sequence[str], why: str) -> None:
    if names:
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        raise SyncError(
            f"{update.slot.name} does not serve the weights it was sent: {', '.join(sorted(names)[:_MAX_NAMED])}{more} "
            f"{why} in the self-test of weight updates; update the server, or choose another --update-weight-transport"
        )
