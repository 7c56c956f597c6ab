"""Videos in prompts: tokens, pixels and grids as transformers' processors give them, and the tokens' log-probs."""

import asyncio
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.native.image_requests import build_engine, logprobs_of, response_of
from tests.models.small_vision import KINDS, draw_image, draw_png, write_processor, write_vision_checkpoint
from tests.train.vision_samples import pack, sample

from miles.backends.fsdp.local_model import LocalModel
from miles.core.errors import DataError
from miles.core.media import compute_digest
from miles.core.media_store import PREFIX
from miles.core.protocols import SamplingParams
from miles.models.checkpoint import hf
from miles.models.processor import load_processor
from miles.models.video_processor import choose_frame_size, process_video
from miles.train.logprobs import compute_logprobs

FPS = 4.0
VIDEO_PROCESSORS = dict(
    zip(KINDS, ("Qwen2VLVideoProcessor", "Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"), strict=True)
)
ASK = "<|vision_start|><|video_pad|><|vision_end|>"
SHOW = "<|vision_start|><|image_pad|><|vision_end|>"


def put_video(processor, frames=5, *, seed=0, fps=FPS, width=40, height=24):
    references = [processor.media.put(draw_png(seed + at, width, height)) for at in range(frames)]
    return processor.media.put_video(references, fps)


@pytest.mark.parametrize("kind", KINDS)
def test_a_video_is_temporal_patches_of_its_frames(kind, tmp_path):
    processor = load_processor(write_processor(tmp_path, kind))
    tokens, (placed,) = processor.encode_with_images(f"see {ASK} now", [put_video(processor)])
    video = placed.image
    assert video.kind == "video" and video.arrays["video_grid_thw"].tolist() == [[3, 6, 10]]
    assert video.num_features == 3 * 6 * 10 // 4 == tokens.count(processor.get_placeholder("video"))
    # The patches of each frame are those of the same frame as an image; the last frame is repeated.
    stacked = video.arrays["pixel_values_videos"].reshape(3, 60, 3, 2, 4, 4)
    for at in range(6):
        frame = processor.process(processor.media.put(draw_png(min(at, 4), 40, 24))).image.arrays["pixel_values"]
        np.testing.assert_array_equal(stacked[at // 2, :, :, at % 2], frame.reshape(60, 3, 2, 4, 4)[:, :, 0])
    text = processor.decode(tokens[placed.start - 1 : placed.end])
    assert text.count("seconds") == (2 if kind == "qwen3_vl" else 0)
    if kind == "qwen3_vl":
        assert "<0.1 seconds><|vision_start|>" in processor.decode(tokens) and "<1.0 seconds>" in text
    assert ("second_per_grid_ts" in video.arrays) == (kind == "qwen2_5_vl")


@pytest.mark.skipif("torchvision" not in sys.modules, reason="transformers' video processors need torchvision")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("frames", "width", "height"), [(4, 40, 24), (5, 40, 24), (7, 90, 61), (2, 9, 30), (6, 300, 9)]
)
def test_tokens_pixels_and_grids_are_those_of_transformers(kind, frames, width, height, tmp_path):
    from transformers import AutoProcessor

    write_processor(tmp_path, kind)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    settings |= {"video_processor_type": VIDEO_PROCESSORS[kind], "size": {"shortest_edge": 512, "longest_edge": 9000}}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    processor = load_processor(tmp_path)
    reference = AutoProcessor.from_pretrained(tmp_path)
    text = f"a {SHOW} b {ASK} c {ASK}"
    videos = [[draw_image(seed + at, width, height) for at in range(frames)] for seed in (0, 50)]
    metadata = [{"fps": FPS, "total_num_frames": frames, "frames_indices": list(range(frames))} for _ in videos]
    expected = reference(
        text=[text], images=[draw_image(9)], videos=videos, video_metadata=metadata, do_sample_frames=False,
        return_tensors="np",
    )  # fmt: skip
    references = [processor.media.put(draw_png(9))]
    references += [put_video(processor, frames, seed=seed, width=width, height=height) for seed in (0, 50)]
    tokens, images = processor.encode_with_images(text, references)
    assert tokens == expected["input_ids"][0].tolist()
    assert processor.expand_tokens(processor.encode(text), references)[0] == tokens
    arrays = [placed.image.arrays for placed in images[1:]]
    for name in ("video_grid_thw", "second_per_grid_ts"):
        if name in expected:
            np.testing.assert_allclose(np.concatenate([each[name] for each in arrays]), expected[name])
    pixels = np.concatenate([each["pixel_values_videos"] for each in arrays])
    # Pillow rounds a resized pixel to 8 bits between its two passes; torchvision does so too, in another order.
    np.testing.assert_allclose(pixels, expected["pixel_values_videos"], atol=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_of_engine_and_trainer_are_those_of_transformers(kind, tmp_path):
    from transformers import AutoModelForImageTextToText

    folder = write_vision_checkpoint(tmp_path, kind, seed=3)
    processor = load_processor(folder)
    references = [put_video(processor, fps=1.0), processor.media.put(draw_png(9)), put_video(processor, 4, seed=20)]
    tokens, images = processor.encode_with_images(f"a {ASK} b {SHOW} c {ASK} d", references)
    decoder = hf.load(folder, device="cpu", dtype=torch.float32).requires_grad_(False)
    engine = build_engine(decoder, page_size=4, prefill_chunk=11)
    how = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)  # no placeholder, with this seed
    answer = asyncio.run(engine.generate(np.array(tokens, np.int32), how, images))
    response = response_of(answer)
    assert not np.isin(response, [processor.get_placeholder(kind) for kind in ("image", "video")]).any()

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[*tokens, *response.tolist()]])
    kinds = (ids == processor.image_token_id).int() + 2 * (ids == processor.get_placeholder("video")).int()
    joined: dict[str, list] = {}
    for placed in images:
        for name, array in placed.image.arrays.items():
            joined.setdefault(name, []).append(torch.from_numpy(array.copy()))
    with torch.no_grad():
        arrays = {name: torch.cat(each) for name, each in joined.items()}
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **arrays).logits
    expected = logits[0, len(tokens) - 1 : -1].log_softmax(-1)
    picked = expected.gather(1, torch.from_numpy(response).long()[:, None])[:, 0]
    np.testing.assert_allclose(logprobs_of(answer), picked.numpy(), atol=1e-4)
    assert response.tolist() == expected.argmax(-1).tolist()

    trained = sample([(len(tokens), False), (len(response), True)], seed=0)
    trained = replace(trained, tokens=ids[0].numpy().astype(np.int32), images=images)
    trainer = LocalModel(hf.load(folder, device="cpu", dtype=torch.float32))

    def loss(number, output):
        logp_R, _ = compute_logprobs(output, rows.target_R)
        return logp_R.sum(), {"logp": logp_R.detach()}

    rows = pack([trained])
    (kept,) = trainer.forward_backward([rows], loss)
    np.testing.assert_allclose(kept["logp"].numpy(), picked.numpy(), atol=1e-4)
    assert any(p.grad is not None and p.grad.any() for name, p in trainer.parameters().items() if "vision" in name)


