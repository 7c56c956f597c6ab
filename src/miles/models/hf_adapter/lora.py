"""LoRA adapters on the linear layers of transformers' own modules, by a forward hook of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from miles.core.errors import UsageError

Adapter = Callable[[Tensor, Tensor], Tensor]


class AdapterHook:
    """A forward hook that gives a layer's output and input to an adapter, which returns the output.

    A copy of the module for an engine has the hook without the adapter: its weights are merged.
    """

    def __init__(self) -> None:
        self.adapter: Adapter | None = None

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out if self.adapter is None else self.adapter(out, args[0])

    def __deepcopy__(self, memo: dict[int, Any]) -> AdapterHook:
        return AdapterHook()


def set_adapter(module: nn.Linear, adapter: Adapter) -> None:
    """Set the adapter of a linear layer, in place of an earlier one."""
    hooks = [hook for hook in module._forward_hooks.values() if isinstance(hook, AdapterHook)]  # pyright: ignore[reportPrivateUsage]
    if not hooks:
        hooks = [AdapterHook()]
        module.register_forward_hook(hooks[0])
    hooks[0].adapter = adapter


def find_linear(model: nn.Module, name: str, shape: tuple[int, ...]) -> nn.Linear:
    """Return the linear layer of a target of the checkpoint; UsageError if transformers has another module there."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        module = None
    if not isinstance(module, nn.Linear) or tuple(module.weight.shape) != shape:
        found = "no module" if module is None else f"a {type(module).__name__}"
        raise UsageError(
            f"--target-modules: {name} of the checkpoint is {found} in transformers, and no linear layer of this "
            "name and shape; name other modules, or add it to --exclude-modules."
        )
    return module
