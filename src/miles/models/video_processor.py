"""Video processors of Qwen's vision models and Gemma 4 without torchvision: resized frames, patches, timestamps.

transformers' video processors need torchvision. Here every frame is resized with Pillow to the size that those choose
for the whole video, and cut into patches by the checkpoint's Pillow image processor; the same pixel of neighbouring
frames then makes a temporal patch. Frames of Gemma 4 are images of fewer features, each with its time before it.

Shapes: N frames, G groups of K frames (temporal patches), P patches of a frame, C channels, s side of a patch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from miles.core.errors import DataError
from miles.core.media import Array

_QWEN2 = {"size": {"shortest_edge": 128 * 28**2, "longest_edge": 768 * 28**2}, "max_video_tokens": 128_000}
_QWEN3 = {"size": {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2}, "max_video_tokens": 768}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "Qwen2VLProcessor": _QWEN2,
    "Qwen2_5_VLProcessor": _QWEN2,
    "Qwen3VLProcessor": _QWEN3,
    "Gemma4Processor": {"max_soft_tokens": 70},
}
_MAX_RATIO = 200


@dataclass(frozen=True, slots=True)
class ProcessedVideo:
    """The arrays of a video by the names of transformers' processors, and the text that its marker becomes."""

    arrays: dict[str, Array]
    text: str


def check_video_support(processor_class: str) -> None:
    """Raise a DataError unless videos of this processor can be processed."""
    if processor_class not in _DEFAULTS:
        raise DataError(
            f"a prompt has a video, and videos of {processor_class} are not supported ({', '.join(_DEFAULTS)} are); "
            "give its frames as images."
        )


def process_video(frames: Sequence[Any], fps: float, processor: Any, folder: Path) -> ProcessedVideo:
    """Process the frames (``PIL.Image``) of a video with the settings of the checkpoint in ``folder``.

    ``processor`` is the checkpoint's transformers processor with a Pillow image processor.
    """
    name = type(processor).__name__
    check_video_support(name)
    sizes = {(frame.width, frame.height) for frame in frames}
    if len(sizes) > 1:
        raise DataError(f"the frames of a video have {len(sizes)} sizes; give all of them one size.")
    settings = {**_DEFAULTS[name], **read_video_settings(folder)}
    if name == "Gemma4Processor":
        return _process_frames(frames, fps, processor, settings, folder)
    image_processor = processor.image_processor
    patch = {key: int(getattr(image_processor, key)) for key in ("temporal_patch_size", "patch_size", "merge_size")}
    if any(settings.get(key, size) != size for key, size in patch.items()):
        raise DataError(f"the videos and images of {folder} have patches of other sizes, which is not supported.")
    group, side, merge = patch.values()
    ((width, height),) = sizes
    pixels = _frame_pixels(settings, len(frames), group, side * merge, per_video=name == "Qwen3VLProcessor")
    target = choose_frame_size(height, width, side * merge, *pixels)
    resized = [frame.resize(target[::-1], resample=int(settings.get("resample", 3))) for frame in frames]
    values = {key: settings[key] for key in ("image_mean", "image_std", "rescale_factor") if key in settings}
    out = image_processor(images=resized, do_resize=False, return_tensors="np", **values)
    rows, columns = (int(count) for count in np.asarray(out["image_grid_thw"])[0, 1:])
    patches = _group_frames(np.asarray(out["pixel_values"]), len(frames), group, side)
    groups = len(patches) // (rows * columns)
    arrays: dict[str, Array] = {
        "pixel_values_videos": patches,
        "video_grid_thw": np.array([[groups, rows, columns]], np.int64),
    }
    if name == "Qwen2_5_VLProcessor":
        arrays["second_per_grid_ts"] = np.array([group / fps])
    features = rows * columns // merge**2
    if name != "Qwen3VLProcessor":
        return ProcessedVideo(arrays, processor.video_token * (groups * features))
    frame_text = processor.vision_start_token + processor.video_token * features + processor.vision_end_token
    times = _group_times(len(frames), fps, group)
    return ProcessedVideo(arrays, "".join(f"<{time:.1f} seconds>{frame_text}" for time in times))


