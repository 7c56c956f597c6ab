"""What a terminal, a pipe and a log file are shown."""

import io
import re
from itertools import pairwise

import pytest
from rich.console import Console
from tests.observe.example_events import finished, group, story, taken

from miles.core.events import Evaluated, Progress, RunEnded, RunStarted, Saved, StepFinished
from miles.core.types import Version
from miles.observe.console import PlainView
from miles.observe.factory import build_view
from miles.observe.live import LiveView
from miles.observe.step_line import RunProgress, eval_rewards, fit
from miles.observe.view import NullView

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]

    def isatty(self) -> bool:
        return True


class Pipe(io.TextIOWrapper):
    """A stream of bytes in some encoding, not a terminal."""

    def __init__(self, encoding="utf-8"):
        self.kept = io.BytesIO()
        super().__init__(self.kept, encoding=encoding)

    def text(self):
        self.flush()
        return self.kept.getvalue().decode(self.encoding)


def live(width, **more):
    screen = Screen()
    console = Console(file=screen, force_terminal=True, width=width, highlight=False, **more)
    return LiveView(screen, console=console), screen


def test_auto_is_live_on_a_terminal_and_plain_elsewhere(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    view = build_view("auto", stream=Screen())
    assert isinstance(view, LiveView)
    view.close()
    assert isinstance(build_view("auto", stream=Pipe()), PlainView)
    assert isinstance(build_view("live", stream=Pipe()), PlainView)
    assert isinstance(build_view("plain", stream=Screen()), PlainView)
    assert isinstance(build_view("none", stream=Screen()), NullView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(build_view("auto", stream=Screen()), PlainView)


@pytest.mark.parametrize("kind", ["plain", "none", "auto"])
def test_every_view_takes_every_event(kind):
    pipe = Pipe()
    view = build_view(kind, stream=pipe)
    with view.stage("set-up", 2) as advance:
        advance(1, "half")
        advance()
    for event in story(4):
        view(event)
    view.note("over")
    view.close()
    assert (pipe.text() == "") == (kind == "none")


def test_a_plain_log_has_one_line_a_step_and_not_one_escape():
    pipe = Pipe()
    view = build_view("auto", stream=pipe, parity_tolerance=0.01)
    for event in (RunStarted(step=0, steps=100), finished(1, reward=0.25), finished(2, reward=0.5)):
        view(event)
    lines = pipe.text().splitlines()
    assert len(lines) == 2 and "\x1b" not in pipe.text() and "\r" not in pipe.text()
    for piece in (
        "step   2/100",
        "reward 0.500  ▁█",
        "rollout  1.2k tok/s",
        "train  3.6k tok/s",
        "staleness 0",
        "parity ok 1e-07",
        "kl 0.01",
        "entropy 1.25",
        "lr 0.001",
        "eta 1m38s",
    ):
        assert piece in lines[1]


def test_a_log_that_cannot_carry_blocks_gets_ascii():
    pipe = Pipe(encoding="ascii")
    view = build_view("plain", stream=pipe)
    view(RunStarted(step=0, steps=9))
    view(finished(1, reward=0.0))
    view(finished(2, reward=1.0))
    view.note("naïve")
    assert "_@" in pipe.text() and "na?ve" in pipe.text()


def test_missing_metrics_leave_their_cells_out():
    pipe = Pipe()
    view = build_view("plain", stream=pipe)
    view(StepFinished(step=1, version=Version(number=1), metrics={}))
    view(StepFinished(step=2, version=Version(number=2), metrics={"loss": 2.5, "tokens": 10.0}, seconds={"train": 0.0}))
    view(Evaluated(step=2, metrics={}))
    assert pipe.text().splitlines() == ["step 1", "step 2  loss 2.5", "eval 2"]


def test_odd_numbers_do_not_break_a_line():
    pipe = Pipe()
    view = build_view("plain", stream=pipe)
    view(finished(1, reward=float("nan"), kl=float("inf"), parity_mean_abs=float("nan")))
    assert "reward nan" in pipe.text() and "parity red nan" in pipe.text() and "kl inf" in pipe.text()


def test_plain_stages_say_start_quarters_and_end():
    pipe = Pipe()
    view = build_view("plain", stream=pipe)
    advance = view.stage("warm-up", 100)
    for n in range(100):
        advance(1, f"loss {n}")
    advance(1)
    with view.stage("loading") as advance:
        advance()
    with pytest.raises(KeyError), view.stage("failing", 3):
        raise KeyError
    assert pipe.text().splitlines() == [
        "warm-up ... (0/100)",
        "warm-up ... 25% (25/100): loss 24",
        "warm-up ... 50% (50/100): loss 49",
        "warm-up ... 75% (75/100): loss 74",
        "warm-up ... done: loss 99",
        "loading ...",
        "loading ... done",
        "failing ... (0/3)",
    ]


def test_a_reader_who_leaves_does_not_end_the_run():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    view = build_view("plain", stream=Closed())
    for event in story(2):
        view(event)


def test_saving_continuing_and_stopping_are_said():
    pipe = Pipe()
    view = build_view("plain", stream=pipe)
    view(RunStarted(step=3, steps=9))
    view(Saved(step=4, name="step-000004", scheduled=False))
    view(RunEnded(step=4, finished=False))
    assert pipe.text().splitlines() == [
        "resuming after step 3 of 9",
        "saved checkpoint step-000004",
        "stopped after step 4 of 9",
    ]


@pytest.mark.parametrize("width", [200, 120, 80, 60, 40, 20, 8])
def test_live_lines_fit_the_terminal(width):
    view, screen = live(width, no_color=True)
    with view.stage("set-up", 2) as advance:
        advance(1, "a note that is much longer than a narrow terminal has room for")
    for event in story(4):
        view(event)
    view(finished(5, parity_mean_abs=0.5))
    view.close()
    for text in ESCAPE.sub("", screen.getvalue()).replace("\r", "\n").splitlines():
        assert len(text) <= width or text.startswith(("set-up", "saved")), text


def test_eighty_columns_hold_all_that_matters():
    view, screen = live(80, no_color=True)
    view(RunStarted(step=0, steps=200))
    for step in range(1, 10):
        view(finished(step, reward=step / 10))
    view.close()
    shown = ESCAPE.sub("", screen.getvalue())
    assert "  9/200  reward 0.900  ▁▂▃▄▅▆▇█  roll  1.2k/s  train  3.6k/s  stale 0  ● 1e-07" in shown


def test_the_parity_dot_has_the_colour_of_the_light():
    view, screen = live(200, color_system="standard")
    for gap in (1e-7, 0.005, 0.5):
        view(finished(1, parity_mean_abs=gap))
    view.close()
    shown = screen.getvalue()
    assert "\x1b[32m● \x1b[0m" in shown and "\x1b[33m● \x1b[0m" in shown and "\x1b[1;31m● \x1b[0m" in shown
    assert "warn 0.005" in ESCAPE.sub("", shown) and "red 0.5" in ESCAPE.sub("", shown)


def test_no_color_is_obeyed(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Screen()
    view = build_view("live", stream=screen)
    for event in story(3):
        view(event)
    view.close()
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", screen.getvalue())


def test_the_live_view_gives_the_terminal_back():
    view, screen = live(100)
    view(RunStarted(step=0, steps=3))
    view(Progress(step=1, done=1, total=2))
    unfinished = view.stage("left behind", 4)
    unfinished(1)
    view.close()
    assert screen.getvalue().rstrip().endswith(("\x1b[?25h", "\x1b[2K")) and "\x1b[?25h" in screen.getvalue()


def test_markup_in_a_note_is_text():
    view, screen = live(100)
    view.note("[red]not red[/red] [1/2]")
    with view.stage("[bold]", 1) as advance:
        advance(1, "[/nothing]")
    view.close()
    assert "[red]not red[/red] [1/2]" in screen.getvalue() and "[/nothing]" in screen.getvalue()


def test_the_time_to_come_is_what_the_last_steps_took():
    seen = RunProgress()
    seen.update(RunStarted(step=0, steps=12))
    assert seen.eta() is None
    seen.update(
        StepFinished(step=1, version=Version(), metrics={}, seconds={"rollout": 1.0, "train": 2.0, "publish": 1.0})
    )
    seen.update(StepFinished(step=2, version=Version(), metrics={}, seconds={"step": 6.0}))
    assert seen.eta() == 50.0
    seen.update(finished(12))
    assert seen.eta() is None


def test_the_most_important_cells_stay_longest():
    seen = RunProgress()
    seen.update(RunStarted(step=0, steps=10))
    seen.update(event := finished(1))
    wide, brief = seen.step_cells(event), seen.step_cells(event, brief=True)
    ranks = [sorted(cell.rank for cell in fit(wide, brief, width)) for width in range(160, 0, -1)]
    for more, fewer in pairwise(ranks):
        assert len(fewer) <= len(more) or max(more) <= 6  # the brief form may make room again
    assert ranks[-1] == [0]


def test_held_out_rewards_go_by_the_name_of_their_set():
    assert eval_rewards({"eval/a/b/reward": 1.0, "reward": 0.5, "eval/a/truncated": 0.0}) == {"a/b": 1.0, "reward": 0.5}


def test_the_accepted_length_is_shown_where_engines_decode_speculatively():
    for seconds, shown in (({}, False), ({"speculative/accept_length": 2.345}, True)):
        pipe = Pipe()
        PlainView(pipe)(StepFinished(step=1, version=Version(), metrics={"reward": 0.5}, seconds=seconds))
        assert ("accept len 2.35" in pipe.text() or "accept len 2.34" in pipe.text()) == shown
        assert ("accept" in pipe.text()) == shown


def test_a_step_line_has_what_explains_a_reward():
    pipe = Pipe()
    view = build_view("plain", stream=pipe)
    more = {"zero_std_ratio": 0.25, "response_length": 1200.0, "truncated_ratio": 0.03, "grad_norm": 0.5}
    view(finished(1, **more))
    for piece in ("equal 25%", "length  1.2k", "truncated 3%", "grad 0.5", "took 1 s"):
        assert " ".join(piece.split()) in " ".join(pipe.text().split())


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"reward_min": 0.0, "reward_max": 0.0}, "all of them are 0; look at a response with miles show"),
        ({"reward_min": 0.0, "reward_max": 0.0, "truncated_ratio": 0.9}, "90% of the responses were truncated"),
        ({"reward_min": 1.0, "reward_max": 1.0}, "all of them are 1; the prompts may be too easy"),
        ({"reward_min": 0.0, "reward_max": 1.0}, "each prompt succeeds always or never"),
        ({"reward_min": 0.0, "reward_max": 0.0, "unscored_ratio": 1.0}, "no trajectory could be scored"),
    ],
)
def test_a_flat_reward_is_explained_once(metrics: dict[str, float], reason: str):
    pipe = Pipe()
    view = build_view("plain", stream=pipe)
    groups = [group(1, [0.0, 0.0])]
    for step in (1, 2):
        view(taken(step, groups))
        view(finished(step, zero_std_ratio=1.0, **metrics))
    assert pipe.text().count("All groups have equal rewards") == 1 and reason in pipe.text()


def test_a_gradient_of_zero_is_reported_once_where_rewards_differ():
    pipe = Pipe()
    view = build_view("plain", stream=pipe)
    for step, norm in ((1, 0.5), (2, 0.0), (3, 0.0)):
        view(taken(step, [group(1, [0.0, 1.0])]))
        view(finished(step, zero_std_ratio=0.5, grad_norm=norm))
    assert pipe.text().count("The gradient of step") == 1 and "The gradient of step 2 is exactly 0" in pipe.text()


def test_single_trajectories_are_no_flat_groups():
    pipe = Pipe()
    view = build_view("plain", stream=pipe)
    view(taken(1, [group(1, [0.0])]))
    view(finished(1, zero_std_ratio=1.0, reward_min=0.0, reward_max=0.0))
    assert "All groups" not in pipe.text()
