"""Whatever the kind of model, the engine writes what transformers would write: tokens, log-probs and routing.

Every kind is asked by an engine with small pages and short prefill chunks: ragged prompts, one of them by several at
once, more requests than slots. Answers are held against full forwards of the finished sequences.
"""

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.backends.native.conftest import Tiny
from tests.models.oracle import KINDS, SMALL, hf_model, our_logits, twin

from miles.core.protocols import SamplingParams
from miles.models.decoder import Decoder, Routing
from miles.models.families import spec_from_config
from miles.models.spec import AttentionSpec, CompressedAttentionSpec, DecoderSpec, MlaSpec, RelativeAttentionSpec

NEW = 6
PAGE = 4
KNOBS = {"page_size": PAGE, "prefill_chunk": 13, "max_running": 4, "kv_tokens": 800}
RNG = np.random.default_rng(0)
SHORT, MIDDLE, LONG = (RNG.integers(0, SMALL["vocab_size"], n).astype(np.int32) for n in (1, 21, 62))
SAMPLES = 3
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
REQUESTS = [
    (LONG, GREEDY),
    *((MIDDLE, SamplingParams(max_new_tokens=NEW, ignore_eos=True, seed=seed)) for seed in range(SAMPLES)),
    (SHORT, GREEDY),
    *((LONG, SamplingParams(max_new_tokens=NEW, ignore_eos=True, seed=seed)) for seed in range(SAMPLES - 1)),
]


@functools.cache
def pair(kind: str):
    """A transformers model and our decoder with its weights."""
    model = hf_model(kind)
    return model, twin(model)


@functools.cache
def specs() -> dict[str, DecoderSpec]:
    configs = {name: kind.config(**(SMALL | kind.own)) for name, kind in KINDS.items()}
    return {
        name: spec_from_config(config.to_dict() | {"architectures": [KINDS[name].model.__name__]})
        for name, config in configs.items()
    }


def first(wanted: Callable[[DecoderSpec], bool]) -> str:
    """A kind of this kind."""
    return next(name for name, spec in specs().items() if wanted(spec))


def mixers(spec: DecoderSpec, kind: type):
    return [layer.mixer for layer in spec.layers if isinstance(layer.mixer, kind)]


def is_windowed(spec: DecoderSpec) -> bool:
    return any(mixer.window is not None for mixer in mixers(spec, AttentionSpec))


def is_chunked(spec: DecoderSpec) -> bool:
    return any(mixer.chunk is not None for mixer in mixers(spec, AttentionSpec))


def is_bounded(spec: DecoderSpec) -> bool:
    return any(mixer.softcap is not None for mixer in mixers(spec, AttentionSpec))


def has_sinks(spec: DecoderSpec) -> bool:
    return any(mixer.sinks for mixer in mixers(spec, AttentionSpec))


def is_latent(spec: DecoderSpec) -> bool:
    return any(mixer.indexer is None for mixer in mixers(spec, MlaSpec))


def is_indexed(spec: DecoderSpec) -> bool:
    return any(mixer.indexer is not None for mixer in mixers(spec, MlaSpec))


def is_compressed(spec: DecoderSpec) -> bool:
    return bool(mixers(spec, CompressedAttentionSpec))


def is_relative(spec: DecoderSpec) -> bool:
    return bool(mixers(spec, RelativeAttentionSpec))


def is_recurrent(spec: DecoderSpec) -> bool:
    return spec.recurrent


def has_experts(spec: DecoderSpec) -> bool:
    return spec.moe is not None


def is_plain(spec: DecoderSpec) -> bool:
    return not any(sort(spec) for sort in (*SORTS, has_experts))


SORTS = [
    is_windowed,
    is_chunked,
    is_bounded,
    has_sinks,
    is_latent,
    is_indexed,
    is_compressed,
    is_relative,
    is_recurrent,
]


@pytest.fixture
def tiny() -> Tiny:
    """Engines that land a step at once."""
    return Tiny()


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_writes_what_transformers_would_write(tiny, kind):
    asked_of(tiny, kind)


@pytest.mark.parametrize("sort", [is_plain, has_experts, *SORTS])
def test_steps_in_flight_change_nothing_whatever_the_sort_of_model(sort):
    asked_of(Tiny(1), first(sort))


