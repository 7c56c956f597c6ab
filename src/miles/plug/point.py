"""One row of the table of plug points: a flag, its door, and how what a user names there is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from miles.plug.load import NO_BUILTINS, load

if TYPE_CHECKING:
    from miles.plug.upstream.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One place for a user's own code. ``door`` is the name of its protocol in the module ``room``.

    ``former`` are addresses under which upstream had what is built in here; ``named`` are names of what a run makes
    from its knobs and does not load. Where the door ``makes`` what is then used, a class is called and not first made
    into an instance.
    """

    flag: str
    door: str
    default: str
    when: str
    builtins: Mapping[str, str] = field(default_factory=lambda: NO_BUILTINS)
    former: Mapping[str, str] = field(default_factory=lambda: NO_BUILTINS)
    room: str = "miles.core.protocols"
    named: tuple[str, ...] = ()
    makes: bool = False

    @property
    def knob(self) -> str:
        """The name under which a config has what the flag was given."""
        return self.flag.removeprefix("--").replace("-", "_")

    def protocol(self) -> type:
        """The door itself; imported on demand, since the nouns it speaks of need numpy or torch."""
        return getattr(import_module(self.room), self.door)

    def now(self, path: str | None) -> str | None:
        """What ``path`` is called here, if upstream had it elsewhere."""
        return path if path is None else self.former.get(path, path)

    def load(self, path: str, run: Run | None = None) -> Any:
        """What the user named under this point's flag, checked against its door.

        With what there is to know of a ``run``, functions of upstream's signatures are fitted to the door.
        """
        return self._loaded(path, run, only_check=False)

    def check(self, path: str, run: Run | None = None) -> None:
        """Refuse what ``load`` would, and make no instance of a class."""
        self._loaded(path, run, only_check=True)

    def _loaded(self, path: str, run: Run | None, *, only_check: bool) -> Any:
        return load(
            self.former.get(path, path),
            self.protocol(),
            builtins=self.builtins,
            flag=self.flag,
            makes=self.makes,
            only_check=only_check,
            run=run,
        )
