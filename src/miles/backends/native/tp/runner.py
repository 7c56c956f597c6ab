"""Tensor-parallel model runner: rank 0 in the engine's process, which drives the worker processes.

Rank 0 sends each command to the workers, then does its own part. Whatever fails on one rank fails for all: the ranks
cannot continue without each other, so the engine's requests fail with one error, and its processes end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from miles.backends.native.engine.draft_tree import DraftStates
from miles.backends.native.engine.forward_batch import (
    ForwardBatch,
    InflightStep,
    LogitEdits,
    LogprobQueries,
    PromptScoring,
    SamplingBatch,
    StepOutput,
)
from miles.backends.native.engine.lora import LoraBatch
from miles.backends.native.engine.vision import VisionBatch
from miles.backends.native.runner.weight_update import CommitWeights, StagedWeightUpdate
from miles.backends.native.tp.communicator import CommunicatorError, TpCommunicator
from miles.backends.native.tp.draft_head import TpDraftHead
from miles.backends.native.tp.worker import (
    RunnerSpec,
    TpRankRunner,
    gather_shards,
    pack_factors,
    run_worker,
    scatter_shards,
    select_platform,
)
from miles.cluster.platform import Platform
from miles.cluster.spmd import SpmdGroup, summarize_error
from miles.core.errors import EngineError, SyncError
from miles.core.media import ImageInput
from miles.core.serialization import Codec
from miles.models.decoder import Decoder
from miles.models.draft.base import Draft
from miles.models.draft.spec import DRAFT_PREFIX
from miles.models.lora.factors import LoraFactors
from miles.models.parallel.tp_sharding import TpShard, compute_tp_shards, shard_spec
from miles.models.spec import DecoderSpec
from miles.sync.manifest import compute_digest

# Seconds one rank waits for another: longer than compiling kernels takes.
RANK_TIMEOUT = 300.0

CODEC = Codec(
    (
        ForwardBatch,
        SamplingBatch,
        LogitEdits,
        LogprobQueries,
        PromptScoring,
        VisionBatch,
        ImageInput,
        LoraBatch,
        DraftStates,
    )
)
"""Encodes the messages between ranks: a command, and a ForwardBatch or a few numbers."""

ComputeNumPages = Callable[[DecoderSpec, Platform], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SmallestRankPlatform(Platform):
    """The devices of all ranks as one: each has at least ``free`` bytes."""

    free: int

    def free_bytes(self) -> int:
        return self.free


def launch_tp_runner(
    name: str,
    runner_spec: RunnerSpec,
    devices: Sequence[torch.device],
    *,
    compute_num_pages: ComputeNumPages,
    draft: Draft | None = None,
    timeout: float = RANK_TIMEOUT,
) -> TpRunner:
    """Start one rank per device and connect them.

    ``compute_num_pages`` returns the number of KV cache pages for a rank's model shard and memory. ``draft`` is rank
    0's draft head, of the spec in ``runner_spec``.
    """
    shard_spec(runner_spec.spec, len(devices))  # refuse before a process starts what cannot be sharded
    compute_tp_shards(runner_spec.spec)
    ranks = SpmdGroup(
        name,
        [str(device) for device in devices],
        partial(run_worker, runner_spec=runner_spec),
        codec=CODEC,
        exclusive_devices=len(set(devices)) == len(devices),
        timeout=timeout,
        error=EngineError,
        hint="start it again",
    )
    try:
        platform = select_platform(devices[0])
        free_bytes = (platform.free_bytes(), *ranks.gather_replies())
        # Ranks on one device share its free memory.
        smallest = _SmallestRankPlatform(
            kind=platform.kind,
            device=platform.device,
            name=platform.name,
            memory_bytes=platform.memory_bytes,
            free=min(free // devices.count(device) for free, device in zip(free_bytes, devices, strict=True)),
        )
        num_pages = compute_num_pages(shard_spec(runner_spec.spec, len(devices)), smallest)
        return TpRunner(ranks, runner_spec, platform, num_pages, draft)
    except BaseException:
        ranks.close()
        raise


class TpRunner(TpRankRunner):
    """Rank 0, and the runner the engine uses."""

    def __init__(
        self,
        ranks: SpmdGroup,
        runner_spec: RunnerSpec,
        platform: Platform,
        num_pages: int,
        draft: Draft | None = None,
    ) -> None:
        self.ranks = ranks
        self.num_pages = num_pages
        self._connected = False
        ranks.broadcast("open", num_pages)
        with self._failing_all_ranks():
            context = ranks.context
            comm = TpCommunicator(
                context.folder,
                0,
                context.world_size,
                device=platform.device,
                exclusive_devices=context.exclusive_devices,
                timeout=context.timeout,
                numerics=runner_spec.numerics,
            )
            super().__init__(runner_spec, comm, num_pages, draft)
        ranks.gather_replies()
        ranks.watch(comm.abort)
        self._connected = True

    # -- ModelRunner ------------------------------------------------------------------------

    def launch(self, batch: ForwardBatch) -> InflightStep:
        with self.ranks.lock:
            self.ranks.broadcast("launch", self._strip(batch))
            with self._failing_all_ranks():
                return _TpStep(super().launch(batch), self.ranks)

    def allocate(self) -> None:
        if not self._connected:  # the workers allocate in their constructor too
            super().allocate()
            return
        with self.ranks.lock:
            self.ranks.broadcast("allocate")
            super().allocate()
            self.ranks.gather_replies()

    def free(self) -> None:
        self.ranks.broadcast("free")
        super().free()

    def clear(self) -> None:
        if not self.ranks.fault:
            super().clear()

    def clear_features(self) -> None:
        if self.images is not None:
            with self.ranks.lock:
                self.ranks.broadcast("clear_features")
                super().clear_features()

    def expected_weights(self) -> dict[str, Tensor]:
        full = Decoder(self._full_spec, device="meta", dtype=self.dtype, numerics=self.numerics)
        weights: dict[str, Tensor] = dict(full.named_parameters())
        if self.draft is not None:
            weights |= {DRAFT_PREFIX + name: parameter for name, parameter in self.draft.named_parameters()}
        return weights

    def build_draft_head(self) -> TpDraftHead:
        """Return the draft head of all ranks."""
        assert self.head is not None, "the ranks were started without a draft head"
        return TpDraftHead(self.head, self.ranks, self._failing_all_ranks)

    def set_weights(self, tensors: Mapping[str, Tensor], own: Collection[str] = ()) -> None:
        """Use these shards from now on, and the workers theirs."""
        with self.ranks.lock:
            self.ranks.broadcast("commit")
            super().set_weights(tensors, own)

    def build_weight_update(self, name: str, commit_weights: CommitWeights) -> StagedWeightUpdate:
        return ShardedWeightUpdate(name, self, commit_weights)

    def register_lora(self, uid: int, factors: LoraFactors) -> None:
        with self.ranks.lock:
            self.ranks.broadcast("register_lora", {"uid": uid, "modules": pack_factors(factors)})
            super().register_lora(uid, factors)
            self.ranks.gather_replies()

    def unregister_lora(self, uid: int) -> None:
        with self.ranks.lock:
            self.ranks.broadcast("unregister_lora", uid)
            super().unregister_lora(uid)

    def check(self) -> None:
        self.ranks.raise_if_failed()

    def close(self) -> None:
        self.ranks.close()
        self.comm.abort()

    # -- weights ----------------------------------------------------------------------------

    def scatter_weight(self, name: str, tensor: Tensor) -> Tensor:
        """Send every rank its shard of a full tensor; return rank 0's."""
        tp_shard, full = self._get_tp_shard(name), tensor.to(self.device)
        shards = [tp_shard.shard(full, rank, self.comm.world) for rank in range(self.comm.world)]
        with self.ranks.lock, self._failing_all_ranks():
            digests = tuple(compute_digest(shard) for shard in shards)
            self.ranks.broadcast("receive_shard", {"name": name, "digests": digests})
            return scatter_shards(self.comm, shards, shards[0])

    def weights(self) -> Mapping[str, Tensor]:
        """Return the full tensors by name, each gathered on access."""
        return _GatheredWeights(self)

    def gather_weight(self, name: str) -> Tensor:
        """Return the current full tensor, gathered from all ranks."""
        tp_shard = self._get_tp_shard(name)
        with self.ranks.lock, self._failing_all_ranks():
            self.ranks.broadcast("gather_weight", name)
            return tp_shard.gather(gather_shards(self.comm, super().weights()[name]))

    def _get_tp_shard(self, name: str) -> TpShard:
        """How a tensor is sharded; those of a draft head are replicated."""
        return TpShard() if name.startswith(DRAFT_PREFIX) else compute_tp_shards(self._full_spec)[name]

    def _strip(self, batch: ForwardBatch) -> ForwardBatch:
        """Return what workers need of a batch: no logit edits and queries, which only rank 0 handles, and no pixels
        of images that all ranks have encoded."""
        scoring = None if batch.prompt_scoring is None else replace(batch.prompt_scoring, logprob_queries=None)
        vision = batch.vision
        if vision is not None and self.images is not None:
            vision = self.images.strip_cached(vision)
        return replace(batch, logit_edits=None, logprob_queries=None, prompt_scoring=scoring, vision=vision)

    @contextmanager
    def _failing_all_ranks(self) -> Iterator[None]:
        """Run a collective operation: an error here leaves the other ranks stuck in it, so it ends them."""
        try:
            yield
        except CommunicatorError as error:
            raise self.ranks.fail(error=error) from error
        except EngineError:
            raise
        except Exception as error:
            raise self.ranks.fail(f"rank 0 of {self.ranks.world_size} failed: {summarize_error(error)}") from error


