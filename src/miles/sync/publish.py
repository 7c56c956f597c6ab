"""Weight updates as transactions: begin, tensors, commit; all engines switch to the new version or none does.

In-process transports differ only in what they pass to ``Receiver.receive``: ``shared`` the trainer's own
tensor (planes take turns: no byte moves), ``copy`` a copy (planes overlap: the trainer may keep writing its own),
``made`` a tensor created for the engine, for instance in another precision.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from miles.cluster.executor import Executor
from miles.core.errors import SyncError
from miles.core.protocols import WeightSync
from miles.core.types import Version
from miles.hooks.compat.types import UpstreamContext
from miles.sync.digest_cache import DigestCache
from miles.sync.manifest import Receiver, build_manifest

Transport = Literal["shared", "copy", "made"]


def share_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor in the trainer's own storage."""
    return tensor.detach()


def copy_tensor(tensor: Tensor) -> Tensor:
    """Return a copy for the engine."""
    return tensor.detach().clone()


TRANSPORTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "shared": share_tensor,
    "copy": copy_tensor,
    "made": share_tensor,
}


class Publication:
    """Implements core.protocols.WeightSync for engines in this process.

    ``trained``: names of the weights that are ever updated; all others are shared whatever the transport.
    """

    def __init__(
        self,
        *,
        weights: Callable[[], Mapping[str, Tensor]],
        engines: Sequence[Receiver],
        transport: Transport,
        run: Executor,
        trained: Collection[str] | None = None,
    ) -> None:
        self._weights = weights
        self._engines = tuple(engines)
        self._transfer = TRANSPORTS[transport]
        # Tensors made for the update belong to the engine if there is only one.
        self._own = transport == "copy" or (transport == "made" and len(self._engines) == 1)
        self._run = run
        self._trained = trained
        self._digest_cache = DigestCache()

    async def publish(self, version: Version) -> Mapping[str, float]:
        """Send the current weights to every engine; returns wall-clock times."""
        return await self._run(lambda: self._transaction(version))

    def _transaction(self, version: Version) -> Mapping[str, float]:
        started = time.perf_counter()
        with torch.no_grad():
            tensors = self._weights()
            manifest = build_manifest(version, tensors, self._digest_cache.compute_digests(tensors))
            manifest_done = time.perf_counter()
            begun: list[Receiver] = []
            try:
                for engine in self._engines:
                    engine.begin(manifest)
                    begun.append(engine)
                    for name, tensor in tensors.items():
                        is_trained = self._trained is None or name in self._trained
                        sent = self._transfer(tensor) if is_trained else share_tensor(tensor)
                        engine.receive(name, sent, own=is_trained and self._own)
                for engine in self._engines:
                    engine.verify()
            except SyncError:
                for engine in begun:
                    engine.rollback()
                raise
            for engine in self._engines:
                engine.commit()
        return {"publish/describe": manifest_done - started, "publish/transfer": time.perf_counter() - manifest_done}


class PostWriteHook(Protocol):
    """Called when every engine has the weights of ``version``; ``weights`` returns them by name when called."""

    def __call__(self, version: Version, weights: Callable[[], Mapping[str, Tensor]]) -> None: ...


def adapt_post_write(function: Callable[..., None], run: UpstreamContext) -> PostWriteHook:
    """Upstream's ``f(args, version_dir, rollout_engines)``: the weights are written to a folder for it, the last two
    versions of which are kept; engines of the run have them already, so the list of engines is empty."""
    parent = Path(run.args.save or ".") / "published"

    def call(version: Version, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        folder = parent / f"weight_v{version.number:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for old in sorted(parent.glob("weight_v*"))[:-2]:
            shutil.rmtree(old)
        function(run.args, str(folder), [])

    return call


class SyncWithHook:
    """A WeightSync that calls ``post_write`` after each weight update, before any token is sampled."""

    def __init__(
        self, sync: WeightSync, post_write: PostWriteHook, *, weights: Callable[[], Mapping[str, Tensor]], run: Executor
    ) -> None:
        self._sync = sync
        self._post_write = post_write
        self._weights = weights
        self._run = run

    async def publish(self, version: Version) -> Mapping[str, float]:
        """Publish, and return once the hook has returned."""
        seconds = await self._sync.publish(version)
        await self._run(lambda: self._post_write(version, self._weights))
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySync:
    """One policy's weight sync, and the current version of its weights."""

    sync: WeightSync
    version: Callable[[], Version]


class MultiPolicySync:
    """A WeightSync over several policies. Versions count each policy's own updates.

    The published version is the main policy's; a policy with unchanged weights is not published again.
    """

    def __init__(self, policies: Mapping[str, PolicySync], main: str) -> None:
        self._policies = policies
        self._main = main
        self._live: dict[str, Version] = {}

    async def publish(self, version: Version) -> Mapping[str, float]:
        assert version == self._policies[self._main].version(), "the loop and the main policy's trainer are in step"
        total_seconds: dict[str, float] = {}
        for name, policy in self._policies.items():
            current = policy.version()
            if self._live.get(name) == current:
                continue
            for part, seconds in (await policy.sync.publish(current)).items():
                total_seconds[part] = total_seconds.get(part, 0.0) + seconds
            self._live[name] = current
        return total_seconds
