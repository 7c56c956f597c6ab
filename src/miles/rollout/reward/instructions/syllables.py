"""How many syllables an English word has, by its spelling: vowels in a row are one, but for the ways English has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

_ALONE: Mapping[str, int] = MappingProxyType(
    {
        word: count
        for count, words in {
            1: "eye eyes eyed friend friends tongue tongues league leagues queue queues rogue vague vogue pier "
            "piers tier tiers shoe shoes toe toes foe foes hoe guy guys buy buys guess guest guide build built "
            "view views news",
            2: "people being seeing going doing poem poems poet poets ruin ruins fluid fluids create real really "
            "every business chocolate evening evenings interest different something sometimes somewhere someone "
            "therefore lion lions riot giant giants client quiet diet science trial trials dial cruel fuel duel "
            "jewel naive chaos via wednesday maybe beyond player players royal loyal mayor layer layers",
            3: "idea ideas area areas creation everyone everything anyone everybody library camera violet radio "
            "video radios videos museum museums piano pianos memory history century natural general everywhere "
            "favourite favorite vegetable poetry created creator",
            4: "society reality experience experiences material biography geography idealist",
        }.items()
        for word in words.split()
    }
)  # fmt: skip
_SILENT = re.compile(
    r"[^aeiouysxzcgh]es$|[^cs]hes$"  # makes, clothes; not houses, dishes
    r"|[^aeiouytd]ed$"  # walked; not wanted
    r"|[^aeioulr]e$|[aeiouy][lr]e$|[^aeiou]re$"  # house, whole
)
_HIATUS = (
    re.compile(r"(?<![tcsgx])i(?:a|o|um|us)"),  # medium, radio; not social, nation
    re.compile(r"(?<![qg])ua"),  # usual; not square
    re.compile(r"[aeiou]y[aeiou]|[aeou]ing|ying|uing"),  # player, doing, trying
    re.compile(r"(?<=[bdfklmnprstvz])ier|(?<=[bdfklmnprstvz])iest|(?<![tcs])ie(?:t|n[ct])"),  # happier, quiet, client
    re.compile(r"eo(?!u)|[^g]ue[lnt](?!$)|uel$|uent|[^aeiou]ism$|[^aeiou]thm$"),  # video, cruel, fluent, prism, rhythm
)
_VOWELS = re.compile(r"[aeiouy]+")


def syllables(word: str) -> int:
    """At least 1.

    >>> [syllables(word) for word in ("cat", "table", "happier", "nation", "walked", "wanted")]
    [1, 2, 3, 2, 1, 2]
    """
    plain = re.sub(r"[^a-z]", "", word.lower().removesuffix("'s").removesuffix("’s"))
    if plain in _ALONE:
        return _ALONE[plain]
    count = len(_VOWELS.findall(plain)) + sum(len(found.findall(plain)) for found in _HIATUS)
    if _SILENT.search(plain) and not re.search(r"[^aeiouy]les?$", plain):
        count -= 1
    return max(1, count)
