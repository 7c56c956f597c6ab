"""Torch's linear and embedding layers, made without filling them: weights always come from a file or a seed."""

from collections.abc import Callable

from torch import Tensor, nn

from miles.kernels.slim import linear


class Linear(nn.Linear):
    """A linear layer whose parameters start as whatever was in memory.

    An ``adapter`` is given what the layer gave and was given, and gives that back with a way for gradients (``lora``).
    """

    adapter: Callable[[Tensor, Tensor], Tensor] | None = None

    def reset_parameters(self) -> None: ...

    def forward(self, input: Tensor) -> Tensor:
        out = linear(input, self.weight, self.bias)
        return out if self.adapter is None else self.adapter(out, input)


class Embedding(nn.Embedding):
    """An embedding whose rows start as whatever was in memory."""

    def reset_parameters(self) -> None: ...
