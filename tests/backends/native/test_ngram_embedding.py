"""N-gram embeddings in the engine: a token meets the ids before it however its sequence was computed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.backends.native.conftest import Tiny
from tests.backends.native.test_oracle import held_against, pair
from tests.models.oracle import our_logits
from tests.models.small_families.qwen4 import QWEN4

from miles.core.protocols import SamplingParams

KIND = "hybrid qwen4"
END = QWEN4["eos_token_id"]
CASES = {
    "short chunks": {"page_size": 2, "prefill_chunk": 2, "max_running": 4},
    "preempted": {"page_size": 4, "prefill_chunk": 5, "kv_tokens": 48, "max_running": 3},
    "drafted": {
        "page_size": 4,
        "speculative_algorithm": "ngram",
        "speculative_num_draft_tokens": 5,
        "speculative_adaptive": False,
    },
    "trees of drafts": {
        "page_size": 4,
        "speculative_algorithm": "ngram",
        "speculative_num_draft_tokens": 8,
        "speculative_num_branches": 3,
        "speculative_adaptive": False,
    },
}


class FullForwards:
    """Our decoder as ``held_against`` calls a model of transformers, against which the same decoder is held."""

    def __init__(self, decoder):
        self.decoder = decoder

    def __call__(self, tokens_BS):
        with torch.no_grad():
            return SimpleNamespace(logits=our_logits(self.decoder, list(tokens_BS)).unflatten(0, tokens_BS.shape))


def requests():
    """Prompts that repeat n-grams, end some, and begin with the same tokens."""
    rng = np.random.default_rng(0)
    phrase = rng.integers(8, 53, 6)
    first = np.concatenate((np.tile(phrase, 3), [END], phrase[:2])).astype(np.int32)
    second = np.concatenate((first, phrase, [END, END], phrase[3:])).astype(np.int32)
    how = [SamplingParams(max_new_tokens=8, ignore_eos=True, seed=i) for i in range(4)]
    return [(first, how[0]), (first, how[1]), (second, how[2]), (np.array([END], np.int32), how[3])]


@pytest.mark.parametrize(
    ("case", "depth"),
    [
        ("preempted", 1),
        ("trees of drafts", 0),
        *(pytest.param(case, depth, marks=pytest.mark.extended) for depth in (0, 1) for case in CASES),
    ],
)
def test_log_probs_are_those_of_full_forwards(case, depth):
    _, decoder = pair(KIND)
    tiny, asked, model = Tiny(depth), requests(), FullForwards(decoder)
    engine = tiny.engine(decoder, **CASES[case])
    for _ in range(2):  # the second time prefixes and n-grams of drafts are known
        held_against(tiny, model, asked, tiny.generate_all(engine, asked))
    stats = engine.stats()
    assert (stats["preemptions"] > 0) == (case == "preempted")
    assert stats["state_hits"] > 0
    assert ("draft" in case) == (stats.get("accepted_draft_tokens", 0) > 0)


def test_a_conversation_goes_on_from_a_cached_state():
    _, decoder = pair(KIND)
    tiny, model = Tiny(), FullForwards(decoder)
    engine = tiny.engine(decoder, page_size=4)
    said = np.array([9, 8, 7], np.int32)
    for turn in range(3):
        asked = [(said, SamplingParams(max_new_tokens=7, ignore_eos=True, seed=turn))]
        answers = tiny.generate_all(engine, asked)
        held_against(tiny, model, asked, answers)
        assert (answers[0].cached_tokens > 0) == (turn > 0)
        said = np.concatenate((said, *(span.tokens for span in answers[0].spans), [20 + turn]))
