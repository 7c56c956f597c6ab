"""Torch's varlen kernel without its custom operator, against the operator: same calls, same gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from miles.kernels.attention.varlen import load_varlen_kernel, run_varlen_kernel

LENGTHS, HEADS, KV_HEADS, HEAD_DIM = (5, 1, 9), 4, 2, 16


def _record(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, Any]]) -> None:
    """Replace the kernels that need a GPU with ones that record how they are called."""

    def forward(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        calls.append(("forward", _describe(args, options)))
        q_THd = args[0]
        return q_THd * 2, q_THd.new_zeros(q_THd.shape[1], len(q_THd)), q_THd.new_zeros(2), q_THd.new_zeros(0), q_THd

    def backward(grad_THd: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        # The operator makes its own seed and empty tensor, which have no meaning without dropout.
        calls.append(("backward", _describe((grad_THd, q, k, v, *args[:-2]), options)))
        return 3 * q, 4 * k, 5 * v

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)


def _describe(args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    shown = [each.tolist() if isinstance(each, Tensor) else each for each in args if each is not False]
    return shown, {name: value for name, value in options.items() if value not in (None, False)}


@pytest.mark.parametrize("window", [None, 3])
def test_kernels_are_called_as_by_torchs_operator(window):
    ends = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    longest = max(LENGTHS)
    kernel, options = load_varlen_kernel()

    def run(own: bool) -> tuple[list[tuple[str, Any]], list[Tensor]]:
        torch.manual_seed(0)
        shapes = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM))
        qkv = tuple(torch.randn(sum(LENGTHS), *shape).requires_grad_() for shape in shapes)
        calls: list[tuple[str, Any]] = []
        with pytest.MonkeyPatch.context() as patch:
            _record(patch, calls)
            if own:
                out = run_varlen_kernel(qkv, (ends, ends), (longest, longest), 0.25, window)
            else:
                size = (-1 if window is None else window - 1, 0)
                out = kernel(*qkv, ends, ends, longest, longest, scale=0.25, window_size=size, **options)
            out.sum().backward()
        return calls, [tensor.grad for tensor in qkv if tensor.grad is not None]

    own, torchs = run(True), run(False)
    assert [name for name, _ in own[0]] == ["forward", "backward"]
    assert own[0] == torchs[0]
    assert len(own[1]) == 3 and all(map(torch.equal, own[1], torchs[1]))
