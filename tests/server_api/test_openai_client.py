"""OpenAI's own client talks to both servers, and asks for what people ask for."""

import json

import jsonschema
import openai
import pytest
from tests.server_api.live_servers import Wire
from tests.server_api.openai_exchanges import ADD, MESSAGES, SCHEMA


@pytest.fixture
def client(server: Wire) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.mark.endpoint("/v1/chat/completions")
def test_the_client_chats(client: openai.OpenAI):
    response = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2
    )
    lines = response.choices[0].logprobs.content
    assert response.usage.completion_tokens == len(lines) == 6 and len(lines[0].top_logprobs) == 2
    assert response.choices[0].finish_reason == "length"


@pytest.mark.endpoint("/v1/chat/completions")
def test_the_client_reads_a_streamed_chat(client: openai.OpenAI):
    asked = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = client.chat.completions.create(**asked, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole


@pytest.mark.endpoint("/v1/chat/completions")
def test_the_client_gets_what_a_schema_allows(client: openai.OpenAI):
    response = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=1, seed=3, max_tokens=300, n=4, response_format=SCHEMA
    )
    ended = [choice.message.content for choice in response.choices if choice.finish_reason == "stop"]
    assert ended
    for text in ended:
        jsonschema.validate(json.loads(text), SCHEMA["json_schema"]["schema"])


@pytest.mark.endpoint("/v1/chat/completions")
def test_a_tool_that_must_be_called_is_called(client: openai.OpenAI):
    how = {"temperature": 1, "seed": 3, "max_tokens": 200, "n": 12}
    response = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=[ADD], tool_choice="required", **how
    )
    calls = [call for choice in response.choices for call in choice.message.tool_calls or ()]
    assert calls
    for call in calls:
        assert call.type == "function" and call.function.name == "add" and call.id
        jsonschema.validate(json.loads(call.function.arguments), ADD["function"]["parameters"])


@pytest.mark.endpoint("/v1/chat/completions")
def test_a_seed_gives_the_same_chat_again(client: openai.OpenAI):
    asked = {"model": "tiny", "messages": MESSAGES, "temperature": 1, "max_tokens": 12, "seed": 5}
    first, again = (client.chat.completions.create(**asked).choices[0].message.content for _ in range(2))
    assert first == again


@pytest.mark.endpoint("/v1/completions")
def test_the_client_completes(client: openai.OpenAI):
    response = client.completions.create(model="tiny", prompt=["the", " dog"], temperature=0, max_tokens=4, logprobs=1)
    assert [choice.index for choice in response.choices] == [0, 1]
    assert all(len(choice.logprobs.token_logprobs) == 4 for choice in response.choices)


@pytest.mark.endpoint("/v1/models")
def test_the_client_lists_the_model(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.endpoint("/v1/chat/completions")
def test_the_client_is_told_what_is_wrong(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
