"""Consistent hashing: which engine has a key, and which keys move when one is added or removed."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from miles.cluster.router.consistent_hash import HashRing, hash_key

names = st.lists(st.text("abcdef0123.:", min_size=1, max_size=12), min_size=1, max_size=12, unique=True)
KEYS = [f"key {i}".encode() for i in range(400)]


def ring_of(members: list[str]) -> HashRing:
    ring = HashRing()
    for name in members:
        ring.add(name)
    return ring


def owners(ring: HashRing) -> dict[bytes, str]:
    return {key: next(ring.walk(key)) for key in KEYS}


@settings(deadline=None, max_examples=examples(40))
@given(names, st.binary(max_size=40))
def test_a_walk_meets_every_member_once(members: list[str], key: bytes):
    assert sorted(ring_of(members).walk(key)) == sorted(members)


@settings(deadline=None, max_examples=examples(40))
@given(names, st.randoms(use_true_random=False))
def test_the_order_of_joining_does_not_matter(members: list[str], random):
    shuffled = members[:]
    random.shuffle(shuffled)
    assert owners(ring_of(members)) == owners(ring_of(shuffled))


@settings(deadline=None, max_examples=examples(40))
@given(names, st.data())
def test_only_the_keys_of_who_joins_or_leaves_move(members: list[str], data):
    ring = ring_of(members)
    mover = data.draw(st.sampled_from(members))
    if len(members) == 1:
        return
    full = owners(ring)
    ring.remove(mover)
    without = owners(ring)
    assert all(without[key] == owner for key, owner in full.items() if owner != mover)
    assert all(owner != mover for owner in without.values())
    ring.add(mover)
    assert owners(ring) == full


@settings(deadline=None, max_examples=examples(40))
@given(names, st.data())
def test_a_key_falls_to_the_next_of_its_walk_when_its_owner_leaves(members: list[str], data):
    ring, key = ring_of(members), data.draw(st.binary(max_size=20))
    walk = list(ring.walk(key))
    ring.remove(walk[0])
    assert list(ring.walk(key)) == walk[1:]


@settings(deadline=None, max_examples=examples(10))
@given(st.integers(2, 16))
def test_everyone_has_about_the_same_share_and_about_that_much_moves(count: int):
    members = [f"10.0.0.{i}:30000" for i in range(count)]
    keys = [i.to_bytes(4, "big") for i in range(4000)]
    ring = ring_of(members)
    before = {key: next(ring.walk(key)) for key in keys}
    shares = Counter(before.values())
    assert max(shares.values()) < 1.6 * len(keys) / count
    assert min(shares.values()) > 0.5 * len(keys) / count
    ring.add("10.0.1.1:30000")
    moved = sum(next(ring.walk(key)) != owner for key, owner in before.items())
    assert 0.5 / (count + 1) < moved / len(keys) < 1.6 / (count + 1)


def test_an_empty_ring_has_nobody():
    assert list(HashRing().walk(b"key")) == []


def test_places_are_those_that_b2sum_prints():
    assert hash_key(b"key") == 0xCE7CCCADC3A94CF5
