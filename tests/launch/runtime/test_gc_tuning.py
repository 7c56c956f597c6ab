"""What is loaded is not looked at for garbage, young objects seldom where much is under way; all is as ever after."""

import gc
import weakref

import pytest

from miles.launch.runtime.gc_tuning import MANY_TRAJECTORIES, pause_gc, reduce_gc


class Ring:
    """Garbage only a collector finds, once nobody else has it."""

    def __init__(self):
        self.me = self


@pytest.mark.parametrize(("inside", "seldom"), [(MANY_TRAJECTORIES - 1, False), (MANY_TRAJECTORIES, True)])
def test_a_driver_with_much_under_way_looks_for_garbage_seldom(inside, seldom):
    usual = gc.get_threshold()
    with reduce_gc(inside):
        assert (gc.get_threshold() != usual) is seldom and gc.get_freeze_count() > 0
    assert gc.get_threshold() == usual and gc.get_freeze_count() == 0


def test_what_was_there_is_found_again_when_it_is_over():
    before, ring = Ring(), weakref.ref(Ring())
    assert ring() is not None
    with pytest.raises(KeyError), reduce_gc():
        assert ring() is None  # what was garbage already is not kept
        known = weakref.ref(before)
        del before
        late = weakref.ref(Ring())
        gc.collect()
        assert known() is not None and late() is None
        raise KeyError
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_a_pause_leaves_the_collector_as_it_was(enabled):
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), pause_gc():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
