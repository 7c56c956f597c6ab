"""transformers on the tiny checkpoints: what the next tokens, their log-probs and their experts must be."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class Oracle:
    """A checkpoint in float32; sequences one at a time, without a cache."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[T, V]: row i is what follows token i."""
        return self._model(torch.tensor([tokens])).logits[0]

    def logprobs(self, prompt: list[int], written: list[int], temperature: float = 1.0) -> list[float]:
        """Of each written token."""
        rows = (self.logits([*prompt, *written])[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        return rows.gather(1, torch.tensor(written)[:, None]).squeeze(1).tolist()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        written: list[int] = []
        for _ in range(count):
            written.append(int(self.logits([*prompt, *written])[-1].argmax()))
        return written

    @torch.no_grad()
    def experts(self, tokens: list[int], each: int) -> torch.Tensor:
        """[T, L, each]: where each token is sent, the heaviest first."""
        routers = self._model(torch.tensor([tokens]), output_router_logits=True).router_logits
        return torch.stack([layer.topk(each, dim=-1).indices for layer in routers], dim=1)
