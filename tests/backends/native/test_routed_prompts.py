"""Experts of the tokens an engine was given: whole, whoever computed them, and however short the answer."""

import asyncio

import numpy as np
import torch

from miles.core.protocols import SamplingParams
from miles.core.token_fields import ROUTED_EXPERTS
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.models.decoder import Routing


def own(decoder, tokens):
    """What the router chooses in one plain forward, in order."""
    routing = Routing(record=True)
    ids_T, attend = torch.from_numpy(tokens.astype(np.int64)), VarlenAttentionBackend([len(tokens)], "cpu")
    with torch.no_grad():
        decoder(ids_T, torch.arange(len(tokens)), attend, routing)
    return np.sort(torch.stack(routing.recorded, 1).numpy(), -1)


def test_all_tokens_but_the_last_have_their_experts_also_in_answers_of_one_token(tiny):
    decoder = tiny.decoder(spec=tiny.moe_spec)
    engine = tiny.engine(decoder, kv_tokens=2048)
    rng = np.random.default_rng(0)
    begin = rng.integers(2, 61, 11).astype(np.int32)
    prompts = [np.concatenate((begin, rng.integers(2, 61, n).astype(np.int32))) for n in (1, 5, 9, 21)]

    async def wave(lengths):
        asks = [(p, n) for p in prompts for n in lengths]
        made = (
            engine.generate(p, SamplingParams(max_new_tokens=n, seed=7 * n + len(p), ignore_eos=True)) for p, n in asks
        )
        return asks, await asyncio.gather(*made)

    async def both():
        return [await wave((1, 6, 1, 2)), await wave((1, 3))]

    for asks, found in asyncio.run(both()):
        for (prompt, _), completion in zip(asks, found, strict=True):
            tokens = np.concatenate([prompt, *(s.tokens for s in completion.spans)])
            reported = np.concatenate(
                [completion.prompt_extras[ROUTED_EXPERTS], *(s.extras[ROUTED_EXPERTS] for s in completion.spans)]
            )
            assert len(completion.prompt_extras[ROUTED_EXPERTS]) == len(prompt) and reported.dtype == np.uint8
            assert np.array_equal(np.sort(reported[:-1], -1), own(decoder, tokens)[:-1])
            assert (reported[-1] == 255).all()
