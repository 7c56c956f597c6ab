"""Micro-batches through Megatron's pipeline schedules: each stage's forward, and the loss on the last.

Every stage runs its layers; the last passes hidden states to the loss callback and differentiates its loss. Kept
tensors are broadcast to all stages at the end. Shapes: ``t`` slots of this rank, ``D`` features, ``F`` those of
all captured layers, ``n`` micro-batches.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch import distributed as dist

from miles.backends.megatron.layer_spec import GPTBackbone
from miles.backends.megatron.packed_batch import MegatronBatch, MegatronRows, RoutingReplay, build_megatron_batch
from miles.backends.megatron.parallel_state import MegatronGroup, ParallelState
from miles.backends.megatron.router import RouterBalance
from miles.backends.megatron.transformer_config import DecoderTransformerConfig, find_router_conflict
from miles.core.errors import UsageError
from miles.kernels.attention.indexer_replay import IndexerSelections
from miles.models.hidden_capture import HiddenCapture
from miles.models.parallel.tp_sharding import ShardSegment
from miles.train.indexer_replay import IndexerCounts, collect_counts
from miles.train.logprobs import HeadOutput, PolicyFeatures, TrainedHeadLora
from miles.train.model_protocols import KeptTensors, LossCallback
from miles.train.stopwatch import Stopwatch

_Step = tuple[int | None, MegatronBatch]
"""A micro-batch and its number in the plan; None for one that only pads an interleaved schedule."""


@dataclass(frozen=True, slots=True)
class _VocabShard:
    """This tensor-parallel rank's rows of the output head."""

    first: int
    size: int
    group: MegatronGroup

    def sum(self, x: Tensor) -> Tensor:
        return self.group.sum(x)

    def max(self, x: Tensor) -> Tensor:
        return self.group.max(x)


@dataclass(frozen=True, slots=True)
class DraftFeatures:
    """What a draft model reads of the policy: the outputs of ``layers``, or if there are none the hidden states after
    the final norm, and whole embedding and head.
    """

    layers: tuple[int, ...]
    embedding_VD: Tensor
    head_VD: Tensor


