"""Selections of indexers that an engine records: those of a plain forward, however they were computed."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.native.conftest import Tiny
from tests.models.oracle import hf_model, twin

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import InlineExecutor
from miles.core.protocols import SamplingParams
from miles.core.token_fields import INDEXER_TOPK
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.models.indexer_layout import build_indexer_layout

SPARSE = ("deepseek v3.2", "glm 5 shared choices", "minimax-m3", "hybrid glm 5.3 flash", "hybrid qwen4")
UNRECORDED = np.iinfo(np.uint16).max


def listen(decoder, tokens, selections=None):
    """What each layer with an indexer attends to in a forward over the whole sequence: {layer: selected}."""
    backend = VarlenAttentionBackend([len(tokens)], "cpu", selections)
    with torch.no_grad():
        decoder(torch.from_numpy(tokens.astype(np.int64)), torch.arange(len(tokens)), backend)
    return {layer: each.selected[0] for layer, each in backend._selections.items() if each is not None}


def units_of(spec, layer, selected, query):
    """The tokens, pools or blocks that a query attends to in each group, as lists."""
    mixer = spec.layers[layer].mixer
    if hasattr(mixer.indexer, "block"):
        return [sorted(each[query].tolist()) for each in selected]
    pool = mixer.indexer.pool
    positions = {int(t) for t in selected[query].tolist() if t <= query}
    complete = (query + 1) // pool
    return [sorted({t // pool for t in positions if t // pool < complete})]


def limit_of(spec, layer):
    indexer = spec.layers[layer].mixer.indexer
    return indexer.top * getattr(indexer, "block", 1)


def engine_of(decoder, tiny, **options):
    like = decoder.embedding.weight
    engine = NativeEngine(
        decoder.spec,
        device="cpu",
        dtype=like.dtype,
        config=NativeConfig(
            **{name if name.startswith("speculative_") else f"engine_{name}": value for name, value in options.items()}
        ),
        run=InlineExecutor(),
        decode=None,
        numerics=decoder.numerics,
        return_indexer_topk=True,
        _depth=tiny.depth,
    )
    tiny.publish(engine, decoder)
    return engine


def recorded_of(completion):
    return np.concatenate([completion.prompt_extras[INDEXER_TOPK], *(s.extras[INDEXER_TOPK] for s in completion.spans)])


def check_records(decoder, prompt, completion):
    """All tokens but the last have the selections of a plain forward."""
    spec, layout = decoder.spec, build_indexer_layout(decoder.spec)
    tokens = np.concatenate([prompt, *(s.tokens for s in completion.spans)])
    records = recorded_of(completion)
    assert records.dtype == layout.dtype and records.shape[1:] == layout.unrecorded_row().shape
    assert len(completion.prompt_extras[INDEXER_TOPK]) == len(prompt) and (records[-1] == UNRECORDED).all()
    plain = listen(decoder, tokens)
    assert set(plain) & set(layout.layers) == set(layout.layers)
    for slot, layer in enumerate(layout.layers):
        for query in range(len(tokens) - 1):
            row = records[query, slot].reshape(layout.groups, layout.count)
            if query + 1 <= limit_of(spec, layer):
                assert (row == UNRECORDED).all()
            else:
                assert row.tolist() == units_of(spec, layer, plain[layer], query)


@pytest.fixture(scope="module")
def decoders():
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = twin(hf_model(kind, max_position_embeddings=256))
        return made[kind]

    return get


@pytest.fixture
def tiny() -> Tiny:
    """Engines with overlap scheduling."""
    return Tiny(1)


def requests_of(decoder, lengths=(19, 19, 27), new=5):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, decoder.spec.vocab_size - 1, n).astype(np.int32) for n in lengths]
    prompts[1] = prompts[0]
    return [(p, SamplingParams(max_new_tokens=new, seed=i, ignore_eos=True)) for i, p in enumerate(prompts)]


CHUNKS = {"page_size": 4, "prefill_chunk": 7, "max_running": 4}
PREEMPTED = {"page_size": 4, "kv_tokens": 44, "max_running": 3}


@pytest.mark.parametrize(("kind", "options"), [*((kind, CHUNKS) for kind in SPARSE), (SPARSE[0], PREEMPTED)])
def test_every_token_but_the_last_has_the_selections_of_a_plain_forward(tiny, decoders, kind, options):
    decoder = decoders(kind)
    engine = engine_of(decoder, tiny, **options)
    asked = requests_of(decoder, new=13 if "kv_tokens" in options else 5)
    for _ in range(2):  # the second time prefixes are cached
        for (prompt, _), completion in zip(asked, tiny.generate_all(engine, asked), strict=True):
            check_records(decoder, prompt, completion)
    if "kv_tokens" in options:
        assert engine.stats()["preemptions"] > 0


def test_verified_drafts_have_the_selections_of_a_plain_forward(tiny, decoders):
    decoder = decoders("deepseek v3.2")
    engine = engine_of(decoder, tiny, page_size=4, speculative_algorithm="ngram", speculative_adaptive=False)
    prompt = np.tile(np.arange(5, 11, dtype=np.int32), 6)
    asked = [(prompt, SamplingParams(max_new_tokens=14, temperature=0.0, ignore_eos=True))] * 2
    for _ in range(2):
        for (each, _), completion in zip(asked, tiny.generate_all(engine, asked), strict=True):
            check_records(decoder, each, completion)
    assert engine.stats()["accepted_draft_tokens"] > 0


def test_tokens_keep_the_selections_that_they_were_first_computed_with(tiny, decoders):
    """A request that goes on under new weights has those of the old ones for its first tokens."""
    decoder = decoders("deepseek v3.2")
    other = twin(hf_model("deepseek v3.2", seed=5, max_position_embeddings=256))
    engine = engine_of(decoder, tiny, page_size=4)
    (prompt, how), *_ = requests_of(decoder, new=40)

    async def interrupted():
        task = asyncio.ensure_future(engine.generate(prompt, how))
        while not any(len(req.tokens) >= len(prompt) + 12 for req in engine._scheduler.iter_reqs()):
            await asyncio.sleep(0)
        await engine.pause("retract")
        tiny.publish(engine, other, 1)
        await engine.resume()
        return await task

    completion = asyncio.run(interrupted())
    assert [span.version.number for span in completion.spans] == [0, 1]
    tokens = np.concatenate([prompt, *(s.tokens for s in completion.spans)])
    first = len(prompt) + len(completion.spans[0]) - 1
    records, plain = recorded_of(completion), listen(decoder, tokens)
    for slot, layer in enumerate(build_indexer_layout(decoder.spec).layers):
        for query in range(limit_of(decoder.spec, layer), first):
            assert records[query, slot].tolist() == units_of(decoder.spec, layer, plain[layer], query)[0]
    assert (records[first:-1] != UNRECORDED).all()


def test_an_engine_that_is_not_asked_records_nothing(tiny, decoders):
    decoder = decoders("deepseek v3.2")
    (completion,) = tiny.generate_all(tiny.engine(decoder, return_routed_experts=False), requests_of(decoder)[:1])
    assert not completion.prompt_extras and not any(span.extras for span in completion.spans)


def test_a_model_without_indexers_has_no_layout(tiny):
    assert build_indexer_layout(tiny.spec) is None
    spec = replace(tiny.spec, max_positions=70_000)
    assert build_indexer_layout(spec) is None
