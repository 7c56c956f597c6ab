"""Triton's interpreter with loops over numbers read from memory, which newer releases of numpy refuse as it makes them.

It also makes the language its own again with every call of a device function, which is a third of the time kernels take
here. Once a launch is enough. And it converts to float8 without a carry into the exponent and with ties away from zero,
where GPUs and torch round to nearest even, and to bfloat16 likewise: torch converts here.
"""

from typing import Any

import torch
from tests.kernels.device import CARD

from miles.kernels.runtime.triton_compat import HAVE_TRITON, tl

if HAVE_TRITON and not CARD:
    from triton.runtime import interpreter

    _patch_tensor: Any = interpreter._patch_lang_tensor
    _patch_language: Any = interpreter._patch_lang
    # Modules that are patched: until the launch that runs is over, and for good, since calls within one undo nothing.
    _now: set[Any] = set()
    _kept: set[Any] = set()

    def _patched_tensor(tensor: Any, scope: Any) -> None:
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def _patched_language(function: Any) -> Any:
        modules = {value for value in function.__globals__.values() if value is tl or value is tl.core}
        if _now and modules <= _now | _kept:
            return interpreter._LangPatchScope()
        scope = _patch_language(function)
        if _now:
            _kept.update(modules - _now)
            return scope
        _now.update(modules)
        undo = scope.restore

        def over() -> None:
            _now.clear()
            undo()

        scope.restore = over
        return scope

    interpreter._patch_lang_tensor = _patched_tensor
    interpreter._patch_lang = _patched_language

    _convert: Any = interpreter._convert_float
    _FLOATS = {
        "fp8e4nv": torch.float8_e4m3fn,
        "fp8e5": torch.float8_e5m2,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp32": torch.float32,
        "fp64": torch.float64,
    }

    def _converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name not in _FLOATS or target.name not in _FLOATS:
            return _convert(values, source, target, rounding)
        wide = torch.frombuffer(bytearray(values.tobytes()), dtype=_FLOATS[source.name]).float()
        if target.name == "fp8e4nv":  # the device saturates
            wide = wide.clamp(-448, 448)
        bits = wide.to(_FLOATS[target.name]).view(torch.uint8).numpy()
        return bits.view(f"uint{target.primitive_bitwidth}").reshape(values.shape)

    interpreter._convert_float = _converted