def asked_of(tiny, kind):
    model, decoder = pair(kind)
    engine = tiny.engine(decoder, **KNOBS)
    answers = tiny.generate_all(engine, REQUESTS)
    assert answers[1].cached_tokens == 0
    assert [answer.cached_tokens for answer in answers[2 : SAMPLES + 1]] == (SAMPLES - 1) * [len(MIDDLE)]
    # What a later request has in common with an earlier one is found, but for a state, which stands elsewhere.
    branch = (np.concatenate((LONG[:41], MIDDLE)), GREEDY)
    (late,) = tiny.generate_all(engine, [branch])
    assert late.cached_tokens == (0 if decoder.spec.recurrent else 40)
    held_against(tiny, model, [*REQUESTS, branch], [*answers, late])
    if decoder.spec.moe is not None:
        same_experts(tiny, decoder, [*REQUESTS, branch], [*answers, late])


@pytest.mark.parametrize("sort", SORTS)
def test_preempting_and_computing_anew_changes_nothing(tiny, sort):
    _, decoder = pair(first(sort))
    asked = [
        (p, SamplingParams(max_new_tokens=18, ignore_eos=True, seed=i)) for i, p in enumerate((LONG, MIDDLE, MIDDLE))
    ]
    engine = tiny.engine(decoder, page_size=PAGE, prefill_chunk=13, kv_tokens=104)
    answers = tiny.generate_all(engine, asked)
    assert engine.stats()["preemptions"] > 0
    for one, other in zip(answers, tiny.generate_all(tiny.engine(decoder, page_size=PAGE), asked), strict=True):
        assert tiny.tokens(one) == tiny.tokens(other)
        np.testing.assert_allclose(tiny.logprobs(one), tiny.logprobs(other), atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3 moe"])
def test_sampled_logprobs_are_those_of_the_temperature_before_any_filter(tiny, kind):
    model, decoder = pair(kind)
    how = SamplingParams(temperature=0.7, top_k=9, top_p=0.9, max_new_tokens=20, seed=3, ignore_eos=True)
    asked = [(prompt, how) for prompt in (LONG, MIDDLE, SHORT)]
    held_against(tiny, model, asked, tiny.generate_all(tiny.engine(decoder, page_size=PAGE), asked))


def held_against(tiny, model, requests, answers):
    """Log-probs are those of full forwards, and greedy tokens the likeliest, or as likely to the last digits."""
    finished = whole(tiny, requests, answers)
    logits = dict(logits_of_each(model, finished))
    for i, ((prompt, how), answer) in enumerate(zip(requests, answers, strict=True)):
        tokens = finished[i][len(prompt) :]
        assert len(tokens) == how.max_new_tokens
        own = logits[i][len(prompt) - 1 : -1]
        if how.temperature == 0:
            assert (own.gather(1, tokens[:, None]).squeeze(1) >= own.max(-1).values - 1e-4).all()
        own = own / (how.temperature or 1.0)
        expected = own.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1).numpy()
        np.testing.assert_allclose(tiny.logprobs(answer), expected, atol=1e-4, rtol=1e-4)


def whole(tiny, requests, answers):
    return [torch.tensor([*prompt, *tiny.tokens(to)]) for (prompt, _), to in zip(requests, answers, strict=True)]


def logits_of_each(model, sequences):
    """Sequences of one length in one batch, as transformers takes them."""
    for length in {len(sequence) for sequence in sequences}:
        alike = [i for i, sequence in enumerate(sequences) if len(sequence) == length]
        with torch.no_grad():
            yield from zip(alike, model(torch.stack([sequences[i] for i in alike])).logits, strict=True)


def same_experts(tiny, decoder: Decoder, requests, answers):
    """The experts of every token that was computed are those of a full forward; the last one never was."""
    finished = whole(tiny, requests, answers)
    routing = Routing(record=True)
    with torch.no_grad():
        our_logits(decoder, finished, routing)
    recorded = torch.stack(routing.recorded, 1).split([len(sequence) for sequence in finished])
    for (prompt, _), answer, expected_TLk in zip(requests, answers, recorded, strict=True):
        routed_TLk = np.concatenate([span.extras["routed_experts"] for span in answer.spans])
        assert routed_TLk.dtype == np.uint8
        assert (routed_TLk[-1] == 255).all()
        assert routed_TLk[:-1].tolist() == expected_TLk[len(prompt) : -1].tolist()
