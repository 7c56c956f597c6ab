"""argv + recipe -> a frozen config, who set each value, and everything that is wrong with them.

Flags are flat (``--eps-clip 0.2``); files may be flat or in sections (``[algo] eps_clip = 0.2``).
Later wins: default, included file, file, flag. Nothing ends the process here: problems are gathered,
so that a user sees them all at once.

argv is cut into chunks, a flag and the words up to the next flag, and each chunk is read by itself;
so one bad chunk hides no other, and ``-1e-5`` is a number wherever it stands.
"""

import os.path
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from miles.config.files import Layer
from miles.config.kind import Misfit
from miles.config.origin import FLAG, Explain, Ledger, Reading, anchored
from miles.config.table import Dataclass, Knob, flag_of, rooms_of

C = TypeVar("C", bound=Dataclass)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A flag and the words that follow it."""

    flag: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.flag, *self.words))


def parse(
    root: type[C], argv: Sequence[str], layers: Sequence[Layer] = (), explain: Explain = lambda flag: None
) -> Reading[C]:
    """Read ``argv`` over ``layers`` over defaults.

    ``explain`` is asked about flags and keys no room owns, and may answer with what to say of one:
    the end of a sentence that starts with its name.
    """
    ledger = Ledger(root)
    for layer in layers:
        _read_layer(ledger, layer, explain)
    _read_flags(ledger, argv, explain)
    return ledger.settle()


def is_flag(word: str) -> bool:
    """Whether a word of a command line is a flag; a negative number is a value."""
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return word.startswith("--") or word[1:2].isalpha()
    return False


def chunks_of(argv: Sequence[str]) -> tuple[list[str], list[Chunk]]:
    """The words before the first flag, and the chunks from there on."""
    loose: list[str] = []
    chunks: list[Chunk] = []
    for word in argv:
        if is_flag(word):
            flag, equals, value = word.partition("=")
            chunks.append(Chunk(flag=flag, words=(value,) if equals else ()))
        elif chunks:
            chunks[-1] = Chunk(flag=chunks[-1].flag, words=(*chunks[-1].words, word))
        else:
            loose.append(word)
    return loose, chunks


# -- flags ----------------------------------------------------------------------------------


def _read_flags(ledger: Ledger[Any], argv: Sequence[str], explain: Explain) -> None:
    known = known_flags(ledger.knobs)
    loose, chunks = chunks_of(argv)
    for word in loose:
        ledger.refuse(f"{word!r} is not expected here: values follow their flag, as in --lr 1e-6.")
    seen: dict[str, tuple[Chunk, Any]] = {}
    for chunk in chunks:
        if chunk.flag not in known:
            _deliver(ledger, chunk, known, explain)
            continue
        knob = known[chunk.flag]
        try:
            value = anchored(knob, _value_of(knob, chunk), "")
        except Misfit as misfit:
            ledger.refuse(_sentence(f"{chunk.flag} {misfit}"), knob.name)
            continue
        first, before = seen.setdefault(knob.name, (chunk, value))
        if before != value:
            ledger.refuse(f"'{first}' and '{chunk}' contradict each other; keep one.", knob.name)
        ledger.put(knob.name, value, FLAG)


def known_flags(knobs: Mapping[str, Knob]) -> dict[str, Knob]:
    """Every spelling of every knob: its flag, aliases, ``--no-`` form, and the flag that turns it off."""
    known: dict[str, Knob] = {}
    for knob in knobs.values():
        for flag in (knob.negation, knob.off, *knob.aliases, knob.flag):
            if flag is not None:
                assert known.get(flag, knob) is knob, f"{flag} is a flag of both {known[flag].name} and {knob.name}"
                known[flag] = knob
    return known


def _value_of(knob: Knob, chunk: Chunk) -> Any:
    if chunk.flag in (knob.negation, knob.off):
        if chunk.words:
            raise Misfit(f"takes no value, but was given {chunk.words[0]!r}")
        return knob.absent
    return knob.kind.from_words(chunk.words)


def _deliver(ledger: Ledger[Any], chunk: Chunk, known: Mapping[str, Knob], explain: Explain) -> None:
    """A flag that is not ours: mail for someone, known to be gone, or a mistake."""
    prefix = next((p for p in ledger.mail if chunk.flag.startswith(f"--{p}-")), None)
    if prefix is not None:
        ledger.mail[prefix] += ["--" + chunk.flag[len(prefix) + 3 :], *chunk.words]
    elif told := explain(chunk.flag):
        ledger.refuse(f"{chunk.flag} {told}.")
    else:
        close = get_close_matches(chunk.flag.replace("_", "-").lower(), known, n=1)
        hint = f"; did you mean {close[0]}?" if close else "; see --help for all of them."
        ledger.refuse(f"{chunk.flag} is not a flag{hint}", known[close[0]].name if close else None)


# -- files ----------------------------------------------------------------------------------


def _read_layer(ledger: Ledger[Any], layer: Layer, explain: Explain) -> None:
    folder, seen = os.path.dirname(layer.label), set[str]()
    for section, key, value in _entries(ledger, layer):
        knob = ledger.knobs.get(key)
        if knob is None:
            _refuse_key(ledger, layer.label, key, explain)
        elif section is not None and section != knob.room:
            ledger.refuse(f"{layer.label}: {key} belongs in [{knob.room}], not in [{section}].", key)
        elif key in seen:
            ledger.refuse(f"{layer.label}: {key} is set twice, at the top and in [{knob.room}]; keep one.", key)
        else:
            seen.add(key)
            try:
                ledger.put(key, anchored(knob, knob.kind.from_file(value), folder), layer.label)
            except Misfit as misfit:
                ledger.refuse(_sentence(f"{layer.label}: {key} {misfit}"), key)


def _entries(ledger: Ledger[Any], layer: Layer) -> Iterator[tuple[str | None, str, Any]]:
    """(section, key, value) of every key; sections that cannot be one are refused."""
    rooms = rooms_of(ledger.root)
    for key, value in layer.values.items():
        if key in rooms and isinstance(value, dict):
            yield from ((key, str(inner), each) for inner, each in value.items())
        elif key in rooms:
            ledger.refuse(f"{layer.label}: {key} is a section and holds keys of its own, as in [{key}].")
        elif isinstance(value, dict) and key not in ledger.knobs:
            close = get_close_matches(key, [*rooms, *ledger.knobs], n=1)
            hint = f"did you mean [{close[0]}]?" if close else f"there are {', '.join(f'[{r}]' for r in rooms)}."
            ledger.refuse(f"{layer.label}: there is no section [{key}]; {hint}")
            ledger.unread.update(str(inner) for inner in value if inner in ledger.knobs)
        else:
            yield None, key, value


def _refuse_key(ledger: Ledger[Any], label: str, key: str, explain: Explain) -> None:
    knob = known_flags(ledger.knobs).get(flag_of(key))
    if knob is not None:
        mend = "false" if knob.kind.scalar is bool and knob.flag != flag_of(key) else "..."
        ledger.refuse(f"{label}: {key} is not a key; write {knob.name} = {mend} instead.", knob.name)
    elif told := explain(flag_of(key)):
        ledger.refuse(f"{label}: {key} {told}.")
    else:
        close = get_close_matches(key.replace("-", "_").lower(), ledger.knobs, n=1)
        hint = f"; did you mean {close[0]}?" if close else "; see miles train --help for all of them."
        ledger.refuse(f"{label}: {key} is not a key{hint}", close[0] if close else None)


def _sentence(text: str) -> str:
    return text if text.endswith("?") else f"{text}."
