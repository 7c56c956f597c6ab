"""Batch tensors: a global batch as flat arrays, and the packed tensors of a micro-batch.

Only what the loss needs is included: a sample is cut after the last token that predicts a trained one,
and a sample without a trained token is left out.

``_S`` samples and ``_N`` tokens of the global batch; ``_T`` packed input tokens, ``_B`` samples, ``_P`` input tokens of
all samples without prefix sharing and ``_R`` trained tokens of the micro-batch; ``L`` MoE layers, ``k`` experts per
token, ``S`` tokens of a token set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.algo.distillation_loss import TEACHER_INDEX
from miles.algo.loss_aggregation import Reducer, WeightedAggregator
from miles.core.errors import MilesError
from miles.core.media import prefix_keys
from miles.core.routed_experts import to_signed_ids, unrecorded_id
from miles.core.token_fields import INDEXER_TOPK, ROUTED_EXPERTS, TEACHER_LOGPROB, TEACHER_LOGPROBS, TEACHER_TOKENS
from miles.core.types import Array, Sample
from miles.kernels.runtime.host_copy import copy_to_device
from miles.train.packed_images import PackedImages, check_images, truncate_images
from miles.train.prefix_sharing import (
    PrefixTree,
    TokenPath,
    TreeNode,
    build_prefix_tree,
    collect_ancestors,
    compute_slots,
)

_TOKEN_FIELDS = ("target_R", "engine_logp_R", "advantage_R", "oldest_R", "weight_R", "mean_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherLogprobs:
    """Log-probs of the trained tokens under served teachers, and of a token set at each position; -1 is no token."""

    logp_R: Tensor
    set_RS: Tensor | None = None
    set_logp_RS: Tensor | None = None

    def to(self, device: torch.device) -> TeacherLogprobs:
        """Return a copy on another device."""
        return self._map(lambda x: x.to(device))

    def select(self, index_R: Tensor) -> TeacherLogprobs:
        """Return the entries of some of the tokens."""
        return self._map(lambda x: x[index_R])

    def _map(self, fn: Callable[[Tensor], Tensor]) -> TeacherLogprobs:
        if self.set_RS is None or self.set_logp_RS is None:
            return TeacherLogprobs(logp_R=fn(self.logp_R))
        return TeacherLogprobs(logp_R=fn(self.logp_R), set_RS=fn(self.set_RS), set_logp_RS=fn(self.set_logp_RS))


@dataclass(slots=True, eq=False)
class RoutedExpertsCache:
    """Routed experts of a micro-batch: filled by its first forward pass and replayed by later ones.

    The order is that of this rank's computation, which is the same each time the same micro-batch is computed; it is
    valid only for the model that filled it. ``t``: tokens of this rank, padding included; -1 where nothing is recorded.
    """

    experts_tLk: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One packed micro-batch. ``before_R`` is the input token that predicts each trained token ``target_R``.

    ``weight_R`` is a token's weight in the loss of its global batch and ``mean_R`` its weight in a mean over
    it, ``oldest_R`` the oldest version among the trained tokens of its sample. ``sample_R`` ascends and gives
    the sample of each token; ``trained_B`` is the number of trained tokens of each sample, at least one.
    In ``replay_TLk`` -1 leaves the choice to the router. ``indexer_TLk`` are the engine's selections of sparse
    attention (``token_fields.INDEXER_TOPK``), in host memory; -1 leaves the choice to the indexer. ``routed_cache``
    records the routed experts of the first forward pass for later ones. ``teacher_indices`` are the indices of the
    samples' teachers, empty if the samples name none; ``teacher_logprobs`` the log-probs of served teachers, if any.
    ``idle`` micro-batches have weight 0 and only keep a rank in step with the others. ``sample_ids`` are each sample's
    prompt and trajectory, ``sample_indices`` its place in the whole batch.

    ``lengths`` are the numbers of input tokens of the samples. With prefix sharing the tokens are a tree
    of ``tree_nodes``: sample b consists of the nodes on the path to node ``ends[b]``, and ``before_R`` may
    contain a token several times. Without nodes the samples' tokens are concatenated.

    ``positions_T`` count the tokens of each sample. ``images`` are those of its samples; None if no sample of the
    global batch has any.
    """

    lengths: tuple[int, ...]
    tokens_T: Tensor
    positions_T: Tensor
    before_R: Tensor
    target_R: Tensor
    engine_logp_R: Tensor
    advantage_R: Tensor
    oldest_R: Tensor
    weight_R: Tensor
    mean_R: Tensor
    sample_R: Tensor
    trained_B: Tensor
    replay_TLk: Tensor | None
    indexer_TLk: Tensor | None = None
    routed_cache: RoutedExpertsCache | None = None
    teacher_indices: tuple[int, ...] = ()
    teacher_logprobs: TeacherLogprobs | None = None
    idle: bool = False
    sample_ids: tuple[tuple[int, int], ...] = ()
    sample_indices: tuple[int, ...] = ()
    tree_nodes: tuple[TreeNode, ...] = ()
    ends: tuple[int, ...] = ()
    images: PackedImages | None = None

    @property
    def saved_tokens(self) -> int:
        """Number of input tokens saved by prefix sharing."""
        return sum(self.lengths) - len(self.tokens_T)

    def unshare(self) -> MicroBatch:
        """Return the micro-batch without prefix sharing, for models that do not support it."""
        if not self.tree_nodes:
            return self
        device = self.tokens_T.device
        slot_P = torch.from_numpy(compute_slots(self.tree_nodes, self.ends)).to(device)
        length_B = torch.tensor(self.lengths, device=device)
        start_B = length_B.cumsum(0) - length_B
        return replace(
            self,
            tokens_T=self.tokens_T[slot_P],
            positions_T=self.positions_T[slot_P],
            before_R=start_B[self.sample_R] + self.positions_T[self.before_R],
            replay_TLk=None if self.replay_TLk is None else self.replay_TLk[slot_P],
            indexer_TLk=None if self.indexer_TLk is None else self.indexer_TLk[slot_P.cpu()],
            tree_nodes=(),
            ends=(),
            images=None if self.images is None else replace(self.images, slot_P=None),
        )

    def without_replay(self) -> MicroBatch:
        """Return the micro-batch without routing and indexer replay."""
        return replace(self, replay_TLk=None, indexer_TLk=None, routed_cache=None)

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch on another device, or itself if it is there."""
        if self.tokens_T.device == device:
            return self
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        on_device = {name: value for name, value in values.items() if name != "indexer_TLk"}
        moved = {name: value.to(device) for name, value in on_device.items() if isinstance(value, Tensor)}
        teacher_logprobs = None if self.teacher_logprobs is None else self.teacher_logprobs.to(device)
        return replace(self, **moved, teacher_logprobs=teacher_logprobs)

    def aggregator(self) -> WeightedAggregator:
        """Return the loss aggregator of its tokens."""
        return WeightedAggregator(
            weight_R=self.weight_R, mean_R=self.mean_R, sample_R=self.sample_R, trained_S=self.trained_B
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequences:
    """Whole sequences, concatenated, of which a model scores the last tokens ``before_R``; the other fields are those
    of a MicroBatch.
    """

    lengths: tuple[int, ...]
    tokens_T: Tensor
    positions_T: Tensor
    before_R: Tensor
    images: PackedImages | None = None
    replay_TLk: Tensor | None = None
    indexer_TLk: Tensor | None = None
    routed_cache: RoutedExpertsCache | None = None
    tree_nodes: tuple[TreeNode, ...] = ()
    idle: bool = False

    def unshare(self) -> PackedSequences:
        """Return itself: no prefix is shared."""
        return self


def pack_sequences(samples: Sequence[Sample], device: torch.device, *, idle: bool = False) -> PackedSequences:
    """Concatenate the tokens of samples."""
    lengths = tuple(len(s) for s in samples)
    images = None
    if any(s.images for s in samples):
        images = PackedImages(tokens=tuple(s.tokens for s in samples), images=tuple(s.images for s in samples))
    return PackedSequences(
        lengths=lengths,
        tokens_T=torch.from_numpy(np.concatenate([s.tokens for s in samples])).to(device, torch.int64),
        positions_T=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])).to(device, torch.int64),
        before_R=torch.tensor(lengths, device=device).cumsum(0) - 1,
        images=images,
        idle=idle,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBatch:
    """A global batch as concatenated arrays: sample s starts at ``start_S[s]`` in every array.

    The model's input are its first ``length_S[s]`` tokens, none if nothing of it is trained; a trained token has
    weight ``weight_S[s]`` in the loss and ``mean_S[s]`` in a mean, and ``oldest_S[s]`` is the oldest version among
    them. ``first_index`` is the place of its first sample in the whole batch.
    """

    samples: Sequence[Sample]
    start_S: NDArray[np.int64]
    length_S: NDArray[np.int64]
    weight_S: NDArray[np.float64]
    mean_S: NDArray[np.float64]
    oldest_S: NDArray[np.int32]
    tokens_N: NDArray[np.int32]
    mask_N: NDArray[np.bool_]
    logprobs_N: NDArray[np.float32]
    advantages_N: NDArray[np.float32]
    versions_N: NDArray[np.int32]
    first_index: int = 0

    @property
    def has_images(self) -> bool:
        """Whether any sample has an image among its input tokens."""
        return any(s.images and s.images[0].start < n for s, n in zip(self.samples, self.length_S, strict=True))


def group_by_trajectory(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of each trajectory, in order; they are contiguous."""
    out: list[list[Sample]] = []
    start = 0
    while start < len(samples):
        count = samples[start].samples_per_trajectory
        siblings = list(samples[start : start + count])
        origins = {(s.prompt_id, s.trajectory, s.samples_per_trajectory) for s in siblings}
        assert len(origins) == 1 and len(siblings) == count, f"a trajectory is not contiguous near sample {start}"
        out.append(siblings)
        start += count
    return out


