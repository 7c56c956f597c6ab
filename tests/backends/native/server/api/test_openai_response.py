"""The official OpenAI client against a live server: chat and completions, streams, log-probs, tools and formats."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai import AsyncOpenAI
from tests.backends.native.server.api.test_sglang_response import theirs
from tests.backends.native.server.live import Live, served
from transformers import AutoTokenizer

from miles.backends.native.server.config import ServeConfig

ASK: Any = [{"role": "user", "content": "the quick brown fox"}]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NO_SPACE = {str(token): -100.0 for token in (200, 201, 204, 223)}
"""A random model would write blanks between the parts of a JSON text for ever."""


def client_of(live: Live, key: str = "any") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0)


def test_a_chat_says_what_the_model_would(folder: Path):
    async def story(live: Live) -> None:
        reply = await client_of(live).chat.completions.create(
            model="tiny", messages=ASK, temperature=0, max_tokens=8, logprobs=True, top_logprobs=2
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        tokens, logprobs, _ = theirs(folder, prompt, 8)
        (choice,) = reply.choices
        assert (reply.object, reply.model, choice.finish_reason) == ("chat.completion", "tiny", "length")
        whole = tokenizer.decode(prompt + tokens, skip_special_tokens=True)
        assert whole.endswith(choice.message.content or "") and choice.message.role == "assistant"
        assert reply.usage is not None and reply.usage.prompt_tokens == len(prompt)
        assert reply.usage.completion_tokens == 8 and reply.usage.total_tokens == len(prompt) + 8
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [line.token for line in choice.logprobs.content] == [tokenizer.decode([token]) for token in tokens]
        assert [line.logprob for line in choice.logprobs.content] == pytest.approx(logprobs, abs=1e-5)
        assert all(len(line.top_logprobs) == 2 for line in choice.logprobs.content)
        assert reply.metadata == {"weight_version": "default"}  # pyright: ignore

    served(story, folder)


def test_a_chat_stream_adds_up_to_the_whole(folder: Path):
    async def story(live: Live) -> None:
        client = client_of(live)
        how: Any = {"model": "tiny", "messages": ASK, "temperature": 0, "max_tokens": 24, "logprobs": True, "n": 2}
        whole = await client.chat.completions.create(**how)
        await live.post("/flush_cache")
        stream = await client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True})
        pieces = [piece async for piece in stream]
        assert pieces[-1].choices == [] and pieces[-1].usage == whole.usage
        for index in range(2):
            choices = [c for piece in pieces for c in piece.choices if c.index == index]
            assert choices[0].delta.role == "assistant" and choices[-1].finish_reason == "length"
            said = "".join(c.delta.content or "" for c in choices)
            assert said == whole.choices[index].message.content
            lines = [line for c in choices if c.logprobs for line in c.logprobs.content or ()]
            assert [line.token for line in lines] == [
                line.token
                for line in whole.choices[index].logprobs.content  # pyright: ignore
            ]

    served(story, folder)


def test_completions_echo_score_and_stop(folder: Path):
    async def story(live: Live) -> None:
        client, tokenizer = client_of(live), AutoTokenizer.from_pretrained(folder)
        text = "the quick brown fox"
        reply = await client.completions.create(
            model="tiny", prompt=text, temperature=0, max_tokens=6, echo=True, logprobs=1
        )
        tokens, logprobs, scores = theirs(folder, tokenizer.encode(text), 6)
        (choice,) = reply.choices
        assert choice.text == tokenizer.decode(tokenizer.encode(text) + tokens, skip_special_tokens=True)
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(scores + logprobs, abs=1e-5)
        batch = await client.completions.create(model="tiny", prompt=["the", "dog"], temperature=0, max_tokens=3, n=2)
        assert [c.index for c in batch.choices] == [0, 1, 2, 3]
        assert batch.choices[0].text == batch.choices[1].text != batch.choices[2].text
        assert batch.usage is not None and batch.usage.completion_tokens == 12
        said = reply.choices[0].text.removeprefix(text)
        stopped = await client.completions.create(
            model="tiny", prompt=text, temperature=0, max_tokens=6, stop=said[1:2], seed=3
        )
        assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (said[: said.index(said[1:2])], "stop")
        stream = await client.completions.create(model="tiny", prompt=text, temperature=0, max_tokens=6, stream=True)
        assert "".join([piece.choices[0].text async for piece in stream if piece.choices]) == said

    served(story, folder)


def test_a_schema_is_followed(folder: Path):
    async def story(live: Live) -> None:
        format: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
        for seed in range(3):
            reply = await client_of(live).chat.completions.create(
                model="tiny", messages=ASK, response_format=format, max_tokens=80, seed=seed, logit_bias=NO_SPACE
            )  # pyright: ignore
            (choice,) = reply.choices
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
        reply = await client_of(live).chat.completions.create(
            model="tiny",
            messages=ASK,
            max_tokens=80,
            temperature=0,
            response_format={"type": "json_object"},
            logit_bias={**NO_SPACE, "95": 90.0},
        )  # pyright: ignore
        assert isinstance(json.loads(reply.choices[0].message.content or ""), dict)
        extra = {"regex": "(abc|de)+[0-9]{2}"}
        reply = await client_of(live).completions.create(model="tiny", prompt="a", max_tokens=60, extra_body=extra)
        assert re.fullmatch(extra["regex"], reply.choices[0].text) or reply.choices[0].finish_reason == "length"

    served(story, folder)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_tool_that_must_be_called_is_called(folder: Path, choice: Any):
    async def story(live: Live) -> None:
        how: Any = {
            **{"model": "tiny", "messages": ASK, "tools": [ADD], "tool_choice": choice, "max_tokens": 200},
            **{"parallel_tool_calls": False, "logit_bias": NO_SPACE, "temperature": 0},
        }
        reply = await client_of(live).chat.completions.create(**how)
        (said,) = reply.choices
        assert said.finish_reason == "tool_calls" and said.message.tool_calls is not None
        (call,) = said.message.tool_calls
        assert call.type == "function" and call.function.name == "add" and call.id.startswith("call_")
        jsonschema.validate(json.loads(call.function.arguments), ADD["function"]["parameters"])
        stream = await client_of(live).chat.completions.create(**how, stream=True)
        pieces = [piece async for piece in stream]
        calls = [c for piece in pieces for c in (piece.choices[0].delta.tool_calls or ())]
        assert [(c.index, c.function.name, c.function.arguments) for c in calls if c.function] == [
            (0, "add", call.function.arguments)
        ]
        assert pieces[-1].choices[0].finish_reason == "tool_calls"

    served(story, folder)


def test_a_call_in_the_models_own_words_is_found(folder: Path):
    async def story(live: Live) -> None:
        words = 'Well. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        grammar = f"root ::= {json.dumps(words)}"
        how: Any = {"model": "tiny", "messages": ASK, "tools": [ADD], "extra_body": {"ebnf": grammar}}
        reply = await client_of(live).chat.completions.create(**how)
        message = reply.choices[0].message
        assert message.content == "Well." and message.tool_calls is not None
        assert message.tool_calls[0].type == "function"
        assert message.tool_calls[0].function.arguments == '{"a": 1}'
        stream = await client_of(live).chat.completions.create(**how, stream=True)
        deltas = [piece.choices[0].delta async for piece in stream]
        assert "".join(delta.content or "" for delta in deltas) == "Well."
        assert sum(len(delta.tool_calls or ()) for delta in deltas) == 1
        plain = await client_of(live).chat.completions.create(**how, tool_choice="none")
        assert plain.choices[0].message.content == words and plain.choices[0].message.tool_calls is None

    served(story, folder)


def test_reasoning_is_told_apart_by_a_server_that_was_told_to(folder: Path):
    async def story(live: Live) -> None:
        grammar = 'root ::= "<think>ab</think>cd"'
        reply = await client_of(live).chat.completions.create(model="tiny", messages=ASK, extra_body={"ebnf": grammar})
        message: Any = reply.choices[0].message
        assert (message.content, message.reasoning_content) == ("cd", "ab")

    served(story, folder, ServeConfig(reasoning_parser="think"))


def test_errors_are_the_clients_own_kinds(folder: Path):
    async def story(live: Live) -> None:
        client = client_of(live, "secret")
        with pytest.raises(openai.BadRequestError, match=r"temperature is -1, but must be at least 0\."):
            await client.chat.completions.create(model="tiny", messages=ASK, temperature=-1)
        with pytest.raises(openai.BadRequestError, match="the context has room for 512"):
            await client.chat.completions.create(model="tiny", messages=ASK, max_tokens=5000, stream=True)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        assert [model.id async for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.AuthenticationError):
            await client_of(live, "wrong").models.list()

    served(story, folder, key="secret")


def test_the_cache_is_reported_where_that_was_asked_for(folder: Path):
    async def story(live: Live) -> None:
        for _ in range(2):
            reply = await client_of(live).chat.completions.create(model="tiny", messages=ASK, max_tokens=1)
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        assert reply.usage.prompt_tokens_details.cached_tokens == reply.usage.prompt_tokens - 1

    served(story, folder, ServeConfig(enable_cache_report=True))
