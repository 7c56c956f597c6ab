"""The tokens a session has stored, held against what the chat template would write of the same conversation.

Both are cut at the marks that frame turns, and each stretch that differs is put in a class: what must be overlooked,
after all that comes before it in ``CLASSES``, for the two to be the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from miles.core.errors import MilesError
from miles.rollout.session.families.family import Difference, Family
from miles.rollout.session.lenient import values_in
from miles.rollout.session.message import canonical_json
from miles.rollout.session.render import Renderer
from miles.rollout.session.session import Session
from miles.rollout.session.tree import Path

CLASSES: tuple[Difference, ...] = ("retokenised", "boundary", "whitespace", "thinking", "tool_calls", "unknown")


@dataclass(frozen=True, slots=True)
class Finding:
    """One stretch that differs, in words: as it is stored, and as the template would have it."""

    kind: Difference
    stored: str
    canonical: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """All that differs in ``conversations`` of ``tokens`` in all; ``refused`` the template would not write at all."""

    findings: tuple[Finding, ...] = ()
    tokens: int = 0
    conversations: int = 0
    refused: int = 0

    @property
    def counts(self) -> Mapping[Difference, int]:
        found = Counter(finding.kind for finding in self.findings)
        return {kind: found[kind] for kind in CLASSES}

    def metrics(self) -> dict[str, float]:
        """How often each class was found, by metric name."""
        counted = {f"session_mismatch/{kind}": float(count) for kind, count in self.counts.items()}
        return {**counted, "session_mismatch/refused": float(self.refused)}


MISMATCH = "session_mismatch"
"""Under which an attempt's metadata tell what an audit of its session found: how often by class, and ``refused``."""


def mismatch_of(session: Session) -> dict[str, dict[str, int]]:
    """What metadata say of a session that was audited; a class that was not found is not in it."""
    found = audit(session)
    counts = {**found.counts, "refused": found.refused}
    return {MISMATCH: {kind: count for kind, count in counts.items() if count}}


def audit(session: Session) -> Audit:
    """Every conversation of a session, each up to its last reply."""
    findings: list[Finding] = []
    paths = session.tree.leaves()
    refused = 0
    for path in paths:
        try:
            canonical = _canonical(path, session.renderer)
        except MilesError:
            refused += 1
            continue
        findings.extend(differences(path.tokens.tolist(), canonical, session.renderer))
    tokens = sum(len(path.tokens) for path in paths)
    return Audit(findings=tuple(findings), tokens=tokens, conversations=len(paths), refused=refused)


def differences(stored: Sequence[int], canonical: Sequence[int], renderer: Renderer) -> Iterator[Finding]:
    """Each stretch in which the two differ. The end of the last turn, which may be unwritten, is left out."""
    marks = renderer.boundaries()
    kept = [_ended(tokens, renderer, marks) for tokens in (stored, canonical)]
    if kept[0] == kept[1]:  # as nearly all are, and cutting them up would take long
        return
    ours, theirs = (_stretches(tokens, renderer, marks) for tokens in kept)
    keys = [[stretch.key for stretch in side] for side in (ours, theirs)]
    for same, a, b, c, d in SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
        pairs = zip(ours[a:b], theirs[c:d], strict=True) if same == "equal" else [(_all(ours[a:b]), _all(theirs[c:d]))]
        for one, other in pairs:
            if one.tokens != other.tokens:
                yield _finding(renderer, one.tokens, other.tokens)


def classified(stored: str, canonical: str, family: Family) -> Difference:
    """The class of a difference between two texts whose tokens differ."""
    pair = stored, canonical
    if stored == canonical:
        return "retokenised"
    for kind in CLASSES[1:-1]:
        pair = tuple(_overlooking(kind, text, family) for text in pair)
        if pair[0] == pair[1]:
            return kind
    return "unknown"


def _overlooking(kind: Difference, text: str, family: Family) -> str:
    if kind == "boundary":
        # Thoughts may be told by the marks around them, so those around thoughts are kept for now.
        return text if re.search(family.thoughts, text, re.DOTALL) else _unmarked(text, family)
    if kind == "whitespace":
        return re.sub(r"\s+", "", text)
    if kind == "thinking":
        return _unmarked(re.sub(family.thoughts, "", text, flags=re.DOTALL), family)
    return _same_json(re.sub(family.wording, "", text))


def _unmarked(text: str, family: Family) -> str:
    for mark in (*family.marks, *family.inner):
        text = text.replace(mark, "")
    return text


def _same_json(text: str) -> str:
    """Every JSON value in it written one way, and names of what a call's arguments are called made one."""
    put: list[str] = []
    at = 0
    for value, start, stop in values_in(text):
        put += [text[at:start], canonical_json(value)]
        at = stop
    joined = "".join([*put, text[at:]])
    return re.sub(r"\s+", "", joined.replace('"parameters":', '"arguments":'))


def _canonical(path: Path, renderer: Renderer) -> list[int]:
    question = next(node for node in reversed(path.nodes) if not node.is_reply)
    return renderer.whole(path.messages, question.tools, **question.template)


def _ended(tokens: Sequence[int], renderer: Renderer, marks: frozenset[int]) -> list[int]:
    kept = list(tokens)
    while kept and (kept[-1] in marks or not renderer.text(kept[-1:]).strip()):
        kept.pop()
    return kept


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A turn or a part of one; ``key`` is what is left of its words when all is overlooked that has a class."""

    tokens: list[int]
    key: str = ""


def _stretches(tokens: Sequence[int], renderer: Renderer, marks: frozenset[int]) -> list[_Stretch]:
    """The tokens cut before and behind marks; a stretch that says nothing, as thoughts do, is the next one's."""
    made: list[_Stretch] = []
    waiting: list[int] = []
    for run in _runs(tokens, marks):
        waiting += run
        if key := _key(renderer.text(waiting), renderer.family):
            made.append(_Stretch(waiting, key))
            waiting = []
    if waiting and made:
        made[-1] = _Stretch(made[-1].tokens + waiting, made[-1].key)
    return made


def _key(text: str, family: Family) -> str:
    for kind in CLASSES[1:-1]:
        text = _overlooking(kind, text, family)
    return text


def _runs(tokens: Sequence[int], marks: frozenset[int]) -> Iterator[list[int]]:
    run: list[int] = []
    for token in tokens:
        if token in marks and run:
            yield run
            run = []
        run.append(token)
    yield run


def _all(stretches: Sequence[_Stretch]) -> _Stretch:
    return _Stretch([token for stretch in stretches for token in stretch.tokens])


def _finding(renderer: Renderer, stored: list[int], canonical: list[int]) -> Finding:
    ours, theirs = renderer.text(stored), renderer.text(canonical)
    return Finding(classified(ours, theirs, renderer.family), ours, theirs)
