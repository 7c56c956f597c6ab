"""Self-play from the verbs of a policy: two sides of one model write a word each, and the better word wins.

The first side answers a word, the second side answers what the first one wrote. A referee compares both answers: the
one with more vowels wins. The winner's tokens get advantage 1, the loser's -1.

    python examples/library/self_play.py MODEL STATE
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import miles

Referee = Callable[[str, str], int]
"""Above 0 if the first word wins, below 0 if the second does, and 0 for a draw."""


def count_vowels(text: str) -> int:
    """How many vowels a text has."""
    return sum(letter in "aeiou" for letter in text)


def more_vowels(first: str, second: str) -> int:
    """The text with more vowels wins."""
    return count_vowels(first) - count_vowels(second)


def play(
    policy: miles.Policy, words: Sequence[str], games: int, referee: Referee
) -> tuple[list[miles.PolicySample], list[float]]:
    """Play some games from each word; returns both sides' samples, and 1, -1 or 0 for each by who won."""
    first = policy.sample(words, n=games)
    second = policy.sample([sample.text or "a" for sample in first])
    outcomes = [referee(one.text, two.text) for one, two in zip(first, second, strict=True)]
    signs = [float((outcome > 0) - (outcome < 0)) for outcome in outcomes]
    return [*first, *second], [*signs, *(-sign for sign in signs)]


def train(
    model: str, state: str, words: Sequence[str], *, steps: int, games: int, referee: Referee, **options: object
) -> Path:
    """Train both sides, which share their weights, on the games they play against each other."""
    with miles.open(model, **options) as policy:
        for step in range(steps):
            samples, advantages = play(policy, words, games, referee)
            metrics = policy.forward_backward(samples, loss="policy_loss", advantages=advantages)
            policy.optim_step()
            policy.publish()
            vowels = sum(count_vowels(sample.text) for sample in samples) / len(samples)
            print(f"step {step + 1}  vowels {vowels:.2f}  entropy {metrics['entropy']:.2f}")
        return policy.save_state(state)


if __name__ == "__main__":
    model, state = sys.argv[1:]
    options = {"lr": 1e-3, "apply_chat_template": True, "rollout_max_response_len": 16}
    print(train(model, state, ["abc", "xyz"], steps=20, games=8, referee=more_vowels, **options))