def flatten_batch(trajectories: Sequence[Sequence[Sample]], reducer: Reducer, mean: Reducer | None = None) -> FlatBatch:
    """Flatten a global batch; MilesError, naming the sample, if advantages or log-probs are not finite, or if it trains
    on tokens of an image.

    ``reducer`` gives token weights in the loss and ``mean`` in metrics; None if the reducer is a mean itself.
    """
    samples = [s for trajectory in trajectories for s in trajectory]
    for sample in samples:
        check_images(sample)
    sizes_S = np.array([len(s) for s in samples], np.int64)
    start_S = np.cumsum(sizes_S) - sizes_S
    mask_N = np.concatenate([s.mask for s in samples])
    trained_R = np.flatnonzero(mask_N)
    sample_R = np.repeat(np.arange(len(samples)), sizes_S)[trained_R]
    length_S = np.zeros(len(samples), np.int64)
    np.maximum.at(length_S, sample_R, trained_R - start_S[sample_R])
    versions_N = np.concatenate([s.versions for s in samples])
    oldest_S = np.full(len(samples), np.iinfo(np.int32).max, np.int32)
    np.minimum.at(oldest_S, sample_R, versions_N[trained_R])
    sample_counts = [len(trajectory) for trajectory in trajectories]
    trajectory_S = np.repeat(np.arange(len(sample_counts)), sample_counts)
    counts = np.bincount(trajectory_S[sample_R], minlength=len(sample_counts)).tolist()
    flat = FlatBatch(
        samples=samples,
        start_S=start_S,
        length_S=length_S,
        weight_S=reducer(counts)[trajectory_S],
        mean_S=(mean or reducer)(counts)[trajectory_S],
        oldest_S=oldest_S,
        tokens_N=np.concatenate([s.tokens for s in samples]),
        mask_N=mask_N,
        logprobs_N=np.concatenate([s.logprobs for s in samples]),
        advantages_N=np.concatenate([s.advantages for s in samples]),
        versions_N=versions_N,
    )
    for name, values_N in (("advantages", flat.advantages_N), ("log-probs", flat.logprobs_N)):
        finite_R = np.isfinite(values_N[trained_R])
        if not finite_R.all():
            bad = samples[sample_R[int(finite_R.argmin())]]
            raise MilesError(
                f"the {name} of trajectory {bad.trajectory} of prompt {bad.prompt_id} are not all finite, so "
                "nothing was trained; check its reward and the engine's log-probs in the rollout file."
            )
    return flat


