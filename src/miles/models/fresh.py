"""A decoder with random weights: what each kind of parameter starts as."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from miles.models.decoder import Decoder
from miles.models.norm import RMSNorm
from miles.models.spec import DecoderSpec

_DEVIATION = 0.02
# Recurrent layers: heads forget at rates between these, in steps between those.
_RATES = (1.0, 16.0)
_STEPS = (0.001, 0.1)


def random(spec: DecoderSpec, *, seed: int, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    """A fresh decoder: matrices normal with deviation 0.02, norms that only normalise, biases zero.

    Values are drawn on the CPU in float32, a parameter at a time: the same seed is the same bits on every device.
    """
    decoder = Decoder(spec, device="meta", dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, wanted in decoder.named_parameters():
        home, _, leaf = name.rpartition(".")
        value = _start(leaf, decoder.get_submodule(home), wanted.shape, generator)
        tensors[name] = value.to(device=device, dtype=wanted.dtype)
    decoder.load_state_dict(tensors, assign=True)
    return decoder


def _start(leaf: str, module: nn.Module, shape: torch.Size, generator: torch.Generator) -> Tensor:
    if leaf == "A_log":
        return torch.linspace(*_RATES, shape[0]).log()
    if leaf == "dt_bias":
        steps = torch.linspace(math.log(_STEPS[0]), math.log(_STEPS[1]), shape[0]).exp()
        return steps.expm1().log()  # a softplus makes steps of it again
    if leaf.endswith("bias") or leaf in ("sinks", "correction"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.full(shape, 1.0 - module.offset if isinstance(module, RMSNorm) else 1.0)
    # A filter over neighbours sees few inputs: it starts as strong as those ask for.
    deviation = shape[-1] ** -0.5 if leaf.startswith("conv") else _DEVIATION
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)
