"""What a function of upstream's signature may know of the run it is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from miles.core.types import Array, Author, Prompt, Sample, Span, Tokens, Trajectory


class RowsOf(Protocol):
    """An attempt's training rows, one a branch, each trained token worth the same."""

    def __call__(self, prompt_id: int, trajectory: Trajectory, *, worth: float, trained: Author) -> list[Sample]: ...


class Arguments:
    """The run's flags by their names, to be read.

    >>> Arguments({"lr": 1e-6}).lr
    1e-06
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", dict(values))

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Any] = object.__getattribute__(self, "_values")
        if name not in values:
            raise AttributeError(
                f"args has no {name}: this run has no such flag; take what the function needs from sample.metadata, "
                "or from the environment."
            )
        return values[name]

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"args.{name} cannot be set: a run's flags are never written to.")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"args.{name} cannot be removed: a run's flags are never written to.")

    def __contains__(self, name: str) -> bool:
        return name in vars(self)

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    @property
    def __dict__(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return dict(object.__getattribute__(self, "_values"))

    def __repr__(self) -> str:
        return f"Arguments({vars(self)!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Flags as ``args``, and the means to show a prompt and an attempt as upstream did.

    ``tokenizer`` gives the checkpoint's own, of transformers. ``render`` gives a prompt's tokens and ``shown`` what a
    sample calls its prompt: the text of these, or messages. ``stamp`` writes what an
    engine found out of tokens it was given into their spans; ``rows`` makes training rows.
    """

    args: Arguments
    tokenizer: Callable[[], Any]
    render: Callable[[Prompt], Tokens]
    shown: Callable[[Prompt], str | Sequence[Mapping[str, Any]]]
    stamp: Callable[[Sequence[Span], Mapping[str, Array]], list[Span]]
    rows: RowsOf
