"""The fair queue: shares are equal and waiting is bounded, whatever others put in."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from miles.backends.service.fair_queue import FairQueue

QUANTUM, LARGEST = 50, 120
COSTS = st.lists(st.integers(1, LARGEST), min_size=40, max_size=60)


@settings(max_examples=examples(200))
@given(st.lists(COSTS, min_size=2, max_size=5), st.integers(20, 400))
def test_tenants_with_work_get_equal_shares(costs, budget):
    queue = FairQueue(QUANTUM)
    for tenant, own in enumerate(costs):
        for cost in own:
            queue.put(str(tenant), (tenant, cost), cost)
    served = [0] * len(costs)
    left = [len(own) for own in costs]
    while min(left) > 0:
        taken = queue.take(budget)
        assert len(taken) == 1 or sum(cost for _, cost in taken) <= budget
        for tenant, cost in taken:
            served[tenant] += cost
            left[tenant] -= 1
            if min(left) > 0:
                assert max(served) - min(served) <= QUANTUM + 2 * LARGEST


@settings(max_examples=examples(200))
@given(st.lists(COSTS, min_size=1, max_size=4), st.integers(1, LARGEST))
def test_a_newcomer_waits_for_few_turns_of_the_others(costs, cost):
    queue = FairQueue(QUANTUM)
    for tenant, own in enumerate(costs):
        for each in own:
            queue.put(str(tenant), (tenant, each), each)
    queue.take(100)
    queue.put("new", ("new", cost), cost)
    waited = 0
    while True:
        (taken,) = queue.take(1, max_count=1)
        if taken[0] == "new":
            break
        waited += taken[1]
    rounds = math.ceil(LARGEST / QUANTUM)
    assert waited <= len(costs) * (rounds * QUANTUM + LARGEST)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 90)), max_size=40))
def test_everything_is_taken_once_and_in_the_order_of_its_tenant(works):
    queue = FairQueue(QUANTUM)
    for number, (tenant, cost) in enumerate(works):
        queue.put(tenant, (tenant, number), cost)
    taken = []
    while len(queue):
        taken += queue.take(64)
    assert sorted(number for _, number in taken) == list(range(len(works)))
    for tenant in "abc":
        own = [number for name, number in taken if name == tenant]
        assert own == sorted(own)


def test_a_tenant_without_work_saves_no_credit():
    queue = FairQueue(10)
    for _ in range(5):
        queue.put("idle", "small", 1)
        assert queue.take(100) == ["small"]
    for number in range(4):
        queue.put("idle", f"idle {number}", 10)
        queue.put("busy", f"busy {number}", 10)
    assert queue.take(40) == ["idle 0", "busy 0", "idle 1", "busy 1"]


def test_work_can_be_removed():
    queue = FairQueue(10)
    for number in range(3):
        queue.put("a", number, 1)
    assert queue.remove("a", lambda number: number == 1) == [1]
    assert queue.remove("b", lambda number: True) == []
    assert (queue.count("a"), queue.take(100)) == (2, [0, 2])
