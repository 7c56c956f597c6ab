"""The distribution of sampled tokens with drafts is the policy's: a chi-square test of three tokens, with its power.

The joint distribution of the first three tokens behind a prompt is computed from the policy's logits on whole
sequences. An alternative q of the same tokens at total variation d from it (p) has the noncentrality
n * sum (q - p)^2 / p >= n * (2 d)^2 (Cauchy-Schwarz), so the number of samples n gives the test its power against every
alternative that far away, whatever its form. A biased acceptance shows that it has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tests.backends.native.conftest import Tiny
from tests.backends.native.test_draft_heads import make_head
from tests.backends.native.test_speculative import perturb

from miles.backends.native.engine import scheduler
from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.engine.forward_batch import DraftRows
from miles.backends.native.engine.request import Bools, Ints
from miles.core.protocols import SamplingParams
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.models.decoder import Decoder
from miles.models.draft.base import Draft, PolicyWeights

VOCABULARY, TOKENS = 3, 3
SPEC = replace(Tiny.spec, vocab_size=VOCABULARY, eos_token_ids=())
PROMPT = [1, 2, 0, 2, 1, 0, 1]
SEQUENCES = list(product(range(VOCABULARY), repeat=TOKENS))
BATCH = 256
# N-grams of a prompt with many running samples are not indexed again at every step: few at once draft more.
NGRAM_BATCH = 32

ALPHA, POWER, DISTANCE = 1e-3, 0.99, 0.02
"""A bias of total variation DISTANCE is found with probability POWER, and what has none is doubted with ALPHA."""

SAMPLINGS: dict[str, dict[str, float | int]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top-p and top-k": {"temperature": 1.3, "top_p": 0.9, "top_k": 2},
}

# -- the test -------------------------------------------------------------------------------


def chi2_tail(value: float, degrees: int) -> float:
    """Probability that a chi-square variable exceeds ``value``."""
    return float(torch.special.gammaincc(torch.tensor(degrees / 2).double(), torch.tensor(value / 2).double()))


def chi2_critical(degrees: int) -> float:
    """The value that a chi-square variable exceeds with probability ALPHA."""
    low, high = 0.0, 1000.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if chi2_tail(middle, degrees) > ALPHA else (low, middle)
    return high


def power(degrees: int, samples: int) -> float:
    """Probability that the test rejects an alternative at total variation DISTANCE, or more than that.

    The statistic is then noncentral: a chi-square variable of 2 j more degrees of freedom, j from a Poisson
    distribution.
    """
    rate = samples * (2 * DISTANCE) ** 2 / 2
    j = torch.arange(600).double()
    weights = (j * np.log(rate) - rate - torch.lgamma(j + 1)).exp()
    tails = torch.special.gammaincc(degrees / 2 + j, torch.full_like(j, chi2_critical(degrees) / 2))
    return float((weights * tails).sum())


def count_samples(degrees: int) -> int:
    """The fewest samples, in hundreds, with which the test has the power POWER."""
    return next(n for n in range(1000, 10**6, 100) if power(degrees, n) >= POWER)


def chi2_pvalue(counts: Mapping[tuple[int, ...], int], expected: Mapping[tuple[int, ...], float]) -> float:
    """The p-value of counted sequences; 0 if one of them cannot occur."""
    total = sum(counts.values())
    if any(counts[each] for each in SEQUENCES if not expected[each]):
        return 0.0
    possible = [each for each in SEQUENCES if expected[each]]
    assert min(total * expected[each] for each in possible) > 5, "too few for a chi-square test"
    statistic = sum((counts[each] - total * expected[each]) ** 2 / (total * expected[each]) for each in possible)
    return chi2_tail(statistic, len(possible) - 1)


# -- the oracle -----------------------------------------------------------------------------


def filter_distribution(logits_V: torch.Tensor, how: Mapping[str, float | int]) -> list[float]:
    """The distribution after temperature, top-k and top-p, in float64."""
    probs = (logits_V.double() / how.get("temperature", 1.0)).softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    if top_k := int(how.get("top_k", 0)):
        order = order[:top_k]
    total, kept, mass = sum(probs[token] for token in order), [], 0.0
    for token in order:
        if mass >= how.get("top_p", 1.0) * total:
            break
        kept.append(token)
        mass += probs[token]
    return [probs[token] / mass if token in kept else 0.0 for token in range(len(probs))]


@torch.no_grad()
def next_logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    backend = VarlenAttentionBackend([len(tokens)], "cpu")
    hidden_TD = model(torch.tensor(tokens), torch.arange(len(tokens)), backend)
    return (hidden_TD[-1:].double() @ model.head().double().T)[0]


@torch.no_grad()
def drafted_logits(decoder: Decoder, head: Draft, tokens: list[int]) -> torch.Tensor:
    """Logits of the token that a head drafts behind ``tokens``, from whole sequences without a cache."""
    count = len(tokens) - 1
    capture, tokens_T, positions_T = head.new_capture(), torch.tensor(tokens), torch.arange(count)
    hidden_TD = decoder(tokens_T[:-1], positions_T, VarlenAttentionBackend([count], "cpu"), capture=capture)
    head.share(PolicyWeights(embed=decoder.embedding, head=decoder.head))
    attention = VarlenAttentionBackend([count], "cpu")
    return head.logits(head(head.features(hidden_TD, capture), tokens_T[1:], positions_T, attention)[-1:])[0]


def joint_distribution(
    decoder: Decoder, how: Mapping[str, float | int], *, draft: Callable[[list[int]], torch.Tensor], share: float = 0.0
) -> dict[tuple[int, ...], float]:
    """The distribution of the first tokens, where a ``share`` of the second ones come from the ``draft``'s logits."""
    conditional = {
        tokens: filter_distribution(next_logits(decoder, [*PROMPT, *tokens]), how)
        for length in range(TOKENS)
        for tokens in product(range(VOCABULARY), repeat=length)
    }
    for (token,) in product(range(VOCABULARY), repeat=1) if share else ():
        drafted = filter_distribution(draft([*PROMPT, token]), how)
        own = conditional[(token,)]
        conditional[(token,)] = [(1 - share) * p + share * d for p, d in zip(own, drafted, strict=True)]
    return {
        each: float(np.prod([conditional[each[:length]][token] for length, token in enumerate(each)]))
        for each in SEQUENCES
    }


