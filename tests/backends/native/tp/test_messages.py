"""Forward batches as bytes: what one rank encodes is what another decodes."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests.tiers import examples

from miles.backends.native.engine.draft_tree import DraftStates
from miles.backends.native.engine.forward_batch import (
    ForwardBatch,
    LogitEdits,
    LogprobQueries,
    PromptScoring,
    SamplingBatch,
)
from miles.backends.native.engine.vision import VisionBatch
from miles.backends.native.tp.runner import CODEC
from miles.core.media import make_image_input
from miles.core.serialization import Codec, SerializationError

KINDS = {"Ints": np.int64, "Floats": np.float32, "BitWords": np.int32, "Bools": np.bool_}


def _array(kind, shape=None):
    shapes = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5) if shape is None else shape
    return arrays.arrays(kind, shapes, elements=arrays.from_dtype(np.dtype(kind), allow_nan=False))


def _instances(cls, **given):
    """Any instance of a dataclass whose other fields are arrays or numbers."""
    own = {}
    for field in fields(cls):
        if field.name in given:
            own[field.name] = given[field.name]
        elif field.type in KINDS:
            own[field.name] = _array(KINDS[field.type])
        elif "bool_" in field.type:
            own[field.name] = _array(np.bool_)
        elif field.type == "bool":
            own[field.name] = st.booleans()
        else:
            own[field.name] = st.integers(0, 2**40) if field.type == "int" else st.none()
    return st.builds(cls, **own)


_QUERIES = st.none() | _instances(LogprobQueries)
_COPIES = st.tuples(_array(np.int64), _array(np.int64))
_IMAGES = _array(np.float32).map(lambda pixels: make_image_input({"pixel_values": pixels}, 3, source="file"))
_VISION = _instances(VisionBatch, images=st.lists(_IMAGES, max_size=3).map(tuple))
_BATCHES = _instances(
    ForwardBatch,
    vision=st.none() | _VISION,
    rope_offsets_B=st.none() | _array(np.int64),
    rope_positions_3T=st.none() | _array(np.int64),
    sampling=_instances(SamplingBatch),
    page_copies=_COPIES,
    state_copies=_COPIES,
    draft_states=st.none() | _instances(DraftStates),
    logit_edits=st.none() | _instances(LogitEdits),
    logprob_queries=_QUERIES,
    prompt_scoring=st.none() | _instances(PromptScoring, logprob_queries=_QUERIES),
)


def same(one, other) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if is_dataclass(one):
        assert type(one) is type(other)
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@given(_BATCHES)
@settings(max_examples=examples(30), deadline=None)
def test_a_forward_batch_decodes_to_what_was_encoded(batch):
    command, found = CODEC.unpack(CODEC.pack("launch", batch))
    assert command == "launch"
    assert same(batch, found)


@pytest.mark.parametrize("content", [None, 7, "words", {"pages": 12, "names": ("a", "b"), "digests": np.arange(3)}])
def test_other_messages_between_ranks_decode_to_what_was_encoded(content):
    command, found = CODEC.unpack(CODEC.pack("open", content))
    assert command == "open"
    if isinstance(content, dict):
        assert all(same(found[key], value) for key, value in content.items())
    else:
        assert found == content


@dataclass
class Stranger:
    command: str


def test_only_forward_batches_are_decoded():
    with pytest.raises(SerializationError, match="a Stranger cannot be serialized"):
        CODEC.pack("launch", Stranger("rm"))
    with pytest.raises(SerializationError, match="a Stranger was received, which is not a registered type"):
        CODEC.unpack(Codec((Stranger,)).pack("launch", Stranger("rm")))
