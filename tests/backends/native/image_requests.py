"""Requests with images to small vision-language models, and what transformers says of the answers."""

import asyncio
import functools
from collections.abc import Sequence

import numpy as np
import torch
from tests.backends.native.conftest import Tiny
from tests.models.vision.small_vision import (
    IMAGE,
    VIDEO,
    VISION_KINDS,
    VISION_VARIANTS,
    Prompt,
    hf_vision_logits,
    our_vision_logits,
    place,
    vision_model,
    vision_twin,
)
from torch import Tensor

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import InlineExecutor
from miles.core.media import ImageInput
from miles.core.protocols import Completion, SamplingParams
from miles.kernels.numerics import FAST, Numerics
from miles.models.decoder import Decoder
from miles.models.draft.base import Draft

Asked = tuple[Prompt, SamplingParams]


@functools.cache
def pair(kind: str):
    """A transformers model and our decoder with its weights."""
    model = vision_model(kind)
    return model, vision_twin(model).requires_grad_(False)


@functools.cache
def images(kind: str) -> list[ImageInput]:
    return (VISION_KINDS | VISION_VARIANTS)[kind].images(np.random.default_rng(7))[:3]


def build_engine(
    decoder: Decoder, *, numerics: Numerics = FAST, depth: int = 0, head: Draft | None = None, **options
) -> NativeEngine:
    """An engine with this decoder's weights, which may draft with a ``head``."""
    engine = NativeEngine(
        decoder.spec,
        device="cpu",
        dtype=torch.float32,
        config=NativeConfig(
            **{name if name.startswith("speculative_") else f"engine_{name}": value for name, value in options.items()}
        ),
        run=InlineExecutor(),
        decode=None,
        numerics=numerics,
        draft=head,
        _depth=depth,
    )
    Tiny().publish(engine, decoder, head=head)
    return engine


def generate(engine: NativeEngine, asked: Sequence[Asked]) -> list[Completion]:
    """Submit all requests at once and return their completions."""

    async def everyone() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(prompt.tokens, how, prompt.images) for prompt, how in asked))

    answers = asyncio.run(everyone())
    Tiny().check(engine)
    return answers


def extend(prompt: Prompt, response: np.ndarray) -> Prompt:
    return Prompt(np.concatenate((prompt.tokens, response)), prompt.images)


def response_of(answer: Completion) -> np.ndarray:
    return np.concatenate([span.tokens for span in answer.spans])


def logprobs_of(answer: Completion) -> np.ndarray:
    return np.concatenate([span.logprobs for span in answer.spans if span.logprobs is not None])


def pick_logprobs(logits: Tensor, prompt: Prompt, response: np.ndarray) -> np.ndarray:
    """The log-probs of a response, out of logits of prompt and response."""
    tokens = torch.from_numpy(response).long()
    return logits[len(prompt.tokens) - 1 : -1].log_softmax(-1).gather(1, tokens[:, None])[:, 0].numpy()


@torch.no_grad()
def hf_logprobs(kind: str, prompt: Prompt, response: np.ndarray) -> np.ndarray:
    """Log-probs of a response by transformers, up to the first placeholder, which transformers takes for an image."""
    special = np.flatnonzero(np.isin(response, (IMAGE, VIDEO)))
    count = special[0] if len(special) else len(response)
    model = pair(kind)[0]
    logits = hf_vision_logits(model, [extend(prompt, response[:count])])
    return pick_logprobs(torch.cat((logits, logits[-1:])), prompt, response[: count + 1])


@torch.no_grad()
def our_logprobs(decoder: Decoder, prompt: Prompt, response: np.ndarray) -> np.ndarray:
    """Log-probs of a response by one forward of our decoder."""
    return pick_logprobs(our_vision_logits(decoder, [extend(prompt, response)]), prompt, response)


def ask(prompt: Prompt, seed: int = 0, new: int = 8, **sampling) -> Asked:
    return prompt, SamplingParams(max_new_tokens=new, seed=seed, ignore_eos=True, **sampling)


def requests(kind: str, new: int = 8) -> list[Asked]:
    """Several images, one image shared with another prompt and by four samples, text alone, an image at the end."""
    a, b, c = images(kind)
    several, shared = place([3, a, 2, b, 1, c, 4], 1), place([5, a, 3], 2)
    asked = [several, *4 * [shared], place([9], 3), place([b, 6], 4), place([4, a], 5), place([4, a], 5)]
    return [ask(prompt, seed, new) for seed, prompt in enumerate(asked)]
