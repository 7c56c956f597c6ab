"""Groups of samples that begin alike, for tests of what they share."""

import numpy as np

from miles.core.types import Sample


def group(rng, prompt_id, *, prompt=12, replies=(5, 9, 1), vocab=31, experts=None):
    """Trajectories of one prompt; with ``experts`` (layers, experts, experts a token) as an engine records them."""
    start = rng.integers(0, vocab, prompt)
    routed = None if experts is None else _routed(rng, prompt, *experts)
    out: list[Sample] = []
    for number, reply in enumerate(replies):
        extras = {}
        if experts is not None:
            extras["routed_experts"] = np.concatenate([routed, _routed(rng, reply, *experts)])
        tokens = np.concatenate([start, rng.integers(0, vocab, reply)])
        out.append(sample(tokens, prompt, prompt_id=prompt_id, trajectory=number, worth=float(rng.normal()), **extras))
    return out


def sample(tokens, prompt, *, prompt_id=0, trajectory=0, share=1, worth=1.0, **extras):
    """Everything after ``prompt`` tokens is trained."""
    mask = np.arange(len(tokens)) >= prompt
    return Sample(
        prompt_id=prompt_id,
        trajectory=trajectory,
        samples_per_trajectory=share,
        tokens=np.asarray(tokens, np.int32),
        mask=mask,
        logprobs=np.where(mask, np.float32(-3.4), np.float32(0)),
        advantages=np.where(mask, np.float32(worth), np.float32(0)),
        versions=np.where(mask, 0, -1).astype(np.int32),
        extras=extras,
    )


def _routed(rng, tokens, layers, experts, chosen):
    found = [[rng.permutation(experts)[:chosen] for _ in range(layers)] for _ in range(tokens)]
    return np.array(found, np.uint8).reshape(tokens, layers, chosen)
