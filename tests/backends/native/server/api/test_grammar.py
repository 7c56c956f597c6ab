"""Whatever is drawn from what a rule allows follows the rule, ends, and ends with the end of the sequence."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backends.native.conftest import Tiny
from tests.backends.native.server.tiny import EOS, VOCABULARY, write_tokenizer
from tests.tiers import examples

from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.engine.request import GenerateRequest
from miles.backends.native.server.api.grammar import GrammarCache
from miles.backends.native.server.api.request_types import GrammarRule
from miles.core.protocols import Completion, SamplingParams
from miles.models.tokenizer import HfTokenizer, load_tokenizer
from miles.rollout.serving.errors import RequestError

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}, "c": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    folder = Path(tmp_path_factory.mktemp("tokenizer"))
    write_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def grammars(tokenizer: HfTokenizer) -> GrammarCache:
    text = tokenizer.as_json()
    assert text is not None
    return GrammarCache(text, vocab_size=VOCABULARY, eos_tokens=[EOS])


def drawn(grammars: GrammarCache, rule: GrammarRule, seed: int) -> list[int]:
    """Tokens drawn evenly from what is allowed, whitespace rarely."""
    chance, constraint = np.random.default_rng(seed), grammars.build_constraint(rule)
    tokens: list[int] = []
    while not constraint.is_finished():
        assert len(tokens) < 400
        words = constraint.get_allowed_tokens()
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCABULARY])
        assert len(words) * 32 >= VOCABULARY and len(allowed)
        weights = np.where(np.isin(allowed, (200, 201, 204, 223)), 0.01, 1.0)
        token = int(chance.choice(allowed, p=weights / weights.sum()))
        constraint.advance(token)
        tokens.append(token)
    return tokens


@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 10**6))
def test_what_is_drawn_follows_its_rule(grammars: GrammarCache, tokenizer: HfTokenizer, seed: int):
    follows = {
        GrammarRule(kind="regex", source="(abc|de)+[0-9]{2}"): lambda text: re.fullmatch("(abc|de)+[0-9]{2}", text),
        GrammarRule(kind="ebnf", source='root ::= "yes" | "no" digit\ndigit ::= [0-9]'): lambda text: re.fullmatch(
            "yes|no[0-9]", text
        ),
        GrammarRule(kind="json_schema", source=json.dumps(SCHEMA)): lambda text: (
            jsonschema.validate(json.loads(text), SCHEMA) is None
        ),
    }
    for rule, fits in follows.items():
        tokens = drawn(grammars, rule, seed)
        assert tokens[-1] == EOS and EOS not in tokens[:-1]
        assert fits(tokenizer.text(tokens)), tokenizer.text(tokens)


def test_requests_with_the_same_rule_do_not_disturb_each_other(grammars: GrammarCache, tokenizer: HfTokenizer):
    rule = GrammarRule(kind="regex", source="ab")
    first, second = grammars.build_constraint(rule), grammars.build_constraint(rule)
    (a,) = tokenizer.encode("a")
    first.advance(a)
    second.advance(a)
    assert np.array_equal(first.get_allowed_tokens(), second.get_allowed_tokens()) and not first.is_finished()


def test_drafts_under_a_json_schema_change_no_token(grammars: GrammarCache, tokenizer: HfTokenizer):
    """The same answers with and without drafts, which are accepted; each answer follows the schema."""
    tiny = Tiny()
    decoder = tiny.decoder(spec=replace(Tiny.spec, vocab_size=VOCABULARY, eos_token_ids=(EOS,)))
    rule = GrammarRule(kind="json_schema", source=json.dumps(SCHEMA))
    drafts = {"speculative_algorithm": "ngram", "speculative_num_branches": 2, "speculative_adaptive": False}
    engines = [tiny.engine(decoder), tiny.engine(decoder, **drafts)]

    async def answer(engine: NativeEngine, seed: int) -> Completion:
        sampling = SamplingParams(max_new_tokens=100, seed=seed)
        prompt = np.array([2, 3, 4, 5], np.int32)
        request = GenerateRequest(tokens=prompt, sampling=sampling, constraint=grammars.build_constraint(rule))
        return await engine.submit(request).completion()

    for seed in (1, 2, 1, 2):
        plain, found = (asyncio.run(answer(engine, seed)) for engine in engines)
        tiny.same(plain, found)
        assert found.finish_reason in ("stop", "length")
        if found.finish_reason == "stop":
            tokens = [token for token in tiny.tokens(found) if token != EOS]
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), SCHEMA)
    assert engines[1].stats()["accepted_draft_tokens"] > 3
    tiny.check(engines[1])


def test_a_token_that_was_not_allowed_is_an_error(grammars: GrammarCache):
    constraint = grammars.build_constraint(GrammarRule(kind="regex", source="a"))
    with pytest.raises(Exception, match="cannot be followed"):
        constraint.advance(100)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "("),
        ("regex", "a(?=b)"),
        ("ebnf", "root ::= ("),
        ("ebnf", "nonsense"),
        ("ebnf", "root ::= other"),
        ("json_schema", '{"type": "wat"}'),
        ("json_schema", "false"),
        ("json_schema", '{"type": "object", "not": {}}'),
        ("regex", "a" * (1 << 21)),
    ],
)
def test_a_rule_that_is_none_is_refused_in_one_line(grammars: GrammarCache, kind: Any, source: str):
    with pytest.raises(RequestError, match=kind) as refused:
        grammars.build_constraint(GrammarRule(kind=kind, source=source))
    assert "\n" not in str(refused.value) and refused.value.status == 400