def run_forward_backward(
    chunks: Sequence[GPTBackbone],
    tf_config: DecoderTransformerConfig,
    state: ParallelState,
    plan: Sequence[MegatronRows],
    judge: LossCallback,
    *,
    trained: bool,
    balance: RouterBalance,
    stopwatch: Stopwatch | None = None,
    add_expert_load: Callable[[Tensor], None] | None = None,
    draft: DraftFeatures | None = None,
    build_lora: Callable[[], TrainedHeadLora | None] = lambda: None,
) -> list[KeptTensors]:
    """Return what the loss callback keeps of every micro-batch, in order; gradients accumulate if grad mode is enabled.

    ``balance`` adds its losses to the gradients. ``stopwatch`` runs during this rank's forward. ``add_expert_load``
    gets how often each expert was selected for this rank's slots, [L, E], if there are gradients. Outputs have what a
    ``draft`` reads. ``build_lora`` returns the adapter of the output layer.
    """
    if not plan:
        return []
    _check_replay(tf_config, plan)
    with_grad = trained and torch.is_grad_enabled()
    per_token = _token_weight(plan, state, tf_config) if with_grad and balance.has_loss else 0.0
    batches = [
        build_megatron_batch(
            rows,
            tf_config.decoder_spec,
            state,
            sequence=tf_config.sequence_parallel,
            dtype=tf_config.params_dtype,
            numerics=tf_config.numerics,
            counted=with_grad and find_router_conflict(tf_config) is None,
            balance=balance if with_grad else None,
            per_token=per_token,
        )
        for rows in plan
    ]
    steps = _list_steps(batches, tf_config, state)
    stage = _Stage(tf_config, state, judge, draft, build_lora, with_grad=with_grad)
    for chunk in chunks:
        chunk.train(with_grad)
    with torch.set_grad_enabled(with_grad):
        found = get_forward_backward_func()(
            forward_step_func=stage.forward if stopwatch is None else stopwatch.wrap(stage.forward),
            data_iterator=[iter(steps) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(steps),
            seq_length=1,  # shapes are sent with the tensors
            micro_batch_size=1,
            forward_only=not with_grad,
        )
    stage.count([batch.packed.replay for batch in batches])
    stage.count_selections([batch.packed.selections for batch in batches])
    if with_grad and add_expert_load is not None:
        _report_load(plan, batches, add_expert_load)
    kept = [kept_tensors for number, kept_tensors in found if number is not None]
    return _broadcast_kept(kept, state.pp_group, tf_config.param_device)


def _list_steps(
    batches: Sequence[MegatronBatch], tf_config: DecoderTransformerConfig, state: ParallelState
) -> list[_Step]:
    """Number the micro-batches; interleaved schedules need a multiple of the number of stages, by repeated ones."""
    steps: list[_Step] = list(enumerate(batches))
    if tf_config.virtual_pipeline_model_parallel_size is not None:
        padding = replace(batches[-1], packed=replace(batches[-1].packed, router_loss=None))
        steps += [(None, padding)] * (-len(steps) % state.pp_group.world)
    return steps


def _report_load(
    plan: Sequence[MegatronRows], batches: Sequence[MegatronBatch], add_expert_load: Callable[[Tensor], None]
) -> None:
    """Report the selections of all micro-batches that are not idle."""
    for rows, batch in zip(plan, batches, strict=True):
        if batch.packed.replay is not None and not rows.idle:
            add_expert_load(batch.packed.replay.load())


def _token_weight(plan: Sequence[MegatronRows], state: ParallelState, tf_config: DecoderTransformerConfig) -> float:
    """Return the weight of a token in a mean over those of all data-parallel ranks."""
    shared = state.cp_group.world == 1  # otherwise sequences are sharded, and share no prefix
    tokens = sum(len(rows.tokens_T) if shared else sum(rows.lengths) for rows in plan if not rows.idle)
    return 1 / float(state.dp_group.sum(torch.tensor(float(tokens), device=tf_config.param_device)))


def _check_replay(tf_config: DecoderTransformerConfig, plan: Sequence[MegatronRows]) -> None:
    """Raise an error if a replay cannot reach every router, also one that is recomputed in backward."""
    kept_tensors, conflict = any(rows.replay_TLk is not None for rows in plan), find_router_conflict(tf_config)
    if conflict is not None and (kept_tensors or any(rows.routed_cache is not None for rows in plan)):
        flag = "--use-rollout-routing-replay" if kept_tensors else "--use-routing-replay"
        raise UsageError(f"{flag} cannot be combined with --megatron-{conflict}: leave one of them out.")


class _Stage:
    """One stage's part in a run over a plan."""

    def __init__(
        self,
        tf_config: DecoderTransformerConfig,
        state: ParallelState,
        judge: LossCallback,
        draft: DraftFeatures | None,
        build_lora: Callable[[], TrainedHeadLora | None],
        *,
        with_grad: bool,
    ) -> None:
        self._draft = draft
        self._build_lora = build_lora
        self._tf_config = tf_config
        self._state = state
        self._judge = judge
        self._with_grad = with_grad
        self._counts: dict[int, tuple[Tensor, Tensor]] = {}
        self._loads: dict[int, Tensor] = {}
        self._indexer_counts: dict[int, IndexerCounts] = {}
        spec = tf_config.decoder_spec
        bounds = ShardSegment(spec.vocab_rows).bounds(state.tp_group.rank, state.tp_group.world)
        first, last = (min(bound, spec.vocab_size) for bound in bounds)  # rows of padding have no logits
        self._vocabulary = _VocabShard(first, last - first, state.tp_group) if state.tp_group.world > 1 else None

    def forward(self, steps: Iterator[_Step], model: GPTBackbone) -> tuple[Tensor, Any]:
        """Run a stage's layers; the returned function computes the loss on the last stage."""
        number, batch = next(steps)
        capture = HiddenCapture(self._draft.layers) if self._draft is not None and self._draft.layers else None
        batch.packed.capture = capture
        out_t1D = model(batch.tokens_1t, None, None, packed_seq_params=batch.packed)
        # A layer that is recomputed in backward captures nothing.
        batch.packed.capture = None
        if not self._with_grad:
            for layer in range(self._tf_config.decoder_spec.num_layers):
                batch.packed.attn_backend.drop_selection(layer)
            batch.packed.positions.shared_kv.clear()
            batch.packed.sent_deepstack_sD.clear()
        return out_t1D, partial(self._loss, model, number, batch, capture)

    def _loss(
        self,
        model: GPTBackbone,
        number: int | None,
        batch: MegatronBatch,
        capture: HiddenCapture | None,
        out_t1D: Tensor,
    ) -> tuple[Tensor, Tensor, tuple[int | None, KeptTensors]]:
        if self._tf_config.sequence_parallel:
            out_t1D = gather_from_sequence_parallel_region(out_t1D, tensor_parallel_output_grad=False)
        hidden_tD = out_t1D.squeeze(1)
        loss, kept = None, {}
        if number is not None:
            features = self._join_features(model, batch, capture, hidden_tD)
            loss, kept = self._judge(number, self._output(model, number, batch, hidden_tD, features))
        if loss is None:
            loss = hidden_tD[:0].sum()
        elif self._with_grad and not loss.requires_grad:
            loss = loss + hidden_tD[:0].sum()
        return loss, torch.zeros((), dtype=torch.int), (number, kept)

    @torch.no_grad()
    def _join_features(
        self, model: GPTBackbone, batch: MegatronBatch, capture: HiddenCapture | None, hidden_tD: Tensor
    ) -> PolicyFeatures | None:
        """Return what a draft model reads of all tokens of the micro-batch, from this rank's slots."""
        if self._draft is None:
            return None
        features_tF = hidden_tD.detach()
        if capture is not None:
            features_tF = model.concatenate_captured(capture).to(self._tf_config.params_dtype)
            if self._tf_config.sequence_parallel:
                features_tF = torch.cat(self._state.tp_group.gather(features_tF))
        features_TF = batch.join_slots(features_tF, self._state.cp_group)
        return PolicyFeatures(
            features_TF=features_TF, embedding_VD=self._draft.embedding_VD, head_VD=self._draft.head_VD
        )

    def _output(
        self,
        model: GPTBackbone,
        number: int,
        batch: MegatronBatch,
        hidden_tD: Tensor,
        features: PolicyFeatures | None,
    ) -> HeadOutput:
        flips = replayed = load_LE = None
        replay = batch.packed.replay
        # ``count`` fills these in when all stages are done.
        if replay is not None and replay.replay_tLk is not None:
            flips, replayed = torch.zeros(2, dtype=torch.int64, device=hidden_tD.device).unbind()
            self._counts[number] = (flips, replayed)
        if replay is not None and self._with_grad:
            load_LE = self._loads[number] = torch.zeros_like(replay.load())
        indexer = None
        if batch.packed.selections is not None:
            none = torch.zeros(2, dtype=torch.int64, device=hidden_tD.device)
            indexer = self._indexer_counts[number] = IndexerCounts(*none.unbind())
        return HeadOutput(
            hidden_RD=hidden_tD.index_select(0, batch.at_r),
            head_VD=model.head(),
            softcap=self._tf_config.decoder_spec.logit_softcap,
            vocabulary=self._vocabulary,
            tokens=batch.tokens,
            flips=flips,
            replayed=replayed,
            load_LE=load_LE,
            indexer_flips=None if indexer is None else indexer.mismatches,
            indexer_replayed=None if indexer is None else indexer.replayed,
            numerics=self._tf_config.numerics,
            features=features,
            lora=self._build_lora(),
        )

    def count(self, replays: Sequence[RoutingReplay | None]) -> None:
        """Fill the outputs' flips and loads with the sums over all stages and ranks that share the tokens."""
        kept_tensors = [replay for replay in replays if replay is not None]
        if not kept_tensors:
            return
        for replay in kept_tensors:
            replay.store_used()
        numbers = [number for number, replay in enumerate(replays) if replay is not None]
        total_n2 = self._all_reduce(torch.stack([replay.total() for replay in kept_tensors]))
        for number, whole in zip(numbers, total_n2.unbind(), strict=True):
            for mine, sum_ in zip(self._counts.get(number, ()), whole.unbind(), strict=False):
                mine.copy_(sum_)
        if self._with_grad:
            load_nLE = self._all_reduce(torch.stack([replay.load() for replay in kept_tensors]))
            for number, load_LE in zip(numbers, load_nLE.unbind(), strict=True):
                if number in self._loads:
                    self._loads[number].copy_(load_LE)

    def count_selections(self, selections: Sequence[IndexerSelections | None]) -> None:
        """Fill the outputs' counts of replayed selections with the sums over all stages and context-parallel ranks."""
        group, device = self._state.cp_group, self._tf_config.param_device
        for number, each in enumerate(selections):
            counts = collect_counts(
                each, device, lambda x: group.sum(self._state.pp_group.sum(x)), self._state.tp_group.sum
            )
            if counts is not None and number in self._indexer_counts:
                for mine, total in zip(self._indexer_counts[number], counts, strict=True):
                    mine.copy_(total)

    def _all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the stages and over all ranks that share the tokens."""
        x = self._state.cp_group.sum(self._state.pp_group.sum(x))
        return self._state.tp_group.sum(x) if self._tf_config.sequence_parallel else x


# -- broadcast from the last stage ----------------------------------------------------------


def _broadcast_kept(kept: list[KeptTensors], group: MegatronGroup, device: torch.device) -> list[KeptTensors]:
    """Broadcast the last pipeline rank's tensors to every stage, as one message."""
    if group.world == 1:
        return kept
    last = group.world - 1
    table: list[Any] = [None]
    if group.rank == last:
        table = [[{name: (t.dtype, tuple(t.shape)) for name, t in each.items()} for each in kept]]
    dist.broadcast_object_list(table, group=group.process_group, group_src=last)
    parts = [(dtype, size) for each in table[0] for dtype, size in each.values()]
    sizes = [torch.Size(size).numel() * dtype.itemsize for dtype, size in parts]
    blob = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    if group.rank == last and sizes:
        tensors = [t for each in kept for t in each.values()]
        blob = torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors])
    group.broadcast(blob, last)
    cut = iter(zip(blob.split(sizes), parts, strict=True))
    out: list[KeptTensors] = []
    for each in table[0]:
        taken = {name: next(cut) for name in each}
        # A clone is aligned for its dtype.
        out.append({name: raw.clone().view(dtype).view(size) for name, (raw, (dtype, size)) in taken.items()})
    return out
