"""Triton's interpreter with loops over numbers read from memory: newer releases of numpy refuse how it makes them."""

from typing import Any

from tests.kernels.device import CARD

from miles.kernels.device_code import HAVE_TRITON

if HAVE_TRITON and not CARD:
    from triton.runtime import interpreter

    _patch: Any = interpreter._patch_lang_tensor

    def _patched(tensor: Any, scope: Any) -> None:
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patched
