"""Nouns as bytes: what goes in comes out, whatever is in it, and nothing else does."""

import json
import math
import struct
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests.tiers import examples

from miles.config.cli import parse
from miles.core import media, types
from miles.core.serialization import CORE_TYPES, Codec, SerializationError
from miles.core.types import (
    Author,
    Batch,
    Group,
    Prompt,
    Reward,
    Sample,
    Span,
    Status,
    StepReport,
    TimeSpan,
    TokenStats,
    Trajectory,
    Version,
)
from miles.launch.config import Config
from miles.launch.distributed.driver import CODEC as TRAINERS

CODEC = Codec(CORE_TYPES)
FLOATS = st.floats(width=32, allow_nan=True)
WORDS = st.text(max_size=6)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(WORDS | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)
VERSIONS = st.builds(Version, WORDS, st.integers(-1, 2**40))


def of(dtype, count: int):
    return arrays.arrays(dtype, count, elements=arrays.from_dtype(np.dtype(dtype)))


@st.composite
def spans(draw) -> Span:
    count, author = draw(st.integers(0, 5)), draw(st.sampled_from(Author))
    wrote = author is Author.POLICY
    kind = draw(st.sampled_from([np.int8, np.uint16, np.float64, np.bool_]))
    return Span(
        author=author,
        tokens=draw(of(np.int32, count)),
        logprobs=draw(of(np.float32, count)) if wrote else None,
        version=draw(VERSIONS) if wrote else None,
        extras=draw(st.dictionaries(WORDS, arrays.arrays(kind, (count, 2, 3)), max_size=2)),
    )


@st.composite
def samples(draw) -> Sample:
    count = draw(st.integers(0, 6))
    mask = draw(of(np.bool_, count))
    mask[:1] = False
    return Sample(
        prompt_id=draw(st.integers(0, 10**15)),
        trajectory=draw(st.integers(0, 9)),
        tokens=draw(of(np.int32, count)),
        mask=mask,
        logprobs=draw(of(np.float32, count)),
        advantages=draw(of(np.float32, count)),
        versions=draw(of(np.int32, count)),
        policy=draw(WORDS),
        samples_per_trajectory=draw(st.integers(1, 4)),
        reward=draw(FLOATS),
        extras=draw(st.dictionaries(WORDS, arrays.arrays(np.int16, (count, 2)), max_size=2)),
    )


PROMPTS = st.builds(
    Prompt,
    id=st.integers(),
    messages=st.lists(st.dictionaries(WORDS, PLAIN, max_size=2), max_size=2),
    label=st.none() | WORDS,
    epoch=st.integers(0, 5),
    metadata=st.dictionaries(WORDS, PLAIN, max_size=3),
)
REWARDS = st.none() | st.builds(Reward, value=FLOATS, parts=st.dictionaries(WORDS, FLOATS, max_size=2))
TRAJECTORIES = st.builds(
    Trajectory,
    branches=st.lists(st.lists(spans(), max_size=3).map(tuple), max_size=2).map(tuple),
    status=st.sampled_from(Status),
    reward=REWARDS,
    index=st.integers(0, 5),
    metadata=st.dictionaries(WORDS, PLAIN, max_size=2),
)
GROUPS = st.builds(Group, prompt=PROMPTS, trajectories=st.lists(TRAJECTORIES, max_size=2).map(tuple))
ROWS = st.lists(samples(), max_size=3).map(tuple)
BATCHES = st.builds(Batch, step=st.integers(0, 9), samples=ROWS, num_groups=st.integers(0, 4), probe=ROWS)
TOKEN_STATS = st.lists(st.lists(FLOATS, max_size=3), max_size=3).map(
    lambda parts: TokenStats(
        sample_indices=np.arange(len(parts), dtype=np.int32),
        counts=np.array([len(part) for part in parts], np.int32),
        logprobs=np.array([value for part in parts for value in part], np.float32),
        entropies=np.array([value for part in parts for value in part], np.float32),
    )
)
TIME_SPANS = st.builds(TimeSpan, name=WORDS, start=st.floats(0, 1e10), seconds=st.floats(0, 1e5), lane=WORDS)
REPORTS = st.builds(
    StepReport,
    spans=st.lists(TIME_SPANS, max_size=2).map(tuple),
    token_stats=st.none() | TOKEN_STATS,
    version=VERSIONS,
    metrics=st.dictionaries(WORDS, st.floats(), max_size=3),
    seconds=st.dictionaries(WORDS, st.floats(), max_size=2),
)
ANYTHING = st.one_of(GROUPS, BATCHES, REPORTS, VERSIONS, st.dictionaries(WORDS, spans() | PLAIN, max_size=2))


