"""Drafts change the number of steps, and no token, log-prob, expert or reason to stop."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.native.conftest import Tiny
from tests.backends.native.test_oracle import (
    first,
    has_experts,
    has_sinks,
    is_chunked,
    is_compressed,
    is_indexed,
    is_latent,
    is_plain,
    is_recurrent,
    is_relative,
    is_windowed,
    pair,
)
from tests.models.oracle import SMALL

from miles.backends.native.engine.draft_tree import DraftBranch
from miles.backends.native.engine.ngram_draft import DraftedTokens, NgramDrafter
from miles.backends.native.engine.request import GenerateRequest
from miles.core.errors import UsageError
from miles.core.protocols import SamplingParams
from miles.core.token_fields import ROUTED_EXPERTS
from miles.kernels.numerics import BATCH_INVARIANT
from miles.models.decoder import Decoder

NGRAM = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 5}
TREE = {
    "speculative_algorithm": "ngram",
    "speculative_num_draft_tokens": 8,
    "speculative_num_branches": 3,
    "speculative_adaptive": False,
}
SMALL_PAGES = {"page_size": 4, "prefill_chunk": 13, "max_running": 30, "kv_tokens": 1600}


def two_epochs(tiny, engine, requests):
    """The completions of requests that are sampled twice, the second time with drafts from the first."""
    return tiny.generate_all(engine, requests), tiny.generate_all(engine, requests)


def experts_of(completion):
    return [span.extras.get(ROUTED_EXPERTS) for span in completion.spans]


@pytest.mark.parametrize(
    "sort",
    [
        is_plain,
        has_experts,
        is_windowed,
        is_chunked,
        has_sinks,
        is_latent,
        is_indexed,
        is_compressed,
        is_relative,
        is_recurrent,
    ],
    ids=lambda f: f.__name__,
)
def test_drafts_change_nothing_whatever_the_sort_of_model(sort):
    tiny = Tiny()
    _, decoder = pair(first(sort))
    requests = [(prompt % SMALL["vocab_size"], how) for prompt, how in tiny.mixed(6, new=20)]
    requests += [(requests[0][0], SamplingParams(max_new_tokens=20, seed=seed, ignore_eos=True)) for seed in range(3)]
    expected = tiny.generate_all(tiny.engine(decoder, **SMALL_PAGES), requests)
    engine = tiny.engine(decoder, **SMALL_PAGES, **NGRAM, speculative_adaptive=False)
    for epoch in two_epochs(tiny, engine, requests):
        for one, other in zip(expected, epoch, strict=True):
            tiny.same(one, other)
            np.testing.assert_equal(experts_of(other), experts_of(one))
    stats = engine.stats()
    assert stats["accepted_draft_tokens"] > 20
    assert stats["drafted_tokens"] > stats["accepted_draft_tokens"]


def test_with_batch_invariant_kernels_they_change_no_bit(tiny):
    decoder = Tiny().decoder(spec=Tiny.moe_spec)
    exact = Decoder(decoder.spec, device="cpu", dtype=torch.float32, numerics=BATCH_INVARIANT)
    exact.load_state_dict(decoder.state_dict())
    requests = tiny.mixed(8, new=20)
    expected = tiny.generate_all(tiny.engine(exact, **SMALL_PAGES), requests)
    engine = tiny.engine(exact, **SMALL_PAGES, **NGRAM)
    for epoch in two_epochs(tiny, engine, requests):
        for one, other in zip(expected, epoch, strict=True):
            assert tiny.tokens(one) == tiny.tokens(other)
            assert tiny.logprobs(one).tobytes() == tiny.logprobs(other).tobytes()
            np.testing.assert_equal(experts_of(other), experts_of(one))
    assert engine.stats()["accepted_draft_tokens"] > 20


class KnownDrafter(NgramDrafter):
    """Drafts what is known to be sampled: in a chain, in a branch at its start, or in one behind its first token."""

    def __init__(self, requests, completions):
        super().__init__(1000, 2)
        self.known = {
            (*prompt.tolist(), how.seed): [*prompt.tolist(), *Tiny().tokens(completion)]
            for (prompt, how), completion in zip(requests, completions, strict=True)
        }

    def draft(self, reqs, lengths):
        return [
            self.draft_known(req, length) if length > 2 else None for req, length in zip(reqs, lengths, strict=True)
        ]

    def draft_known(self, req, length):
        start = len(req.tokens)
        known = self.known[*req.tokens[: req.prompt_length], req.request.sampling.seed]
        right = known[start : start + length]
        if len(right) < 3:
            return None
        wrong = [(token + 1) % 5 for token in right]
        others = {0: right[:0], 1: right[:0], 2: right[:1], 3: None}[start % 4]
        if others is None:
            return DraftedTokens(right, 2, [DraftBranch(1, wrong[1:])])
        fork = len(others)
        return DraftedTokens([*others, *wrong[fork:]], 2, [DraftBranch(fork, right[fork:])])


@pytest.mark.parametrize(
    ("sort", "size"),
    [
        (is_plain, 4),
        (is_plain, 16),
        (has_experts, 4),
        (is_windowed, 4),
        (is_latent, 4),
        (is_compressed, 4),
        (is_relative, 4),
        (is_recurrent, 4),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_accepted_branches_change_nothing_whatever_the_sort_of_model(sort, size):
    tiny = Tiny()
    _, decoder = pair(first(sort))
    sizes = SMALL_PAGES | {"page_size": size, "max_running": 60}
    requests = [(prompt % SMALL["vocab_size"], how) for prompt, how in tiny.mixed(4, new=20)]
    requests += [(requests[0][0], SamplingParams(max_new_tokens=20, seed=seed, ignore_eos=True)) for seed in range(2)]
    expected = tiny.generate_all(tiny.engine(decoder, **sizes), requests)
    engine = tiny.engine(decoder, **sizes, **TREE)
    engine._speculation._drafter = KnownDrafter(requests, expected)
    for one, other in zip(expected, tiny.generate_all(engine, requests), strict=True):
        tiny.same(one, other)
        np.testing.assert_equal(experts_of(other), experts_of(one))
    stats = engine.stats()
    assert stats["draft_branches"] > stats["accepted_draft_branches"] > 3


@pytest.mark.parametrize("spec", [Tiny.spec, Tiny.moe_spec], ids=["dense", "experts"])
def test_with_batch_invariant_kernels_branches_change_no_bit(tiny, spec):
    decoder = tiny.decoder(spec=spec)
    exact = Decoder(decoder.spec, device="cpu", dtype=torch.float32, numerics=BATCH_INVARIANT)
    exact.load_state_dict(decoder.state_dict())
    requests = tiny.mixed(5, new=16)
    sizes = SMALL_PAGES | {"max_running": 60}
    expected = tiny.generate_all(tiny.engine(exact, **sizes), requests)
    engine = tiny.engine(exact, **sizes, **TREE)
    engine._speculation._drafter = KnownDrafter(requests, expected)
    for one, other in zip(expected, tiny.generate_all(engine, requests), strict=True):
        assert tiny.tokens(one) == tiny.tokens(other)
        assert tiny.logprobs(one).tobytes() == tiny.logprobs(other).tobytes()
        np.testing.assert_equal(experts_of(other), experts_of(one))
    assert engine.stats()["accepted_draft_branches"] > 5


def test_branches_of_aborted_and_retracted_requests_are_freed(tiny):
    decoder = tiny.decoder(spec=replace(Tiny.spec, vocab_size=12, eos_token_ids=()))
    engine = tiny.engine(decoder, **SMALL_PAGES | {"max_running": 60}, **TREE)
    requests = [
        replace(REQUEST, rid=str(seed), sampling=replace(REQUEST.sampling, max_new_tokens=60, seed=seed))
        for seed in range(4)
    ]

    async def generate():
        outputs = [engine.submit(request) for request in requests]
        async for chunk in outputs[0]:
            if chunk.first + len(chunk.tokens) >= 20:
                break
        await engine.pause("retract")
        await engine.resume()
        async for chunk in outputs[1]:
            if chunk.first + len(chunk.tokens) >= 30:
                break
        await engine.abort("2")
        return [await output.completion() for output in outputs]

    completions = asyncio.run(generate())
    tiny.check(engine)
    assert completions[2].finish_reason == "abort"
    for request, completion in zip(requests, completions, strict=True):
        ((expected, _),) = submit_all(tiny.engine(decoder), [request])
        found = tiny.tokens(completion)
        assert found == tiny.tokens(expected)[: len(found)]
    assert engine.stats()["accepted_draft_branches"] > 0


def test_completions_count_their_drafts(tiny):
    """What the requests count adds up to what the engine counts, and without speculation there is nothing to count."""
    requests = tiny.mixed(6, new=20)
    engine = tiny.engine(**NGRAM)
    counts = [completion.speculation for epoch in two_epochs(tiny, engine, requests) for completion in epoch]
    stats = engine.stats()
    assert sum(each.verifications for each in counts) == stats["draft_chains"]
    assert sum(each.drafted for each in counts) == stats["drafted_tokens"]
    assert sum(each.accepted for each in counts) == stats["accepted_draft_tokens"] > 0
    for each in counts:
        assert each.verifications == sum(each.histogram)
        assert each.accepted == sum(accepted * count for accepted, count in enumerate(each.histogram))
        assert len(each.histogram) <= NGRAM["speculative_num_draft_tokens"] + 1
    assert all(completion.speculation is None for completion in tiny.generate_all(tiny.engine(), requests))


def submit_all(engine, requests):
    async def everyone():
        outputs = [engine.submit(request) for request in requests]
        return [(await output.completion(), output) for output in outputs]

    return asyncio.run(everyone())


def decode(tokens):
    return "".join(chr(97 + token % 26) for token in tokens)


REQUEST = GenerateRequest(
    tokens=np.array([5, 6, 7, 5, 6, 7, 5, 6], np.int32),
    sampling=SamplingParams(max_new_tokens=40, seed=3, ignore_eos=True),
)
EDITED = {
    "frequency": replace(REQUEST, frequency_penalty=0.5),
    "presence": replace(REQUEST, presence_penalty=1.5),
    "repetition": replace(REQUEST, repetition_penalty=1.3),
    "bias": replace(REQUEST, logit_bias={7: 3.0}),
    "top log-probs": replace(REQUEST, top_logprobs_num=4, token_ids_logprob=(3, 9)),
    "least tokens": replace(REQUEST, sampling=replace(REQUEST.sampling, ignore_eos=False), min_new_tokens=12),
    "filters": replace(REQUEST, sampling=replace(REQUEST.sampling, top_p=0.7, top_k=9)),
}


@pytest.mark.parametrize("name", EDITED)
def test_penalties_filters_and_queried_logprobs_are_those_without_drafts(tiny, name):
    requests = [EDITED[name], replace(EDITED[name], rid="again"), REQUEST]
    decoder = tiny.decoder(scale=6.0)
    expected = submit_all(tiny.engine(decoder, decode=decode), requests)
    engine = tiny.engine(decoder, decode=decode, **NGRAM)
    for _ in range(2):
        for (one, plain), (other, output) in zip(expected, submit_all(engine, requests), strict=True):
            tiny.same(one, other)
            assert [[token for token, _ in row] for row in output.top_logprobs] == [
                [token for token, _ in row] for row in plain.top_logprobs
            ]
            assert len(output.token_ids_logprobs) == len(plain.token_ids_logprobs)
    assert engine.stats()["accepted_draft_tokens"] > 0


@pytest.mark.parametrize("length", [1, 3, 7])
def test_a_stop_string_among_accepted_drafts_ends_the_request_there(tiny, length):
    decoder = tiny.decoder()
    ((whole, _),) = submit_all(tiny.engine(decoder, decode=decode), [REQUEST])
    stop = decode(tiny.tokens(whole))[length : length + 3]
    stopping = replace(REQUEST, sampling=replace(REQUEST.sampling, stop=(stop,)), top_logprobs_num=2)
    ((expected, _),) = submit_all(tiny.engine(decoder, decode=decode), [stopping])
    engine = tiny.engine(decoder, decode=decode, **NGRAM)
    submit_all(engine, [REQUEST])
    ((found, output),) = submit_all(engine, [stopping])
    tiny.same(expected, found)
    assert found.finish_reason == "stop"
    assert len(output.top_logprobs) == len(tiny.tokens(found))


class Even:
    """Allows even tokens, each fourth of which is small, and counts what it was told."""

    def __init__(self, vocab_size, seen=()):
        self.vocab_size, self.seen = vocab_size, list(seen)

    def get_allowed_tokens(self):
        tokens = np.arange(self.vocab_size)
        return (tokens % 2 == 0) & (tokens < (10 if len(self.seen) % 4 == 0 else self.vocab_size))

    def advance(self, token):
        assert self.get_allowed_tokens()[token]
        self.seen.append(token)

    def is_finished(self):
        return len(self.seen) == 30

    def copy(self):
        return Even(self.vocab_size, self.seen)


@pytest.mark.parametrize("options", [NGRAM, TREE], ids=["chain", "tree"])
def test_a_grammar_is_obeyed_by_drafts(tiny, options):
    """The same tokens and log-probs as without drafts, for a request with a grammar and one beside it."""
    decoder, size = tiny.decoder(), tiny.spec.vocab_size
    plain, engine = tiny.engine(decoder, decode=decode), tiny.engine(decoder, decode=decode, **options)
    for seed in (1, 1, 2):
        sampling = replace(REQUEST.sampling, seed=seed, temperature=0.5)
        grammars = [Even(size), Even(size)]
        (expected, beside), (found, other) = (
            [
                completion
                for completion, _ in submit_all(
                    each, [replace(REQUEST, constraint=grammar, sampling=sampling, frequency_penalty=0.1), REQUEST]
                )
            ]
            for each, grammar in zip((plain, engine), grammars, strict=True)
        )
        tiny.same(expected, found)
        tiny.same(beside, other)
        assert tiny.tokens(found) == grammars[1].seen and len(grammars[1].seen) == 30
        assert found.speculation.verifications > 0 or seed == 1
    assert found.speculation is not None
    tiny.check(engine)
    before = engine.stats()["accepted_draft_tokens"]
    ((completion, _),) = submit_all(engine, [replace(REQUEST, constraint=Even(size))])
    assert completion.speculation.accepted == engine.stats()["accepted_draft_tokens"] - before
    ((completion, _),) = submit_all(engine, [replace(REQUEST, constraint=Even(size))])
    assert completion.speculation.accepted > 5


def test_weights_may_change_while_drafts_are_made(tiny):
    """Tokens of both versions are those of engines that had their tokens so far as prompt."""
    decoders = [tiny.decoder(seed=seed) for seed in (0, 1)]
    engine = tiny.engine(decoders[0], **NGRAM)

    async def generate():
        output = engine.submit(replace(REQUEST, sampling=replace(REQUEST.sampling, max_new_tokens=60)))
        async for chunk in output:
            if chunk.first + len(chunk.tokens) >= 20 and engine.version.number == 0:
                tiny.publish(engine, decoders[1], number=1)
        return await output.completion()

    completion = asyncio.run(generate())
    assert [span.version.number for span in completion.spans] == [0, 1]
    plain = tiny.engine(decoders[0])
    ((expected, _),) = submit_all(plain, [REQUEST])
    count = min(len(completion.spans[0]), 40)
    assert tiny.tokens(completion)[:count] == tiny.tokens(expected)[:count]
    assert sum(len(span) for span in completion.spans) == 60


DRAFT_MODEL = {
    "speculative_algorithm": "draft-model",
    "speculative_num_draft_tokens": 4,
    "speculative_adaptive": False,
}


def perturb(decoder, seed, scale):
    """A model that is much like another."""
    draft = Decoder(decoder.spec, device="cpu", dtype=torch.float32, numerics=decoder.numerics)
    draft.load_state_dict(decoder.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += scale * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return draft


@pytest.mark.parametrize(("scale", "least", "most"), [(0.0, 1.0, 1.0), (0.1, 0.2, 0.9)])
def test_drafts_of_another_model_change_nothing(tiny, scale, least, most):
    decoder = tiny.decoder(spec=Tiny.moe_spec, scale=6.0)
    requests = [(prompt, replace(how, ignore_eos=True)) for prompt, how in tiny.mixed(8)]
    requests += [(requests[0][0], SamplingParams(max_new_tokens=30, seed=seed, ignore_eos=True)) for seed in range(3)]
    expected = tiny.generate_all(tiny.engine(decoder, **SMALL_PAGES), requests)
    engine = tiny.engine(decoder, draft=perturb(decoder, 0, scale), **SMALL_PAGES, **DRAFT_MODEL)
    for one, other in zip(expected, tiny.generate_all(engine, requests), strict=True):
        tiny.same(one, other)
        np.testing.assert_equal(experts_of(other), experts_of(one))
    stats = engine.stats()
    assert stats["drafted_tokens"] > 50
    assert least <= stats["accepted_draft_tokens"] / stats["drafted_tokens"] <= most


def test_branches_of_a_draft_model_change_nothing(tiny):
    decoder = tiny.decoder(spec=replace(Tiny.moe_spec, vocab_size=20, eos_token_ids=()), scale=6.0)
    requests = [(prompt % 20, replace(how, max_new_tokens=25)) for prompt, how in tiny.mixed(6)]
    expected = tiny.generate_all(tiny.engine(decoder, **SMALL_PAGES), requests)
    options = DRAFT_MODEL | {"speculative_num_branches": 3, "speculative_num_draft_tokens": 5}
    engine = tiny.engine(decoder, draft=perturb(decoder, 0, 0.6), **SMALL_PAGES, **options)
    for one, other in zip(expected, tiny.generate_all(engine, requests), strict=True):
        tiny.same(one, other)
        np.testing.assert_equal(experts_of(other), experts_of(one))
    stats = engine.stats()
    assert stats["draft_branches"] > stats["accepted_draft_branches"] > 0


def test_an_accepted_branch_is_known_to_the_draft_model(tiny):
    """A draft model that is the policy drafts nothing but accepted tokens, also behind a branch that was taken."""
    decoder = tiny.decoder(scale=6.0)
    options = DRAFT_MODEL | {"speculative_num_branches": 2, "speculative_num_draft_tokens": 3}
    engine = tiny.engine(decoder, draft=perturb(decoder, 0, 0.0), page_size=4, **options)
    drafter = engine._speculation._drafter
    propose = drafter.draft
    swapped = []

    def swap(reqs, lengths):
        """Exchange the first token of each other chain with its branch."""
        drafts = propose(reqs, lengths)
        if any(draft.branches for draft in drafts) and len(swapped) % 2 == 0:
            drafts = [
                draft._replace(tokens=draft.branches[0].tokens, branches=[DraftBranch(0, draft.tokens[:1])])
                if draft.branches
                else draft
                for draft in drafts
            ]
        swapped.append(len(drafts))
        return drafts

    drafter.draft = swap
    request = (tiny.prompts(1)[0], SamplingParams(max_new_tokens=40, seed=4, ignore_eos=True))
    (expected,) = tiny.generate_all(tiny.engine(decoder), [request])
    (found,) = tiny.generate_all(engine, [request])
    tiny.same(expected, found)
    stats = engine.stats()
    # Each verification accepts a whole chain, or the branch that stands for its first token.
    assert stats["accepted_draft_branches"] >= 5
    assert found.speculation.histogram[0] == 0


def test_a_draft_model_sleeps_and_is_filled_again(tiny):
    decoder = tiny.decoder(scale=6.0)
    requests = tiny.mixed(3)
    expected = tiny.generate_all(tiny.engine(decoder), requests)
    engine = tiny.engine(decoder, draft=perturb(decoder, 0, 0.0), **DRAFT_MODEL)

    async def generate():
        outputs = [engine.submit(GenerateRequest(tokens=tokens, sampling=how)) for tokens, how in requests]
        async for _ in outputs[0]:
            break
        await engine.sleep()
        await engine.wake()
        return [await output.completion() for output in outputs]

    for one, other in zip(expected, asyncio.run(generate()), strict=True):
        tiny.same(one, other)
    assert engine.stats()["accepted_draft_tokens"] > 0


def test_a_draft_model_with_another_vocabulary_drafts_what_both_have(tiny):
    decoder = tiny.decoder(scale=6.0)
    requests = tiny.mixed(4)
    expected = tiny.generate_all(tiny.engine(decoder), requests)
    for size in (40, 90):
        other = tiny.decoder(seed=3, spec=replace(Tiny.spec, vocab_size=size))
        engine = tiny.engine(decoder, draft=other, **DRAFT_MODEL)
        for one, found in zip(expected, tiny.generate_all(engine, requests), strict=True):
            tiny.same(one, found)
        assert engine.stats()["drafted_tokens"] > 0


def test_a_draft_model_that_costs_as_much_as_the_policy_is_not_used(tiny):
    decoder = tiny.decoder(scale=6.0)
    engine = tiny.engine(decoder, draft=perturb(decoder, 0, 0.0), **DRAFT_MODEL | {"speculative_adaptive": True})
    tiny.generate_all(engine, tiny.mixed(3))
    assert engine.stats()["drafted_tokens"] == 0


def test_the_algorithm_and_the_draft_model_need_each_other(tiny):
    with pytest.raises(UsageError, match="need each other"):
        tiny.engine(**DRAFT_MODEL)
