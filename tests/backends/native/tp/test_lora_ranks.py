"""Adapters on tensor-parallel ranks: the ranks' shards of the factors give what one process gives."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.native.conftest import ATTENTION, Tiny
from tests.backends.native.lora_adapters import random_expert_factors, random_factors

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.engine.lora import LoraShape
from miles.backends.native.engine.request import GenerateRequest
from miles.backends.native.runner.lora import list_served_modules
from miles.cluster.executor import InlineExecutor
from miles.core.protocols import SamplingParams
from miles.kernels.numerics import FAST
from miles.models.lora.targets import list_targets
from miles.models.spec import LayerSpec, MlpSpec

# Inner channels that two ranks pad, and a gated attention whose queries are wider.
SPEC = replace(
    Tiny.spec,
    layers=(
        LayerSpec(mixer=ATTENTION, ffn=MlpSpec(size=47)),
        LayerSpec(mixer=replace(ATTENTION, gated=True, output_bias=True), ffn=MlpSpec(size=48, bias=True)),
    ),
)
NEW = SamplingParams(max_new_tokens=5, ignore_eos=True)


def build_factors(spec, seed, rank):
    if spec.moe:
        return random_expert_factors(spec, rank - 1)
    only = None if seed == 1 else {target.short_name for target in list_targets(spec)}
    return random_factors(spec, seed, rank=rank, scale=0.4, only=only)


def ask(engine: NativeEngine, spec):
    """Requests with adapters, before an update in place and behind it."""
    for number, name in enumerate(("first", "second", "third")):
        engine.load_lora(name, build_factors(spec, number, 1 + number))

    async def story():
        found = []
        for _ in range(2):
            asked = [
                engine.submit(GenerateRequest(tokens=p, sampling=replace(NEW, seed=i), lora=name))
                for i, (p, name) in enumerate(zip(Tiny().prompts(4), ("first", None, "second", "third"), strict=True))
            ]
            for output in asked:
                await output.completion()
            found += [(output.tokens, output.logprobs) for output in asked]
            engine.update_lora("first", build_factors(spec, 9, 4))
        engine.unload_lora("second")
        return found

    return asyncio.run(story())


@pytest.mark.extended
@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (SPEC, ("all", "lm_head")),
        (replace(SPEC, vocab_size=61, tie_embeddings=True), ("all", "lm_head")),
        (Tiny.moe_spec, ("experts",)),
    ],
    ids=["dense", "tied with padded ranks", "experts"],
)
def test_ranks_answer_with_adapters_as_one_process_does(spec, words):
    decoder = Tiny().decoder(spec=spec)
    shape = LoraShape(num_slots=2, max_rank=4, modules=list_served_modules(spec, words, FAST))
    knobs = {"engine_page_size": 4, "engine_prefill_chunk": 13, "engine_max_running": 4}
    engine = NativeEngine(
        spec,
        device="cpu",
        dtype=torch.float32,
        config=NativeConfig(**knobs),
        run=InlineExecutor(),
        decode=None,
        devices=[torch.device("cpu")] * 2,
        lora=shape,
    )
    try:
        Tiny().publish(engine, decoder)
        ranks = ask(engine, spec)
    finally:
        asyncio.run(engine.close())
    alone = ask(Tiny().engine(decoder, lora=shape, page_size=4, prefill_chunk=13, max_running=4), spec)
    for (tokens, logprobs), (wanted_tokens, wanted) in zip(ranks, alone, strict=True):
        assert tokens == wanted_tokens
        np.testing.assert_allclose(logprobs, wanted, atol=1e-4)
    assert alone[0][0] != alone[4][0] and alone[1][0] == alone[5][0]
