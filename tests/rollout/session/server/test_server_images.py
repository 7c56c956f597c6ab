"""Images over the session server: every API's images reach the engine, and bad ones are a 400 with the reason."""

import base64
import re

import anthropic
import openai
import pytest
from tests.models.small_vision import draw_png, write_processor
from tests.rollout.session.server.live_session_server import Scripted, hosted

from miles.core.image_files import encode_data_url
from miles.core.media_store import MediaStore
from miles.models.processor import load_processor
from miles.models.tokenizer import load_tokenizer


class Seeing(Scripted):
    """The scripted engine, which also keeps the images it is given."""

    def __init__(self, tokenizer) -> None:
        super().__init__(tokenizer, lambda context, before: f"seen {before}")
        self.images = []

    async def generate(self, tokens, sampling, images=()):
        self.images.append([placed.image.source for placed in images])
        return await super().generate(tokens, sampling, images)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_processor(tmp_path_factory.mktemp("vision"), "qwen2_5_vl")


@pytest.fixture
def processor(folder):
    return load_processor(folder, media=MediaStore())


def source(seed):
    return MediaStore().put(draw_png(seed)).removeprefix("sha256:")


def image_url(seed):
    return {"type": "image_url", "image_url": {"url": encode_data_url(draw_png(seed))}}


def block(seed):
    data = base64.b64encode(draw_png(seed)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def test_openai_clients_send_images_in_any_turn(processor):
    engine = Seeing(processor)
    with hosted(processor, engine) as host:
        client = openai.OpenAI(base_url=f"{(url := host.open())}/v1", api_key="none", max_retries=0)
        messages = [{"role": "user", "content": [{"type": "text", "text": "?"}, image_url(0)]}]
        for seed in (1, 2):
            reply = client.chat.completions.create(model="m", messages=messages).choices[0].message
            messages += [reply.to_dict(), {"role": "user", "content": [image_url(seed)]}]
        response = client.responses.create(
            model="m",
            input=[{"role": "user", "content": [{"type": "input_image", "image_url": encode_data_url(draw_png(5))}]}],
        )
        assert response.output_text
        trajectory = host.trajectory(url)
    assert engine.images == [[source(0)], [source(0), source(1)], [source(5)]]
    assert len(trajectory["branches"]) == 2


def test_anthropic_clients_send_images_also_as_tool_results(processor):
    engine = Seeing(processor)
    with hosted(processor, engine) as host:
        client = anthropic.Anthropic(base_url=host.open(), api_key="none", max_retries=0)
        use = {"type": "tool_use", "id": "t", "name": "zoom", "input": {}}
        messages = [
            {"role": "user", "content": [block(0), {"type": "text", "text": "?"}]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [block(1)]}]},
        ]
        tools = [{"name": "zoom", "input_schema": {"type": "object"}}]
        assert client.messages.create(model="m", max_tokens=8, messages=messages, tools=tools).content
        counted = client.messages.count_tokens(model="m", messages=messages, tools=tools).input_tokens
        assert counted == len(engine.asked[0][0])
    assert engine.images == [[source(0), source(1)]]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64,AAAA", "is no image of a known format"),
        ("data:text/plain;base64,AAAA", "of type text/plain"),
        ("http://127.0.0.1:9/a.png", "is a URL, and this server fetches none"),
        (encode_data_url(draw_png(0))[:-60], "base64|truncated|damaged"),
    ],
)
def test_a_bad_image_is_a_400_with_the_reason_and_takes_no_turn(url, reason, processor):
    engine = Seeing(processor)
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    with hosted(processor, engine) as host:
        address = host.open()
        response = host.http.post(f"{address}/v1/chat/completions", json=body)
        assert response.status_code == 400 and re.search(reason, response.json()["error"]["message"]), response.text
        assert host.http.get(f"{address}/trajectory").status_code == 409
    assert not engine.images


def test_a_text_model_refuses_images_instead_of_dropping_them(folder):
    tokenizer = load_tokenizer(folder)
    with hosted(tokenizer, Scripted(tokenizer, lambda context, before: "x")) as host:
        body = {"messages": [{"role": "user", "content": [image_url(0)]}]}
        response = host.http.post(f"{host.open()}/v1/chat/completions", json=body)
        assert response.status_code == 400 and "reads text only" in response.text
