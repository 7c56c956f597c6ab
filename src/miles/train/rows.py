"""Samples to tensors: a global batch laid end to end, and the packed rows of a micro-batch cut from it.

Only what the loss needs goes in: a sample is cut after the last token that predicts a trained one,
and a sample without a trained token is left out.

``_S`` samples and ``_N`` tokens of the global batch; ``_T`` packed input tokens, ``_B`` samples, ``_P`` input tokens of
each sample for itself and ``_R`` trained tokens of the micro-batch; ``L`` layers with experts, ``k`` experts a token,
``S`` tokens of a set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.algo.distill import TEACHER
from miles.algo.reduce import Reducer, Weighted
from miles.core.errors import MilesError
from miles.core.extras import ROUTED, TEACHER_LOGPROB, TEACHER_LOGPROBS, TEACHER_TOKENS
from miles.core.routed import as_choices, unrecorded
from miles.core.types import Array, Sample
from miles.train.experts import Used
from miles.train.prefix import LEAST, Path, Stretch, Tree, branches_of, slots_of, tree_of

_OF_TOKENS = ("target_R", "engine_logp_R", "advantage_R", "oldest_R", "weight_R", "mean_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What served teachers said of the trained tokens, and of the ``S`` tokens of a set at each; -1 is no token."""

    said_R: Tensor
    set_RS: Tensor | None = None
    said_RS: Tensor | None = None

    def to(self, device: torch.device) -> Told:
        """The same on another device."""
        if self.set_RS is None or self.said_RS is None:
            return Told(said_R=self.said_R.to(device))
        return Told(said_R=self.said_R.to(device), set_RS=self.set_RS.to(device), said_RS=self.said_RS.to(device))

    def of(self, at_R: Tensor) -> Told:
        """The same of some of the tokens."""
        if self.set_RS is None or self.said_RS is None:
            return Told(said_R=self.said_R[at_R])
        return Told(said_R=self.said_R[at_R], set_RS=self.set_RS[at_R], said_RS=self.said_RS[at_R])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One micro-batch. ``before_R`` says which input token predicts each trained token ``target_R``.

    ``weight_R`` is what a token weighs in the loss of its global batch and ``mean_R`` what it weighs in a mean over
    it, ``oldest_R`` the stalest version that wrote any trained token of its sample. ``sample_R`` ascends and says
    which sample of the micro-batch a token is of; ``trained_B`` how many trained tokens each has, at least one.
    In ``replay_TLk`` -1 leaves the choice to the router. With ``used`` the first forward says which experts it used,
    and those after it use the same. ``teachers`` are the numbers of the samples' teachers, empty
    where the samples name none; ``told`` what teachers elsewhere said, where the samples bring it. ``idle`` rows only
    keep a rank in step with the others: they weigh nothing. ``names`` are each sample's prompt and attempt.

    ``lengths`` are how many tokens each sample reads. Where samples share what they begin with, the tokens are a tree
    of ``stretches``, one after the other: sample b reads those on the way to stretch ``ends[b]``, and ``before_R`` may
    name a token many times. Without stretches the tokens are those of one sample after the other.
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
    used: Used | None = None
    teachers: tuple[int, ...] = ()
    told: Told | None = None
    idle: bool = False
    names: tuple[tuple[int, int], ...] = ()
    stretches: tuple[Stretch, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def shared(self) -> int:
        """How many tokens need not be read because another sample begins with them too."""
        return sum(self.lengths) - len(self.tokens_T)

    def apart(self) -> Rows:
        """The same rows with every sample's tokens for itself, for models that cannot read a tree."""
        if not self.stretches:
            return self
        device = self.tokens_T.device
        slot_P = torch.from_numpy(slots_of(self.stretches, self.ends)).to(device)
        length_B = torch.tensor(self.lengths, device=device)
        start_B = length_B.cumsum(0) - length_B
        return replace(
            self,
            tokens_T=self.tokens_T[slot_P],
            positions_T=self.positions_T[slot_P],
            before_R=start_B[self.sample_R] + self.positions_T[self.before_R],
            replay_TLk=None if self.replay_TLk is None else self.replay_TLk[slot_P],
            stretches=(),
            ends=(),
        )

    def unrouted(self) -> Rows:
        """The same rows for a model that chooses all experts itself."""
        return replace(self, replay_TLk=None, used=None)

    def to(self, device: torch.device) -> Rows:
        """The same rows on another device, or these where they are there."""
        if self.tokens_T.device == device:
            return self
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {name: value.to(device) for name, value in held.items() if isinstance(value, Tensor)}
        return replace(self, **moved, told=None if self.told is None else self.told.to(device))

    def layout(self) -> Weighted:
        """The sums over its tokens that an objective may ask for."""
        return Weighted(weight_R=self.weight_R, mean_R=self.mean_R, sample_R=self.sample_R, trained_S=self.trained_B)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """A global batch laid end to end: sample s is ``start_S[s]`` onwards in every array.

    The model reads its first ``length_S[s]`` tokens, none if nothing of it is trained; one of its trained tokens
    weighs ``weight_S[s]`` in the loss and ``mean_S[s]`` in a mean, and ``oldest_S[s]`` is the stalest version that
    wrote one.
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


def trajectories_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each trajectory, in order; they stand next to each other, ``share`` of them."""
    out: list[list[Sample]] = []
    start = 0
    while start < len(samples):
        whole = list(samples[start : start + samples[start].share])
        names = {(s.prompt_id, s.trajectory, s.share) for s in whole}
        assert len(names) == 1 and len(whole) == whole[0].share, f"a trajectory was torn apart near sample {start}"
        out.append(whole)
        start += len(whole)
    return out


def flatten(trajectories: Sequence[Sequence[Sample]], reducer: Reducer, mean: Reducer | None = None) -> Flat:
    """Lay a global batch end to end; refuses what would poison the weights, by name.

    ``reducer`` weighs the tokens in the loss and ``mean`` in metrics; None where the reducer is a mean itself.
    """
    samples = [s for whole in trajectories for s in whole]
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
    shares = [len(whole) for whole in trajectories]
    whole_S = np.repeat(np.arange(len(shares)), shares)
    counts = np.bincount(whole_S[sample_R], minlength=len(shares)).tolist()
    flat = Flat(
        samples=samples,
        start_S=start_S,
        length_S=length_S,
        weight_S=reducer(counts)[whole_S],
        mean_S=(mean or reducer)(counts)[whole_S],
        oldest_S=oldest_S,
        tokens_N=np.concatenate([s.tokens for s in samples]),
        mask_N=mask_N,
        logprobs_N=np.concatenate([s.logprobs for s in samples]),
        advantages_N=np.concatenate([s.advantages for s in samples]),
        versions_N=versions_N,
    )
    for what, values_N in (("advantages", flat.advantages_N), ("log-probs", flat.logprobs_N)):
        finite_R = np.isfinite(values_N[trained_R])
        if not finite_R.all():
            bad = samples[sample_R[int(finite_R.argmin())]]
            raise MilesError(
                f"the {what} of attempt {bad.trajectory} at prompt {bad.prompt_id} are not all finite; "
                "nothing was trained. Look at its reward and at the engine's log-probs in the rollout file."
            )
    return flat


def paths_of(flat: Flat, chosen: Sequence[int], *, replay: bool) -> list[Path]:
    """What is read of the ``chosen`` samples, as ``prefix`` compares it."""
    out: list[Path] = []
    for i in chosen:
        sample, end = flat.samples[i], int(flat.length_S[i])
        routed = sample.extras[ROUTED][:end] if replay and ROUTED in sample.extras else None
        out.append(Path(prompt=sample.prompt_id, tokens=sample.tokens[:end], routed=routed))
    return out


def rows_of(
    flat: Flat, chosen: Sequence[int], *, device: torch.device, replay: bool, share: bool = False, least: int = LEAST
) -> Rows:
    """Pack the ``chosen`` samples; with ``replay``, with the experts the engine said it used.

    With ``share`` samples of one prompt read what they begin with once, if that is ``least`` tokens.
    """
    sizes = flat.length_S[chosen]
    places_P = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    token_P = places_P + np.repeat(flat.start_S[chosen], sizes)
    before_R = np.flatnonzero(flat.mask_N[token_P + 1])
    trained_R = token_P[before_R] + 1
    sample_R = np.repeat(np.arange(len(chosen)), sizes)[before_R]
    tree = _tree(flat, chosen, replay=replay, least=least) if share else None
    replay_PLk = _replay([flat.samples[i] for i in chosen], sizes.tolist()) if replay else None

    def read(of_P: Array) -> Array:
        return of_P if tree is None else of_P[tree.kept_T]

    def put(values: Array, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype)

    return Rows(
        lengths=tuple(sizes.tolist()),
        tokens_T=put(flat.tokens_N[read(token_P)], torch.int64),
        positions_T=put(read(places_P), torch.int64),
        before_R=put(before_R if tree is None else tree.slot_P[before_R], torch.int64),
        target_R=put(flat.tokens_N[trained_R], torch.int64),
        engine_logp_R=put(flat.logprobs_N[trained_R], torch.float32),
        advantage_R=put(flat.advantages_N[trained_R], torch.float32),
        oldest_R=put(flat.oldest_S[chosen][sample_R], torch.int32),
        weight_R=put(flat.weight_S[chosen][sample_R], torch.float32),
        mean_R=put(flat.mean_S[chosen][sample_R], torch.float32),
        sample_R=put(sample_R, torch.int64),
        trained_B=put(np.bincount(sample_R, minlength=len(chosen)), torch.int64),
        replay_TLk=None if replay_PLk is None else torch.from_numpy(read(replay_PLk)).to(device),
        teachers=tuple(int(s.extras[TEACHER][0]) for i in chosen if TEACHER in (s := flat.samples[i]).extras),
        told=_told(flat, chosen, trained_R, sample_R, device),
        names=tuple((s.prompt_id, s.trajectory) for s in (flat.samples[i] for i in chosen)),
        stretches=() if tree is None else tree.stretches,
        ends=() if tree is None else tree.ends,
    )


def _tree(flat: Flat, chosen: Sequence[int], *, replay: bool, least: int) -> Tree | None:
    """How the samples share what they begin with; None where they do not."""
    tree = tree_of(paths_of(flat, chosen, replay=replay), least=least)
    return tree if len(tree.kept_T) < len(tree.slot_P) else None


def _told(
    flat: Flat, chosen: Sequence[int], trained_R: NDArray[np.int64], sample_R: NDArray[np.int64], device: torch.device
) -> Told | None:
    """What the samples bring of teachers elsewhere; None where they bring nothing."""
    samples = [flat.samples[i] for i in chosen]
    if not any(TEACHER_LOGPROB in s.extras for s in samples):
        return None

    def joined(name: str) -> Tensor:
        parts: list[Array] = []
        for number, sample in enumerate(samples):
            at_R = trained_R[sample_R == number] - flat.start_S[chosen[number]]
            parts.append(sample.extras[name][at_R] if name in sample.extras else np.full(len(at_R), np.nan))
            if not np.isfinite(parts[-1]).all():
                raise MilesError(
                    f"attempt {sample.trajectory} at prompt {sample.prompt_id} lacks its teacher's log-probs; a "
                    "generate or credit function of your own must keep what spans carry in extras."
                )
        return torch.from_numpy(np.concatenate(parts)).to(device)

    said_R, sets = joined(TEACHER_LOGPROB), all(TEACHER_TOKENS in s.extras for s in samples)
    if not sets:
        return Told(said_R=said_R)
    return Told(said_R=said_R, set_RS=joined(TEACHER_TOKENS).long(), said_RS=joined(TEACHER_LOGPROBS))


def samples_of(rows: Rows, chosen: Sequence[int]) -> tuple[Rows, Tensor]:
    """The ``chosen`` samples of a micro-batch, and which of its trained tokens are theirs."""
    device = rows.tokens_T.device
    kept = set(chosen)
    taken_B = torch.tensor([i in kept for i in range(len(rows.lengths))], device=device)
    pieces, stretches, ends = _branches(rows, sorted(kept))
    sizes = [s.length for s in rows.stretches] or rows.lengths
    taken = torch.tensor([i in pieces for i in range(len(sizes))], device=device)
    at_T = taken.repeat_interleave(torch.tensor(sizes, device=device)).nonzero()[:, 0]
    at_R = taken_B[rows.sample_R].nonzero()[:, 0]
    part = replace(
        rows,
        lengths=tuple(length for i, length in enumerate(rows.lengths) if i in kept),
        tokens_T=rows.tokens_T[at_T],
        positions_T=rows.positions_T[at_T],
        before_R=torch.searchsorted(at_T, rows.before_R[at_R]),
        sample_R=(taken_B.cumsum(0) - 1)[rows.sample_R[at_R]],
        trained_B=rows.trained_B[taken_B],
        replay_TLk=None if rows.replay_TLk is None else rows.replay_TLk[at_T],
        teachers=tuple(t for i, t in enumerate(rows.teachers) if i in kept),
        names=tuple(name for i, name in enumerate(rows.names) if i in kept),
        told=None if rows.told is None else rows.told.of(at_R),
        stretches=stretches,
        ends=ends,
        **{name: getattr(rows, name)[at_R] for name in _OF_TOKENS},
    )
    return part, at_R


def _branches(rows: Rows, kept: Sequence[int]) -> tuple[set[int], tuple[Stretch, ...], tuple[int, ...]]:
    """The stretches that the ``kept`` samples read, or these themselves where there are none; the tree that is left."""
    if not rows.stretches:
        return set(kept), (), ()
    pieces = branches_of(rows.stretches, [rows.ends[i] for i in kept])
    number = {piece: i for i, piece in enumerate(pieces)}
    stretches = [rows.stretches[piece] for piece in pieces]
    left = tuple(Stretch(s.length, None if s.after is None else number[s.after]) for s in stretches)
    return set(pieces), left, tuple(number[rows.ends[i]] for i in kept)


def _replay(samples: Sequence[Sample], lengths: Sequence[int]) -> Array | None:
    """What the engine recorded, its "none" as -1; None where it recorded nothing of any sample."""
    pattern = next((s.extras[ROUTED] for s in samples if ROUTED in s.extras), None)
    if pattern is None:
        return None
    kind = (pattern.dtype, pattern.shape[1:])
    for sample in samples:
        found = sample.extras.get(ROUTED, pattern)
        if (found.dtype, found.shape[1:]) != kind or found.dtype.kind != "u" or found.ndim != 3:
            raise MilesError(
                f"the {ROUTED} of attempt {sample.trajectory} at prompt {sample.prompt_id} are "
                f"{found.dtype}{list(found.shape)}, and must be unsigned [tokens, layers, experts], alike in all "
                "attempts; a generate or credit function of your own must keep what spans carry in extras."
            )
    missing = np.broadcast_to(np.array(unrecorded(pattern.dtype), pattern.dtype), (max(lengths), *pattern.shape[1:]))
    parts = [s.extras.get(ROUTED, missing)[:n] for s, n in zip(samples, lengths, strict=True)]
    return as_choices(np.concatenate(parts))
