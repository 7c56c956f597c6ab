"""Routing policies, and the routing keys of request bodies."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from benchmarks.bench_routing import POLICIES, Policy, scan_candidates, scan_least_load, scan_prefix, scan_round_robin
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cluster.router.harness import ManualClock, RouterHarness, reply, run, running_router
from tests.tiers import examples

from miles.cluster.least_loaded import LeastLoadedIndex
from miles.cluster.router.config import RouterConfig
from miles.cluster.router.consistent_hash import HashRing
from miles.cluster.router.engine_pool import RouterEnginePool
from miles.cluster.router.engine_state import EngineState, RoutedEngine
from miles.cluster.router.http_client import ConnectionPool, EngineAddress
from miles.cluster.router.http_types import HttpRequest
from miles.cluster.router.policy import LeastLoadPolicy, PrefixPolicy, RoundRobinPolicy
from miles.cluster.router.routing_key import RoutingKey, estimate_work, extract_rids, extract_routing_key


class FakeRequest:
    """A request by its key and its work alone."""

    def __init__(self, key: bytes = b"", work: int = 1, *, pinned: bool = False) -> None:
        self.work = work
        self._key = RoutingKey(key, pinned)

    def key(self) -> RoutingKey:
        return self._key

    def rids(self) -> list[str]:
        return []


def engines_of(count: int) -> list[RoutedEngine]:
    addresses = [EngineAddress.parse(f"http://10.0.0.{i}:30000") for i in range(count)]
    return [RoutedEngine(ConnectionPool(address, ManualClock(), 1.0), ranks=None) for address in addresses]


def among(engines: list[RoutedEngine]) -> LeastLoadedIndex[RoutedEngine]:
    """All of them, open."""
    made = LeastLoadedIndex[RoutedEngine]()
    for engine in engines:
        engine.state = EngineState.HEALTHY
        made.add(engine)
    return made


def prefix_of(engines: list[RoutedEngine], **options: Any) -> PrefixPolicy:
    policy = PrefixPolicy(**{"factor": 1.25, "floor": 1, **options})
    for engine in engines:
        policy.add_engine(engine.name)
    return policy


# -- policies ----------------------------------------------------------------------------------------


def test_round_robin_gives_everyone_the_same():
    engines, policy = engines_of(3), RoundRobinPolicy()
    assert set(Counter(policy.choose(among(engines), FakeRequest()).name for _ in range(30)).values()) == {10}


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200), st.integers(1, 8))
def test_least_load_keeps_the_work_within_one_request_of_even(works: list[int], count: int):
    engines, policy = engines_of(count), LeastLoadPolicy()
    for work in works:
        policy.choose(among(engines), FakeRequest(work=work)).start_request(work)
    loads = [engine.load for engine in engines]
    assert max(loads) - min(loads) <= max(works)


def test_least_load_gives_equals_in_turn():
    engines, policy = engines_of(4), LeastLoadPolicy()
    assert len({policy.choose(among(engines), FakeRequest()).name for _ in range(4)}) == 4


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=300), st.integers(2, 6), st.floats(1, 3), st.integers(1, 40))
def test_prefix_keeps_a_key_in_place_until_its_engine_has_more_than_its_share(
    keys: list[int], count: int, factor: float, floor: int
):
    engines = engines_of(count)
    policy = prefix_of(engines, factor=factor, floor=floor)
    homes = {key: policy.choose(among(engines), FakeRequest(b"%d" % key)) for key in range(4)}
    for done, key in enumerate(keys):
        chosen = policy.choose(among(engines), FakeRequest(b"%d" % key))
        bound = max(floor, factor * (done + 1) / count)
        assert chosen.outstanding < bound + 1
        if chosen is not homes[key]:
            assert homes[key].outstanding >= bound - 1
        chosen.start_request(1)


def test_prefix_leaves_a_session_where_it_is_however_loaded_that_is():
    engines = engines_of(4)
    policy = prefix_of(engines)
    home = policy.choose(among(engines), FakeRequest(b"s", pinned=True))
    for _ in range(50):
        assert policy.choose(among(engines), FakeRequest(b"s", pinned=True)) is home
        home.start_request(1)
    assert policy.choose(among(engines), FakeRequest(b"s")) is not home


def test_prefix_passes_over_who_is_not_open_and_comes_back():
    engines = engines_of(5)
    policy = prefix_of(engines, floor=100)
    home = policy.choose(among(engines), FakeRequest(b"k"))
    rest = [engine for engine in engines if engine is not home]
    stand_in = policy.choose(among(rest), FakeRequest(b"k"))
    assert stand_in is not home
    assert policy.choose(among(rest), FakeRequest(b"k")) is stand_in
    assert policy.choose(among(engines), FakeRequest(b"k")) is home


# -- without looking at every engine -----------------------------------------------------------------


def change(kind: str, pool: RouterEnginePool, ring: HashRing, some: RoutedEngine | None, url: str) -> None:
    """Who there is and how they do."""
    match kind:
        case "j" if EngineAddress.parse(url).name not in pool.engines:
            ring.add(pool.add(url).name)
        case "l" if some is not None:
            ring.remove(some.name)
            pool.remove(some)
        case "q" if some is not None:
            pool.quarantine(some, "of the test")
        case "a" if some is not None:
            pool.admit(some)
        case "n" if some is not None:
            pool.record_success(some)
        case _:
            pass


@settings(deadline=None, max_examples=examples(150))
@given(st.sampled_from(POLICIES), st.data())
def test_who_is_chosen_is_who_a_look_at_every_engine_would_choose(policy: Policy, data: st.DataObject):
    pool = RouterEnginePool(RouterConfig(policy=policy, spill_floor=2), ManualClock(), lambda sentence: None)
    ring = HashRing()
    config = RouterConfig()
    choose = {
        "round_robin": scan_round_robin(),
        "least_load": scan_least_load(),
        "prefix": scan_prefix(ring, factor=config.spill_factor, floor=2),
    }[policy]
    under_way: list[tuple[RoutedEngine, FakeRequest]] = []
    names = st.integers(0, 7)
    for kind in data.draw(st.lists(st.sampled_from("jjlqaappppprrn"), max_size=60)):
        there = list(pool.engines.values())
        some = there[data.draw(names) % len(there)] if there else None
        change(kind, pool, ring, some, f"http://10.0.0.{data.draw(names)}:30000")
        match kind:
            case "p":
                engines = list(pool.engines.values())
                wish = FakeRequest(
                    b"%d" % data.draw(names), data.draw(st.integers(1, 3)), pinned=data.draw(st.booleans())
                )
                avoid = frozenset(engine.name for engine in engines if data.draw(st.integers(0, 5)) == 0)
                left = scan_candidates(pool, avoid)
                expected = choose(left, wish) if left else None
                assert pool.has_other(avoid) == any(e.open and e.name not in avoid for e in engines)
                assert pool.pick(wish, avoid) is expected
                if expected is not None:
                    under_way.append((expected, wish))
            case "r" if under_way:
                pool.release(*under_way.pop(data.draw(names) % len(under_way)), 0.0)
            case _:
                pass


# -- what a body tells -------------------------------------------------------------------------------


def request_of(body: Any, **headers: str) -> HttpRequest:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HttpRequest(method=b"POST", target=b"/generate", path="/generate", query=b"", headers=pairs, body=raw)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"input_ids": list(range(300))}, {"input_ids": [*range(256), 9, 9]}, True),
        ({"input_ids": list(range(300))}, {"input_ids": [1, *range(299)]}, False),
        ({"input_ids": [[1, 2], [3]]}, {"input_ids": [1, 2]}, True),
        ({"text": "a" * 2000}, {"text": "a" * 1500}, True),
        ({"text": ["ab", "cd"]}, {"text": "ab"}, True),
        ({"prompt": "ab"}, {"prompt": "ac"}, False),
        ({"messages": [{"role": "user", "content": "x"}]}, {"messages": [{"role": "user", "content": "y"}]}, False),
        ({"routing_key": "k", "text": "a"}, {"routing_key": "k", "text": "b"}, True),
        ({"session_params": {"id": "s"}, "text": "a"}, {"session_id": "s", "routing_key": "z"}, True),
        ({"rid": "1", "text": "a"}, {"rid": "2", "text": "a", "sampling_params": {"n": 3}}, True),
        (b"not json", b"not json", True),
        ([1], [2], False),
    ],
)
def test_what_requests_share_decides_their_key(one: Any, other: Any, same: bool):
    assert (extract_routing_key(request_of(one), 256) == extract_routing_key(request_of(other), 256)) is same


def test_a_routing_key_in_the_header_goes_before_the_body_but_not_before_a_session():
    assert extract_routing_key(request_of(b"not json at all", x_routing_key="k"), 8) == RoutingKey(b"k")
    assert extract_routing_key(request_of({"text": "a", "routing_key": "b"}, x_routing_key="k"), 8) == RoutingKey(b"k")
    assert extract_routing_key(request_of({"session_params": {"id": "s"}}, x_routing_key="k"), 8) == RoutingKey(
        b"s", pinned=True
    )


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"sampling_params": {"max_new_tokens": 4000}}, 4000),
        ({"sampling_params": {"max_new_tokens": 50, "n": 8}}, 400),
        ({"max_tokens": 77}, 77),
        ({"max_completion_tokens": 77, "n": 2}, 154),
        ({"max_tokens": None}, 128),
        ({"text": "hi"}, 128),
        (b"\xff\xfe", 128),
    ],
)
def test_the_work_of_a_request_is_what_it_asks_to_be_written(body: Any, tokens: int):
    assert tokens <= estimate_work(request_of(body).body) <= tokens + 4


@given(st.binary(max_size=300))
def test_no_body_is_too_odd_to_be_routed(raw: bytes):
    request = request_of(raw)
    assert estimate_work(raw) > 0
    assert isinstance(extract_routing_key(request, 16), RoutingKey)
    assert isinstance(extract_rids(request), list)


@settings(deadline=None, max_examples=examples(30))
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    )
)
def test_no_prompt_is_too_odd_to_be_routed(value: Any):
    for name in ("input_ids", "text", "messages", "session_params", "routing_key", "rid"):
        request = request_of({name: value})
        assert isinstance(extract_routing_key(request, 16), RoutingKey)
        assert all(isinstance(rid, str) for rid in extract_rids(request))


# -- through the router ---------------------------------------------------------------------------------


def served(**options: Any) -> Callable[[Callable[[RouterHarness], Awaitable[None]]], None]:
    def call(test: Callable[[RouterHarness], Awaitable[None]]) -> None:
        async def inner() -> None:
            async with running_router(3, **options) as h:
                await test(h)

        run(inner)

    return call


def test_requests_with_one_key_meet_on_one_engine():
    async def test(h: RouterHarness):
        homes = {}
        for _ in range(3):
            for key in "abcdefgh":
                _, _, headers = await h.ask(headers={"x-routing-key": key})
                assert homes.setdefault(key, headers["x-miles-engine"]) == headers["x-miles-engine"]
        assert len(set(homes.values())) > 1

    served(policy="prefix")(test)


def test_the_samples_of_one_prompt_meet_on_one_engine_also_all_at_once():
    async def test(h: RouterHarness):
        body = {"input_ids": list(range(40)), "sampling_params": {"n": 1}}
        answers = await asyncio.gather(*(h.ask(body={**body, "rid": str(i)}) for i in range(16)))
        assert len({headers["x-miles-engine"] for _, _, headers in answers}) == 1

    served(policy="prefix")(test)


def test_long_requests_count_for_more_than_short_ones():
    async def test(h: RouterHarness):
        release = asyncio.Event()

        async def wait(request: web.Request) -> web.StreamResponse:
            await release.wait()
            return await reply(request)

        for engine in h.engines:
            engine.behave = wait
        long = [asyncio.create_task(h.ask(body={"sampling_params": {"max_new_tokens": 9000}})) for _ in range(2)]
        await h.arrived.reach(2)
        short = [asyncio.create_task(h.ask(body={"sampling_params": {"max_new_tokens": 10}})) for _ in range(6)]
        await h.arrived.reach(8)
        assert sorted(engine.arrived.count for engine in h.engines) == [1, 1, 6]
        release.set()
        await asyncio.gather(*long, *short)

    served(policy="least_load")(test)
