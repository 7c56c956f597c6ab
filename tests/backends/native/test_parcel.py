"""Orders as bytes: what one rank packs is what another unpacks."""

from dataclasses import dataclass, fields, is_dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from miles.backends.native.order import Edits, Looks, Manner, Order, Scoring
from miles.backends.native.parcel import CODEC
from miles.core.wire import Codec, WireError

KINDS = {"Ints": np.int64, "Floats": np.float32, "Words": np.int32}


def _array(kind, shape=None):
    shapes = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5) if shape is None else shape
    return arrays.arrays(kind, shapes, elements=arrays.from_dtype(np.dtype(kind), allow_nan=False))


def _noun(noun, **given):
    """Any instance of a noun whose other fields are arrays or numbers."""
    own = {}
    for field in fields(noun):
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
    return st.builds(noun, **own)


_LOOKS = st.none() | _noun(Looks)
_COPIES = st.tuples(_array(np.int64), _array(np.int64))
_ORDERS = _noun(
    Order,
    manner=_noun(Manner),
    copies=_COPIES,
    seat_copies=_COPIES,
    edits=st.none() | _noun(Edits),
    looks=_LOOKS,
    scoring=st.none() | _noun(Scoring, looks=_LOOKS),
)


def same(one, other) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if is_dataclass(one):
        assert type(one) is type(other)
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@given(_ORDERS)
@settings(max_examples=30, deadline=None)
def test_an_order_comes_out_as_it_went_in(order):
    verb, found = CODEC.unpack(CODEC.pack("launch", order))
    assert verb == "launch"
    assert same(order, found)


@pytest.mark.parametrize("content", [None, 7, "words", {"pages": 12, "names": ("a", "b"), "digests": np.arange(3)}])
def test_other_words_between_ranks_come_out_as_they_went_in(content):
    verb, found = CODEC.unpack(CODEC.pack("open", content))
    assert verb == "open"
    if isinstance(content, dict):
        assert all(same(found[key], value) for key, value in content.items())
    else:
        assert found == content


@dataclass
class Stranger:
    command: str


def test_nothing_but_orders_is_made_out_of_bytes():
    with pytest.raises(WireError, match="a Stranger cannot be sent"):
        CODEC.pack("launch", Stranger("rm"))
    with pytest.raises(WireError, match="a Stranger was sent, which is no noun that travels"):
        CODEC.unpack(Codec((Stranger,)).pack("launch", Stranger("rm")))
