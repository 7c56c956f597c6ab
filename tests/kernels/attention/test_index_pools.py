"""Pooled keys of a DSA indexer, against the definition token by token, and the same selection in both forms."""

import pytest
import torch
from tests.kernels.device import random

from miles.kernels.attention.index_pools import (
    GatedPool,
    expand_pools,
    mask_unselected_pools,
    pool_index_keys,
    select_pools,
    select_topk_pools,
)

HEADS, SIZE = 5, 6


def select_by_definition(q, keys, weights, topk, bias):
    """The tokens that each token attends to, as sets."""
    pool, chosen = len(bias), []
    for token in range(len(q)):
        complete = (token + 1) // pool
        scores = []
        for number in range(complete):
            own = keys[number * pool : (number + 1) * pool]
            probabilities = (own[:, SIZE:] + bias).softmax(0)
            key = (probabilities * own[:, :SIZE]).sum(0)
            scores.append(float((weights[token] * (q[token] @ key).relu()).sum()))
        best = sorted(range(complete), key=lambda n: -scores[n])[: topk // pool]
        tokens = {number * pool + i for number in best for i in range(pool)}
        chosen.append(tokens | set(range(complete * pool, token + 1)))
    return chosen


@pytest.mark.parametrize(("length", "pool", "topk"), [(17, 4, 8), (40, 3, 9), (9, 4, 4), (30, 1, 7), (23, 8, 8)])
def test_the_tokens_of_the_best_pools_and_behind_them_are_selected(length, pool, topk):
    q, keys, weights = random(length, HEADS, SIZE), random(length, 2 * SIZE), random(length, HEADS).abs()
    bias = random(pool, SIZE)
    wanted = select_by_definition(q, keys, weights, topk, bias)
    for at_once in (1, 10**6):
        found = expand_pools(select_topk_pools(q, keys, weights, topk, GatedPool(bias), max_scores=at_once), pool)
        assert found.shape == (length, topk + pool - 1)
        assert [set(row.tolist()) for row in found] == wanted
    scores = torch.einsum("th,thp->tp", weights, (q @ pool_index_keys(keys, bias).T).relu())
    visible = torch.arange(1, length + 1)[None]
    pools = select_pools(scores[None], visible // pool, topk // pool)
    hidden = mask_unselected_pools(pools, visible, length // pool, length, pool)[0]
    seen = [{i for i in range(token + 1) if not hidden[token, i]} for token in range(length)]
    assert seen == wanted


def test_a_context_without_a_complete_pool_is_seen_as_it_is():
    bias, keys = random(4, SIZE), random(3, 2 * SIZE)
    assert pool_index_keys(keys, bias).shape == (0, SIZE)
    none = select_pools(torch.zeros(1, 1, 0), torch.tensor([[0]]), 2)
    hidden = mask_unselected_pools(none, torch.tensor([[3]]), 0, 3, 4)
    assert not hidden.any()
