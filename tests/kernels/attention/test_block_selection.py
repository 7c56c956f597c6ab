"""Block selection of block-sparse attention, against loops over queries and blocks."""

import pytest
import torch

from miles.kernels.attention import block_selection
from miles.kernels.attention.block_selection import select_topk_blocks, select_visible_blocks, unselected_tokens
from miles.kernels.attention.eager import eager_attention
from miles.kernels.attention.params import AttentionInputs, AttentionParams, BlockIndexerInputs
from miles.kernels.attention.varlen import VarlenAttentionBackend

GROUPS = 2


def indexer(length, *, block, topk, local, seed=0):
    torch.manual_seed(seed)
    q_TGd, k_Td = torch.randn(length, GROUPS, 5), torch.randn(length, 5)
    return BlockIndexerInputs(q_TGd=q_TGd, k_Td=k_Td, block=block, topk=topk, local=local)


def blocks_by_hand(index, group, query):
    """The blocks one query attends to, of those that have begun."""
    begun = query // index.block + 1
    scores = []
    for block in range(begun):
        keys = index.k_Td[block * index.block : min((block + 1) * index.block, query + 1)]
        near = begun - 1 - block < index.local
        scores.append(float("inf") if near else max(float(index.q_TGd[query, group] @ key) for key in keys))
    order = sorted(range(begun), key=lambda block: -scores[block])
    return set(order[: index.topk])


CASES = [(29, 4, 3, 1), (29, 4, 3, 2), (30, 5, 2, 0), (17, 16, 1, 1)]


@pytest.mark.parametrize(("length", "block", "topk", "local"), CASES)
@pytest.mark.parametrize("scores", [1 << 26, 40])
def test_blocks_are_those_of_the_best_token_and_the_last_ones(length, block, topk, local, scores, monkeypatch):
    monkeypatch.setattr(block_selection, "_MAX_SCORES", scores)
    index = indexer(length, block=block, topk=topk, local=local)
    selected_GSt = select_topk_blocks(index.q_TGd, index.k_Td, index)
    for group in range(GROUPS):
        for query in range(length):
            begun = {b for b in selected_GSt[group, query].tolist() if b * block <= query}
            assert begun == blocks_by_hand(index, group, query)


@pytest.mark.parametrize(("length", "block", "topk", "local"), CASES)
def test_a_paged_row_sees_what_the_whole_sequence_sees(length, block, topk, local):
    index = indexer(length, block=block, topk=topk, local=local)
    whole_GST = unselected_tokens(select_topk_blocks(index.q_TGd, index.k_Td, index), block, length)
    first = 9
    position_Q = torch.arange(first, length)
    visible_QT = torch.arange(length) <= position_Q[:, None]
    selected_1GQt = select_visible_blocks(
        index.q_TGd[None, first:], index.k_Td[None], visible_QT[None], position_Q[None], index
    )
    paged_1GQT = unselected_tokens(selected_1GQt, block, length)
    assert torch.equal(paged_1GQT[0] & visible_QT, whole_GST[:, first:] & visible_QT)


@pytest.mark.parametrize("lengths", [[29], [29, 3, 40, 12]])
def test_attention_and_its_gradients_are_those_of_a_mask(lengths):
    total = sum(lengths)
    index = indexer(total, block=4, topk=3, local=1)
    torch.manual_seed(1)
    inputs = [torch.randn(total, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, GROUPS, GROUPS)]
    params = AttentionParams(scale=0.3)
    out = VarlenAttentionBackend(lengths, "cpu")(0, AttentionInputs(*inputs, params, indexer=index))
    expected = []
    for q, k, v, iq, ik in zip(*(x.split(lengths) for x in (*inputs, index.q_TGd, index.k_Td)), strict=True):
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1).expand(GROUPS, -1, -1)
        if len(q) > index.max_selected:
            hidden = hidden | unselected_tokens(select_topk_blocks(iq, ik, index), 4, len(q))
        scores = torch.einsum("sgrd,tgd->grst", q.unflatten(1, (GROUPS, -1)), k) * params.scale
        probs = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
        expected.append(torch.einsum("grst,tgd->sgrd", probs, v).flatten(1, 2))
    expected = torch.cat(expected)
    assert torch.allclose(out, expected, atol=1e-12)
    weights = torch.randn_like(out)
    ours = torch.autograd.grad((out * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=True))


def test_blocks_of_one_token_are_a_selection_of_tokens():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 12, heads, 8) for heads in (4, GROUPS, GROUPS))
    tokens_BSt = torch.stack([torch.randperm(12)[:3] for _ in range(12)])[None]
    params = AttentionParams(scale=0.3)
    tokens_BSt[..., 0] = torch.arange(12)  # each sees itself, so that no row is empty
    by_token = eager_attention(q, k, v, params, selected_BSt=tokens_BSt)
    by_block = eager_attention(q, k, v, params, selected_BGSt=tokens_BSt[:, None].expand(-1, GROUPS, -1, -1), block=1)
    assert torch.equal(by_token, by_block)
