"""GenerateRequest options: prompt log-probs, top log-probs, penalties, constraints and output chunks."""

import asyncio
import functools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.native.test_oracle import LONG, MIDDLE, pair

from miles.backends.native.engine.request import GenerateRequest
from miles.backends.native.runner import model_runner
from miles.core.errors import EngineError
from miles.core.protocols import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
KNOBS = {"page_size": 4, "prefill_chunk": 13, "kv_tokens": 800}


def opened(engine, *asks):
    """The answers to requests made together, all at their end."""

    async def everyone():
        answers = [engine.submit(ask) for ask in asks]
        await asyncio.gather(*(answer.completion() for answer in answers))
        return answers

    return asyncio.run(everyone())


def logprobs_of(tokens, temperature=1.0):
    """What transformers gives at each position of the qwen3 model of the oracle, for the token after it."""
    model, _ = pair("qwen3")
    with torch.no_grad():
        return (model(torch.tensor(np.array(tokens))[None]).logits[0] / temperature).log_softmax(-1)


@functools.cache
def decoder():
    return pair("qwen3")[1]


# -- log-probs of the prompt ----------------------------------------------------------------


@pytest.mark.parametrize("logprob_start_len", [0, 1, 30, 61, 62])
def test_scores_are_the_log_probs_of_transformers_at_temperature_one(tiny, logprob_start_len, monkeypatch):
    monkeypatch.setattr(model_runner, "_MAX_PROMPT_LOGITS", 5 * decoder().spec.vocab_size)  # five rows at a time
    how = replace(GREEDY, temperature=0.7, max_new_tokens=2)
    engine = tiny.engine(decoder(), **KNOBS)
    opened(engine, GenerateRequest(tokens=LONG, sampling=GREEDY))
    (answer,) = opened(
        engine,
        GenerateRequest(
            tokens=LONG,
            sampling=how,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=3,
            token_ids_logprob=(7, 0, 7),
        ),
    )
    expected = logprobs_of(LONG)
    scores = answer.prompt_logprobs
    places = range(logprob_start_len, len(LONG))
    assert scores.first == logprob_start_len
    assert len(scores.logprobs) == len(scores.top_logprobs) == len(scores.token_ids_logprobs) == len(places)
    for place, logprob, tops, watched in zip(
        places, scores.logprobs, scores.top_logprobs, scores.token_ids_logprobs, strict=True
    ):
        if place == 0:
            assert (logprob, tops, watched) == (None, (), ())
            continue
        before = expected[place - 1]
        assert logprob == pytest.approx(float(before[LONG[place]]), abs=1e-4)
        assert [value for _, value in tops] == pytest.approx(before.topk(3).values.tolist(), abs=1e-4)
        assert [before[token].item() for token, _ in tops] == pytest.approx([v for _, v in tops], abs=1e-4)
        assert [token for token, _ in watched] == [7, 0, 7]
        assert [value for _, value in watched] == pytest.approx(before[[7, 0, 7]].tolist(), abs=1e-4)
    (span,) = asyncio.run(answer.completion()).spans
    assert (span.tokens.tolist(), span.version) == (answer.tokens, answer.version)
    # What is scored is computed, however much of it is known.
    assert answer.cached_tokens == max(0, (logprob_start_len - 1) // 4 * 4 if logprob_start_len < 62 else 61)
    tiny.check(engine)


def test_a_scored_prompt_does_not_take_the_stamp_off_what_is_drawn_after_it(tiny):
    engine = tiny.engine(decoder(), **KNOBS)
    scored, plain = opened(
        engine,
        GenerateRequest(tokens=LONG, sampling=GREEDY, logprob_start_len=0),
        GenerateRequest(tokens=LONG, sampling=GREEDY),
    )
    assert [span.version for span in scored.req.build_completion({}).spans] == [engine.version]
    assert tiny.tokens(scored.req.build_completion({})) == tiny.tokens(plain.req.build_completion({}))


def test_a_request_for_no_tokens_scores_the_prompt_and_ends(tiny):
    engine = tiny.engine(decoder(), **KNOBS)
    nothing = replace(GREEDY, max_new_tokens=0)
    scored, bare, usual = opened(
        engine,
        GenerateRequest(tokens=MIDDLE, sampling=nothing, logprob_start_len=0),
        GenerateRequest(tokens=MIDDLE, sampling=nothing),
        GenerateRequest(tokens=MIDDLE, sampling=GREEDY),
    )
    tiny.check(engine)
    expected = logprobs_of(MIDDLE)[:-1].gather(1, torch.tensor(MIDDLE[1:]).long()[:, None]).squeeze(1)
    assert scored.prompt_logprobs.logprobs[0] is None
    assert list(scored.prompt_logprobs.logprobs[1:]) == pytest.approx(expected.tolist(), abs=1e-4)
    for answer in (scored, bare):
        assert (answer.finish_reason.kind, answer.finish_reason.length, answer.tokens) == ("length", 0, [])
        assert asyncio.run(answer.completion()).spans == ()
        assert answer.version.number == 0
    assert bare.prompt_logprobs is None
    assert len(usual.tokens) == 8
    with pytest.raises(EngineError, match="max_new_tokens is 0, must be at least 1"):
        tiny.generate_all(engine, [(MIDDLE, nothing)])


def test_scores_survive_preemption_and_start_over_with_new_weights(tiny):
    prompts = tiny.prompts(5, low=30, high=40)
    asks = [
        GenerateRequest(
            tokens=p, sampling=SamplingParams(max_new_tokens=20, seed=i, ignore_eos=True), logprob_start_len=2
        )
        for i, p in enumerate(prompts)
    ]
    roomy = opened(tiny.engine(page_size=4), *asks)
    engine = tiny.engine(page_size=4, kv_tokens=88, prefill_chunk=7)
    for one, other in zip(opened(engine, *asks), roomy, strict=True):
        assert one.tokens == other.tokens
        assert list(one.prompt_logprobs.logprobs) == pytest.approx(list(other.prompt_logprobs.logprobs), abs=2e-5)
    assert engine.stats()["preemptions"] > 0

    old, new = tiny.decoder(1), tiny.decoder(2)
    engine = tiny.engine(old, page_size=4, prefill_chunk=7)

    async def swapped():
        answer = engine.submit(asks[0])
        while engine.stats()["prefilled_tokens"] < 15:
            await asyncio.sleep(0)
        tiny.publish(engine, new, number=1)
        await answer.completion()
        return answer

    answer = asyncio.run(swapped())
    (other,) = opened(tiny.engine(new), asks[0])
    assert list(answer.prompt_logprobs.logprobs) == pytest.approx(list(other.prompt_logprobs.logprobs), abs=2e-5)
    assert answer.version.number == 1
    tiny.check(engine)


# -- beside each drawn token ----------------------------------------------------------------


def test_the_likeliest_and_the_watched_tokens_beside_each_drawn_one_are_those_of_transformers(tiny):
    how = SamplingParams(temperature=0.7, top_k=9, max_new_tokens=9, seed=4, ignore_eos=True)
    asks = [
        GenerateRequest(tokens=MIDDLE, sampling=how, top_logprobs_num=4),
        GenerateRequest(tokens=LONG, sampling=how),
        GenerateRequest(tokens=LONG, sampling=how, token_ids_logprob=(5, 2)),
        GenerateRequest(tokens=MIDDLE, sampling=how, top_logprobs_num=2, token_ids_logprob=(3,)),
        GenerateRequest(tokens=MIDDLE, sampling=how, top_logprobs_num=100_000),
    ]
    answers = opened(tiny.engine(decoder(), **KNOBS), *asks)
    assert answers[0].tokens == answers[3].tokens == answers[4].tokens
    for ask, answer in zip(asks, answers, strict=True):
        expected = logprobs_of([*ask.tokens, *answer.tokens], 0.7)[len(ask.tokens) - 1 : -1]
        most = min(ask.top_logprobs_num, decoder().spec.vocab_size)
        assert len(answer.top_logprobs) == (9 if ask.top_logprobs_num else 0)
        assert len(answer.token_ids_logprobs) == (9 if ask.token_ids_logprob else 0)
        for row, tops in zip(expected, answer.top_logprobs, strict=False):
            assert [value for _, value in tops] == pytest.approx(row.topk(most).values.tolist(), abs=2e-4)
        for row, watched in zip(expected, answer.token_ids_logprobs, strict=False):
            assert watched == tuple(
                (token, pytest.approx(row[token].item(), abs=2e-4)) for token in ask.token_ids_logprob
            )


# -- how tokens are drawn -------------------------------------------------------------------


def penalised(logits, drawn, *, frequency=0.0, presence=0.0, repetition=1.0):
    """The rule, written out."""
    logits = logits.clone()
    for token, count in Counter(drawn).items():
        logits[token] -= frequency * count + presence
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    return logits


@pytest.mark.parametrize(
    "penalties",
    [
        {"frequency_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 1.8},
        {"frequency_penalty": 0.3, "presence_penalty": -0.4, "repetition_penalty": 1.2},
    ],
)
def test_penalties_count_what_was_drawn_and_change_choice_and_log_prob_by_the_written_rule(tiny, penalties):
    model, _ = pair("qwen3")
    ask = GenerateRequest(tokens=MIDDLE, sampling=replace(GREEDY, max_new_tokens=12), **penalties)
    answer, beside = opened(tiny.engine(decoder(), **KNOBS), ask, GenerateRequest(tokens=LONG, sampling=GREEDY))
    rule = {name.removesuffix("_penalty"): value for name, value in penalties.items()}
    tokens = list(MIDDLE)
    for token, logprob in zip(answer.tokens, answer.logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(np.array(tokens))[None]).logits[0, -1]
        expected = penalised(logits, tokens[len(MIDDLE) :], **rule)
        assert expected[token] >= expected.max() - 1e-4
        assert logprob == pytest.approx(expected.log_softmax(-1)[token].item(), abs=1e-4)
        tokens.append(token)
    (plain,) = opened(tiny.engine(decoder(), **KNOBS), GenerateRequest(tokens=LONG, sampling=GREEDY))
    assert beside.tokens == plain.tokens


def test_a_bias_is_added_to_the_logits_and_may_change_from_request_to_request(tiny):
    asks = [
        GenerateRequest(tokens=MIDDLE, sampling=replace(GREEDY, temperature=1.0, seed=1), logit_bias=bias)
        for bias in ({3: 1000.0}, {}, {4: 2.5, 9: -1.5}, {3: -1000.0})
    ]
    always, plain, some, _ = opened(tiny.engine(decoder(), **KNOBS), *asks)
    assert always.tokens == [3] * 8
    assert always.logprobs == pytest.approx([0.0] * 8, abs=1e-6)
    (alone,) = opened(tiny.engine(decoder(), **KNOBS), asks[1])
    assert plain.tokens == alone.tokens
    model, _ = pair("qwen3")
    with torch.no_grad():
        logits = model(torch.tensor(np.array([*MIDDLE, *some.tokens]))[None]).logits[0, len(MIDDLE) - 1 : -1]
    logits[:, 4] += 2.5
    logits[:, 9] -= 1.5
    expected = logits.log_softmax(-1).gather(1, torch.tensor(some.tokens)[:, None]).squeeze(1)
    assert some.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_no_end_comes_before_the_least_number_of_tokens(tiny):
    engine = tiny.engine()
    how = SamplingParams(temperature=0.0, max_new_tokens=9, stop_token_ids=(5,))
    wanted = {1: 1000.0, 5: 900.0}
    for least in (0, 3, 9):
        (answer,) = opened(
            engine, GenerateRequest(tokens=tiny.prompts(1)[0], sampling=how, logit_bias=wanted, min_new_tokens=least)
        )
        assert not {1, 5} & set(answer.tokens[:least])
        assert answer.tokens[least:] == [1] * (least < 9)
        assert (answer.finish_reason.kind, answer.finish_reason.matched) == (
            ("stop", 1) if least < 9 else ("length", None)
        )
    tiny.check(engine)


class Song:
    """A constraint: at each place one of a set, for so many places; the mask as truth values or as bits."""

    def __init__(self, places, vocabulary, *, bits=False):
        self.places, self.vocabulary, self.bits = list(places), vocabulary, bits
        self.tokens = []

    def get_allowed_tokens(self):
        truth = np.zeros(self.vocabulary, np.bool_)
        truth[list(self.places[len(self.tokens)])] = True
        if not self.bits:
            return truth
        words = np.zeros(-(-self.vocabulary // 32), np.uint32)
        for token in np.flatnonzero(truth):
            words[token // 32] |= np.uint32(1) << np.uint32(token % 32)
        return words.view(np.int32)

    def advance(self, token):
        self.tokens.append(token)

    def is_finished(self):
        return len(self.tokens) == len(self.places)


@pytest.mark.parametrize("bits", [False, True])
def test_a_constraint_decides_what_may_be_drawn_and_when_it_ends(tiny, bits):
    places = [{3, 9, 31}, {32}, {5, 6, 60}, {1, 2}, {7, 8}]
    how = SamplingParams(max_new_tokens=30, seed=3, ignore_eos=True)
    prompt = tiny.prompts(1)[0]
    engine = tiny.engine(page_size=4)
    songs = [Song(places, 61, bits=bits) for _ in range(3)]
    *sung, free = opened(
        engine,
        *(
            GenerateRequest(tokens=prompt, sampling=replace(how, seed=i), constraint=song)
            for i, song in enumerate(songs)
        ),
        GenerateRequest(tokens=prompt, sampling=how),
    )
    tiny.check(engine)
    for answer, song in zip(sung, songs, strict=True):
        assert song.tokens == answer.tokens
        assert all(token in place for token, place in zip(answer.tokens, places, strict=True))
        assert (answer.finish_reason.kind, answer.finish_reason.matched) == ("stop", answer.tokens[-1])
        assert answer.logprobs[1] == pytest.approx(0.0, abs=1e-6)
    assert len({tuple(answer.tokens) for answer in sung}) > 1
    assert free.tokens == tiny.tokens(tiny.alone((prompt, how)))
    # Log-probs are those of what was allowed.
    (watched,) = opened(
        tiny.engine(),
        GenerateRequest(tokens=prompt, sampling=how, constraint=Song(places, 61), token_ids_logprob=tuple(range(61))),
    )
    for place, row in zip(places, watched.token_ids_logprobs, strict=True):
        shares = {token: np.exp(logprob) for token, logprob in row if np.isfinite(logprob)}
        assert set(shares) == place
        assert sum(shares.values()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(("places", "message"), [([{3}, set(), {4}], "allows no token"), ([{3}], "broken song")])
def test_what_a_constraint_breaks_is_its_own_requests_alone(tiny, places, message):
    class Broken(Song):
        def is_finished(self):
            if len(self.tokens) == len(self.places):
                raise RuntimeError("broken song")
            return False

    engine = tiny.engine()
    request = (tiny.prompts(1)[0], SamplingParams(max_new_tokens=12, ignore_eos=True))

    async def story():
        broken = engine.submit(GenerateRequest(tokens=request[0], sampling=request[1], constraint=Broken(places, 61)))
        whole = asyncio.create_task(engine.generate(*request))
        with pytest.raises((EngineError, RuntimeError), match=message):
            await broken.completion()
        return await whole

    tiny.same(asyncio.run(story()), tiny.alone(request))
    tiny.check(engine)
    with pytest.raises(EngineError, match="allows no token"):
        opened(engine, GenerateRequest(tokens=request[0], sampling=request[1], constraint=Song([set()], 61)))


def test_preemption_changes_nothing_of_all_this(tiny):
    def asks():
        how = SamplingParams(max_new_tokens=24, ignore_eos=True)
        for i, prompt in enumerate(tiny.prompts(6, low=9, high=20)):
            sampling = replace(how, seed=i)
            yield GenerateRequest(
                tokens=prompt, sampling=sampling, frequency_penalty=0.7, top_logprobs_num=2, token_ids_logprob=(i,)
            )
            yield GenerateRequest(
                tokens=prompt, sampling=sampling, constraint=Song(24 * [{i, 9, 13}], 61), repetition_penalty=1.3
            )

    roomy = opened(tiny.engine(page_size=4), *asks())
    engine = tiny.engine(page_size=4, kv_tokens=120, max_running=5)
    for one, other in zip(opened(engine, *asks()), roomy, strict=True):
        assert one.tokens == other.tokens
        assert [t for row in one.top_logprobs for t, _ in row] == [t for row in other.top_logprobs for t, _ in row]
        assert len(one.top_logprobs) == len(other.top_logprobs)
        assert len(one.token_ids_logprobs) == len(other.token_ids_logprobs)
    assert engine.stats()["preemptions"] > 0
    tiny.check(engine)


# -- what can never be served ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"logprob_start_len": 4}, "logprob_start_len is 4, must be between 0 and the prompt's 3 tokens"),
        ({"logprob_start_len": -1}, "logprob_start_len is -1"),
        ({"top_logprobs_num": -1}, "top_logprobs_num is -1"),
        ({"token_ids_logprob": (3, 61)}, "token_ids_logprob names token 61, outside the vocabulary of 61"),
        ({"logit_bias": {-2: 1.0}}, "logit_bias names token -2"),
        ({"logit_bias": {2: float("nan")}}, "logit_bias is not a number between"),
        ({"frequency_penalty": 2.1}, "frequency_penalty is 2.1"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"min_new_tokens": 9}, "min_new_tokens is 9"),
        ({"stop_regex": ("x",)}, "stop strings need a tokenizer"),
        ({"sampling": SamplingParams(max_new_tokens=-1)}, "max_new_tokens is -1, must be at least 0"),
    ],
)
def test_an_ask_that_makes_no_sense_is_refused_in_one_sentence(tiny, more, message):
    engine = tiny.engine()
    ask = replace(
        GenerateRequest(tokens=np.array([2, 3, 4], np.int32), sampling=SamplingParams(max_new_tokens=8)), **more
    )
    with pytest.raises(EngineError, match=message):
        opened(engine, ask)
    tiny.check(engine)


def test_a_pattern_that_is_none_is_refused(tiny):
    ask = GenerateRequest(tokens=np.array([2], np.int32), sampling=GREEDY, stop_regex=("(",))
    with pytest.raises(EngineError, match=r"stop_regex '\(' is not a regular expression"):
        opened(tiny.engine(decode=str), ask)
