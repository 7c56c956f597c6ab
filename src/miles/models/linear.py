"""Torch's linear and embedding layers, made without filling them: weights always come from a file or a seed."""

from torch import Tensor, nn

from miles.kernels.slim import linear


class Linear(nn.Linear):
    """A linear layer whose parameters start as whatever was in memory."""

    def reset_parameters(self) -> None: ...

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class Embedding(nn.Embedding):
    """An embedding whose rows start as whatever was in memory."""

    def reset_parameters(self) -> None: ...
