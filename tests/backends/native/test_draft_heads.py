"""Draft heads on the policy's hidden states: what they draft, and that drafts change nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.native.conftest import Tiny
from tests.backends.native.test_speculative import SMALL_PAGES, experts_of

from miles.core.protocols import SamplingParams
from miles.core.types import Version
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.numerics import BATCH_INVARIANT, FAST
from miles.models.decoder import Decoder
from miles.models.draft.base import PolicyWeights
from miles.models.draft.checkpoint import init_eagle
from miles.models.draft.eagle import EagleDraft
from miles.models.draft.spec import build_eagle_spec
from miles.sync.manifest import build_manifest

# Few tokens, so that a random head drafts the right one now and then.
SPEC = replace(Tiny.spec, vocab_size=6, eos_token_ids=())
MOE_SPEC = replace(Tiny.moe_spec, vocab_size=6, eos_token_ids=())


def drafting(tokens):
    return {
        "speculative_algorithm": "draft-model",
        "speculative_num_draft_tokens": tokens,
        "speculative_adaptive": False,
    }


def make_head(spec, numerics=FAST):
    head = init_eagle(build_eagle_spec(spec), seed=5, device="cpu", dtype=torch.float32, numerics=numerics)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12.0)
    return head


def make_engine(tiny, decoder, tokens, **options):
    """An engine with a head, and the head's weights for references."""
    head = make_head(decoder.spec, decoder.numerics)
    empty = EagleDraft(head.spec, device="meta", dtype=torch.float32, numerics=decoder.numerics)
    engine = tiny.engine(decoder, draft=empty, head=head, **SMALL_PAGES | options, **drafting(tokens))
    return engine, head


def prompts(count):
    return [prompt % 6 for prompt in Tiny().prompts(count)]


@torch.no_grad()
def draft_one(decoder, head, tokens):
    """The token that the head drafts behind known tokens, from whole sequences without a cache."""
    count = len(tokens) - 1
    backend = VarlenAttentionBackend([count], "cpu")
    capture = head.new_capture()
    tokens_T, positions_T = torch.tensor(tokens), torch.arange(count)
    hidden_TD = decoder(tokens_T[:-1], positions_T, backend, capture=capture)
    head.share(PolicyWeights(embed=decoder.embedding, head=decoder.head))
    drafted_TD = head(
        head.features(hidden_TD, capture), tokens_T[1:], positions_T, VarlenAttentionBackend([count], "cpu")
    )
    return int(head.logits(drafted_TD[-1:]).argmax())


def test_a_head_drafts_what_it_does_on_whole_sequences(tiny):
    decoder = tiny.decoder(spec=SPEC, scale=6.0)
    prompt = prompts(1)[0]
    request = (prompt, SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True))
    engine, head = make_engine(tiny, decoder, 1)
    (completion,) = tiny.generate_all(engine, [request])
    whole = [*prompt.tolist(), *tiny.tokens(completion)]
    known, accepted, drafted = len(prompt) + 1, 0, 0
    while known < len(whole) - 1:  # the last token gets no draft behind it
        drafted += 1
        if draft_one(decoder, head, whole[:known]) == whole[known]:
            accepted += 1
            known += 1
        known += 1
    assert accepted > 0
    stats = engine.stats()
    assert (stats["accepted_draft_tokens"], stats["drafted_tokens"]) == (accepted, drafted)


@pytest.mark.parametrize("spec", [SPEC, MOE_SPEC], ids=["dense", "experts"])
def test_drafts_of_a_head_change_nothing(tiny, spec):
    decoder = tiny.decoder(spec=spec, scale=6.0)
    requests = [
        (prompt, replace(how, max_new_tokens=30, ignore_eos=True))
        for prompt, (_, how) in zip(prompts(8), tiny.mixed(8), strict=True)
    ]
    requests += [(requests[0][0], SamplingParams(max_new_tokens=30, seed=seed, ignore_eos=True)) for seed in range(3)]
    expected = tiny.generate_all(tiny.engine(decoder, **SMALL_PAGES), requests)
    engine, _ = make_engine(tiny, decoder, 3)
    for one, other in zip(expected, tiny.generate_all(engine, requests), strict=True):
        tiny.same(one, other)
        np.testing.assert_equal(experts_of(other), experts_of(one))
    assert engine.stats()["accepted_draft_tokens"] > 20


