"""Factory of terminal views."""

from __future__ import annotations

import sys
from typing import TextIO

from miles.observe.view import NullView, View, ViewKind, supports_cursor


def build_view(kind: ViewKind, *, stream: TextIO | None = None, parity_tolerance: float = 0.01) -> View:
    """Build the view of a kind on a stream (default: standard output); without a terminal, live falls back to plain.

    On the standard output of a notebook, it is that of notebooks.
    """
    if kind == "none":
        return NullView()
    if kind != "plain" and stream is None and "IPython" in sys.modules:
        from miles.observe.notebook import NotebookView, is_notebook

        if is_notebook():
            return NotebookView(parity_tolerance=parity_tolerance)
    out = sys.stdout if stream is None else stream
    if kind != "plain" and supports_cursor(out):
        from miles.observe.live import LiveView

        return LiveView(out, parity_tolerance=parity_tolerance)
    from miles.observe.console import PlainView

    return PlainView(out, parity_tolerance=parity_tolerance)
