"""Every metric is explained, and those of groups are what their sentences say."""

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tests.observe.example_events import finished, group, span, story, trajectory

from miles.core.types import Author, Group, Prompt, Status, Trajectory, Version
from miles.observe.metric import SECTIONS, find_metric, group_metrics, list_undocumented, render_docs

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_generated_page_of_metrics_is_up_to_date(regenerate: bool):
    if regenerate:
        DOCS.write_text(render_docs(), encoding="utf-8")
    assert DOCS.read_text(encoding="utf-8") == render_docs(), "run make regenerate"


def test_every_meaning_is_one_sentence_and_every_name_is_there_once():
    for metrics, _ in SECTIONS.values():
        names = [m.name for m in metrics]
        assert len(names) == len(set(names))
        for m in metrics:
            assert re.fullmatch(r"[A-Z][^|]*\.", m.meaning) and m.unit, m.name


def test_what_the_loop_and_the_groups_report_is_explained():
    expected = [
        "reward",
        "reward_std",
        "response_length",
        "truncated_ratio",
        "staleness",
        "loss",
        "kl",
        "entropy",
        "grad_norm",
        "lr",
        "parity_mean_abs",
        "parity_max_abs",
        "train_tokens",
        "rollout_tokens",
        "groups_dropped",
    ]
    assert list_undocumented(expected) == []
    assert list_undocumented(group_metrics([group(1, [0.0, 1.0])], Version())) == []
    assert list_undocumented(["eval/easy/reward", "eval/easy/pass@8", "eval/easy/nonsense", "rewards"]) == [
        "eval/easy/nonsense",
        "rewards",
    ]
    found = find_metric("eval/a set/pass@4")
    assert found is not None and found.unit == "fraction"


def test_group_metrics_by_hand():
    fresh = group(1, [0.0, 1.0], length=2, version=5)
    flat = group(2, [0.5, 0.5], length=4, version=3, status=Status.TRUNCATED)
    seen = group_metrics([fresh, flat], Version(number=5))
    assert seen["reward"] == 0.5 and seen["reward_min"] == 0.0 and seen["reward_max"] == 1.0
    assert abs(seen["reward_std"] - 0.125**0.5) < 1e-15
    assert seen["response_length"] == 3.0 and seen["response_length_max"] == 4.0 and seen["rollout_tokens"] == 12.0
    assert seen["truncated_ratio"] == 0.5 and seen["zero_std_ratio"] == 0.5
    assert seen["staleness"] == 2.0 and seen["staleness_mean"] == 1.0
    assert all(type(value) is float for value in seen.values())


def test_the_oldest_token_of_any_branch_counts():
    mixed = (
        (span(Author.PROMPT, [1]), span(Author.POLICY, [2], 7)),
        (span(Author.PROMPT, [1]), span(Author.POLICY, [3], 4)),
    )
    one = Group(prompt=Prompt(id=1, messages=[]), trajectories=(trajectory(0, 1.0, branches=mixed),))
    assert group_metrics([one], Version(number=7))["staleness"] == 3.0


def test_nothing_to_measure_gives_nothing():
    assert group_metrics([], Version()) == {}
    bare = Trajectory(branches=((span(Author.PROMPT, [1]),),), status=Status.FAILED)
    seen = group_metrics([Group(prompt=Prompt(id=1, messages=[]), trajectories=(bare,))], Version())
    assert "reward" not in seen and "staleness" not in seen and seen["response_length"] == 0.0


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4), min_size=1, max_size=5))
def test_means_lie_between_extremes_and_shares_are_shares(rewards):
    seen = group_metrics([group(n, values) for n, values in enumerate(rewards)], Version(number=2))
    slack = 1e-9 * (1 + abs(seen["reward"]))
    assert seen["reward_min"] - slack <= seen["reward"] <= seen["reward_max"] + slack
    assert 0 <= seen["zero_std_ratio"] <= 1 and seen["reward_std"] >= 0


def test_the_story_of_these_tests_uses_the_names_of_the_table():
    assert list_undocumented(name for name in finished(1).metrics) == []
    assert any(type(event).__name__ == "StepFinished" for event in story(1))
