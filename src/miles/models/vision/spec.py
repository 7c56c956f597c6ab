"""Vision specs: a vision tower's architecture, and how its features enter the decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PositionKind = Literal["sequential", "mrope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """The vision part of a decoder.

    The features of images replace the embeddings of ``image_token_id``, those of videos ``video_token_id`` (None: the
    model takes no videos). ``positions`` ``mrope`` gives the tokens of an image positions in time, height and width
    (``vision.positions``), ``sequential`` counts them as text. ``merge_size`` patches in height and width become one
    feature.
    """

    image_token_id: int
    video_token_id: int | None = None
    positions: PositionKind = "sequential"
    merge_size: int = 1
