"""Gradient accumulation: micro-batches of a global batch, their forward passes, losses and summed metrics.

``_R`` trained tokens of a micro-batch; ``L`` MoE layers, ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from miles.algo.policy_loss import LossFn, LossInputs
from miles.models.accounting.prefix_sharing import PrefixCost, count_segments, count_sequences
from miles.models.layers.moe import imbalance
from miles.train.balance import CostFn, partition_micro_batches
from miles.train.batch_tensors import FlatBatch, MicroBatch, build_token_paths, pack_micro_batch
from miles.train.config import TrainConfig
from miles.train.distillation import Distillation, TeacherOutput
from miles.train.dp_group import SINGLE_RANK, DataParallelGroup
from miles.train.draft_trainer import DraftTrainer
from miles.train.logprobs import HeadOutput, compute_logprobs
from miles.train.micro_batching import PatchLimit
from miles.train.model_protocols import FrozenModel, KeptTensors, TrainModel, is_pipelined
from miles.train.packed_images import truncate_images
from miles.train.prefix_sharing import PrefixTree, TreeBuilder, bundle_by_prefix, join_trees

_LOGP, _ENTROPY = "logp", "token_entropy"
_LOAD = "expert_load"
"""Names of kept tensors that are not metrics."""


@dataclass(slots=True)
class MetricSums:
    """Sums and maxima of metrics over micro-batches, kept on the device until the end of a step.

    ``load_LE`` is how often each expert was chosen, for MoE models. ``compared`` are the micro-batches compared with
    the engine and the trainer's log-probs of them, kept if a single difference must be located. ``token_stats`` has
    the log-probs and entropies of each micro-batch, if these are recorded.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    load_LE: Tensor | None = None
    compared: list[tuple[MicroBatch, Tensor]] = field(default_factory=list)
    token_stats: list[tuple[MicroBatch, Tensor, Tensor]] = field(default_factory=list)

    def add(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def update_max(self, name: str, value: Tensor) -> None:
        self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def add_expert_load(self, load_LE: Tensor) -> None:
        """Add to how often each expert was chosen."""
        self.load_LE = load_LE if self.load_LE is None else self.load_LE + load_LE

    def expert_imbalance(self, dp_group: DataParallelGroup = SINGLE_RANK) -> dict[str, float]:
        """Return the expert imbalance over all ranks; empty if no load was counted."""
        if self.load_LE is None:
            return {}
        return {"expert_imbalance": float(imbalance(dp_group.sum(self.load_LE.to(torch.float64))))}

    def to_floats(self, dp_group: DataParallelGroup = SINGLE_RANK) -> dict[str, float]:
        """Return all entries as floats, reduced over all ranks, with one device synchronisation."""
        totals: dict[str, Tensor] = {}
        for entries, reduce in ((self.sums, dp_group.sum), (self.maxima, dp_group.max)):
            names = dp_group.union_names(list(entries))
            if names:
                zero = next(iter((self.sums | self.maxima).values())).new_zeros((), dtype=torch.float64)
                stacked = torch.stack([entries.get(name, zero).detach().to(torch.float64) for name in names])
                totals |= dict(zip(names, reduce(stacked).unbind(), strict=True))
        return dict(zip(totals, torch.stack(list(totals.values())).tolist(), strict=True)) if totals else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobReader:
    """Computes log-probs with a model, at a temperature, with the logits of ``chunk`` tokens at a time.

    ``max_tokens`` of a micro-batch decide whether logits are computed once (``train.logprobs``); None: twice, for
    losses with an entropy bonus.
    """

    temperature: float
    chunk: int | None
    max_tokens: int | None = None

    def run_model(self, model: TrainModel, micro_batches: Sequence[MicroBatch]) -> dict[int, HeadOutput]:
        """Return the hidden states that predict the trained tokens, on the last stage of a pipeline."""
        outputs: dict[int, HeadOutput] = {}

        def collect(index: int, output: HeadOutput) -> tuple[None, KeptTensors]:
            outputs[index] = output
            return None, {}

        model.forward_backward(micro_batches, collect)
        return outputs

    def compute_logprobs(self, output: HeadOutput, target_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probs of the tokens ``target_R``, and the entropies of their distributions."""
        return compute_logprobs(
            output, target_R, temperature=self.temperature, chunk=self.chunk, max_tokens=self.max_tokens
        )

    @torch.no_grad()
    def compute_frozen(self, model: FrozenModel, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probs of each micro-batch's trained tokens, without gradients."""

        def compute(index: int, output: HeadOutput) -> tuple[None, KeptTensors]:
            return None, {_LOGP: self.compute_logprobs(output, micro_batches[index].target_R)[0]}

        return [kept[_LOGP] for kept in model.forward_backward(micro_batches, compute)]


def build_micro_batches(
    flat: FlatBatch,
    config: TrainConfig,
    *,
    device: torch.device,
    replay: bool,
    replay_indexer: bool = False,
    paired: bool = False,
    dp_group: DataParallelGroup = SINGLE_RANK,
    cost_fn: CostFn | None = None,
    patches_per_feature: int = 1,
    prefix_cost: PrefixCost | None = None,
) -> list[MicroBatch]:
    """Pack this rank's part of a global batch; ``paired`` samples (0 and 1, 2 and 3, ...) stay together.

    ``replay`` includes the engine's routed experts, ``replay_indexer`` its selections of sparse attention.
    All ranks have the same number of micro-batches; one without samples has weight 0. ``cost_fn`` gives the cost of a
    number of tokens and image features to balance; by default the number of tokens. The vision tower computes a feature
    from ``patches_per_feature`` patches. Without --share-prefix or --no-share-prefix the samples of a prompt share
    prefixes where ``prefix_cost`` says that it pays, on all ranks alike; None: nowhere.
    """
    unit_size = 2 if paired else 1
    count = None if config.micro_batch_size is None or config.use_dynamic_batch_size else config.micro_batch_size
    patches = _PatchCounter(flat, config.max_patches_per_gpu, patches_per_feature)
    build_units = partial(
        _build_units, flat, unit_size=unit_size, replay=replay, dp_size=dp_group.dp_size, patches=patches
    )
    limit = config.max_tokens_per_gpu * dp_group.cp_size if count is None else None
    share = bool(config.share_prefix)
    units, lengths, trees = build_units(limit=limit if share else None)
    if not units:
        return []
    if config.share_prefix is None and prefix_cost is not None and limit is not None:
        shared = build_units(limit=limit)
        share = _sharing_pays(prefix_cost, flat.length_S[flat.length_S > 0].tolist(), shared[2])
        units, lengths, trees = shared if share else (units, lengths, trees)
    bins = partition_micro_batches(
        lengths,
        dp_size=dp_group.dp_size,
        budget=config.max_tokens_per_gpu,
        cp_size=dp_group.cp_size,
        count=None if count is None else max(1, count // unit_size),
        costs=None
        if cost_fn is None
        else [cost_fn(length, patches.count_features(unit)) for length, unit in zip(lengths, units, strict=True)],
        balanced=config.balance_data,
        unit_name="pair" if paired else "sample",
        patch_limit=patches.build_limit(units),
    )[dp_group.dp_rank]
    smallest = units[min(range(len(units)), key=lengths.__getitem__)]

    pack_samples = partial(pack_micro_batch, flat, device=device, replay=replay, replay_indexer=replay_indexer)

    def pack(chosen: Sequence[int]) -> MicroBatch:
        samples = [i for unit in chosen for i in units[unit]]
        tree = _join_trees(flat, [units[unit] for unit in chosen], [trees[unit] for unit in chosen]) if trees else None
        return pack_samples(samples, share=share, tree=tree)

    return [pack(chosen) if chosen else _make_idle(pack_samples(smallest)) for chosen in bins]


class _PatchCounter:
    """Counts the features and patches of the different images of some samples of a global batch."""

    def __init__(self, flat: FlatBatch, limit: int | None, patches_per_feature: int) -> None:
        self._flat = flat
        self._limit = limit
        self._patches_per_feature = patches_per_feature

    def count_features(self, samples: Sequence[int]) -> int:
        return sum(self._list_features(samples).values())

    def fits(self, samples: Sequence[int]) -> bool:
        """Return whether one micro-batch may contain the patches of some samples."""
        return self._limit is None or self.count_features(samples) * self._patches_per_feature <= self._limit

    def build_limit(self, units: Sequence[Sequence[int]]) -> PatchLimit | None:
        """Return the limit of patches in a micro-batch of some of the units; None if there is none."""
        if self._limit is None or not self._flat.has_images:
            return None
        features = map(self._list_features, units)
        patches = [{digest: n * self._patches_per_feature for digest, n in unit.items()} for unit in features]
        return PatchLimit(patches=patches, limit=self._limit)

    def _list_features(self, samples: Sequence[int]) -> dict[str, int]:
        flat = self._flat
        placed = (each for i in samples for each in truncate_images(flat.samples[i], int(flat.length_S[i])))
        return {each.image.digest: each.image.num_features for each in placed}


def _build_units(
    flat: FlatBatch, *, unit_size: int, replay: bool, limit: int | None, dp_size: int, patches: _PatchCounter
) -> tuple[list[list[int]], list[int], list[TreeBuilder]]:
    """Return the units that stay together and their token counts; with ``limit``, bundles of samples of a prompt and
    their prefix trees.
    """
    trained = np.flatnonzero(flat.length_S).tolist()
    if limit is not None:
        paths = build_token_paths(flat, trained, replay=replay)
        bundles = bundle_by_prefix(
            paths,
            limit=limit,
            dp_size=dp_size,
            unit_size=unit_size,
            fits=lambda members: patches.fits([trained[i] for i in members]),
        )
        units = [[trained[i] for i in bundle.members] for bundle in bundles]
        return units, [bundle.tokens for bundle in bundles], [bundle.tree for bundle in bundles]
    units = [trained[start : start + unit_size] for start in range(0, len(trained), unit_size)]
    return units, [int(flat.length_S[unit].sum()) for unit in units], []


def _sharing_pays(cost: PrefixCost, lengths: Sequence[int], trees: Sequence[TreeBuilder]) -> bool:
    """Return whether the prefix trees are cheaper than samples of these lengths, each by itself."""
    if sum(tree.count_tokens() for tree in trees) == sum(lengths):
        return False
    return cost.pays(count_sequences(lengths), count_segments(s for tree in trees for s in tree.list_segments()))


def _join_trees(flat: FlatBatch, units: Sequence[Sequence[int]], trees: Sequence[TreeBuilder]) -> PrefixTree | None:
    """Return the prefix tree of units in one micro-batch; None where two are of one prompt, and may share more."""
    prompts = {flat.samples[unit[0]].prompt_id for unit in units}
    return join_trees(trees) if len(prompts) == len(units) else None


def _make_idle(rows: MicroBatch) -> MicroBatch:
    """Return the micro-batch with weight 0, for a rank without samples that must take part in collectives."""
    return replace(
        rows,
        idle=True,
        oldest_R=torch.full_like(rows.oldest_R, -1),
        weight_R=torch.zeros_like(rows.weight_R),
        mean_R=torch.zeros_like(rows.mean_R),
        advantage_R=torch.zeros_like(rows.advantage_R),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GradAccumulator:
    """Accumulates the gradient of one global batch; a ``draft`` accumulates its own on the side.

    With ``record_tokens`` the log-prob and entropy of every trained token are kept.
    """

    actor: TrainModel
    reference: FrozenModel | None
    loss_fn: LossFn
    reader: LogprobReader
    distillation: Distillation | None = None
    draft: DraftTrainer | None = None
    record_tokens: bool = False

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], old_logprobs: Sequence[Tensor | None], sums: MetricSums
    ) -> list[Tensor]:
        """Run forward, loss and backward of every micro-batch; returns the log-probs before the update.

        Without old log-probs the current ones are used: the ratio is 1 and only its gradient matters.
        """
        ref_logprobs: Sequence[Tensor | None] = [None] * len(micro_batches)
        if self.reference is not None:
            unreplayed = [rows.without_replay() for rows in micro_batches]
            ref_logprobs = self.reader.compute_frozen(self.reference, unreplayed)

        # The teachers of a pipelined policy are pipelines too, and cannot run in the middle of its schedule.
        teacher_outputs = self._run_teachers(micro_batches) if is_pipelined(self.actor) else None

        def compute_loss(index: int, output: HeadOutput) -> tuple[Tensor, KeptTensors]:
            if self.draft is not None:
                self.draft.accumulate(micro_batches[index], output)
            teachers = (
                self._run_teachers([micro_batches[index]])[0] if teacher_outputs is None else teacher_outputs[index]
            )
            return self._compute_loss(micro_batches[index], old_logprobs[index], ref_logprobs[index], teachers, output)

        results = self.actor.forward_backward(micro_batches, compute_loss)
        for rows, kept in zip(micro_batches, results, strict=True):
            if _LOAD in kept:
                sums.add_expert_load(kept[_LOAD])
            for name, value in kept.items():
                if name not in (_LOGP, _ENTROPY, _LOAD):
                    sums.add(name, value)
            if _ENTROPY in kept and not rows.idle:
                sums.token_stats.append((rows, kept[_LOGP], kept[_ENTROPY]))
        return [kept[_LOGP] for kept in results]

    def _run_teachers(self, micro_batches: Sequence[MicroBatch]) -> list[list[TeacherOutput]]:
        if self.distillation is None:
            return [[] for _ in micro_batches]
        return self.distillation.forward(micro_batches, self.reader.run_model)

    def _compute_loss(
        self,
        rows: MicroBatch,
        old_logp_R: Tensor | None,
        ref_logp_R: Tensor | None,
        teacher_outputs: Sequence[TeacherOutput],
        output: HeadOutput,
    ) -> tuple[Tensor, KeptTensors]:
        logp_R, entropy_R = self.reader.compute_logprobs(output, rows.target_R)
        current_logp_R = logp_R.detach()
        old_logp_R = current_logp_R if old_logp_R is None else old_logp_R
        advantage_R, distill_terms = rows.advantage_R, None
        if self.distillation is not None:
            distill_terms = self.distillation.compute_terms(teacher_outputs, output, rows)
            advantage_R = distill_terms.add_to_advantages(advantage_R, old_logp_R)
        inputs = LossInputs(
            logp_R=logp_R,
            old_logp_R=old_logp_R,
            engine_logp_R=rows.engine_logp_R,
            advantage_R=advantage_R,
            entropy_R=entropy_R,
            sample_R=rows.sample_R,
            samples=len(rows.lengths),
            ref_logp_R=ref_logp_R,
        )
        loss = self.loss_fn(inputs, rows.aggregator())
        if distill_terms is not None:
            loss = distill_terms.add_to_loss(loss, old_logp_R, rows.aggregator())
        kept = {name: part.detach() for name, part in loss.metrics.items()}
        if output.flips is not None and output.replayed is not None:
            kept |= {"routing_mismatches": output.flips, "routing_replayed": output.replayed}
        if output.indexer_flips is not None and output.indexer_replayed is not None:
            kept |= {"indexer_mismatches": output.indexer_flips, "indexer_replayed": output.indexer_replayed}
        if output.load_LE is not None:
            kept[_LOAD] = output.load_LE if not rows.idle else torch.zeros_like(output.load_LE)
        if self.record_tokens:
            kept[_ENTROPY] = entropy_R.detach()
        return loss.loss, {**kept, _LOGP: current_logp_R}
