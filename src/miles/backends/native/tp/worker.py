"""Tensor-parallel worker: one rank's model runner, and the process that runs it on commands of rank 0.

Every rank runs the same forward batches over its shard of the model. Logits are gathered to rank 0, which samples;
the sampled tokens are broadcast to all ranks. A draft head has all its layers on every rank (``tp.draft_head``).

Shapes: R rows, D hidden, V vocabulary, S request slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from miles.backends.native.engine.forward_batch import ForwardBatch, InflightStep
from miles.backends.native.engine.lora import LoraShape
from miles.backends.native.engine.request import Ints
from miles.backends.native.runner.draft_head import HeadLayersRunner
from miles.backends.native.runner.lora import LoraRunner
from miles.backends.native.runner.model_runner import ModelRunner
from miles.backends.native.tp.communicator import TpCommunicator
from miles.backends.native.tp.draft_head import TpDraftHeadRunner
from miles.cluster.platform import Platform, detect_platform
from miles.cluster.spmd import RankChannel, RankContext
from miles.core.types import Array
from miles.kernels.numerics import Numerics, configure_cublas
from miles.models.draft.base import Draft
from miles.models.draft.checkpoint import build_meta_draft
from miles.models.draft.spec import DraftSpec
from miles.models.lora.factors import LoraFactors, ModuleFactors
from miles.models.parallel.tp_decoder import build_tp_decoder
from miles.models.parallel.tp_sharding import shard_spec
from miles.models.spec import DecoderSpec
from miles.sync.manifest import compute_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSpec:
    """What every rank needs to build its runner; ``spec`` is that of the whole model.

    ``draft`` is that of a draft head, whose reduced vocabulary, if it has one, is in ``draft_offsets_v``.
    """

    spec: DecoderSpec
    page_size: int
    num_slots: int
    return_routed_experts: bool
    dtype: torch.dtype
    numerics: Numerics
    vision_cache_bytes: int = 0
    lora: LoraShape | None = None
    draft: DraftSpec | None = None
    draft_offsets_v: tuple[int, ...] | None = None
    num_draft_states: int = 0
    num_cached_states: int = 0
    return_indexer_topk: bool = False

    def build_draft(self) -> Draft | None:
        """Return the draft head without storage; its weights come with the policy's."""
        if self.draft is None:
            return None
        draft = build_meta_draft(self.draft, dtype=self.dtype, numerics=self.numerics)
        if self.draft_offsets_v is not None:
            draft.token_offsets_v = torch.tensor(self.draft_offsets_v)
        return draft


class TpRankRunner(ModelRunner):
    """The runner of one rank: pages and slots are those of all ranks, heads and vocabulary rows its own.

    ``head`` runs the steps of a draft head.
    """

    def __init__(
        self, runner_spec: RunnerSpec, comm: TpCommunicator, num_pages: int, draft: Draft | None = None
    ) -> None:
        self.comm = comm
        self.head: TpDraftHeadRunner | None = None
        self._head_layers: HeadLayersRunner | None = None
        self._full_spec = spec = runner_spec.spec
        # Everything outside the decoder uses the whole vocabulary.
        super().__init__(
            replace(shard_spec(spec, comm.world), vocab_size=spec.vocab_size),
            num_pages=num_pages,
            page_size=runner_spec.page_size,
            num_slots=runner_spec.num_slots,
            return_routed_experts=runner_spec.return_routed_experts,
            device=comm.device,
            dtype=runner_spec.dtype,
            numerics=runner_spec.numerics,
            model=build_tp_decoder(spec, comm, device="meta", dtype=runner_spec.dtype, numerics=runner_spec.numerics),
            vision_cache_bytes=runner_spec.vision_cache_bytes,
            draft=draft,
            lora=runner_spec.lora,
            num_draft_states=runner_spec.num_draft_states,
            num_cached_states=runner_spec.num_cached_states,
            # All ranks select the same tokens or pools; only rank 0's output is read.
            return_indexer_topk=runner_spec.return_indexer_topk and comm.rank == 0,
        )
        if draft is not None:
            self._build_head(draft)

    def _build_head(self, draft: Draft) -> None:
        if draft.token_offsets_v is not None:
            draft.token_offsets_v = draft.token_offsets_v.to(self.device)
        self._head_layers = HeadLayersRunner(
            draft,
            num_pages=self._num_pages,
            page_size=self._page_size,
            num_slots=self._num_slots,
            device=self.device,
            dtype=self.dtype,
            use_cuda_graphs=False,
        )
        self.head = TpDraftHeadRunner(self._head_layers, self.get_features, self.comm)

    def allocate(self) -> None:
        super().allocate()
        if self._head_layers is not None:
            self._head_layers.allocate()

    def free(self) -> None:
        super().free()
        if self._head_layers is not None:
            self._head_layers.free()

    def _build_lora(self, shape: LoraShape) -> LoraRunner:
        return LoraRunner(
            self.decoder,
            shape,
            self._full_spec,
            rank=self.comm.rank,
            world=self.comm.world,
            max_rows=self._num_slots,
            device=self.device,
            dtype=self.dtype,
        )

    def launch(self, batch: ForwardBatch) -> InflightStep:
        """Start a step; every rank starts the same steps in the same order."""
        step = super().launch(batch)
        if len(batch.req_slots_D):
            with torch.inference_mode():
                self.last_tokens_S.copy_(self.comm.broadcast(self.last_tokens_S))
        return step

    def _compute_logits(self, hidden_RD: Tensor, rows_R: Ints) -> Tensor:
        shard_RV = super()._compute_logits(hidden_RD, rows_R)
        shards = self.comm.gather(shard_RV) if shard_RV.numel() else [shard_RV] * self.comm.world
        if self.comm.rank == 0:
            return torch.cat(shards, 1)[:, : self.spec.vocab_size]
        # Tokens sampled from these are replaced by rank 0's.
        return shard_RV.new_zeros((len(shard_RV), self.spec.vocab_size))


