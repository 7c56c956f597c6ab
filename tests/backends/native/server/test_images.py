"""Images over the engine's HTTP API: what reaches the engine, and which images are refused and why."""

import asyncio
import base64
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web
from PIL import Image
from tests.backends.native.server.live import Live, serving
from tests.backends.native.server.tiny import write_model
from tests.core.test_image_files import make_bomb
from tests.models.small_vision import draw_png, write_processor

from miles.backends.remote.client import RequestRejected, SglangClient
from miles.core.image_files import encode_data_url
from miles.core.media import compute_digest
from miles.core.protocols import SamplingParams
from miles.models.processor import load_processor

MARKED = "look <|vision_start|><|image_pad|><|vision_end|> now"


@pytest.fixture(scope="module")
def vision_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    write_model(folder)
    return write_processor(folder, "qwen2_5_vl")


class Captured:
    """What reached the engine; the small model has no tower, so it goes on without the images."""

    def __init__(self, live: Live, monkeypatch) -> None:
        self.requests = []
        submit = live.engine.submit

        def capture(request):
            self.requests.append(request)
            return submit(replace(request, images=()))

        monkeypatch.setattr(live.engine, "submit", capture)


def run(story, folder, monkeypatch):
    async def tell():
        async with serving(folder) as live:
            return await story(live, Captured(live, monkeypatch))

    return asyncio.run(tell())


def data_url(seed=0, width=40, height=32) -> str:
    return encode_data_url(draw_png(seed, width, height))


def image_part(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize("prompt", ["text", "input_ids"])
def test_generate_expands_one_marker_for_each_image(prompt, vision_folder, monkeypatch):
    processor = load_processor(vision_folder)
    given = MARKED if prompt == "text" else processor.encode(MARKED)
    body = {prompt: [given, given], "image_data": [data_url(0), [base64.b64encode(draw_png(1, 64, 32)).decode()]]}

    async def story(live, captured):
        status, reply = await live.post("/generate", body | {"sampling_params": {"max_new_tokens": 2}})
        assert status == 200, reply
        assert [each["meta_info"]["prompt_tokens"] for each in reply] == [len(r.tokens) for r in captured.requests]
        return captured.requests

    requests = run(story, vision_folder, monkeypatch)
    for request, seed, width in zip(requests, (0, 1), (40, 64), strict=True):
        reference = processor.media.put(draw_png(seed, width, 32))
        tokens, images = processor.encode_with_images(MARKED, [reference])
        assert request.tokens.tolist() == tokens and request.images == images
        assert request.images[0].image.arrays["pixel_values"].shape[0] == 4 * request.images[0].length


def test_chats_take_images_of_users_and_of_tool_results(vision_folder, monkeypatch):
    processor = load_processor(vision_folder)
    call = {"id": "c", "type": "function", "function": {"name": "zoom", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "?"}, image_part(data_url(0))]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [image_part(data_url(1))]},
    ]

    async def story(live, captured):
        status, reply = await live.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
        assert status == 200, reply
        return captured.requests

    (request,) = run(story, vision_folder, monkeypatch)
    first, second = request.images
    assert first.image.source in processor.media.put(draw_png(0))
    assert second.image.source in processor.media.put(draw_png(1))
    text = processor.decode(request.tokens.tolist())
    assert text.index("zoom") > text.index("<|image_pad|>") and text.count("<tool_response>") == 1


def bad_images():
    noise = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(noise, format="PNG")
    yield "truncated", base64.b64encode(noise.getvalue()[:2000]).decode(), "is truncated"
    yield "bomb", base64.b64encode(make_bomb(60000, 60000)).decode(), "decompression bomb"
    yield "pixels", base64.b64encode(make_bomb(9000, 9000)).decode(), "9000 x 9000 pixels, and the limit is"
    yield "type", "data:application/pdf;base64,JVBERi0=", "of type application/pdf"
    yield "format", base64.b64encode(b"<svg/>").decode(), "no image of a known format"
    yield "large", "A" * (28 << 20), "bytes, and the limit is"
    yield "url", "http://127.0.0.1:9/a.png", "is a URL, and this server fetches none"
    yield "path", "/etc/passwd", "not valid base64"
    yield "empty", "", "is empty"


@pytest.mark.parametrize(("value", "reason"), [pytest.param(*case[1:], id=case[0]) for case in bad_images()])
def test_bad_images_are_refused_with_the_reason(value, reason, vision_folder, monkeypatch):
    part = image_part(value)

    async def story(live, captured):
        body = {"text": MARKED, "image_data": value, "sampling_params": {"max_new_tokens": 1}}
        status, reply = await live.post("/generate", body)
        assert status == 400 and reason in reply["error"]["message"], reply
        status, reply = await live.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
        assert status == 400 and reason in str(reply), reply
        assert not captured.requests

    run(story, vision_folder, monkeypatch)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"text": "no marker", "image_data": data_url()}, "0 image markers <|image_pad|>"),
        ({"text": MARKED + MARKED, "image_data": data_url()}, "2 image markers"),
        ({"text": MARKED, "image_data": [data_url()] * 65}, "65 images, and the limit is 64"),
        ({"text": [MARKED], "image_data": data_url()}, "the images of each of the 1 prompts"),
        ({"text": MARKED, "image_data": [3]}, "must be base64, a data URL"),
        ({"text": MARKED, "image_data": [data_url()], "image_runs": []}, "0 runs for 1 images"),
        ({"text": MARKED, "image_data": [data_url()], "image_runs": [[0, 20, "x"]]}, "has other pixels here"),
        ({"text": MARKED, "image_data": [data_url()], "image_runs": [["0"]]}, "a list of [start, length, digest]"),
        ({"text": MARKED, "video_data": ["x"]}, "video_data is not supported"),
    ],
)
def test_requests_whose_images_do_not_fit_are_refused(body, reason, vision_folder, monkeypatch):
    async def story(live, captured):
        status, reply = await live.post("/generate", body)
        assert status == 400 and reason in str(reply), reply

    run(story, vision_folder, monkeypatch)


