"""Torch's linear and embedding layers, made without filling them: weights always come from a file or a seed."""

from torch import nn


class Linear(nn.Linear):
    """A linear layer whose parameters start as whatever was in memory."""

    def reset_parameters(self) -> None: ...


class Embedding(nn.Embedding):
    """An embedding whose rows start as whatever was in memory."""

    def reset_parameters(self) -> None: ...
