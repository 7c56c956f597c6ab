"""How the tokens of a turn are drawn: the session's sampling, what a request may change of it, and the seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from miles.core.protocols import Sampling
from miles.core.types import Tokens
from miles.rollout.seeds import mix
from miles.rollout.session.server.ask import Wish
from miles.rollout.session.server.fields import Fields
from miles.rollout.session.server.refusal import Refusal

GREEDY = 1e-6
SETTINGS = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop", "stop_token_ids", "ignore_eos", "seed")
)
_BENT = ("frequency_penalty", "presence_penalty", "logit_bias")


def read_wish(fields: Fields, limit: int | None, *, stop: str = "stop", unforced: tuple[str, ...] = ()) -> Wish:
    """The drawing fields the APIs share; ``stop`` is what this one calls its stop strings."""
    bent = tuple(name for name in _BENT if fields.raw(name))
    if (penalty := fields.maybe_number("repetition_penalty")) is not None and penalty != 1:
        bent = (*bent, "repetition_penalty")
    return Wish(
        temperature=fields.within("temperature", lambda x: 0 <= x <= 1e6, "a number from 0 on"),
        top_p=fields.within("top_p", lambda x: 0 < x <= 1, "above 0 and at most 1"),
        top_k=_top_k(fields),
        min_p=fields.within("min_p", lambda x: 0 <= x <= 1, "from 0 to 1"),
        limit=limit,
        stop=tuple(text for text in fields.texts(stop) if text),
        stop_token_ids=fields.integers("stop_token_ids", low=0, high=2**31 - 1, what="token ids"),
        ignore_eos=None if "ignore_eos" not in fields else fields.flag("ignore_eos"),
        seed=fields.maybe_integer("seed"),
        unforced=(*unforced, *bent),
    )


def read_sampling(fields: Fields, given: Sampling) -> Sampling:
    """``given``, changed by the ``sampling`` of a session that is opened."""
    fields.only(SETTINGS, fields.where)
    limit = fields.maybe_integer("max_new_tokens", low=1)
    wish = read_wish(fields, None)
    return replace(
        _drawn(given, wish),
        max_new_tokens=given.max_new_tokens if limit is None else limit,
        stop=wish.stop if "stop" in fields else given.stop,
        stop_token_ids=wish.stop_token_ids if "stop_token_ids" in fields else given.stop_token_ids,
        seed=given.seed if wish.seed is None else wish.seed,
    )


def sampling_of(given: Sampling, wish: Wish, *, held: bool, room: int) -> tuple[Sampling, tuple[str, ...]]:
    """The sampling of a turn but for its seed, and what of the wish it does not go by.

    In a held session the run decides how tokens are drawn, for the trainer takes them as drawn that way; a request may
    only end its reply earlier. Elsewhere what a request asks for is given, or refused. ``room``: what the context
    leaves.
    """
    if held:
        own = {"seed": wish.seed} if wish.seed is not None else {}
        unused = (*(name for name, _ in _differing(given, wish)), *own, *wish.unforced)
        drawn = given
    else:
        if wish.unforced:
            raise Refusal(
                f"{wish.unforced[0]} would bend what the policy draws, which this server does not do; leave it out, or "
                "open the session with hold to have it passed over.",
                param=wish.unforced[0].partition(":")[0],
            )
        unused, drawn = (), _drawn(given, wish)
    limit = min(given.max_new_tokens, room) if wish.limit is None else min(wish.limit, given.max_new_tokens, room)
    stops = (*given.stop, *(stop for stop in wish.stop if stop not in given.stop))
    ids = (*given.stop_token_ids, *(each for each in wish.stop_token_ids if each not in given.stop_token_ids))
    return replace(drawn, max_new_tokens=limit, stop=stops, stop_token_ids=ids), unused


def context_of(tokens: Tokens) -> int:
    """A 64-bit number that stands for a context."""
    return int.from_bytes(hashlib.sha256(tokens.tobytes()).digest()[:8], "little")


def seed_of(session: int, context: int, before: int) -> int:
    """The seed of a turn: of its session, its context, and how often that context was asked before.

    It is the same whatever other turns of the session are under way, and another when a turn is asked again.
    """
    return mix(session, context, before) >> 1


def _drawn(given: Sampling, wish: Wish) -> Sampling:
    changed = replace(given, **dict(_differing(given, wish)))
    greedy = changed.temperature < GREEDY or changed.top_k == 1
    return replace(changed, temperature=0.0, top_k=-1) if greedy else changed


def _differing(given: Sampling, wish: Wish) -> Iterator[tuple[str, Any]]:
    """What the wish says of drawing that the session's sampling does not."""
    pairs = (
        ("temperature", wish.temperature, given.temperature),
        ("top_p", wish.top_p, given.top_p),
        ("top_k", wish.top_k, given.top_k),
        ("min_p", wish.min_p, given.min_p),
        ("ignore_eos", wish.ignore_eos, given.ignore_eos),
    )
    return ((name, wished) for name, wished, own in pairs if wished is not None and wished != own)


def _top_k(fields: Fields) -> int | None:
    value = fields.maybe_integer("top_k")
    if value is not None and value < 1 and value not in (-1, 0):
        raise fields.refuse("top_k", "-1 (off) or at least 1")
    return -1 if value == 0 else value