def total_variation(one: Mapping[tuple[int, ...], float], other: Mapping[tuple[int, ...], float]) -> float:
    return sum(abs(one[each] - other[each]) for each in SEQUENCES) / 2


# -- engines --------------------------------------------------------------------------------


def make_policy() -> Decoder:
    return Tiny().decoder(seed=1, spec=SPEC, scale=4.0)


def make_engine(kind: str, decoder: Decoder) -> tuple[NativeEngine, Callable[[list[int]], torch.Tensor]]:
    """An engine that drafts, and the logits of its draft behind known tokens."""
    options: dict[str, Any] = {"max_running": 4 * BATCH, "kv_tokens": 32768, "speculative_num_draft_tokens": 2}
    options |= {"speculative_adaptive": False}
    if kind == "ngram":
        return Tiny().engine(decoder, speculative_algorithm="ngram", **options), lambda _: torch.zeros(VOCABULARY)
    options |= {"speculative_algorithm": "draft-model"}
    if kind == "draft model":
        model = perturb(decoder, 2, 0.7)
        return Tiny().engine(decoder, draft=model, **options), lambda tokens: next_logits(model, tokens)
    head = make_head(SPEC)
    engine = Tiny().engine(decoder, draft=make_head(SPEC), head=head, **options)
    return engine, lambda tokens: drafted_logits(decoder, head, tokens)


def sample_sequences(
    engine: NativeEngine, how: Mapping[str, Any], count: int, *, new: int, batch: int = BATCH
) -> dict[tuple[int, ...], int]:
    """How often each sequence of first tokens is sampled with ``count`` seeds."""
    counts = dict.fromkeys(SEQUENCES, 0)
    prompt = np.array(PROMPT, np.int32)
    for start in range(0, count, batch):
        seeds = range(start, min(start + batch, count))
        requests = [(prompt, SamplingParams(max_new_tokens=new, seed=seed, **how)) for seed in seeds]
        for completion in Tiny().generate_all(engine, requests, checked=False):
            counts[tuple(Tiny().tokens(completion)[:TOKENS])] += 1
    return counts


