"""GRPO from the verbs of a policy: what ``miles train`` does in its synchronous mode, to the bit.

python examples/library/grpo.py MODEL DATA.jsonl STATE
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import miles


def shared_letters(response: str, label: str) -> int:
    """How many letters of the reference answer a response has."""
    return len(set(response) & set(label))


def pick(prompts: Sequence[miles.Prompt], step: int, size: int) -> list[miles.Prompt]:
    """The prompts of a step: the data again and again, in its order."""
    return [prompts[number % len(prompts)] for number in range(step * size, (step + 1) * size)]


def train(model: str, data: str, state: str, *, steps: int, prompts_per_step: int, n: int, **options: object) -> Path:
    """Train for some steps; returns the folder of the trained checkpoint."""
    with miles.open(model, algorithm="grpo", **options) as policy:
        prompts = policy.read_prompts(data)
        for step in range(steps):
            samples = policy.sample(pick(prompts, step, prompts_per_step), n=n)
            samples = policy.score(samples, shared_letters)
            metrics = policy.forward_backward(samples)
            metrics |= policy.optim_step()
            policy.publish()
            reward = sum(sample.reward or 0.0 for sample in samples) / len(samples)
            print(f"step {step + 1}  reward {reward:.3f}  loss {metrics['loss']:+.4f}  grad {metrics['grad_norm']:.2f}")
        return policy.save_state(state)


if __name__ == "__main__":
    model, data, state = sys.argv[1:]
    options = {"lr": 1e-3, "label_key": "label", "apply_chat_template": True, "rollout_max_response_len": 16}
    print(train(model, data, state, steps=20, prompts_per_step=8, n=8, **options))