def test_equal_videos_are_one_file_whose_frames_are_kept_with_it(tmp_path):
    processor = load_processor(write_processor(tmp_path / "model", "qwen3_vl"))
    store = processor.media
    store.folder = tmp_path / "media"
    one, same, slower = put_video(processor), put_video(processor), put_video(processor, fps=1.0)
    assert one == same != slower
    asyncio.run(processor.prepare([{"role": "user", "content": [{"type": "video", "video": one}]}]))
    names = sorted(path.name for path in store.folder.iterdir())
    assert len(names) == 6 and sum(name.endswith(".video.json") for name in names) == 1
    again = load_processor(tmp_path / "model")
    again.media.add_folder(store.folder)
    image = again.load_image(one.removeprefix(PREFIX))
    assert image.kind == "video" and image == processor.process(one).image
    assert image.digest == compute_digest(image.arrays, "video")


def test_unusable_videos_are_refused(tmp_path):
    processor = load_processor(write_processor(tmp_path, "qwen3_vl"))
    frames = [processor.media.put(draw_png(0)), processor.media.put(draw_png(1, 48, 32))]
    with pytest.raises(DataError, match="the frames of a video have 2 sizes"):
        processor.process(processor.media.put_video(frames))
    with pytest.raises(ValueError, match="has 1 frames, but a video must have from 2 to 768"):
        processor.media.put_video(frames[:1])
    with pytest.raises(ValueError, match="positive number"):
        processor.media.put_video(frames, 0.0)
    with pytest.raises(DataError, match="a text has 0 video markers <|video_pad|> for 1 videos".replace("|", r"\|")):
        processor.encode_with_images("see", [put_video(processor)])
    with pytest.raises(DataError, match="in another order than those are given"):
        processor.encode_with_images(f"see {SHOW} {ASK}", [put_video(processor), frames[0]])
    other = type("Idefics3Processor", (), {})()
    with pytest.raises(DataError, match="videos of Idefics3Processor are not supported"):
        process_video([draw_image()], 2.0, other, tmp_path)


@pytest.mark.parametrize(
    ("size", "limits", "expected"),
    [((30, 50), (256, 4096), (32, 48)), ((300, 500), (256, 4096), (48, 80)), ((5, 7), (256, 4096), (16, 24))],
)
def test_frames_have_a_size_within_the_limits(size, limits, expected):
    assert choose_frame_size(*size, 8, *limits) == expected
    with pytest.raises(DataError, match="times as long as wide"):
        choose_frame_size(2, 500, 8, *limits)
