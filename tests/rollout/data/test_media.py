"""Images of prompt data: every form a row may hold them in, and the sentence for each that cannot be used."""

import asyncio
import base64
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web
from tests.core.test_image_files import make_bomb
from tests.models.small_vision import draw_image, draw_png

from miles.core.errors import DataError
from miles.core.image_files import ImageLimits, encode_data_url
from miles.core.media_store import MediaStore, find_image_references, find_references
from miles.core.video_files import VideoManifest, parse_manifest
from miles.rollout.data.dataset import DatasetSource, read_dataset
from miles.rollout.data.media import MediaReader

URL = encode_data_url(draw_png(0))


def read(path, *, column="images", store=None, skip=False, keys=None, **options):
    return read_dataset(
        str(path),
        input_key="input",
        media_keys=keys or ({} if column is None else {"image": column}),
        media=MediaReader(store=store or MediaStore()),
        skip_bad_rows=skip,
        **options,
    )


def write(folder, *rows):
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def expected(seed):
    return MediaStore().put(draw_png(seed))


@pytest.mark.parametrize(
    "value",
    [
        "pictures/a.png",
        "file://{folder}/pictures/a.png",
        "{folder}/pictures/a.png",
        URL,
        base64.b64encode(draw_png(0)).decode(),
        {"path": "pictures/a.png", "bytes": None},
        {"url": URL},
    ],
)
def test_every_form_of_an_image_becomes_the_same_reference(value, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(draw_png(0))
    value = value.format(folder=tmp_path) if isinstance(value, str) and "{" in value else value
    path = write(tmp_path, {"input": "see <image> now", "images": [value]})
    (prompt,) = read(path).prompts
    assert prompt.messages[0]["content"] == [
        {"type": "text", "text": "see "},
        {"type": "image", "image": expected(0)},
        {"type": "text", "text": " now"},
    ]


def test_images_of_a_hugging_face_image_data_set_are_read_from_parquet(tmp_path):
    rows = [
        {"input": "<image>a", "images": [{"bytes": draw_png(0), "path": "a.png"}]},
        {"input": "<image><image>b", "images": [{"bytes": draw_png(seed), "path": None} for seed in (1, 2)]},
        {"input": "text alone", "images": []},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    prompts = read(tmp_path / "data.parquet").prompts
    found = [find_image_references(prompt.messages) for prompt in prompts]
    assert found == [[expected(0)], [expected(1), expected(2)], []]
    assert prompts[2].messages[0]["content"] == "text alone"


def test_typed_parts_hold_images_or_take_them_from_the_column(tmp_path):
    messages = [
        {"role": "system", "content": "Look."},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": URL},
                {"type": "text", "text": "against"},
                {"type": "image"},
                {"type": "image_url", "image_url": {"url": encode_data_url(draw_png(2))}},
            ],
        },
    ]
    path = write(tmp_path, {"input": messages, "images": encode_data_url(draw_png(1))})
    (prompt,) = read(path).prompts
    assert find_image_references(prompt.messages) == [expected(0), expected(1), expected(2)]


def test_other_images_are_other_data(tmp_path):
    def state(seed):
        path = write(tmp_path, {"input": "<image>", "images": [encode_data_url(draw_png(seed))]})
        return DatasetSource(read(path)).state()["data"]

    assert state(0) == state(0) != state(1)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input": "<image>", "images": ["no.png"]}, r"line 1, column images, image 1: the image 'no.png' is no file"),
        ({"input": "<image>", "images": [base64.b64encode(make_bomb(9999, 9999)).decode()]}, "9999 x 9999 pixels"),
        ({"input": "<image>", "images": ["data:image/png;base64,AAAA"]}, "is no image of a known format"),
        ({"input": "<image>", "images": ["data:text/plain;base64,AAAA"]}, "of type text/plain"),
        ({"input": "<image>", "images": ["https://example.com/a.png"]}, "unless --allow-image-urls is given"),
        ({"input": "<image>", "images": [7]}, "is a int, and not a path"),
        ({"input": "<image>", "images": [{"height": 3}]}, "an object without bytes, path or url"),
        ({"input": "<image>", "images": [encode_data_url(draw_png(0, 400, 400))]}, "bytes, and the limit is 1000"),
        ({"input": "<image><image>", "images": [URL]}, "line 1, message 1: there are more <image> markers"),
        ({"input": "no marker", "images": [URL]}, "column images has 1 images for 0 <image> markers"),
        ({"input": [{"role": "user", "content": [{"type": "audio", "audio": "v"}]}], "images": []}, "type 'audio'"),
        (
            {"input": [{"role": "user", "content": [{"type": "video", "path": "v.mp4"}]}], "images": []},
            "is 'v.mp4', and",
        ),
    ],
)
def test_rows_whose_images_cannot_be_used_are_named(row, reason, tmp_path):
    good = {"input": "<image>", "images": [URL]}
    store = MediaStore(limits=ImageLimits(max_bytes=1000) if "limit is 1000" in reason else ImageLimits())
    with pytest.raises(DataError, match=reason):
        read(write(tmp_path, row, good), store=store)
    dataset = read(write(tmp_path, row, good), store=store, skip=True)
    assert (dataset.skipped, [prompt.id for prompt in dataset.prompts]) == (1, [1])


