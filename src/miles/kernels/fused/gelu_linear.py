"""Linear layer with a bias and GELU (tanh) in the epilogue of the GEMM, by cuBLASLt.

Shapes: T rows, K in, N out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.numerics import Numerics


def can_fuse_gelu(x_TK: Tensor, bias_N: Tensor | None, *, numerics: Numerics) -> bool:
    """Whether ``gelu_tanh_linear`` applies: inference in half precision on an NVIDIA GPU, with a bias.

    The trainer's backward needs the input of the activation, which the epilogue does not write.
    """
    return (
        bias_N is not None
        and not numerics.batch_invariant
        and torch.is_inference_mode_enabled()
        and x_TK.is_cuda
        and torch.version.hip is None
        and x_TK.dtype in (torch.bfloat16, torch.float16)
        and x_TK.ndim == 2
    )


def gelu_tanh_linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor) -> Tensor:
    """GELU, in its tanh approximation, of rows times a weight plus a bias; accumulated in float32 and rounded once."""
    return torch.ops.aten._addmm_activation(bias_N, x_TK, weight_NK.t(), use_gelu=True)
