"""The closing words are true and readable."""

import io
import math
from pathlib import Path

from miles.observe.log_reader import LogRow, LogRows
from miles.observe.summary import BeforeAfter, list_facts, print_summary, summarise, summary_text


def rows(*entries):
    return LogRows(rows=tuple(LogRow(kind=k, step=s, values=v) for k, s, v in entries), unreadable=())


RUN = rows(
    ("eval", 0, {"eval/easy/reward": 0.2}),
    ("train", 1, {"reward": 0.25, "rollout_tokens": 1000.0, "train_tokens": 1500.0, "parity_mean_abs": 1e-7}),
    ("train", 2, {"reward": 0.5, "rollout_tokens": 1000.0, "tokens": 1500.0, "parity_mean_abs": 3e-7}),
    ("eval", 2, {"eval/easy/reward": 0.9}),
    ("train", 3, {"reward": 0.75}),
    ("eval", 3, {"eval/easy/reward": 0.8}),
)
SPENT = rows(("train", 1, {"step": 2.0}), ("train", 2, {"rollout": 1.0, "train": 1.0}), ("eval", 2, {"evaluate": 3.0}))


def test_the_figures_are_first_last_and_best():
    said = dict(list_facts(summarise(RUN, folder=Path("runs/x"), timings=SPENT)))
    assert said["held-out reward"].startswith("0.200 -> 0.800 (best 0.900 at step 2)")
    assert said["training reward"] == "0.250 -> 0.750  ▁▅█"
    assert said["trained"] == "3 steps in 7.0s"
    assert said["tokens"] == "2.0k sampled, 3.0k trained on"
    assert said["worst parity"].startswith("3e-07") and said["run directory"] == "runs/x"


def test_plain_text_shows_samples_and_commands():
    turns = [BeforeAfter(prompt="reverse: ab\n", before="ab\x1b[31m", after="ba", reward_before=0.0, reward_after=1.0)]
    commands = [("miles chat runs/x", "talk to it"), ("miles demo --moe", "")]
    text = summary_text(summarise(RUN, folder=Path("runs/x"), examples=turns, commands=commands))
    assert "prompt  reverse: ab\\n" in text and "before  ab\\x1b[31m   [0]" in text and "after   ba   [1]" in text
    assert "  miles chat runs/x  talk to it\n  miles demo --moe\n" in text and "\x1b" not in text


def test_a_run_that_did_nothing_can_be_summed_up():
    text = summary_text(summarise(rows(), folder=Path("runs/x")))
    assert text == "trained        0 steps\nrun directory  runs/x\n"


def test_several_sets_are_told_apart_and_odd_rewards_survive():
    odd = rows(
        ("eval", 0, {"eval/a/reward": math.nan, "eval/b/reward": 1.0}), ("train", 1, {"parity_mean_abs": math.nan})
    )
    said = dict(list_facts(summarise(odd, folder=Path("x"))))
    assert said["held-out reward, a"] == "nan" and said["held-out reward, b"] == "1.000"
    assert said["worst parity"].startswith("nan")


def test_a_pipe_gets_plain_text_and_a_terminal_tables(monkeypatch):
    turns = [BeforeAfter(prompt="[bold]p[/bold]", before="b" * 300, after="a")]
    end = summarise(RUN, folder=Path("runs/x"), examples=turns, commands=[("miles chat", "talk")])
    pipe = io.StringIO()
    print_summary(end, pipe)
    assert "\x1b" not in pipe.getvalue() and "before and after" in pipe.getvalue()

    class Screen(io.StringIO):
        encoding = "utf-8"  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]

        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "70")
    screen = Screen()
    print_summary(end, screen)
    assert "\x1b[" in screen.getvalue() and "[bold]p[/bold]" in screen.getvalue() and "miles chat" in screen.getvalue()
