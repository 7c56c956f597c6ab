"""Grades in processes: what hangs is cut off, what crashes is noticed, and the next grade is as good as any."""

import asyncio
import contextlib
import gc
import os
import weakref

import pytest
from tests.rollout.reward.reward_case import prompt, trajectory, value

from miles.rollout.reward.context import GraderContext
from miles.rollout.reward.grader_pool import GraderPool
from miles.rollout.reward.mixture import build_builtin_reward
from miles.rollout.reward.types import BadLabel, GradingError

NEVER_ENDS = r"\boxed{9^{9^{9^9}}}"
BACKTRACKS = ("a" * 60, "(a+)+b")


def call(workers: GraderPool, address: str, *args):
    return asyncio.run(workers.call(address, *args))


@pytest.fixture
def hasty():
    workers = GraderPool(1, seconds=0.3)
    yield workers
    workers.close()


def test_a_comparison_that_never_ends_is_cut_off_and_the_next_is_answered(hasty):
    with pytest.raises(GradingError, match=r"it took more than 0\.3 s"):
        value("math", NEVER_ENDS, "1", means=GraderContext(pool=hasty))
    assert call(hasty, "operator:add", 1, 2) == 3


def test_a_pattern_that_backtracks_for_ever_is_cut_off(hasty):
    with pytest.raises(GradingError, match="it took more than"):
        value("regex", *BACKTRACKS, means=GraderContext(pool=hasty))


def test_others_are_graded_while_one_hangs():
    """The loop is never held up: a sibling's grade comes back before the hanging one is killed."""
    order = []

    async def graded(score, reply, name):
        with contextlib.suppress(GradingError):
            await score(prompt("x+1"), trajectory(reply))
        order.append(name)

    async def both():
        workers = GraderPool(2, seconds=2.0)
        await asyncio.gather(*(workers.call("miles.rollout.reward.symbolic:is_equivalent", "1", "1") for _ in range(2)))
        score = build_builtin_reward("math", GraderContext(pool=workers))
        await asyncio.gather(graded(score, NEVER_ENDS, "hangs"), graded(score, r"\boxed{1+x}", "ends"))
        workers.close()

    asyncio.run(both())
    assert order == ["ends", "hangs"]


@pytest.mark.parametrize(
    ("address", "args", "reason"),
    [("os:abort", (), "SIGABRT"), ("os:_exit", (7,), "exit code 7"), ("os:kill", (0, 9), "SIGKILL")],
)
def test_a_process_that_dies_fails_its_grade_and_no_other(means, address, args, reason):
    with pytest.raises(GradingError, match=rf"the grading process died \({reason}\)"):
        call(means.pool, address, *args)
    assert call(means.pool, "operator:add", 1, 2) == 3


def test_memory_is_limited():
    workers = GraderPool(1, memory=1 << 30)
    with pytest.raises(GradingError, match="MemoryError"):
        call(workers, "builtins:bytearray", 4 << 30)
    assert call(workers, "builtins:len", b"abc") == 3
    workers.close()


def test_what_a_grader_raises_is_its_reason(means):
    with pytest.raises(GradingError, match="ZeroDivisionError: division by zero"):
        call(means.pool, "operator:truediv", 1, 0)
    with pytest.raises(GradingError, match="ModuleNotFoundError"):
        call(means.pool, "no_such_module:f")
    with pytest.raises(BadLabel, match="not a regular expression"):
        call(means.pool, "miles.rollout.reward.text:regex", "a", "(", {})


def test_tuples_arrive_as_tuples_and_printing_does_no_harm(means):
    assert call(means.pool, "builtins:repr", ((1, 2), {3: "x"})) == "((1, 2), {3: 'x'})"
    assert call(means.pool, "builtins:print", '{"value": 5}') is None
    assert call(means.pool, "operator:add", "\ud800", "b") == "\ud800b"


def test_one_process_serves_many_calls_and_none_starts_before_it_is_needed():
    workers = GraderPool(1)
    first = call(workers, "os:getpid")
    assert first != os.getpid()
    assert call(workers, "os:getpid") == first
    workers.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_processes_end_with_the_last_who_could_use_them():
    workers = GraderPool(1)
    pid = call(workers, "os:getpid")
    gone = weakref.ref(workers)
    del workers
    gc.collect()
    assert gone() is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
