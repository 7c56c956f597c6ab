"""What quantizing a weight is said to take at its peak, against the tensors that torch makes."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from miles.models.accounting.activations import activation_bytes
from miles.models.accounting.known_models import load_known_models
from miles.models.accounting.quantize_workspace import DEQUANTIZE_BYTES, QUANTIZE_BYTES, quantize_workspace_bytes
from miles.models.families import spec_from_config
from miles.precision.formats import FORMATS, QuantizationSpec
from miles.precision.quantize import dequantize, quantize


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made inside had at once."""

    def __init__(self):
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata, None)
                self.peak = max(self.peak, sum(self.live.values()))
        return out


@pytest.mark.parametrize("name", FORMATS)
def test_the_peak_of_quantizing_is_counted_within_three_percent(name):
    format = FORMATS[name]
    weight = torch.randn(512, 1024, dtype=torch.bfloat16)
    with PeakBytes() as made:
        packed = quantize(weight, format, (512,))
    assert made.peak / weight.numel() == pytest.approx(QUANTIZE_BYTES[format.element, format.scale], rel=0.03)
    with PeakBytes() as made:
        dequantize(packed, torch.bfloat16)
    zero_point = 1 if format.zero_point else 0
    assert made.peak / weight.numel() == pytest.approx(DEQUANTIZE_BYTES + zero_point, rel=0.03)


def planned(model, name, tokens=8192, **options):
    spec = spec_from_config(load_known_models()[model])
    return replace(spec, quantization=QuantizationSpec(format=FORMATS[name], packed=False, **options)), tokens


def test_experts_without_a_kernel_need_the_memory_of_the_whole_stack():
    spec, tokens = planned("Qwen3-30B-A3B", "int4")
    stack = 128 * 2 * 768 * 2048
    workspace = quantize_workspace_bytes(spec, size=2, fused=True)
    assert workspace == pytest.approx(16.2 * stack)
    assert quantize_workspace_bytes(spec, size=2, fused=True, experts=8) == pytest.approx(workspace / 8)
    # It is needed when the logits of the step's end are gone: two chunks of 2^28, and the gradient of the head; and the
    # hidden states behind the last layer, before and after their norm.
    logits = 2 * 4 * 2**28 + 4 * spec.vocab_size * spec.hidden_size + 2 * 2 * spec.hidden_size * tokens
    wide = activation_bytes(replace(spec, quantization=None), tokens, size=2, fused=True)
    found = activation_bytes(spec, tokens, size=2, fused=True)
    assert found - wide == pytest.approx(workspace - logits, rel=0.005)


def test_kernels_need_less_than_a_layers_activations():
    spec, tokens = planned("Qwen3-30B-A3B", "fp8", backward="e4m3")
    assert quantize_workspace_bytes(spec, size=2, fused=True) == 2 * 128 * 2 * 768 * 2048
    wide_backward = replace(spec, quantization=replace(spec.quantization, backward="wide"))
    assert activation_bytes(wide_backward, tokens, size=2, fused=True) > activation_bytes(
        spec, tokens, size=2, fused=True
    )