def _process_frames(
    frames: Sequence[Any], fps: float, processor: Any, settings: Mapping[str, Any], folder: Path
) -> ProcessedVideo:
    """A video of Gemma 4: every frame an image, behind its time in minutes and seconds."""
    image_processor = processor.image_processor
    for key in ("patch_size", "pooling_kernel_size"):
        if settings.get(key, getattr(image_processor, key)) != getattr(image_processor, key):
            raise DataError(f"the videos and images of {folder} have another {key}, which is not supported.")
    names = ("max_soft_tokens", "image_mean", "image_std", "rescale_factor", "resample")
    values = {key: settings[key] for key in names if key in settings}
    out = image_processor(images=list(frames), return_tensors="np", **values)
    counts = {int(count) for count in np.asarray(out["num_soft_tokens_per_image"]).reshape(-1)}
    assert len(counts) == 1, "frames of one size have as many features"
    frame_text = processor.boi_token + processor.video_token * counts.pop() + processor.eoi_token
    seconds = (int(number / fps) for number in range(len(frames)))
    arrays: dict[str, Array] = {
        "pixel_values_videos": np.asarray(out["pixel_values"])[None],
        "video_position_ids": np.asarray(out["image_position_ids"])[None],
    }
    text = " ".join(f"{second // 60:02d}:{second % 60:02d} {frame_text}" for second in seconds)
    return ProcessedVideo(arrays, text)


def _group_frames(pixels: Array, frames: int, group: int, side: int) -> Array:
    """Temporal patches out of the patches of single frames, in which a frame is repeated; the last frame fills up."""
    pixels_NPCKss = pixels.reshape(frames, -1, pixels.shape[-1] // (group * side**2), group, side, side)
    frames_NPCss = pixels_NPCKss[:, :, :, 0]
    missing = -frames % group
    frames_NPCss = np.concatenate((frames_NPCss, np.repeat(frames_NPCss[-1:], missing, 0)))
    groups_GPCKss = frames_NPCss.reshape(-1, group, *frames_NPCss.shape[1:]).transpose(0, 2, 3, 1, 4, 5)
    return np.ascontiguousarray(groups_GPCKss.reshape(-1, pixels.shape[-1]))


def _group_times(frames: int, fps: float, group: int) -> list[float]:
    """The mean of the first and the last time of each temporal patch, in seconds."""
    starts = range(0, frames, group)
    return [(start / fps + min(start + group - 1, frames - 1) / fps) / 2 for start in starts]


def _frame_pixels(
    settings: Mapping[str, Any], frames: int, group: int, factor: int, *, per_video: bool
) -> tuple[float, float, float]:
    """Fewest and most pixels, and how many frames they are for."""
    size = settings["size"]
    low = int(settings.get("min_pixels") or size["shortest_edge"])
    high = int(settings.get("max_pixels") or size["longest_edge"])
    cap, floor = bool(settings.get("cap_pixels_per_frame")), int(low * 1.05)
    tokens = int(settings["max_video_tokens"])
    if per_video:
        if cap:
            high = max(min(tokens * factor**2, high // frames), floor) * frames
        return low, high, frames
    if cap:
        high = max(min(high, int(tokens * factor**2 * 0.9) * group // frames), floor)
    return low, high, 1


def choose_frame_size(
    height: int, width: int, factor: int, low: float, high: float, frames: float = 1
) -> tuple[int, int]:
    """Height and width that are multiples of ``factor``, near those given, with ``low`` to ``high`` pixels in all.

    >>> choose_frame_size(100, 200, 28, 3136, 1e6), choose_frame_size(1000, 2000, 28, 3136, 1e5)
    ((112, 196), (196, 420))
    """
    if frames > 1 and min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > _MAX_RATIO:
        raise DataError(f"a frame of {width} x {height} pixels is more than {_MAX_RATIO} times as long as wide.")
    rounded = round(height / factor) * factor, round(width / factor) * factor
    # Qwen3-VL counts whole temporal patches of two frames where it compares, and frames where it scales.
    total = rounded[0] * rounded[1] * (1 if frames == 1 else round(frames / 2) * 2)
    if total > high:
        scale = math.sqrt(frames * height * width / high)
        height, width = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
        return height, width
    if total < low:
        scale = math.sqrt(low / (frames * height * width))
        height, width = (math.ceil(side * scale / factor) * factor for side in (height, width))
        return height, width
    return rounded


def read_video_settings(folder: Path) -> dict[str, Any]:
    """The settings of the video processor of a checkpoint, wherever it has them."""
    for name in ("video_preprocessor_config.json", "processor_config.json", "preprocessor_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        settings = json.loads(path.read_text(encoding="utf-8"))
        if name == "processor_config.json":
            settings = settings.get("video_processor")
        if settings:
            return dict(settings)
    return {}
