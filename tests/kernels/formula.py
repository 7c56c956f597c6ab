"""Attention by its formula, one sequence after the other, in the inputs' dtype."""

import torch

from miles.kernels.attention.params import AttentionParams, IndexerInputs


def seen(length: int, params: AttentionParams, index: IndexerInputs | None = None):
    """Which keys each query of one sequence looks at; ``index`` holds that sequence's tokens alone."""
    query, key = torch.arange(length)[:, None], torch.arange(length)
    visible = key <= query
    if params.window is not None:
        visible &= query - key < params.window
    if params.chunk is not None:
        visible &= query // params.chunk == key // params.chunk
    if index is not None:
        each = torch.einsum("qhd,kd->qhk", index.q_THd, index.k_Td).clamp(min=0)
        scores = (each * index.weights_TH[..., None]).sum(1).masked_fill(~visible, float("-inf"))
        # Of equal scores the lowest position is selected.
        for row, best in enumerate(scores.sort(descending=True, stable=True).indices[:, : index.topk]):
            visible[row] &= torch.isin(key, best)
    return visible


def part(index: IndexerInputs | None, lo: int, hi: int) -> IndexerInputs | None:
    if index is None:
        return None
    tensors = (x[lo:hi] for x in (index.q_THd, index.k_Td, index.weights_TH))
    return IndexerInputs(**dict(zip(("q_THd", "k_Td", "weights_TH"), tensors, strict=True)), topk=index.topk)


def by_hand(q_THd, k_TGd, v_TGe, lengths, params: AttentionParams, sinks_H=None, index: IndexerInputs | None = None):
    share = q_THd.shape[1] // k_TGd.shape[1]
    outs, start = [], 0
    for n in lengths:
        q, k, v = (x[start : start + n] for x in (q_THd, k_TGd, v_TGe))
        own = part(index, start, start + n)
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * params.scale
        if params.softcap is not None:
            scores = torch.tanh(scores / params.softcap) * params.softcap
        scores = scores.masked_fill(~seen(n, params, own), float("-inf"))
        if sinks_H is not None:
            scores = torch.cat((scores, sinks_H.to(scores.dtype)[:, None, None].expand(-1, n, 1)), -1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :n], v))
        start += n
    return torch.cat(outs)


def tensors(*shapes, seed=0, dtype=torch.float64):
    """Random tensors that take gradients."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def qkv(total, heads, kv_heads, dim, value_dim=None, seed=0, dtype=torch.float64):
    shapes = (total, heads, dim), (total, kv_heads, dim), (total, kv_heads, value_dim or dim)
    return tensors(*shapes, seed=seed, dtype=dtype)


def index_of(total, top, heads=5, dim=6, seed=0, dtype=torch.float64) -> IndexerInputs:
    q, k, weights = (x.detach() for x in tensors((total, heads, dim), (total, dim), (total, heads), seed=seed))
    return IndexerInputs(q_THd=q.to(dtype), k_Td=k.to(dtype), weights_TH=weights.to(dtype), topk=top)


def gradients(out, inputs, seed=0):
    """Of a fixed random mixture of what came out."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device, out.dtype)
    return torch.autograd.grad((out * weight).sum(), inputs, retain_graph=True)


def off(found, wanted) -> float:
    """The largest difference, against the largest value."""
    difference = (found.detach().double().cpu() - wanted.detach().double().cpu()).abs().max()
    return (difference / wanted.detach().abs().max().clamp_min(1e-6).double().cpu()).item()