def animate(frames=3, **how):
    out = io.BytesIO()
    first, *rest = (draw_image(seed) for seed in range(frames))
    first.save(out, format="PNG", save_all=True, append_images=rest, **how)
    return out.getvalue()


def read_videos(tmp_path, *rows):
    store = MediaStore()
    keys = {"image": "images", "video": "frames"}
    dataset = read(write(tmp_path, *rows), store=store, column=None, keys=keys)
    found = [[parse_manifest(store.get(each)) for each in find_references(p.messages)] for p in dataset.prompts]
    return dataset, found


FRAMES = [encode_data_url(draw_png(seed)) for seed in range(3)]


@pytest.mark.parametrize(
    ("value", "fps"),
    [
        (FRAMES, 2.0),
        ({"frames": FRAMES, "fps": 8}, 8.0),
        ({"bytes": base64.b64encode(animate(duration=250)).decode()}, 4.0),
        (encode_data_url(animate()), 2.0),
        ("clip.png", 5.0),
    ],
)
def test_every_form_of_a_video_is_its_frames_and_their_rate(value, fps, tmp_path):
    (tmp_path / "clip.png").write_bytes(animate(duration=200))
    part = [{"role": "user", "content": [{"type": "video", "video": value}]}]
    _, found = read_videos(tmp_path, {"input": "see <video>", "frames": value, "images": []}, {"input": part})
    assert found == 2 * [[VideoManifest(tuple(expected(seed) for seed in range(3)), fps)]]


def test_images_and_several_videos_take_their_places_in_a_prompt(tmp_path):
    row = {
        "input": "a <video> b <image> c <video>",
        "images": [URL],
        "frames": [FRAMES, {"frames": FRAMES[:2], "fps": 1}],
    }
    dataset, ((first, none, second),) = read_videos(tmp_path, row)
    kinds = [part["type"] for part in dataset.prompts[0].messages[0]["content"]]
    assert kinds == ["text", "video", "text", "image", "text", "video"] and none is None
    assert (len(first.frames), first.fps, len(second.frames), second.fps) == (3, 2.0, 2, 1.0)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (
            "clip.mp4",
            "column frames, video 1: the video is 'clip.mp4', and not a list of frames.* extract their frames",
        ),
        (FRAMES[:1], "the video has 1 frames, but a video must have from 2 to 768"),
        ([*FRAMES, "no.png"], "video 1, frame 4: the image 'no.png' is no file"),
        ({"frames": FRAMES, "fps": "fast"}, "has fps 'fast', which must be a number"),
        (URL, "the video has 1 frames"),
        ([FRAMES, FRAMES], "column frames has 2 videos for 1 <video> markers"),
    ],
)
def test_rows_whose_videos_cannot_be_used_are_named(value, reason, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(bytes(100))
    with pytest.raises(DataError, match=reason):
        read_videos(tmp_path, {"input": "<video>", "frames": value, "images": []})


def test_a_column_that_no_row_has_is_an_error(tmp_path):
    with pytest.raises(DataError, match="has no column pictures, which --multimodal-keys names"):
        read(write(tmp_path, {"input": "a", "images": []}), column="pictures")


def test_images_for_a_text_model_are_an_error(tmp_path):
    part = [{"role": "user", "content": [{"type": "image", "image": URL}]}]
    with pytest.raises(DataError, match="reads text only"):
        read_dataset(str(write(tmp_path, {"input": part})), input_key="input")


def test_urls_are_fetched_where_they_are_allowed_and_only_images(tmp_path):
    async def serve(request):
        kind = "text/html" if request.path.endswith("page") else "image/png"
        return web.Response(body=draw_png(0), content_type=kind)

    async def story():
        app = web.Application()
        app.router.add_get("/{name}", serve)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        store = MediaStore(allow_urls=True)
        path = write(tmp_path, {"input": "<image>", "images": [f"{url}/a.png"]})
        (prompt,) = (await asyncio.to_thread(read, path, store=store)).prompts
        assert find_image_references(prompt.messages) == [expected(0)]
        small = MediaStore(allow_urls=True, limits=ImageLimits(max_bytes=10))
        with pytest.raises(DataError, match="has more than 10 bytes"):
            await asyncio.to_thread(read, path, store=small)
        page = write(tmp_path, {"input": "<image>", "images": [f"{url}/page"]})
        with pytest.raises(DataError, match="is of type text/html, and not an image"):
            await asyncio.to_thread(read, page, store=store)
        await runner.cleanup()

    asyncio.run(story())
