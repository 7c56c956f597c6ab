"""The modules upstream's functions import from, under the names they import: our own things stand behind each."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from miles.plug.upstream import engine, sample

MODULES: Mapping[str, Mapping[str, Any]] = {
    "miles.utils": {},
    "miles.utils.types": {"Sample": sample.Sample},
    "miles.utils.http_utils": {"post": engine.post},
    "miles.rollout.sglang_rollout": {"GenerateState": engine.GenerateState},
    "miles.rollout.filter_hub": {},
    "miles.rollout.filter_hub.base_types": {"DynamicFilterOutput": sample.DynamicFilterOutput},
}
"""Only what is listed can be imported; there is no such file."""


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of the table, after all that there are files of."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        return ModuleSpec(fullname, self, is_package=any(name.startswith(f"{fullname}.") for name in MODULES))

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(MODULES[module.__name__])


_FINDER = _Finder()


def offer() -> None:
    """Let the modules of the table be imported."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
