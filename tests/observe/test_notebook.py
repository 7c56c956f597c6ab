"""The view of notebooks: one output of the cell, replaced as the run goes on."""

import sys
from types import SimpleNamespace

import pytest

from miles.core.events import Progress, RunStarted, StepFinished
from miles.core.types import Version
from miles.observe.console import PlainView
from miles.observe.factory import build_view
from miles.observe.notebook import NotebookView


class Output:
    """The output of a cell."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def __call__(self, html: str) -> "Output":
        self.shown.append(html)
        return self

    update = __call__


def test_steps_move_the_bar_and_lines_are_escaped():
    output = Output()
    view = NotebookView(output)
    view.note("<b>read</b>")
    view(RunStarted(step=0, steps=4))
    view(Progress(step=1, done=2, total=3))
    assert "rollout 2/3" in output.shown[-1] and 'value="0" max="4"' in output.shown[-1]
    view(StepFinished(step=1, version=Version(number=1), metrics={"reward": 0.25}))
    assert 'value="1" max="4"' in output.shown[-1] and "reward 0.250" in output.shown[-1]
    assert "&lt;b&gt;read" in output.shown[-1]
    with view.stage("Loading", total=2) as advance:
        advance(1)
        assert "Loading 1/2" in output.shown[-1]
    view.close()
    assert "Loading" not in output.shown[-1]


def test_a_notebook_is_known_by_its_shell(monkeypatch: pytest.MonkeyPatch):
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert isinstance(build_view("auto"), NotebookView)
    assert isinstance(build_view("plain"), PlainView)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert isinstance(build_view("auto"), PlainView)
