"""The examples of docs/hooks.md as modules that record each of their calls."""

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles.hooks.import_path import find_object

PAGE = Path(__file__).parents[2] / "docs" / "hooks.md"
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks() -> list[str]:
    return FENCE.findall(PAGE.read_text(encoding="utf-8"))


def names() -> set[str]:
    """Every function and class of the page."""
    return {name for body in blocks() for name in re.findall(r"^(?:async def|def|class) (\w+)", body, re.MULTILINE)}


class Examples:
    """Writes examples into ``folder``, and records each call in ``calls``: its name and what it was given."""

    def __init__(self, folder: Path, **exchanged: str) -> None:
        self._folder, self._exchanged = folder, exchanged
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __call__(self, name: str) -> str:
        """The address of an example that tells of its calls."""
        body = next(body for body in blocks() if re.search(rf"^(async def|def|class) {name}\b", body, re.MULTILINE))
        for written, meant in self._exchanged.items():
            body = body.replace(written, meant)
        file = self._folder / f"documented_{name}.py"
        file.write_text(body)
        example = find_object(f"{file}:{name}")
        module = inspect.getmodule(example)
        assert module is not None
        if inspect.isclass(example):
            if "__call__" in vars(example):
                example.__call__ = self._told(name, example.__call__, method=True)
        else:
            setattr(module, name, self._told(name, example))
        return f"{file}:{name}"

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [given for called, given in self.calls if called == name]

    def order(self, *names: str) -> list[str]:
        return [called for called, _ in self.calls if called in names]

    def _told(self, name: str, function: Callable[..., Any], *, method: bool = False) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def waited(*given: Any, **more: Any) -> Any:
                self.calls.append((name, given))
                return await function(*given, **more)

            return waited

        @functools.wraps(function)
        def report_value(*given: Any, **more: Any) -> Any:
            self.calls.append((name, given[1:] if method else given))
            return function(*given, **more)

        return report_value