# -- tests ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are too small for several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_tables_of_the_test_are_those_of_the_textbook():
    assert chi2_critical(10) == pytest.approx(29.588, abs=1e-3)
    assert chi2_critical(26) == pytest.approx(54.052, abs=1e-3)
    assert power(26, 0 + 1) == pytest.approx(ALPHA, rel=0.01)
    uniform = dict.fromkeys(SEQUENCES, 1 / len(SEQUENCES))
    counts = dict.fromkeys(SEQUENCES, 100)
    assert chi2_pvalue(counts, uniform) == 1.0
    assert chi2_pvalue(counts, uniform | {SEQUENCES[0]: 0.0}) == 0.0


def test_the_power_is_that_of_simulated_alternatives():
    """Multinomial counts at total variation DISTANCE, in the form that is hardest to find: the same in all cells."""
    rng = np.random.default_rng(0)
    cells = len(SEQUENCES)
    samples = count_samples(cells - 1)
    base = np.full(cells, 1 / cells)
    signs = np.where(np.arange(cells) % 2, 1.0, -1.0)
    signs[-1] = 0.0
    biased = base * (1 + signs * 2 * DISTANCE * cells / (cells - 1))
    assert abs(biased - base).sum() / 2 == pytest.approx(DISTANCE)

    def reject(probs: np.ndarray) -> float:
        counts = rng.multinomial(samples, probs, size=4000)
        statistics = ((counts - samples * base) ** 2 / (samples * base)).sum(1)
        return float((statistics > chi2_critical(cells - 1)).mean())

    assert reject(biased) > POWER - 0.005
    assert reject(base) < 4 * ALPHA


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", ["ngram", "draft model", "head"])
def test_tokens_sampled_with_drafts_have_the_policys_distribution(kind: str, sampling: str):
    decoder, how = make_policy(), SAMPLINGS[sampling]
    engine, draft = make_engine(kind, decoder)
    expected = joint_distribution(decoder, how, draft=draft)
    samples = count_samples(sum(p > 0 for p in expected.values()) - 1)
    batch = NGRAM_BATCH if kind == "ngram" else BATCH
    pvalue = chi2_pvalue(sample_sequences(engine, how, samples, new=TOKENS + 1, batch=batch), expected)
    stats = engine.stats()
    rate = stats["accepted_draft_tokens"] / stats["drafted_tokens"]
    assert stats["drafted_tokens"] > samples / 2 and 0.1 < rate < 0.95
    assert pvalue > ALPHA


@pytest.mark.parametrize("kind", ["draft model", "head"])
def test_an_acceptance_that_is_biased_is_found(kind: str, monkeypatch: pytest.MonkeyPatch):
    """A share of the drafts behind the first token replaces what was sampled, by a total variation of DISTANCE.

    N-grams draft what the policy sampled before, so that accepting too many of them is hardly a bias.
    """
    decoder = make_policy()
    engine, draft = make_engine(kind, decoder)
    expected = joint_distribution(decoder, {}, draft=draft)
    share = DISTANCE / total_variation(expected, joint_distribution(decoder, {}, draft=draft, share=1.0))
    biased = joint_distribution(decoder, {}, draft=draft, share=share)
    assert share < 0.1 and total_variation(expected, biased) == pytest.approx(DISTANCE)
    rng, right = np.random.default_rng(0), scheduler.find_accepted_drafts

    def accept_more(drafts_D: DraftRows, tokens_D: Ints) -> Bools:
        rows = ((drafts_D.offsets > 0) & (rng.random(len(tokens_D)) < share)).nonzero()[0]
        tokens_D[rows - 1] = drafts_D.tokens[rows]
        return right(drafts_D, tokens_D)

    monkeypatch.setattr(scheduler, "find_accepted_drafts", accept_more)
    samples = count_samples(len(SEQUENCES) - 1)
    counts = sample_sequences(engine, {}, samples, new=TOKENS)  # the last token gets no draft
    assert chi2_pvalue(counts, expected) < ALPHA < chi2_pvalue(counts, biased)
