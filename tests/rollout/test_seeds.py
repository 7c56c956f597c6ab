"""Seeds: pure, distinct, and apart from each other's streams."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles.core.types import Prompt
from miles.rollout.seeds import hash_text, make_eval_seed_fn, make_training_seed_fn, mix, mix_each

WHOLE = st.integers(-(2**70), 2**70)


def at(prompt_id: int, epoch: int = 0) -> Prompt:
    return Prompt(id=prompt_id, messages=(), epoch=epoch)


def test_the_mixer_is_splitmix64():
    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of splitmix64 seeded with 0
    assert mix(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4  # and its second


@given(parts=st.lists(WHOLE, min_size=1, max_size=5))
def test_a_hash_is_a_word_and_depends_on_nothing_else(parts):
    assert 0 <= mix(*parts) < 2**64
    assert mix(*parts) == mix(*parts)


@given(prefix=st.lists(st.integers(0, 2**64 - 1), max_size=3), values=st.lists(st.integers(0, 2**62), max_size=8))
def test_hashing_an_array_is_hashing_each_entry(prefix, values):
    found = mix_each(tuple(prefix), np.array(values, np.int64))
    assert found.tolist() == [mix(*prefix, value) for value in values]


def test_no_two_trajectories_share_a_seed():
    of = {run: make_training_seed_fn(run) for run in (0, 1, 42)}
    held_out = {name: make_eval_seed_fn(42, name) for name in ("easy", "hard")}
    seeds = [f(at(p, e), i) for f in of.values() for p in range(40) for e in range(4) for i in range(8)]
    seeds += [f(at(p), i) for f in held_out.values() for p in range(40) for i in range(8)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_evaluation_seeds_do_not_follow_the_epoch():
    of = make_eval_seed_fn(42, "easy")
    assert of(at(3, 0), 1) == of(at(3, 5), 1)


def test_seeds_are_the_same_in_every_process_and_version():
    assert make_training_seed_fn(42)(at(7, 1), 3) == mix(1, 42, 7, 1, 3) >> 1
    assert hash_text("easy") == 0xC8C9D501FE0EC197  # the first eight bytes of its SHA-256


def test_the_bits_of_seeds_are_balanced():
    seeds = np.array([make_training_seed_fn(1)(at(p), i) for p in range(250) for i in range(16)], np.uint64)
    ones = [float(((seeds >> np.uint64(bit)) & np.uint64(1)).mean()) for bit in range(63)]
    assert all(abs(share - 0.5) < 0.05 for share in ones)  # 4000 draws: six standard deviations
