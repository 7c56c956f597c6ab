"""Garbage is looked for seldom where much is under way, and as ever where little is."""

import gc

import pytest

from miles.launch.garbage import MANY, collect_seldom


@pytest.mark.parametrize(("inside", "seldom"), [(MANY - 1, False), (MANY, True)])
def test_a_driver_with_much_under_way_looks_for_garbage_seldom(inside, seldom):
    usual = gc.get_threshold()
    try:
        collect_seldom(inside)
        assert (gc.get_threshold() != usual) is seldom and (gc.get_freeze_count() > 0) is seldom
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)
