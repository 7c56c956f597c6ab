"""Images to stock SGLang through the run's client: tokens and log-probs are those of the native engine."""

import asyncio

import numpy as np
import pytest
import torch
from tests.backends.native.image_requests import build_engine, logprobs_of, response_of
from tests.models.small_vision import draw_png, write_vision_checkpoint
from tests.server_api.live_servers import sglang

from miles.backends.remote.client import SglangClient
from miles.backends.remote.sglang_flags import build_command
from miles.core.protocols import SamplingParams
from miles.models.checkpoint import hf
from miles.models.processor import load_processor

# SGLang takes the pixels of Qwen2.5-VL for features unless a patch has the published size.
PATCH_SIZES = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16}
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
PILLOW = "--disable-fast-image-processor"
NEW_TOKENS = 8


def read_prompts(processor, side):
    """Prompts with images: one, several of other sizes, the same text with another image, one resized, and none."""
    files = [draw_png(0, 4 * side, 3 * side), draw_png(1, 2 * side, 5 * side), draw_png(2, 3 * side + 5, 4 * side - 3)]
    a, b, resized = (processor.media.put(file) for file in files)
    asked = [(f"look {IMAGE} now", [a]), (f"{IMAGE} and {IMAGE} or {IMAGE}?", [a, b, a]), (f"look {IMAGE} now", [b])]
    asked += [(f"in {IMAGE} here", [resized]), ("in the text", [])]
    return [processor.encode_with_images(text, references) for text, references in asked]


def test_servers_that_read_images_resize_them_as_the_run_does():
    def command(*given: str, images: bool) -> tuple[str, ...]:
        how = {"device": "cuda", "dtype": "bfloat16", "ranks": 1, "routed_experts": False, "trust_remote_code": False}
        return build_command("python", "folder", given, images=images, **how)

    assert command(images=True).count(PILLOW) == command(PILLOW, images=True).count(PILLOW) == 1
    assert PILLOW not in command(images=False)


@pytest.mark.sglang
@pytest.mark.parametrize("kind", list(PATCH_SIZES))
def test_stock_sglang_samples_what_the_native_engine_samples(kind, tmp_path):
    # SGLang takes the decoder's epsilon for the norms of Qwen2-VL's tower, too, which is the same in published ones.
    folder = write_vision_checkpoint(tmp_path / "model", kind, patch_size=PATCH_SIZES[kind], rms_norm_eps=1e-6)
    processor = load_processor(folder)
    prompts = read_prompts(processor, 2 * PATCH_SIZES[kind])
    greedy = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    engine = build_engine(hf.load(folder, device="cpu", dtype=torch.float32).requires_grad_(False))

    replies = []

    async def compare(url):
        client = SglangClient(url, "sglang", vocab_size=len(processor.inner), media=processor.media)
        await client.fetch_info()
        for tokens, images in prompts:
            response, error = await client.generate(tokens, greedy, images=images)
            assert error is None
            ours = await engine.generate(np.array(tokens, np.int32), greedy, images)
            assert response.tokens == response_of(ours).tolist()
            np.testing.assert_allclose(response.logprobs, logprobs_of(ours), atol=2e-5)
            replies.append(response.tokens)
        await client.close()

    with sglang(folder, tmp_path / "sglang.log", PILLOW) as wire:
        asyncio.run(compare(wire.url))
    assert replies[0] != replies[2], "equal tokens, other images"
