"""Sequences in scattered pages of a cache whose unused slots hold no numbers, for tests of attention over pages."""

from dataclasses import dataclass

import numpy as np
import torch
from tests.kernels.device import CARD, DEVICE, random
from torch import Tensor

from miles.kernels.attention.split_kv import SplitKVPlan

# Processors that work is cut for; without a card few, so that every program takes several items.
SMS = 132 if CARD else 1


@dataclass(frozen=True, slots=True)
class Case:
    """``lengths`` tokens of each row, families (first row, behind the last, tokens in common), and their cache."""

    lengths: np.ndarray
    group: np.ndarray
    shared: np.ndarray
    k_SGd: Tensor
    v_SGe: Tensor
    block_table_SP: Tensor
    req_slots_B: Tensor
    page_size: int

    def work(self, queries: int, *, trunks: bool = True, items: int = 64, **more) -> SplitKVPlan:
        """The step, cut and sent. Rows of families ask for their trunks together."""
        work = SplitKVPlan(len(self.lengths) + 2, items, DEVICE, prefix_queries=more.pop("prefix_queries", 64))
        shared = self.shared if trunks else np.zeros_like(self.shared)
        sms, kv_heads = more.pop("sms", SMS), more.pop("kv_heads", self.k_SGd.shape[1])
        work.fill(self.lengths, self.group, shared, kv_heads=kv_heads, queries_per_kv=queries, sms=sms, **more)
        work.copy_to_device()
        return work


def case(
    lengths: list[int],
    families: list[tuple[int, int, int]] = [],  # noqa: B006
    *,
    heads: int = 2,
    width: int = 32,
    values: int | None = None,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Rows sit in slots in no order, pages lie anywhere; rows of a family begin with the same pages."""
    rng = np.random.default_rng(len(lengths))
    most = max(1, -(-max(lengths) // page_size))
    pages_BP = np.zeros((len(lengths), most), np.int64)
    free = iter(rng.permutation(sum(-(-n // page_size) for n in lengths) + 5).tolist())
    for row, length in enumerate(lengths):
        pages_BP[row, : -(-length // page_size)] = [next(free) for _ in range(-(-length // page_size))]
    group, shared = np.arange(len(lengths)) + len(lengths), np.zeros(len(lengths), np.int64)
    for number, (first, end, common) in enumerate(families):
        group[first:end], shared[first:end] = number, common
        pages_BP[first:end, : common // page_size] = pages_BP[first, : common // page_size]
    slots = (sum(-(-n // page_size) for n in lengths) + 5) * page_size
    k_SGd = random(slots, heads, width, dtype=dtype)
    v_SGe = random(slots, heads, values or width, dtype=dtype)
    used = np.zeros(slots, bool)
    for row, length in enumerate(lengths):
        token = np.arange(length)
        used[pages_BP[row, token // page_size] * page_size + token % page_size] = True
    for held in (k_SGd, v_SGe):
        held[torch.from_numpy(~used).to(DEVICE)] = torch.nan
    req_slots_B = rng.permutation(len(lengths) + 3)[: len(lengths)]
    block_table_SP = np.full((len(lengths) + 3, most + 2), 10**6, np.int32)
    block_table_SP[req_slots_B, :most] = np.where(
        np.arange(most) < -(-np.array(lengths) // page_size)[:, None], pages_BP, 10**6
    )
    return Case(
        np.array(lengths),
        group,
        shared,
        k_SGd,
        v_SGe,
        torch.from_numpy(block_table_SP).to(DEVICE),
        torch.from_numpy(req_slots_B).to(DEVICE),
        page_size,
    )


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Room for a result in which nothing is a number yet."""
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
