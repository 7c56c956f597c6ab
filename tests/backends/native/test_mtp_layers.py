"""Several MTP layers: each has the keys of all positions, so an engine drafts what a trainer's full forward would."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.native.test_draft_heads import SPEC, drafting, prompts
from tests.backends.native.test_speculative import SMALL_PAGES

from miles.core.protocols import SamplingParams
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.models.checkpoint import hf
from miles.models.draft.base import PolicyWeights
from miles.models.draft.mtp import MtpDraft
from miles.models.draft.multi_step_attention import MultiStepAttention
from miles.models.draft.spec import build_mtp_spec
from miles.models.families.base import MtpLayout

LAYOUT = MtpLayout(
    block="mtp.{}",
    layer="mtp.{}",
    embedding_norm="embedding_norm",
    hidden_norm="hidden_norm",
    projection="projection",
    norm="norm",
)
DRAFTED = 4
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)


def make_engine(tiny, decoder, num_layers, **options):
    """An engine with MTP layers of random weights, which attend to distant tokens, and these layers."""
    spec = build_mtp_spec(decoder.spec, LAYOUT, num_layers)
    empty, head = (MtpDraft(spec, device="meta", dtype=torch.float32, numerics=decoder.numerics) for _ in range(2))
    head.load_state_dict(hf.sample_params(head, seed=5, device="cpu"), assign=True)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12.0)
    head.share(PolicyWeights(embed=decoder.embedding, head=decoder.head))
    engine = tiny.engine(decoder, draft=empty, head=head, **SMALL_PAGES | options, **drafting(DRAFTED))
    return engine, head


@torch.no_grad()
def draft_all(decoder, head, tokens, count):
    """The tokens drafted behind known ones, every layer computed on the whole sequence as in training."""
    length, drafted = len(tokens) - 1, []
    positions_T = torch.arange(length)
    hidden_TD = decoder(torch.tensor(tokens[:-1]), positions_T, VarlenAttentionBackend([length], "cpu"))
    attention = MultiStepAttention(VarlenAttentionBackend([length], "cpu"), [length])
    for step in range(count):
        next_tokens_T = torch.tensor([*tokens, *drafted][step + 1 :])
        hidden_TD = head(hidden_TD, next_tokens_T, positions_T + step, attention, step=step)
        drafted.append(int(head.logits(hidden_TD[-1:], step=step).argmax()))
    return drafted


def watch_drafts(engine):
    """What is drafted from now on: tokens known then, and tokens drafted."""
    drafter, found = engine._speculation._drafter, []
    propose = drafter.draft

    def watch(reqs, lengths):
        drafts = propose(reqs, lengths)
        found.extend((list(req.tokens), draft.tokens) for req, draft in zip(reqs, drafts, strict=True) if draft)
        return drafts

    drafter.draft = watch
    return found


def count_accepted(drafts, whole):
    """By position of a draft: how often all tokens up to there are what the policy says."""
    counts = np.zeros(DRAFTED, np.int64)
    for known, drafted in drafts:
        wanted = whole[tuple(known[:8])][len(known) : len(known) + len(drafted)]
        same = np.cumprod([one == two for one, two in zip(drafted, wanted, strict=False)])
        counts[: len(same)] += same.astype(np.int64)
    return counts


@pytest.mark.parametrize("num_layers", [2, 3])
@pytest.mark.parametrize("chunk", [13, 3])
def test_layers_draft_what_they_do_on_whole_sequences(tiny, num_layers, chunk):
    decoder = tiny.decoder(spec=SPEC, scale=6.0)
    requests = [(prompt, GREEDY) for prompt in prompts(4)]
    engine, head = make_engine(tiny, decoder, num_layers, prefill_chunk=chunk)
    drafts = watch_drafts(engine)
    completions = tiny.generate_all(engine, requests)
    whole = {
        tuple(prompt.tolist()[:8]): [*prompt.tolist(), *tiny.tokens(completion)]
        for (prompt, _), completion in zip(requests, completions, strict=True)
    }
    oracle = [(known, draft_all(decoder, head, known, len(drafted))) for known, drafted in drafts]
    assert len(drafts) > 20
    assert [drafted for _, drafted in drafts] == [drafted for _, drafted in oracle]
    accepted = count_accepted(drafts, whole)
    assert (accepted >= count_accepted(oracle, whole)).all() and accepted[1] > 0


@pytest.mark.parametrize("num_layers", [2, 3])
def test_drafts_of_several_layers_change_nothing(tiny, num_layers):
    decoder = tiny.decoder(spec=SPEC, scale=6.0)
    requests = [
        (prompt, replace(GREEDY, temperature=0.0 if i % 2 else 1.0, seed=i)) for i, prompt in enumerate(prompts(6))
    ]
    requests += [(requests[0][0], replace(GREEDY, temperature=1.0, seed=seed)) for seed in range(3)]
    requests += [(requests[1][0][:count], GREEDY) for count in (1, 2, 3)]
    expected = tiny.generate_all(tiny.engine(decoder, **SMALL_PAGES), requests)
    engine, _ = make_engine(tiny, decoder, num_layers)
    for one, other in zip(expected, tiny.generate_all(engine, requests), strict=True):
        tiny.same(one, other)
    assert engine.stats()["accepted_draft_tokens"] > 0