def same(one, other) -> bool:
    """The same to the bit, types of containers included; a read-only view of a mapping is a mapping."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if is_dataclass(one):
        return type(one) is type(other) and all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, float):
        alike = struct.pack("d", one) == struct.pack("d", other)
        return type(other) is float and (alike or (math.isnan(one) and math.isnan(other)))
    if hasattr(one, "keys"):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_an_image_of_several_samples_is_written_once():
    pixels = np.arange(4096, dtype=np.float32).reshape(64, 64)
    placed = [
        media.PlacedImage(start=1, length=2, image=media.make_image_input({"pixel_values": pixels.copy()}, 2))
        for _ in range(8)
    ]
    other = media.PlacedImage(start=1, length=2, image=media.make_image_input({"pixel_values": -pixels}, 2))
    zeros = np.zeros(4, np.float32)

    def sample(image: media.PlacedImage) -> Sample:
        return Sample(
            prompt_id=0,
            trajectory=0,
            tokens=np.arange(4, dtype=np.int32),
            mask=np.array([False, False, False, True]),
            logprobs=zeros,
            advantages=zeros,
            versions=np.full(4, -1, np.int32),
            images=(image,),
        )

    batch = Batch(step=0, samples=tuple(map(sample, [*placed, other])), num_groups=1)
    data = CODEC.pack("step", batch)
    assert 2 * pixels.nbytes < len(data) < 3 * pixels.nbytes
    _, found = CODEC.unpack(data)
    assert same(batch, found)
    assert len({id(s.images[0].image) for s in found.samples}) == 2


def test_a_reference_to_an_image_that_the_message_lacks_is_refused():
    header = json.dumps(["kind", {"image": 0}]).encode()
    header += b" " * (-(4 + len(header)) % 8)
    with pytest.raises(SerializationError, match="refers to image 0 of 0"):
        CODEC.unpack(struct.pack("<I", len(header)) + header)


@given(ANYTHING)
@settings(max_examples=examples(80), deadline=None)
def test_an_object_round_trips(value):
    kind, found = CODEC.unpack(CODEC.pack("kind", value))
    assert kind == "kind"
    assert same(value, found)


def test_every_core_type_can_be_serialized():
    modules = (types, media)
    own = {cls for m in modules for cls in vars(m).values() if isinstance(cls, type) and cls.__module__ == m.__name__}
    assert own == set(CORE_TYPES)


def test_a_config_comes_out_as_it_went_in():
    config = parse(Config, ["--lr", "3", "--rollout-stop", "a", "b"], ()).config
    assert TRAINERS.unpack(TRAINERS.pack("open", config)) == ("open", config)
    assert TRAINERS.unpack(TRAINERS.pack("save", Path("a/b"))) == ("save", Path("a/b"))


def test_arrays_lie_where_they_can_be_read_and_may_be_written_to():
    _, found = CODEC.unpack(CODEC.pack("x", (np.arange(3, dtype=np.int8), np.arange(4.0), np.zeros((0, 2)))))
    assert found[1].flags.aligned
    found[1][0] = 7
    data = bytearray(CODEC.pack("x", np.arange(4)))
    CODEC.unpack(data)[1][0] = 9  # bytes of the reader's own are not copied
    assert CODEC.unpack(data)[1].tolist() == [9, 1, 2, 3]


def test_numbers_of_numpy_become_plain_ones():
    found = CODEC.unpack(CODEC.pack("x", Reward(value=np.float32(0.5))))[1]
    assert type(found.value) is float
    assert found == Reward(value=0.5)


@dataclass(frozen=True)
class Stranger:
    command: str


@pytest.mark.parametrize("content", [Stranger("rm"), {1, 2}, object(), np.array(["a"]), np.array([object()])])
def test_nothing_else_is_sent(content):
    with pytest.raises(SerializationError, match="cannot be serialized"):
        CODEC.pack("kind", {"inside": (content,)})


def written(tree, arrays: bytes = b"") -> bytes:
    header = json.dumps(["kind", tree]).encode()
    header += b" " * (-(4 + len(header)) % 8)
    return struct.pack("<I", len(header)) + header + arrays


def reward(**fields) -> dict:
    return {"type": "Reward", "fields": fields}


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (reward(value=1.0), "lacks the field parts"),
        (reward(value=1.0, parts={"mapping": []}, more=1), "has the unknown field more"),
        (reward(value="1", parts={"mapping": []}), "field value of a received Reward has the wrong type: a str"),
        (reward(value=True, parts={"mapping": []}), "field value of a received Reward has the wrong type: a bool"),
        (reward(value=1.0, parts={"mapping": [["a", None]]}), "field parts of a received Reward has the wrong type"),
        ({"type": "Stranger", "fields": {"command": "rm"}}, "a Stranger was received, which is not a registered type"),
        ({"enum": "Author", "value": "me"}, "a received Author is invalid"),
        ({"array": "|O", "shape": [1]}, "no array has dtype '|O' and shape"),
        ({"array": "<f4", "shape": [-1]}, "no array has dtype"),
        ({"array": "<f4", "shape": [3]}, "ends within an array"),
        ({"array": "nonsense", "shape": [3]}, "is not a numeric dtype"),
        ({"call": "rm"}, "unknown node with keys call"),
        ({"path": "a", "more": 1}, "unknown node with keys path, more"),
    ],
)
def test_bytes_that_are_no_message_are_refused(tree, says):
    with pytest.raises(SerializationError) as raised:
        CODEC.unpack(written(tree))
    assert says in str(raised.value)


def test_arrays_that_do_not_belong_together_are_refused():
    row = Sample(
        prompt_id=0,
        trajectory=0,
        tokens=np.zeros(3, np.int32),
        mask=np.zeros(3, bool),
        logprobs=np.zeros(3, np.float32),
        advantages=np.zeros(3, np.float32),
        versions=np.zeros(3, np.int32),
    )
    good = CODEC.pack("x", row)
    with pytest.raises(
        SerializationError, match="field logprobs of a received Sample has the wrong type: an array of float16"
    ):
        CODEC.unpack(good.replace(b'"<f4"', b'"<f2"', 1))
    longer = good.replace(b'"<i4","shape":[3]', b'"<i4","shape":[4]', 1)
    with pytest.raises(SerializationError, match=r"has 3 entries for 4 tokens"):
        CODEC.unpack(longer)


@given(ANYTHING, st.data())
@settings(max_examples=examples(40), deadline=None)
def test_bytes_cut_short_or_long_are_refused(value, data):
    whole = CODEC.pack("kind", value)
    with pytest.raises(SerializationError):
        CODEC.unpack(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(SerializationError):
        CODEC.unpack(whole + b"\0" * data.draw(st.integers(1, 9)))


@given(st.binary(max_size=60))
def test_no_bytes_whatever_bring_it_down(data):
    with pytest.raises(SerializationError):
        CODEC.unpack(data)
