"""Plain sequences as the rows a trainer reads, every token but the first of each asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from miles.algo.reduce import per_trajectory
from miles.core.types import Sample, Tokens
from miles.train.rows import Rows, flatten, rows_of


def rows_for(sequences: Sequence[Tokens], device: torch.device) -> Rows:
    """One micro-batch of them all, in order."""
    samples = [_sample(number, tokens) for number, tokens in enumerate(sequences)]
    flat = flatten([[sample] for sample in samples], per_trajectory)
    return rows_of(flat, range(len(samples)), device=device, replay=False)


def _sample(number: int, tokens: Tokens) -> Sample:
    zeros, mask = np.zeros(len(tokens), np.float32), np.ones(len(tokens), bool)
    mask[0] = False
    versions = np.where(mask, 0, -1).astype(np.int32)
    return Sample(
        prompt_id=number, trajectory=0, tokens=tokens, mask=mask, logprobs=zeros, advantages=zeros, versions=versions
    )