class ShardedWeightUpdate(StagedWeightUpdate):
    """A staging area spread over the ranks: full tensors are checked here, and each rank checks its shards."""

    def __init__(self, name: str, runner: TpRunner, commit_weights: CommitWeights) -> None:
        super().__init__(name, runner.expected_weights(), runner.device, commit_weights)
        self._runner = runner
        self._digests: dict[str, int] = {}

    def verify(self) -> None:
        super().verify()
        ranks = self._runner.ranks
        with ranks.lock:
            ranks.broadcast("verify")
            for rank, mismatched in enumerate(ranks.gather_replies(), 1):
                if mismatched:
                    raise SyncError(f"{self._name}: rank {rank} received tensor {mismatched[0]} with a wrong digest")

    def rollback(self) -> None:
        super().rollback()
        self._digests = {}
        if not self._runner.ranks.fault:
            self._runner.ranks.broadcast("rollback")

    def _stage(self, name: str, tensor: Tensor) -> Tensor:
        self._digests[name] = compute_digest(tensor)
        return self._runner.scatter_weight(name, tensor)

    def _compute_digests(self) -> Mapping[str, int]:
        return self._digests


class _GatheredWeights(Mapping[str, Tensor]):
    """The full weights of all ranks."""

    def __init__(self, runner: TpRunner) -> None:
        self._runner = runner
        self._expected = runner.expected_weights()

    def __getitem__(self, name: str) -> Tensor:
        return self._runner.gather_weight(name) if name in self._expected else self._expected[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._expected)

    def __len__(self) -> int:
        return len(self._expected)


class _TpStep:
    """A step launched on all ranks (an ``InflightStep``)."""

    def __init__(self, own_step: InflightStep, ranks: SpmdGroup) -> None:
        self._own_step = own_step
        self._ranks = ranks

    def result(self) -> StepOutput:
        try:
            return self._own_step.result()
        except Exception as error:
            raise self._ranks.fail(error=error) from error
