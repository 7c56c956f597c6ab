"""Session audit: compares a session's stored tokens with what the chat template renders of the same conversation.

Both are split at the markers that frame turns, and each segment that differs is classified by what must be ignored,
after everything that comes before it in ``MISMATCH_KINDS``, for the two to be equal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from miles.core.errors import MilesError
from miles.rollout.serving.lenient_json import iterate_json_values
from miles.rollout.serving.messages import dump_canonical_json
from miles.rollout.session.families import ChatFamily, MismatchKind
from miles.rollout.session.render import ChatRenderer
from miles.rollout.session.session import Session

MISMATCH_KINDS: tuple[MismatchKind, ...] = (
    "retokenised",
    "boundary",
    "whitespace",
    "thinking",
    "tool_calls",
    "unknown",
)


@dataclass(frozen=True, slots=True)
class TokenMismatch:
    """One segment that differs, as text: as it is stored, and as the template would render it."""

    kind: MismatchKind
    stored: str
    canonical: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """All mismatches in ``conversations`` with ``tokens`` in all; the template failed to render ``refused`` of them."""

    mismatches: tuple[TokenMismatch, ...] = ()
    tokens: int = 0
    conversations: int = 0
    refused: int = 0

    @property
    def counts(self) -> Mapping[MismatchKind, int]:
        found = Counter(mismatch.kind for mismatch in self.mismatches)
        return {kind: found[kind] for kind in MISMATCH_KINDS}

    def metrics(self) -> dict[str, float]:
        """Mismatches of each kind, by metric name."""
        counts = {f"session_mismatch/{kind}": float(count) for kind, count in self.counts.items()}
        return {**counts, "session_mismatch/refused": float(self.refused)}


MISMATCH = "session_mismatch"
"""Metadata key of a trajectory: the mismatches of its session's audit by kind, and ``refused``."""


def summarize_mismatches(session: Session) -> dict[str, dict[str, int]]:
    """Audit a session for its trajectory's metadata; a kind that was not found is left out."""
    report = audit_session(session)
    counts = {**report.counts, "refused": report.refused}
    return {MISMATCH: {kind: count for kind, count in counts.items() if count}}


def audit_session(session: Session) -> AuditReport:
    """Compare every conversation of a session, each up to its last reply."""
    renderer = session.renderer
    mismatches: list[TokenMismatch] = []
    conversations = session.tree.leaves()
    refused = 0
    for conversation in conversations:
        question = next(node for node in reversed(conversation.nodes) if not node.is_reply)
        try:
            canonical = renderer.render_conversation(conversation.messages, question.tools, **question.template)
        except MilesError:
            refused += 1
            continue
        mismatches.extend(find_mismatches(conversation.tokens.tolist(), canonical, renderer))
    tokens = sum(len(conversation.tokens) for conversation in conversations)
    return AuditReport(mismatches=tuple(mismatches), tokens=tokens, conversations=len(conversations), refused=refused)


def find_mismatches(stored: Sequence[int], canonical: Sequence[int], renderer: ChatRenderer) -> Iterator[TokenMismatch]:
    """Each segment in which the two differ. The end of the last turn, which may be missing, is ignored."""
    boundaries = renderer.boundary_tokens()
    trimmed = [_trim_end(tokens, renderer, boundaries) for tokens in (stored, canonical)]
    if trimmed[0] == trimmed[1]:  # nearly all are equal, and segmenting is slow
        return
    ours, theirs = (_split_segments(tokens, renderer, boundaries) for tokens in trimmed)
    keys = [[segment.key for segment in side] for side in (ours, theirs)]
    for tag, a, b, c, d in SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
        if tag == "equal":
            pairs = zip(ours[a:b], theirs[c:d], strict=True)
        else:
            pairs = [(_join_segments(ours[a:b]), _join_segments(theirs[c:d]))]
        for our, their in pairs:
            if our.tokens != their.tokens:
                texts = renderer.decode(our.tokens), renderer.decode(their.tokens)
                yield TokenMismatch(classify_mismatch(*texts, renderer.family), *texts)


def classify_mismatch(stored: str, canonical: str, family: ChatFamily) -> MismatchKind:
    """The kind of mismatch between two texts whose tokens differ."""
    if stored == canonical:
        return "retokenised"
    for kind in MISMATCH_KINDS[1:-1]:
        stored, canonical = _remove(kind, stored, family), _remove(kind, canonical, family)
        if stored == canonical:
            return kind
    return "unknown"


def _remove(kind: MismatchKind, text: str, family: ChatFamily) -> str:
    """``text`` without what a mismatch of this kind ignores."""
    if kind == "boundary":
        # Reasoning may be recognised by the markers around it, so those are kept for now.
        has_reasoning = re.search(family.reasoning_pattern, text, re.DOTALL)
        return text if has_reasoning else _remove_markers(text, family)
    if kind == "whitespace":
        return re.sub(r"\s+", "", text)
    if kind == "thinking":
        return _remove_markers(re.sub(family.reasoning_pattern, "", text, flags=re.DOTALL), family)
    return _normalize_json(re.sub(family.call_wording, "", text))


def _remove_markers(text: str, family: ChatFamily) -> str:
    for marker in (*family.frame_markers, *family.inner_markers):
        text = text.replace(marker, "")
    return text


def _normalize_json(text: str) -> str:
    """Every JSON value in canonical form, with one name for a call's arguments."""
    pieces: list[str] = []
    position = 0
    for value, start, stop in iterate_json_values(text):
        pieces += [text[position:start], dump_canonical_json(value)]
        position = stop
    normalized = "".join([*pieces, text[position:]])
    return re.sub(r"\s+", "", normalized.replace('"parameters":', '"arguments":'))


def _trim_end(tokens: Sequence[int], renderer: ChatRenderer, boundaries: frozenset[int]) -> list[int]:
    trimmed = list(tokens)
    while trimmed and (trimmed[-1] in boundaries or not renderer.decode(trimmed[-1:]).strip()):
        trimmed.pop()
    return trimmed


@dataclass(frozen=True, slots=True)
class _Segment:
    """A turn or a part of one; ``key`` is what is left of its text when everything classifiable is ignored."""

    tokens: list[int]
    key: str = ""


def _split_segments(tokens: Sequence[int], renderer: ChatRenderer, boundaries: frozenset[int]) -> list[_Segment]:
    """The tokens split at boundary tokens; a segment with an empty key, such as reasoning, joins the next one."""
    segments: list[_Segment] = []
    pending: list[int] = []
    for run in _split_runs(tokens, boundaries):
        pending += run
        key = renderer.decode(pending)
        for kind in MISMATCH_KINDS[1:-1]:
            key = _remove(kind, key, renderer.family)
        if key:
            segments.append(_Segment(pending, key))
            pending = []
    if pending and segments:
        segments[-1] = _Segment(segments[-1].tokens + pending, segments[-1].key)
    return segments


def _split_runs(tokens: Sequence[int], boundaries: frozenset[int]) -> Iterator[list[int]]:
    run: list[int] = []
    for token in tokens:
        if token in boundaries and run:
            yield run
            run = []
        run.append(token)
    yield run


def _join_segments(segments: Sequence[_Segment]) -> _Segment:
    return _Segment([token for segment in segments for token in segment.tokens])
