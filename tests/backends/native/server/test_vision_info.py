"""What a server says of a model with a vision tower."""

from pathlib import Path

from tests.backends.native.server.live import Live, served
from tests.models.vision.small_vision import vision_model

from miles.backends.native.server.config import ServeConfig


def test_a_model_with_a_vision_tower_understands_images(folder: Path, tmp_path: Path):
    async def story(live: Live):
        _, metrics = await live.get("/metrics")
        assert "encoded_images" in metrics
        return (await live.get("/model_info"))[1]["has_image_understanding"]

    vision_model("qwen3_vl").save_pretrained(tmp_path)
    assert served(story, tmp_path, ServeConfig(skip_tokenizer_init=True), engine_kv_tokens=256)
    assert not served(story, folder)