def build_token_paths(flat: FlatBatch, chosen: Sequence[int], *, replay: bool) -> list[TokenPath]:
    """Return the input tokens of the ``chosen`` samples, for prefix comparison; those of other images differ."""
    out: list[TokenPath] = []
    for i in chosen:
        sample, end = flat.samples[i], int(flat.length_S[i])
        routed = sample.extras[ROUTED_EXPERTS][:end] if replay and ROUTED_EXPERTS in sample.extras else None
        images = truncate_images(sample, end)
        tokens = prefix_keys(sample.tokens[:end], images) if images else sample.tokens[:end]
        out.append(TokenPath(prompt=sample.prompt_id, tokens=tokens, routed=routed))
    return out


def pack_micro_batch(
    flat: FlatBatch,
    chosen: Sequence[int],
    *,
    device: torch.device,
    replay: bool,
    replay_indexer: bool = False,
    share: bool = False,
    min_shared: int | None = None,
    tree: PrefixTree | None = None,
) -> MicroBatch:
    """Pack the ``chosen`` samples; ``replay`` includes the engine's routed experts, ``replay_indexer`` its selections.

    With ``share`` samples of one prompt share common prefixes of at least ``min_shared`` tokens; None: a default. Their
    prefix ``tree`` is built if it is not given.
    """
    sizes = flat.length_S[chosen]
    position_P = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    token_P = position_P + np.repeat(flat.start_S[chosen], sizes)
    before_R = np.flatnonzero(flat.mask_N[token_P + 1])
    trained_R = token_P[before_R] + 1
    sample_R = np.repeat(np.arange(len(chosen)), sizes)[before_R]
    if share and tree is None:
        tree = build_prefix_tree(build_token_paths(flat, chosen, replay=replay), min_shared=min_shared)
    if tree is not None and len(tree.kept_T) == len(tree.slot_P):
        tree = None  # they share nothing
    replay_PLk = _build_replay(flat, chosen, ROUTED_EXPERTS) if replay else None
    indexer_PLk = _build_replay(flat, chosen, INDEXER_TOPK) if replay_indexer else None

    def deduplicate(x_P: Array) -> Array:
        return x_P if tree is None else x_P[tree.kept_T]

    def to_tensor(values: Array, dtype: torch.dtype) -> Tensor:
        return copy_to_device(torch.from_numpy(values), device, dtype)

    return MicroBatch(
        lengths=tuple(sizes.tolist()),
        tokens_T=to_tensor(flat.tokens_N[deduplicate(token_P)], torch.int64),
        positions_T=to_tensor(deduplicate(position_P), torch.int64),
        before_R=to_tensor(before_R if tree is None else tree.slot_P[before_R], torch.int64),
        target_R=to_tensor(flat.tokens_N[trained_R], torch.int64),
        engine_logp_R=to_tensor(flat.logprobs_N[trained_R], torch.float32),
        advantage_R=to_tensor(flat.advantages_N[trained_R], torch.float32),
        oldest_R=to_tensor(flat.oldest_S[chosen][sample_R], torch.int32),
        weight_R=to_tensor(flat.weight_S[chosen][sample_R], torch.float32),
        mean_R=to_tensor(flat.mean_S[chosen][sample_R], torch.float32),
        sample_R=to_tensor(sample_R, torch.int64),
        trained_B=to_tensor(np.bincount(sample_R, minlength=len(chosen)), torch.int64),
        replay_TLk=None if replay_PLk is None else copy_to_device(torch.from_numpy(deduplicate(replay_PLk)), device),
        indexer_TLk=None if indexer_PLk is None else torch.from_numpy(deduplicate(indexer_PLk)),
        teacher_indices=tuple(
            int(s.extras[TEACHER_INDEX][0]) for i in chosen if TEACHER_INDEX in (s := flat.samples[i]).extras
        ),
        teacher_logprobs=_collect_teacher_logprobs(flat, chosen, trained_R, sample_R, device),
        sample_ids=tuple((s.prompt_id, s.trajectory) for s in (flat.samples[i] for i in chosen)),
        sample_indices=tuple(flat.first_index + i for i in chosen),
        tree_nodes=() if tree is None else tree.nodes,
        ends=() if tree is None else tree.ends,
        images=_pack_images(flat, chosen, tree) if flat.has_images else None,
    )


