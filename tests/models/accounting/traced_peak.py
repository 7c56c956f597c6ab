"""The peak of a training step, traced: forward and backward on tensors that have no memory and report a GPU.

Every operation of the step runs on meta tensors, and the bytes of all storages alive are added up, so that code takes
the branches and frees the tensors that it does on the GPU. Not counted are workspaces inside a kernel. Run as a program
it prints, for the benchmark's cases with these numbers, what is traced and what ``miles plan`` counts, as JSON.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from benchmarks.bench_memory_plan import CASES, Case, plan_bytes
from tests.kernels.compiled.fake_gpu import TARGETS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from miles.cluster.parallel_dims import ParallelDims
from miles.kernels.attention import sdpa_dense
from miles.kernels.attention.gather_rows import index_rows
from miles.kernels.attention.varlen import run_varlen_kernel
from miles.kernels.runtime.fake_gpu import DEVICE, fake_gpu
from miles.launch.plan.layout_memory import estimate_rank_memory
from miles.models.decoder import Decoder
from miles.models.layers import rope
from miles.train.logprobs import HeadOutput, compute_logprobs
from miles.train.optim.master_weights import TrainedParam
from miles.train.prefix_sharing import build_attention

_STEP = __file__


class PeakMeter(TorchDispatchMode):
    """Adds up the storages that operations make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.add.Tensor and _is_called_by_autograd():
            return args[0]  # gradients of a tensor that is used twice are added in place, but not below such a mode
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        if func is torch.ops.aten._safe_softmax.default:
            # Inside: which values are minus infinity, and the softmax before rows of such values become zeros.
            self.peak = max(self.peak, self.alive + out.numel() * (out.element_size() + 1))
        return out

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, once."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def free(_: object) -> None:
            del self._storages[key]
            self.alive -= size

        self._storages[key] = weakref.ref(storage, free)
        self.alive += size
        self.peak = max(self.peak, self.alive)


def _is_called_by_autograd() -> bool:
    """Whether an operation is one of the backward pass itself, not of a function in Python."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename != _STEP:
        if frame.f_code.co_name == "backward" or "checkpoint" in frame.f_code.co_filename:
            return False
        frame = frame.f_back
    return frame.f_code.co_name == "_run_micro_batch" and not torch.is_grad_enabled()


def _attend_dense(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, count: int, scale: float) -> Tensor:
    """A dense batch as varlen attention: SDPA would take the kernel of meta tensors."""
    length = len(q_THd) // count
    ends_B = torch.arange(0, len(q_THd) + 1, length, dtype=torch.int32, device=DEVICE)
    return run_varlen_kernel((q_THd, k_TGd, v_TGd), (ends_B, ends_B), (length, length), scale, None)


class _FusedRmsNorm(torch.autograd.Function):
    """torch's kernel on a GPU, which saves its input and a value per row; meta tensors are normalized step by step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        x, grad = x.contiguous(), grads[0].contiguous()
        del grad
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    assert tuple(shape) == x.shape[-1:] and (weight is None or weight.dtype == x.dtype)
    return _FusedRmsNorm.apply(x, weight)  # pyright: ignore[reportReturnType]


def trace_step(case: Case) -> int:
    """Bytes at the peak of a case's step, without weights and optimizer."""
    from triton.runtime.jit import JITFunction

    rope._cos_sin_cache.cache_clear()  # the tables of a case before
    with (
        fake_gpu(TARGETS["sm_90"]),
        mock.patch.object(JITFunction, "run", lambda *_, **__: None),
        mock.patch.object(sdpa_dense, "_dense_batch", _attend_dense),
        mock.patch.object(torch.nn.functional, "rms_norm", _rms_norm),
        PeakMeter() as meter,
    ):
        decoder = Decoder(case.spec(), device="meta", dtype=torch.bfloat16)
        decoder.checkpoint_layers = case.checkpointing
        # Recomputed tensors report the GPU where the saved ones, packed by torch, do not.
        options: dict[str, Any] = {"preserve_rng_state": False, "determinism_check": "none"}
        decoder.checkpoint_fn = partial(checkpoint, use_reentrant=False, **options)
        trained = [TrainedParam(name, p, offloaded=False) for name, p in decoder.named_parameters() if p.requires_grad]
        meter.alive = meter.peak = 0
        for _ in range(case.batches):
            _run_micro_batch(decoder, case)
        del trained
        return meter.peak


def _run_micro_batch(decoder: Decoder, case: Case) -> None:
    lengths = (case.length,) * (case.tokens // case.length)
    tokens_T = torch.zeros(case.tokens, dtype=torch.int64, device=DEVICE)
    positions_T = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])
    rows_R = torch.arange(case.tokens, device=DEVICE)
    attention = build_attention(lengths, (), DEVICE, numerics=decoder.numerics)

    def build_output() -> HeadOutput:
        hidden_TD = decoder(tokens_T, positions_T, attention, None)
        return HeadOutput(
            hidden_RD=index_rows(hidden_TD, rows_R, repeated=False),
            head_VD=decoder.head(),
            softcap=decoder.spec.logit_softcap,
            numerics=decoder.numerics,
        )

    loss = compute_logprobs(build_output(), tokens_T, max_tokens=case.tokens)[0].sum()
    # ``backward`` itself would leave the mode in which tensors report a GPU.
    torch.autograd.graph._engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def main() -> None:
    """Print a line of JSON for each case."""
    for number in map(int, sys.argv[1:]):
        case = CASES[number]
        held = estimate_rank_memory(case.spec(), ParallelDims(), "bfloat16")
        fixed = held.weights + held.optimizer
        found = {
            "label": case.label(),
            "traced": trace_step(case) + fixed,
            "planned": plan_bytes(case),
            "fixed": fixed + held.gradients,
        }
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
