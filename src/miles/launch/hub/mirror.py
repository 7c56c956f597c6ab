"""Mirror of a run in an object store: each checkpoint and the logs, and the way back when the local copy is gone.

A checkpoint's ``manifest.json`` is copied last: one without it is incomplete, and is never restored.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from miles.core.errors import ResumeError, describe_error
from miles.core.events import Event, Saved
from miles.launch.hub.object_store import open_store
from miles.schedule.checkpoints import verify_checkpoint

_LOGS = ("config.toml", "inputs.json", "events.jsonl", "metrics.jsonl", "timings.jsonl")
_MANIFEST = "manifest.json"


class CheckpointMirror:
    """An observer that copies every saved checkpoint of ``run`` to ``url``, one after the other in a thread.

    A copy that fails is a note, and the next checkpoint is copied all the same; ``close`` waits for the last one and
    says whether it is there. Without ``keep`` no checkpoint in the store is removed.
    """

    def __init__(self, url: str, run: Path, *, keep: int | None, note: Callable[[str], None]) -> None:
        self._url = url.rstrip("/")
        self._run = run
        self._keep = keep
        self._note = note
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._last: Future[bool] | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Saved):
            self._last = self._thread.submit(self._copy, event.name)

    def close(self) -> bool:
        """Wait for the copies; whether the last checkpoint is in the store (true where none was saved)."""
        self._thread.shutdown()
        return self._last is None or self._last.result()

    def _copy(self, name: str) -> bool:
        try:
            store, path = open_store(self._url)
            folder = self._run / "checkpoints" / name
            files = sorted(file.relative_to(self._run) for file in folder.rglob("*") if file.is_file())
            manifest = folder.relative_to(self._run) / _MANIFEST
            logs = [Path(log) for log in _LOGS if (self._run / log).is_file()]
            for file in [*logs, *(file for file in files if file != manifest), manifest]:
                _put(store, self._run / file, f"{path}/{file}")
            self._prune(store, path)
        except Exception as error:  # every store has errors of its own
            self._note(f"{name} was not copied to {self._url}: {describe_error(error)}")
            return False
        return True

    def _prune(self, store: Any, path: str) -> None:
        for name in [] if self._keep is None else _list_checkpoints(store, path)[: -self._keep]:
            store.rm(f"{path}/checkpoints/{name}/{_MANIFEST}")  # first: what is left is incomplete
            store.rm(f"{path}/checkpoints/{name}", recursive=True)


def restore_run(url: str, run: Path) -> str | None:
    """Copy the logs and the newest complete checkpoint back to a run directory that is not there; its name."""
    if (run / "config.toml").exists():
        return None
    store, path = open_store(url.rstrip("/"))
    names = _list_checkpoints(store, path)
    if not names:
        return None
    draft = run.with_name(f".{run.name}.restored")
    shutil.rmtree(draft, ignore_errors=True)
    folder = draft / "checkpoints" / names[-1]
    try:
        folder.mkdir(parents=True)
        for log in (log for log in _LOGS if store.exists(f"{path}/{log}")):
            store.get_file(f"{path}/{log}", str(draft / log))
        store.get(f"{path}/checkpoints/{names[-1]}/", f"{folder}/", recursive=True)
    except Exception as error:  # every store has errors of its own
        raise ResumeError(f"{url} could not be copied back to {run}: {describe_error(error)}") from error
    verify_checkpoint(folder)
    if run.is_dir():
        run.rmdir()
    draft.rename(run)
    return names[-1]


def _list_checkpoints(store: Any, path: str) -> list[str]:
    """The complete checkpoints in the store, oldest first."""
    found = store.glob(f"{path}/checkpoints/step-*/{_MANIFEST}")
    return sorted((Path(file).parent.name for file in found), key=lambda name: int(name.rpartition("-")[2]))


def _put(store: Any, file: Path, target: str) -> None:
    store.makedirs(target.rpartition("/")[0], exist_ok=True)
    store.put_file(str(file), target)