def _pack_images(flat: FlatBatch, chosen: Sequence[int], tree: PrefixTree | None) -> PackedImages:
    samples = [(flat.samples[i], int(flat.length_S[i])) for i in chosen]
    return PackedImages(
        tokens=tuple(sample.tokens[:length] for sample, length in samples),
        images=tuple(truncate_images(sample, length) for sample, length in samples),
        slot_P=None if tree is None else tree.slot_P,
    )


def _collect_teacher_logprobs(
    flat: FlatBatch,
    chosen: Sequence[int],
    trained_R: NDArray[np.int64],
    sample_R: NDArray[np.int64],
    device: torch.device,
) -> TeacherLogprobs | None:
    """Collect the served teachers' log-probs from the samples' extras; None if there are none."""
    samples = [flat.samples[i] for i in chosen]
    if not any(TEACHER_LOGPROB in s.extras for s in samples):
        return None

    def collect(name: str) -> Tensor:
        parts: list[Array] = []
        for number, sample in enumerate(samples):
            index_R = trained_R[sample_R == number] - flat.start_S[chosen[number]]
            parts.append(sample.extras[name][index_R] if name in sample.extras else np.full(len(index_R), np.nan))
            if not np.isfinite(parts[-1]).all():
                raise MilesError(
                    f"trajectory {sample.trajectory} of prompt {sample.prompt_id} lacks its teacher's log-probs; "
                    "custom generate and advantage functions must keep the extras of spans."
                )
        return torch.from_numpy(np.concatenate(parts)).to(device)

    logp_R = collect(TEACHER_LOGPROB)
    if not all(TEACHER_TOKENS in s.extras for s in samples):
        return TeacherLogprobs(logp_R=logp_R)
    return TeacherLogprobs(logp_R=logp_R, set_RS=collect(TEACHER_TOKENS).long(), set_logp_RS=collect(TEACHER_LOGPROBS))