def select_platform(device: torch.device) -> Platform:
    """Make ``device`` current and return its platform."""
    if device.type != "cpu":
        torch.cuda.set_device(device)
    return replace(detect_platform(device.type), device=device)


def run_worker(context: RankContext, channel: RankChannel, *, runner_spec: RunnerSpec) -> None:
    """Run a worker process: report free memory, receive the number of pages, execute commands until closed."""
    torch.set_num_threads(1)
    configure_cublas(runner_spec.numerics)
    platform = select_platform(torch.device(context.device))
    channel.send("here", platform.free_bytes())
    _, num_pages = channel.receive()
    if num_pages is None:
        return
    comm = TpCommunicator(
        context.folder,
        context.rank,
        context.world_size,
        device=platform.device,
        exclusive_devices=context.exclusive_devices,
        timeout=context.timeout,
        numerics=runner_spec.numerics,
    )
    worker = _Worker(TpRankRunner(runner_spec, comm, num_pages, runner_spec.build_draft()), platform)
    channel.send("open")
    while True:
        command, content = channel.receive()
        if command == "close":
            return
        reply = worker.commands[command](content)
        if reply is not None:
            channel.send(command, reply)


class _Worker:
    """The commands of a worker; those that return a value are answered."""

    def __init__(self, runner: TpRankRunner, platform: Platform) -> None:
        self._runner = runner
        self._platform = platform
        self._staged: dict[str, Tensor] = {}
        self._mismatched: list[str] = []
        self.commands: Mapping[str, Callable[[Any], Any]] = {
            "launch": self._launch,
            "free": self._free,
            "clear_features": lambda _: self._runner.clear_features(),
            "allocate": self._allocate,
            "receive_shard": self._receive_shard,
            "verify": lambda _: tuple(self._mismatched),
            "commit": self._commit,
            "gather_weight": self._gather_weight,
            "rollback": self._rollback,
            "register_lora": self._register_lora,
            "unregister_lora": lambda uid: self._runner.unregister_lora(uid),
        }
        if runner.head is not None:
            self.commands = {**self.commands, **_wrap_head(runner.head)}

    def _launch(self, batch: ForwardBatch) -> None:
        self._runner.launch(batch)

    def _register_lora(self, content: Mapping[str, Any]) -> bool:
        self._runner.register_lora(content["uid"], unpack_factors(content["modules"]))
        return True

    def _free(self, _: None) -> None:
        self._runner.free()
        self._platform.empty_cache()

    def _allocate(self, _: None) -> bool:
        self._runner.allocate()
        return True

    def _receive_shard(self, content: Mapping[str, Any]) -> None:
        """Stage a shard scattered by rank 0, and compare its digest."""
        name = content["name"]
        self._staged[name] = scatter_shards(self._runner.comm, [], self._runner.expected_weights()[name])
        if compute_digest(self._staged[name]) != content["digests"][self._runner.comm.rank]:
            self._mismatched.append(name)

    def _gather_weight(self, name: str) -> None:
        gather_shards(self._runner.comm, self._runner.weights()[name])

    def _commit(self, _: None) -> None:
        self._runner.set_weights(self._staged)
        self._rollback(None)

    def _rollback(self, _: None) -> None:
        self._staged, self._mismatched = {}, []


def _wrap_head(head: TpDraftHeadRunner) -> Mapping[str, Callable[[Any], Any]]:
    """The commands of a draft head; nothing is answered, because rank 0 has the tokens too."""

    def wrap(method: Callable[..., Any]) -> Callable[[Any], None]:
        def run(args: Sequence[Any]) -> None:
            method(*args)

        return run

    methods = (head.run_first, head.run_next, head.find_top, head.copy_pages)
    return {f"draft_{method.__name__}": wrap(method) for method in methods}


def scatter_shards(comm: TpCommunicator, shards: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return this rank's of the ``shards`` on rank 0; ``like`` has its shape and dtype."""
    into = torch.empty(like.numel() * like.element_size(), dtype=torch.uint8, device=comm.device)
    return comm.scatter([_as_bytes(shard) for shard in shards], into).view(like.dtype).view(like.shape)


def gather_shards(comm: TpCommunicator, tensor: Tensor) -> list[Tensor]:
    """Return on rank 0 every rank's shard of a weight."""
    return [shard.view(tensor.dtype).view(tensor.shape) for shard in comm.gather(_as_bytes(tensor))]


def pack_factors(factors: LoraFactors) -> dict[str, tuple[Array, Array, float]]:
    """Return an adapter's factors as float32 arrays, which hold every value of a model's dtype exactly."""
    return {
        module: (each.a_rI.float().cpu().numpy(), each.b_Or.float().cpu().numpy(), each.scale)
        for module, each in factors.modules.items()
    }


def unpack_factors(modules: Mapping[str, tuple[Array, Array, float]]) -> LoraFactors:
    return LoraFactors(
        {
            module: ModuleFactors(torch.tensor(a_rI), torch.tensor(b_Or), float(scale))
            for module, (a_rI, b_Or, scale) in modules.items()
        }
    )


def _as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes: gloo does not support every dtype."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