@pytest.mark.parametrize("spec", [SPEC, MOE_SPEC], ids=["dense", "experts"])
def test_branches_of_a_head_change_nothing(tiny, spec):
    decoder = tiny.decoder(spec=spec, scale=6.0)
    requests = [(p, SamplingParams(max_new_tokens=30, seed=i, ignore_eos=True)) for i, p in enumerate(prompts(6))]
    expected = tiny.generate_all(tiny.engine(decoder, **SMALL_PAGES), requests)
    engine, _ = make_engine(tiny, decoder, 5, speculative_num_branches=3)
    for one, other in zip(expected, tiny.generate_all(engine, requests), strict=True):
        tiny.same(one, other)
        np.testing.assert_equal(experts_of(other), experts_of(one))
    stats = engine.stats()
    assert stats["draft_branches"] > stats["accepted_draft_branches"] > 0


def test_behind_an_accepted_branch_a_head_drafts_what_it_does_on_whole_sequences(tiny):
    """Greedy: with as many branches as tokens, every first draft is accepted, in the chain or in a branch."""
    decoder = tiny.decoder(spec=SPEC, scale=6.0)
    prompt = prompts(1)[0]
    request = (prompt, SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True))
    engine, head = make_engine(tiny, decoder, 6, speculative_num_branches=6)
    drafter, drafted = engine._speculation._drafter, []
    propose = drafter.draft

    def watch(reqs, lengths):
        drafts = propose(reqs, [min(length, 1) for length in lengths])
        drafted.extend((list(req.tokens), draft) for req, draft in zip(reqs, drafts, strict=True) if draft is not None)
        return drafts

    drafter.draft = watch
    tiny.generate_all(engine, [request])
    assert engine.stats()["accepted_draft_branches"] >= 5
    assert len(drafted) > 10
    for tokens, draft in drafted:
        if draft.tokens:
            assert draft.tokens[0] == draft_one(decoder, head, tokens)


def test_what_a_head_drafts_for_a_request_does_not_depend_on_the_others(tiny):
    plain = tiny.decoder(spec=SPEC, scale=6.0)
    decoder = Decoder(SPEC, device="cpu", dtype=torch.float32, numerics=BATCH_INVARIANT)
    decoder.load_state_dict(plain.state_dict())
    requests = [(p, SamplingParams(max_new_tokens=25, seed=i, ignore_eos=True)) for i, p in enumerate(prompts(4))]

    def count_drafts(*batches, **options):
        engine, _ = make_engine(tiny, decoder, 3, **options)
        for batch in batches:
            tiny.generate_all(engine, batch)
        return engine.stats()["drafted_tokens"], engine.stats()["accepted_draft_tokens"]

    together = count_drafts(requests)
    assert count_drafts(*([request] for request in requests)) == together
    assert count_drafts(requests, prefill_chunk=5, page_size=16) == together


def test_samples_that_share_a_prompt_are_drafted_for_as_alone(tiny):
    """Also if the prompt ends within a page, which each sample has a copy of."""
    plain = tiny.decoder(spec=SPEC, scale=6.0)
    decoder = Decoder(SPEC, device="cpu", dtype=torch.float32, numerics=BATCH_INVARIANT)
    decoder.load_state_dict(plain.state_dict())
    prompt = prompts(1)[0][:11]
    requests = [(prompt, SamplingParams(max_new_tokens=20, seed=seed, ignore_eos=True)) for seed in range(5)]

    def count_drafts(batch):
        engine, _ = make_engine(tiny, decoder, 3, page_size=16)
        tiny.generate_all(engine, batch)
        return np.array([engine.stats()["drafted_tokens"], engine.stats()["accepted_draft_tokens"]])

    assert (count_drafts(requests) == sum(count_drafts([request]) for request in requests)).all()


def test_a_weight_update_brings_the_head_too(tiny):
    decoder = tiny.decoder(spec=SPEC, scale=6.0)
    engine, head = make_engine(tiny, decoder, 2)
    request = (prompts(1)[0], SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True))
    tiny.generate_all(engine, [request])
    before = engine.stats()["accepted_draft_tokens"]
    with torch.no_grad():
        other = {f"draft.{name}": -parameter for name, parameter in head.named_parameters()}
    tensors = dict(decoder.named_parameters()) | other
    engine.begin(build_manifest(Version(number=1), tensors))
    for name, tensor in tensors.items():
        engine.receive(name, tensor)
    engine.verify()
    engine.commit()
    tiny.generate_all(engine, [request])
    assert engine.stats()["accepted_draft_tokens"] - before != before
    assert torch.equal(engine.weights()["draft.norm.weight"], other["draft.norm.weight"])