def select_samples(rows: MicroBatch, chosen: Sequence[int]) -> tuple[MicroBatch, Tensor]:
    """Return the ``chosen`` samples of a micro-batch, and the indices of their trained tokens."""
    device = rows.tokens_T.device
    selected = set(chosen)
    selected_B = torch.tensor([i in selected for i in range(len(rows.lengths))], device=device)
    pieces, tree_nodes, ends = _prune_tree(rows, sorted(selected))
    sizes = [node.length for node in rows.tree_nodes] or rows.lengths
    selected_pieces = torch.tensor([i in pieces for i in range(len(sizes))], device=device)
    index_T = selected_pieces.repeat_interleave(torch.tensor(sizes, device=device)).nonzero()[:, 0]
    index_R = selected_B[rows.sample_R].nonzero()[:, 0]
    part = replace(
        rows,
        lengths=tuple(length for i, length in enumerate(rows.lengths) if i in selected),
        tokens_T=rows.tokens_T[index_T],
        positions_T=rows.positions_T[index_T],
        before_R=torch.searchsorted(index_T, rows.before_R[index_R]),
        sample_R=(selected_B.cumsum(0) - 1)[rows.sample_R[index_R]],
        trained_B=rows.trained_B[selected_B],
        replay_TLk=None if rows.replay_TLk is None else rows.replay_TLk[index_T],
        indexer_TLk=None if rows.indexer_TLk is None else rows.indexer_TLk[index_T.cpu()],
        teacher_indices=tuple(t for i, t in enumerate(rows.teacher_indices) if i in selected),
        sample_ids=tuple(sample_id for i, sample_id in enumerate(rows.sample_ids) if i in selected),
        sample_indices=tuple(index for i, index in enumerate(rows.sample_indices) if i in selected),
        teacher_logprobs=None if rows.teacher_logprobs is None else rows.teacher_logprobs.select(index_R),
        tree_nodes=tree_nodes,
        ends=ends,
        images=None
        if rows.images is None
        else rows.images.select(sorted(selected), compute_slots(tree_nodes, ends) if tree_nodes else None),
        **{name: getattr(rows, name)[index_R] for name in _TOKEN_FIELDS},
    )
    return part, index_R


def _prune_tree(rows: MicroBatch, selected: Sequence[int]) -> tuple[set[int], tuple[TreeNode, ...], tuple[int, ...]]:
    """Return the nodes (without a tree: the samples) that the ``selected`` samples need, and the pruned tree."""
    if not rows.tree_nodes:
        return set(selected), (), ()
    pieces = collect_ancestors(rows.tree_nodes, [rows.ends[i] for i in selected])
    number = {piece: i for i, piece in enumerate(pieces)}
    nodes = [rows.tree_nodes[piece] for piece in pieces]
    pruned = tuple(TreeNode(n.length, None if n.parent is None else number[n.parent]) for n in nodes)
    return set(pieces), pruned, tuple(number[rows.ends[i]] for i in selected)


def _build_replay(flat: FlatBatch, chosen: Sequence[int], name: str) -> Array | None:
    """Return what the engine recorded of the tokens under this name, -1 where nothing is; None if no sample has any."""
    samples, lengths = [flat.samples[i] for i in chosen], flat.length_S[chosen].tolist()
    pattern = next((s.extras[name] for s in samples if name in s.extras), None)
    if pattern is None:
        return None
    expected = (pattern.dtype, pattern.shape[1:])
    for sample in samples:
        found = sample.extras.get(name, pattern)
        if (found.dtype, found.shape[1:]) != expected or found.dtype.kind != "u" or found.ndim != 3:
            raise MilesError(
                f"the {name} of trajectory {sample.trajectory} of prompt {sample.prompt_id} are "
                f"{found.dtype}{list(found.shape)}, but must be unsigned [tokens, layers, entries], the same in all "
                "trajectories; custom generate and advantage functions must keep the extras of spans."
            )
    missing = np.broadcast_to(np.array(unrecorded_id(pattern.dtype), pattern.dtype), (max(lengths), *pattern.shape[1:]))
    parts = [s.extras.get(name, missing)[:n] for s, n in zip(samples, lengths, strict=True)]
    joined = np.concatenate(parts)
    # Positions need 31 bits at most, while to_signed_ids keeps 32.
    return joined.view(np.int32) if joined.dtype == np.uint32 and name == INDEXER_TOPK else to_signed_ids(joined)
