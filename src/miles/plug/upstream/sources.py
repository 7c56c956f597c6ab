"""Upstream's data sources, which deal out samples, as sources of prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles.core.errors import PlugError
from miles.core.plugs import DataSource
from miles.core.types import Prompt
from miles.plug.upstream.run import Run
from miles.plug.upstream.sample import Sample


class SamplesSource:
    """A core.protocols.Source over an object with ``get_samples``; a prompt's id is how many came before it.

    Its state is that number: a run that goes on draws and passes over as many, so the object must deal them out alike.
    """

    def __init__(self, inner: Any) -> None:
        self._inner, self._drawn = inner, 0

    def next(self) -> Prompt:
        groups = self._inner.get_samples(1)
        if len(groups) != 1 or not groups[0] or not isinstance(groups[0][0], Sample):
            raise PlugError("get_samples(1) of the data source gives a list of one list of samples, all of one prompt.")
        sample, self._drawn = groups[0][0], self._drawn + 1
        asked = sample.prompt
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        return Prompt(id=self._drawn - 1, messages=messages, label=sample.label, metadata=dict(sample.metadata))

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def load(self, state: Mapping[str, Any]) -> None:
        while self._drawn < state["drawn"]:
            self.next()


def data_source(made: Callable[..., Any], run: Run) -> DataSource:
    """A class ``C(args)`` with ``get_samples(count)``."""

    def make(prompts: Sequence[Prompt]) -> SamplesSource:
        inner = made(run.args)
        if not callable(getattr(inner, "get_samples", None)):
            raise PlugError(
                f"The data source is a {type(inner).__name__} without get_samples; write it as def "
                "(prompts: Sequence[Prompt]) -> Source."
            )
        return SamplesSource(inner)

    return make
