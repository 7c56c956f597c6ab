"""SGLang's FP8 GEMMs in torch, for tests on a CPU: its own are compiled, or in Triton, for a GPU.

Only the arithmetic is replaced. Which parameters a layer has, and how a checkpoint or a weight update is loaded into
them, is SGLang's own code, on the path that it takes on a GPU: on a CPU it would repack weights for AMX.

Shapes: T tokens, K input and N output channels, E experts, a experts of a token.
"""

import importlib.abc
import importlib.util
import sys
from types import ModuleType

MODULE = "sglang.srt.layers.quantization.fp8"
_BLOCK = 128
_MAX = 448.0


def quantize_rows(x_TK):
    """Each 128 values of a row rounded to E4M3 with a scale of their own, in float32."""
    blocks = x_TK.float().unflatten(-1, (-1, _BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-10) / _MAX
    return ((blocks / scale).to(_e4m3()).float() * scale).flatten(-2)


def dequantize(weight, scale):
    """The weights, or a stack of them, in float32."""
    wide = scale.repeat_interleave(_BLOCK, -2)[..., : weight.shape[-2], :]
    return weight.float() * wide.repeat_interleave(_BLOCK, -1)[..., : weight.shape[-1]]


def block_linear(input, weight, block_size, weight_scale, input_scale=None, bias=None):
    assert list(block_size) == [_BLOCK, _BLOCK] and input_scale is None
    y_TN = quantize_rows(input) @ dequantize(weight, weight_scale).T
    return (y_TN if bias is None else y_TN + bias.float()).to(input.dtype)


def run_experts(self, layer, dispatch_output):
    import torch
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x_TK = dispatch_output.hidden_states
    weights_Ta, ids_Ta, _ = dispatch_output.topk_output
    out_TK = torch.zeros(x_TK.shape, dtype=torch.float32)
    up_ENK = dequantize(layer.w13_weight, layer.w13_weight_scale_inv)
    down_EKN = dequantize(layer.w2_weight, layer.w2_weight_scale_inv)
    for expert in range(len(up_ENK)):
        token, rank = torch.where(ids_Ta == expert)
        gate, up = (quantize_rows(x_TK[token]) @ up_ENK[expert].T).to(x_TK.dtype).float().chunk(2, -1)
        inner = (torch.nn.functional.silu(gate) * up).to(x_TK.dtype)
        y = (quantize_rows(inner) @ down_EKN[expert].T).to(x_TK.dtype).float()
        out_TK.index_add_(0, token, y * weights_Ta[token, rank, None].float())
    return StandardCombineInput(hidden_states=out_TK.to(x_TK.dtype))


def install() -> None:
    """Replace the GEMMs when SGLang imports its FP8 layers."""
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _replace(module)

        spec.loader.exec_module = exec_module
        return spec


def _replace(module: ModuleType) -> None:
    module._is_cpu = False
    module.dispatch_w8a8_block_fp8_linear = lambda: block_linear
    module.Fp8MoEMethod.apply = run_experts


def _e4m3():
    import torch

    return torch.float8_e4m3fn
