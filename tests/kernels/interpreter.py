"""Triton's interpreter with loops over numbers read from memory, which newer releases of numpy refuse as it makes them.

It also makes the language its own again with every call of a device function, which is a third of the time kernels take
here. Once a launch is enough.
"""

from typing import Any

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
