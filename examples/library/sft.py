"""Supervised fine-tuning from the verbs of a trainer: demonstrations in, a checkpoint out; no engine is needed.

python examples/library/sft.py MODEL DATA.jsonl STATE
"""

import random
import sys
from pathlib import Path

import miles


def train(model: str, data: str, state: str, *, epochs: int, batch_size: int, lr: float, **options: object) -> Path:
    """Train on all demonstrations ``epochs`` times, with a linear decay of the learning rate."""
    with miles.Trainer(model, algorithm="sft", **options) as trainer:
        samples = trainer.read_demonstrations(data)
        updates = epochs * (len(samples) // batch_size)
        for epoch in range(epochs):
            order = random.Random(epoch).sample(samples, len(samples))
            for start in range(0, len(samples) - batch_size + 1, batch_size):
                loss = trainer.forward_backward(order[start : start + batch_size])["loss"]
                trainer.optim_step(lr=lr * (1 - trainer.version / updates))
                print(f"update {trainer.version}/{updates}  loss {loss:.3f}")
        return trainer.save_state(state)


if __name__ == "__main__":
    model, data, state = sys.argv[1:]
    print(train(model, data, state, epochs=2, batch_size=16, lr=1e-3, label_key="label", apply_chat_template=True))
