"""Multimodal processor: a checkpoint's own HF processor (image processor, chat template) behind the tokenizer protocol.

text with one marker per image  ->  markers expanded to placeholder tokens  ->  tokens, and images placed among them

Images are processed one by one on threads of their own, each once while it is in the cache. transformers is imported
when the first image is processed; its Pillow image processors are used, so that torchvision is not needed and all
machines compute the same pixels.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles.core.errors import DataError, describe_error
from miles.core.image_files import ImageFileError, decode_image
from miles.core.media import Array, ImageInput, Images, PlacedImage, make_image_input
from miles.core.media_store import PREFIX, MediaStore, find_references, parse_reference
from miles.core.video_files import VideoManifest, parse_manifest
from miles.models.hf_processor import load_hf_processor
from miles.models.media_config import has_image_processor
from miles.models.tokenizer import HfTokenizer, load_tokenizer
from miles.models.video_processor import process_video

_TEXT_OUTPUTS = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}
)
_PROBE = "Zwischenruf"
NUM_THREADS = 4
"""Threads that process images; most of the work releases the interpreter lock."""


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image's arrays, and the text and tokens that its marker in a prompt is replaced by."""

    image: ImageInput
    text: str
    tokens: tuple[int, ...]


class MultimodalProcessor(HfTokenizer):
    """A tokenizer that also encodes images. Raw files are in ``media``; processed ones are cached up to
    ``cache_bytes``."""

    def __init__(
        self,
        inner: Any,
        folder: Path,
        media: MediaStore,
        *,
        trust_remote_code: bool = False,
        cache_bytes: int = 1 << 30,
    ) -> None:
        super().__init__(inner, folder)
        self.media = media
        self._trust_remote_code = trust_remote_code
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._cache: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._pending: dict[str, Future[ProcessedImage]] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="image-processor")
        self._local = threading.local()
        self._hf: Any = None
        self._placeholder: int | None = None
        self._wants_parts: bool | None = None

    # -- properties of the processor --------------------------------------------------------

    @property
    def hf_processor(self) -> Any:
        """The transformers processor; loaded when first needed."""
        with self._lock:
            if self._hf is None:
                self._hf = load_hf_processor(self._folder, self._inner, trust_remote_code=self._trust_remote_code)
            return self._hf

    @property
    def image_marker(self) -> str:
        """The text that the chat template writes for one image."""
        return str(self.hf_processor.image_token)

    @property
    def image_token_id(self) -> int:
        """The placeholder token that image features replace."""
        if self._placeholder is None:
            self._placeholder = _find_placeholder(self.hf_processor, self._folder)
        return self._placeholder

    @property
    def media_markers(self) -> dict[str, str]:
        """The text that the chat template writes for one image, and for one video if the processor knows videos."""
        video = getattr(self.hf_processor, "video_token", None)
        return {"image": self.image_marker} | ({} if video is None else {"video": str(video)})

    def get_placeholder(self, kind: str) -> int:
        """The placeholder token that the features of an image or video replace."""
        return self.image_token_id if kind == "image" else int(self.hf_processor.video_token_id)

    def count_markers(self, tokens: Sequence[int]) -> int:
        """The number of markers of images and videos among tokens."""
        return sum(token in self._marker_tokens for token in tokens)

    @property
    def _marker_tokens(self) -> dict[int, str]:
        markers = {kind: self.encode(marker) for kind, marker in self.media_markers.items()}
        assert all(len(tokens) == 1 for tokens in markers.values()), "a marker is a token by itself"
        return {tokens[0]: kind for kind, tokens in markers.items()}

    # -- processing -------------------------------------------------------------------------

    async def prepare(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Process the images of messages on threads, so that encoding them afterwards takes no time.

        Their files are kept in the folder of the store, where it has one.
        """
        references = list(dict.fromkeys(find_references(messages)))
        if not references:
            return
        await asyncio.gather(*(asyncio.wrap_future(self._start(parse_reference(each))) for each in references))
        if not all(map(self.media.is_kept, references)):
            await asyncio.to_thread(lambda: list(map(self.media.keep, references)))

    def process(self, reference: str) -> ProcessedImage:
        """An image of the store, processed; DataError if it cannot be used."""
        return self._start(parse_reference(reference)).result()

    def load_image(self, source: str) -> ImageInput:
        """The arrays of a file of the store by its SHA-256."""
        return self.process(PREFIX + source).image

    def _start(self, digest: str) -> Future[ProcessedImage]:
        with self._lock:
            if (cached := self._cache.get(digest)) is not None:
                self._cache.move_to_end(digest)
                done: Future[ProcessedImage] = Future()
                done.set_result(cached)
                return done
            if (pending := self._pending.get(digest)) is not None:
                return pending
            pending = self._pending[digest] = self._pool.submit(self._process, digest)
        pending.add_done_callback(lambda future: self._finish(digest, future))
        return pending

    def _finish(self, digest: str, future: Future[ProcessedImage]) -> None:
        with self._lock:
            self._pending.pop(digest, None)
            if future.cancelled() or future.exception() is not None:
                return
            processed = future.result()
            self._cache[digest] = processed
            self._cached_bytes += processed.image.nbytes
            while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
                _, evicted = self._cache.popitem(last=False)
                self._cached_bytes -= evicted.image.nbytes

    def _process(self, digest: str) -> ProcessedImage:
        reference = PREFIX + digest
        where = self.media.describe(reference)
        data = self.media.get(reference)
        if (manifest := parse_manifest(data)) is not None:
            return self._process_video(digest, manifest, where)
        try:
            image = decode_image(data, self.media.limits)
        except ImageFileError as error:
            raise DataError(f"{where}: the image {error}.") from error
        processor = self._get_thread_processor()
        marker = str(processor.image_token)
        try:
            out = processor(images=[image], text=[marker], return_tensors="np", return_text_replacement_offsets=True)
        except Exception as error:  # a processor rejects shapes in its own ways
            raise DataError(
                f"{where}: the processor of {self._folder} rejects the image of {image.width} x {image.height} pixels "
                f"({describe_error(error)})."
            ) from error
        (replaced,) = out["text_replacement_offsets"][0]
        text = str(replaced["replacement"])
        tokens = tuple(processor.tokenizer.encode(text, add_special_tokens=False))
        num_features = tokens.count(_find_placeholder(processor, self._folder))
        arrays: dict[str, Array] = {
            name: np.ascontiguousarray(np.asarray(value)) for name, value in out.items() if name not in _TEXT_OUTPUTS
        }
        return ProcessedImage(make_image_input(arrays, num_features, source=digest), text, tokens)

    def _process_video(self, digest: str, manifest: VideoManifest, where: str) -> ProcessedImage:
        processor = self._get_thread_processor()
        try:
            frames = [decode_image(self.media.get(frame), self.media.limits) for frame in manifest.frames]
            video = process_video(frames, manifest.fps, processor, self._folder)
        except (ImageFileError, DataError) as error:
            raise DataError(f"{where}: {str(error).rstrip('.')}.") from error
        tokens = tuple(processor.tokenizer.encode(video.text, add_special_tokens=False))
        num_features = tokens.count(processor.video_token_id)
        image = make_image_input(video.arrays, num_features, kind="video", source=digest)
        return ProcessedImage(image, video.text, tokens)

    def _get_thread_processor(self) -> Any:
        """A processor of this thread's own: fast tokenizers cannot be called on two threads at once."""
        if not hasattr(self._local, "processor"):
            tokenizer = load_tokenizer(self._folder, self._trust_remote_code).inner
            self._local.processor = load_hf_processor(
                self._folder, tokenizer, trust_remote_code=self._trust_remote_code
            )
        return self._local.processor

    # -- encoding ---------------------------------------------------------------------------

    def render(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> tuple[NDArray[np.int32], Images]:
        """The tokens of a conversation by the chat template, and its images among them."""
        tokens, images = self.encode_with_images(
            self.render_chat_text(messages, **template), list(find_references(messages))
        )
        return np.array(tokens, np.int32), images

    def render_chat_text(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> str:
        if self._wants_parts is None:
            self._wants_parts = False
            probe = super().render_chat_text([{"role": "user", "content": _PROBE}], add_generation_prompt=True)
            self._wants_parts = _PROBE not in probe
        return super().render_chat_text(list(map(_as_parts, messages)) if self._wants_parts else messages, **template)

    def encode_with_images(self, text: str, references: Sequence[str]) -> tuple[list[int], Images]:
        """Encode a text that has one marker for each image, in order, expanded as the processor expands it."""
        if not references:
            return self.encode(text), ()
        markers = self.media_markers
        pieces = re.split("|".join(f"({re.escape(marker)})" for marker in markers.values()), text)
        pieces = [piece for piece in pieces if piece]
        kinds = {marker: kind for kind, marker in markers.items()}
        processed = [self.process(reference) for reference in references]
        self._check_markers([kinds[piece] for piece in pieces if piece in kinds], processed, "a text has")
        rest = iter(processed)
        tokens = self.encode("".join(next(rest).text if piece in kinds else piece for piece in pieces))
        return tokens, self._place(np.array(tokens, np.int64), processed)

    def expand_tokens(self, tokens: Sequence[int], references: Sequence[str]) -> tuple[list[int], Images]:
        """Expand tokens that have one marker token for each image, in order; other tokens stay as they are."""
        if not references:
            return list(tokens), ()
        kinds = self._marker_tokens
        processed = [self.process(reference) for reference in references]
        self._check_markers([kinds[token] for token in tokens if token in kinds], processed, "the tokens have")
        expanded: list[int] = []
        rest = iter(processed)
        for token in tokens:
            expanded += next(rest).tokens if token in kinds else (token,)
        return expanded, self._place(np.array(expanded, np.int64), processed)

    def _check_markers(self, found: Sequence[str], processed: Sequence[ProcessedImage], subject: str) -> None:
        """Raise a DataError unless there is a marker for each image and video, in their order."""
        expected = [each.image.kind for each in processed]
        for kind, marker in self.media_markers.items():
            if found.count(kind) != expected.count(kind):
                raise DataError(
                    f"{subject} {found.count(kind)} {kind} markers {marker} for {expected.count(kind)} {kind}s; text "
                    f"must not hold the marker itself, and the chat template must write it once for each {kind}."
                )
        if list(found) != expected:
            raise DataError(f"{subject} markers of images and videos in another order than those are given.")

    def _place(self, tokens: NDArray[np.int64], processed: Sequence[ProcessedImage]) -> Images:
        """Each image from its first placeholder to its last."""
        kinds = dict.fromkeys(each.image.kind for each in processed)
        rest = {kind: np.flatnonzero(tokens == self.get_placeholder(kind)) for kind in kinds}
        for kind, positions in rest.items():
            count = sum(each.image.num_features for each in processed if each.image.kind == kind)
            if len(positions) != count:
                raise DataError(
                    f"a prompt has {len(positions)} {kind} placeholder tokens for {kind}s of {count}; text must not "
                    "hold the placeholder itself."
                )
        images: list[PlacedImage] = []
        for each in processed:
            kind, count = each.image.kind, each.image.num_features
            start, end = int(rest[kind][0]), int(rest[kind][count - 1]) + 1
            rest[kind] = rest[kind][count:]
            images.append(PlacedImage(start=start, length=end - start, image=each.image))
        return tuple(images)


def _as_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose text is a part, for chat templates that read nothing else."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


# -- loading --------------------------------------------------------------------------------


def load_processor(
    folder: str | Path,
    *,
    media: MediaStore | None = None,
    trust_remote_code: bool = False,
    cache_bytes: int = 1 << 30,
    reads_images: bool = True,
) -> HfTokenizer:
    """The processor of a checkpoint that reads images, or the tokenizer of one that does not.

    ``reads_images`` False: the model is run without its vision tower, so that images are refused.
    """
    tokenizer = load_tokenizer(folder, trust_remote_code)
    if not has_image_processor(folder):
        return tokenizer
    legacy = Path(folder) / "chat_template.json"
    if legacy.is_file():
        tokenizer.inner.chat_template = json.loads(legacy.read_text(encoding="utf-8"))["chat_template"]
    if not reads_images:
        return tokenizer
    return MultimodalProcessor(
        tokenizer.inner,
        Path(folder),
        media or MediaStore(),
        trust_remote_code=trust_remote_code,
        cache_bytes=cache_bytes,
    )


def _find_placeholder(processor: Any, folder: Path) -> int:
    """The token that features replace; the model's config names it where that is not the marker itself."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    for name in ("image_token_id", "image_token_index", "media_placeholder_token_id"):
        if isinstance(config.get(name), int):
            return int(config[name])
    return int(processor.image_token_id)
