"""The least-loaded index agrees with a scan of all engines."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from miles.cluster.least_loaded import LeastLoadedIndex


@dataclass(eq=False)
class Engine:
    name: str
    outstanding: int = 0
    state: str = "open"
    why: str = ""

    @property
    def open(self) -> bool:
        return self.state == "open"

    @property
    def load(self) -> int:
        return self.outstanding


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 8), st.sampled_from("+-oc")), max_size=400))
def test_the_least_loaded_is_the_one_a_scan_finds(count, moves):
    engines = [Engine(f"engine {i}") for i in range(count)]
    index = LeastLoadedIndex[Engine]()
    for engine in engines:
        index.add(engine)
    for number, move in moves:
        engine = engines[number % count]
        if move in "+-":
            engine.outstanding = max(0, engine.outstanding + (1 if move == "+" else -1))
        else:
            state = "open" if move == "o" else "closed"
            changed = state != engine.state
            assert index.set_state(engine, state, "") == changed and engine.state == state
        index.update(engine)
        open_ = [each for each in engines if each.open]
        assert index.least_loaded() is (min(open_, key=lambda each: each.load) if open_ else None)
        others = [each for each in open_ if each is not engine]
        other = min(others, key=lambda each: each.load, default=None)
        assert index.least_loaded_except({engine.name, "left"}) is other
        assert len(index) == len(open_) and index.outstanding == sum(each.outstanding for each in open_)
        assert [index.nth(i) for i in range(len(index))] == open_
    assert list(index.members.values()) == engines
    index.remove(engines[0])
    assert "engine 0" not in index