def test_a_text_model_refuses_images(folder, monkeypatch):
    async def story(live, captured):
        status, reply = await live.post("/generate", {"text": "a", "image_data": data_url()})
        assert status == 400 and "reads text only" in str(reply)
        part = image_part(data_url())
        status, reply = await live.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
        assert status == 400 and "reads text only" in str(reply)

    run(story, folder, monkeypatch)


def test_the_runs_client_sends_tokens_and_raw_images_and_nothing_is_tokenized_again(vision_folder, monkeypatch):
    processor = load_processor(vision_folder)
    reference = processor.media.put(draw_png(3))
    # A token sequence that no text would give: the policy sampled it.
    tokens, images = processor.expand_tokens([104, 105, *processor.encode(MARKED), 40, 41], [reference])

    async def story(live, captured):
        client = SglangClient(live.url, "engine", vocab_size=512, media=processor.media)
        await client.fetch_info()
        response, error = await client.generate(tokens, SamplingParams(max_new_tokens=3), images=images)
        assert error is None and len(response.tokens) in (1, 2, 3)
        shifted = tuple(placed.shift(1) for placed in images)
        with pytest.raises(RequestRejected, match="placeholder tokens"):
            await client.generate(tokens, SamplingParams(max_new_tokens=3), images=shifted)
        await client.close()
        return captured.requests

    (request,) = run(story, vision_folder, monkeypatch)
    assert request.tokens.tolist() == tokens and request.images == images
    assert compute_digest(request.images[0].image.arrays) == images[0].image.digest


def test_the_runs_client_sends_the_frames_of_a_video(vision_folder, monkeypatch):
    processor = load_processor(vision_folder)
    frames = [processor.media.put(draw_png(seed)) for seed in range(3)]
    references = [processor.media.put_video(frames, 4.0), processor.media.put(draw_png(3))]
    text = f"<|vision_start|><|video_pad|><|vision_end|> {MARKED}"
    tokens, images = processor.encode_with_images(text, references)

    async def story(live, captured):
        client = SglangClient(live.url, "engine", vocab_size=512, media=processor.media)
        await client.fetch_info()
        _, error = await client.generate(tokens, SamplingParams(max_new_tokens=3), images=images)
        assert error is None
        await client.close()
        video = {"frames": [data_url(seed) for seed in range(3)], "fps": 4.0}
        body = {"text": text, "image_data": [video, data_url(3)], "sampling_params": {"max_new_tokens": 2}}
        status, reply = await live.post("/generate", body)
        assert status == 200, reply
        for bad in ({"frames": "a"}, {"frames": [data_url(0)], "fps": "x"}, {"frames": [data_url(0)], "more": 1}):
            status, reply = await live.post("/generate", body | {"image_data": [bad, data_url(3)]})
            assert status == 400 and "image_data[0] must be base64" in str(reply), reply
        status, reply = await live.post(
            "/generate", body | {"image_data": [video | {"frames": [data_url(0)]}, data_url(3)]}
        )
        assert status == 400 and "the video has 1 frames" in str(reply), reply
        return captured.requests

    for request in run(story, vision_folder, monkeypatch):
        assert request.tokens.tolist() == tokens and request.images == images
        assert [placed.image.kind for placed in request.images] == ["video", "image"]


def test_videos_are_not_sent_to_stock_sglang(vision_folder):
    processor = load_processor(vision_folder)
    frames = [processor.media.put(draw_png(seed)) for seed in range(2)]
    tokens, images = processor.encode_with_images("<|video_pad|>", [processor.media.put_video(frames)])
    client = SglangClient("http://127.0.0.1:9", "sglang", vocab_size=512, media=processor.media)
    with pytest.raises(RequestRejected, match="cannot be sent the frames of this run"):
        asyncio.run(client.generate(tokens, SamplingParams(max_new_tokens=1), images=images))


def test_stock_sglang_gets_one_placeholder_for_each_image_and_its_count_is_checked(vision_folder):
    processor = load_processor(vision_folder)
    references = [processor.media.put(draw_png(seed)) for seed in (0, 1)]
    marked = processor.encode(MARKED)
    tokens, images = processor.expand_tokens(marked + marked, references)
    sent = []

    async def generate(request):
        body = await request.json()
        sent.append(body)
        meta = {
            "completion_tokens": 1,
            "prompt_tokens": len(tokens) + (len(sent) > 1),
            "output_token_logprobs": [[-1.0, 5, None]],
            "finish_reason": {"type": "length", "length": 1},
        }
        event = {"output_ids": [5], "meta_info": meta}
        return web.Response(text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    async def story():
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        client = SglangClient(f"http://127.0.0.1:{port}", "sglang", vocab_size=512, media=processor.media)
        limit = SamplingParams(max_new_tokens=1)
        response, error = await client.generate(tokens, limit, images=images)
        assert error is None and response.tokens == [5]
        with pytest.raises(RequestRejected, match="its processor expands images otherwise"):
            await client.generate(tokens, limit, images=images)
        with pytest.raises(RequestRejected, match="has sampled the image placeholder"):
            await client.generate([*tokens, processor.image_token_id], limit, images=images)
        await client.close()
        await runner.cleanup()

    asyncio.run(story())
    assert sent[0]["input_ids"] == marked + marked
    assert sent[0]["image_data"] == [data_url(0), data_url(1)] and "image_runs" not in sent[0]
