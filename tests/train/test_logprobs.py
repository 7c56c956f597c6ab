"""Chunked log-probs and entropies against plain autograd."""

import pytest
import torch

from miles.train.logprobs import HeadOutput, TrainedHeadLora, compute_logprobs, default_chunk_size


def material(dtype, rows=7, width=5, vocab=11):
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    head = torch.randn(vocab, width, dtype=dtype, requires_grad=True)
    return hidden, head, torch.randint(0, vocab, (rows,))


def plain(hidden, head, target, temperature):
    logp = torch.log_softmax((hidden @ head.T) / temperature, -1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("used", [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)])
def test_values_and_gradients_equal_plain_autograd_however_it_is_chunked(chunk, temperature, used):
    hidden, head, target = material(torch.float64)
    weights = torch.randn(2, 7, dtype=torch.float64)
    mine = compute_logprobs(HeadOutput(hidden_RD=hidden, head_VD=head), target, temperature=temperature, chunk=chunk)
    theirs = plain(hidden, head, target, temperature)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)

    def loss(pair):
        return sum(scale * (w * x).sum() for scale, w, x in zip(used, weights, pair, strict=True) if scale)

    for a, b in zip(
        torch.autograd.grad(loss(mine), (hidden, head)), torch.autograd.grad(loss(theirs), (hidden, head)), strict=True
    ):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(("chunk", "softcap"), [(None, None), (3, None), (3, 2.0), (None, 2.0)])
def test_an_adapter_of_the_head_has_the_gradients_of_plain_autograd(chunk, softcap, merged):
    hidden, head, target = material(torch.float64)
    head = head.detach()
    a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5), (11, 2)))
    used = head + 0.5 * (b @ a).detach() if merged else head
    lora = TrainedHeadLora(a_XD=a, b_VX=b, scale=0.5, merged=merged)
    output = HeadOutput(hidden_RD=hidden, head_VD=used, softcap=softcap, lora=lora)
    mine = compute_logprobs(output, target, temperature=0.7, chunk=chunk)
    logits = hidden @ (head + 0.5 * b @ a).T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / 0.7, -1)
    theirs = logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    weights = torch.randn(2, 7, dtype=torch.float64)
    found, wanted = (
        torch.autograd.grad((weights * torch.stack(pair)).sum(), (hidden, a, b)) for pair in (mine, theirs)
    )
    for mine_each, theirs_each in zip((*mine, *found), (*theirs, *wanted), strict=True):
        assert torch.allclose(mine_each, theirs_each, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", [None, 3])
def test_gradients_pass_the_finite_difference_check(chunk):
    hidden, head, target = material(torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: compute_logprobs(HeadOutput(hidden_RD=h, head_VD=w), target, temperature=1.3, chunk=chunk),
        (hidden, head),
        fast_mode=False,
    )


def test_float32_is_as_good_as_plain_float32():
    hidden, head, target = material(torch.float32, rows=64, width=32, vocab=500)
    mine, entropy = compute_logprobs(HeadOutput(hidden_RD=hidden, head_VD=head), target, chunk=10)
    theirs, their_entropy = plain(hidden, head, target, 1.0)
    assert torch.allclose(mine, theirs, atol=1e-5) and torch.allclose(entropy, their_entropy, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad(mine.sum(), (hidden, head)), torch.autograd.grad(theirs.sum(), (hidden, head)), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-4)


def test_low_precision_weights_give_float32_logits_and_low_precision_gradients():
    hidden, head, target = material(torch.bfloat16, rows=16, width=8)
    mine, entropy = compute_logprobs(HeadOutput(hidden_RD=hidden, head_VD=head), target, chunk=5)
    theirs, _ = plain(hidden.float(), head.float(), target, 1.0)
    assert mine.dtype == entropy.dtype == torch.float32 and torch.allclose(mine, theirs, atol=1e-5)
    grads = torch.autograd.grad(mine.sum(), (hidden, head))
    exact = torch.autograd.grad(theirs.sum(), (hidden, head))
    for a, b in zip(grads, exact, strict=True):
        assert a.dtype == torch.bfloat16 and torch.allclose(a.float(), b.float(), atol=0.1, rtol=0.05)


def test_only_the_asked_gradients_are_made_and_no_rows_are_no_trouble():
    hidden, head, target = material(torch.float32)
    compute_logprobs(HeadOutput(hidden_RD=hidden.detach(), head_VD=head), target)[0].sum().backward()
    assert head.grad is not None and hidden.grad is None
    empty, entropy = compute_logprobs(HeadOutput(hidden_RD=hidden[:0], head_VD=head), target[:0])
    assert empty.shape == entropy.shape == (0,)
    empty.sum().backward()


def test_the_scratch_space_does_not_grow_with_the_vocabulary():
    sizes = {default_chunk_size(torch.empty(vocab, 1, device="meta")) * vocab for vocab in (1000, 32_000, 151_936)}
    assert max(sizes) <= 1 << 24
