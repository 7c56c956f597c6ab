"""Instructions that are whole tasks: one right answer, or a form that holds nothing but the answer."""

from __future__ import annotations

import re
import string
import unicodedata
from datetime import date
from itertools import pairwise

from miles.rollout.reward.instructions.pieces import lines, sentences, words
from miles.rollout.reward.instructions.settings import Settings

# From north to south, those above 45 degrees. That Kyiv lies between Brussels and Prague is often forgotten.
_CAPITALS = words(
    "reykjavik helsinki oslo tallinn stockholm riga moscow copenhagen vilnius minsk dublin berlin amsterdam warsaw "
    "london brussels kyiv prague luxembourg paris vienna bratislava budapest vaduz chisinau bern ljubljana zagreb"
)
_OTHERWISE = {"kiev": "kyiv", "luxembourg city": "luxembourg", "berne": "bern"}
_AFRICA = frozenset(
    re.split(
        r"\s*;\s*",
        "algeria; angola; benin; botswana; burkina faso; burundi; cabo verde; cape verde; cameroon; central african "
        "republic; chad; comoros; democratic republic of the congo; congo, democratic republic of the; dr congo; drc; "
        "congo (democratic republic); congo-kinshasa; republic of the congo; congo, republic of the; congo (republic); "
        "congo-brazzaville; congo; djibouti; egypt; equatorial guinea; eritrea; eswatini; swaziland; eswatini "
        "(swaziland); ethiopia; gabon; gambia; the gambia; gambia, the; ghana; guinea; guinea-bissau; ivory coast; "
        "cote d'ivoire; cote d'ivoire (ivory coast); ivory coast (cote d'ivoire); kenya; lesotho; liberia; libya; "
        "madagascar; malawi; mali; mauritania; mauritius; morocco; mozambique; namibia; niger; nigeria; rwanda; sao "
        "tome and principe; sao tome & principe; senegal; seychelles; sierra leone; somalia; south africa; south "
        "sudan; sudan; tanzania; togo; tunisia; uganda; western sahara; sahrawi arab democratic republic; zambia; "
        "zimbabwe",
    )
)
_FEWEST_COUNTRIES = 52
_OPTION = re.compile(r"\(?[A-Ea-e1-5][.):]\s*\S")
_ANSWER = re.compile(r"(?:correct\s+)?answer\b", re.IGNORECASE)
_QUESTIONS, _OPTIONS = 4, 5
_MARKS = " \t*#_>-•"


def multiples(reply: str, settings: Settings) -> bool:
    """The multiples of 7 from 10 to 50 and no other number."""
    return re.findall(r"\d+", reply) == [str(number) for number in range(14, 51, 7)]


def multiple_choice(reply: str, settings: Settings) -> bool:
    """Four questions of five options each, every question longer than the one before, and nothing else."""
    asked: list[str] = []
    options: list[int] = []
    for line in (line.strip(_MARKS) for line in lines(reply)):
        if line.lower().startswith("question"):
            asked.append(re.sub(r"^question\s*\d*[\s.:)*-]*", "", line, flags=re.IGNORECASE))
            options.append(0)
        elif not asked:
            return False
        elif _OPTION.match(line):
            options[-1] += 1
        elif options[-1] == 0:
            asked[-1] = f"{asked[-1]} {line}".strip()
        elif not _ANSWER.match(line):
            return False
    return options == [_OPTIONS] * _QUESTIONS and all(len(a) < len(b) for a, b in pairwise(asked))


def countries_in_reverse(reply: str, settings: Settings) -> bool:
    """The countries of Africa from Zimbabwe on, in reverse alphabetical order, each on a line of its own."""
    said = [_plain(re.sub(r"^\s*\d+[.)]", "", line)) for line in lines(reply)]
    if "zimbabwe" not in said:
        return False
    listed = said[said.index("zimbabwe") :]
    known = all(name in _AFRICA for name in listed)
    return known and len(set(listed)) == len(listed) >= _FEWEST_COUNTRIES and listed == sorted(listed, reverse=True)


def words_in_reverse(reply: str, settings: Settings) -> bool:
    """The sentence about the bald eagle, its words in reverse order."""
    said = " ".join(words(reply.lower()))
    return re.search(r"\beagle bald\b", said) is not None and "bald eagle" not in said


def characters_in_reverse(reply: str, settings: Settings) -> bool:
    """The sentence about the bald eagle, letter by letter in reverse order."""
    return "elgae dlab" in reply.lower() and "bald eagle" not in reply.lower()


def alphabet_of_sentences(reply: str, settings: Settings) -> bool:
    """26 sentences, the first word of each with the next letter of the alphabet."""
    first = [words(sentence)[0][0].lower() for sentence in sentences(reply)]
    return first == list(string.ascii_lowercase)


def capitals_by_latitude(reply: str, settings: Settings) -> bool:
    """The capitals of Europe above 45 degrees north, from north to south, parted by commas; Kyiv may be left out."""
    said = [_plain(name) for name in reply.strip().rstrip(".").split(",")]
    named = [_OTHERWISE.get(name, name) for name in said]
    return named in (_CAPITALS, [name for name in _CAPITALS if name != "kyiv"])


def dates(reply: str, settings: Settings) -> bool:
    """Dates of Napoleon's time as YYYY-MM-DD, parted by commas, and nothing else."""
    return all(map(_is_his_date, reply.strip().split(",")))


def _is_his_date(written: str) -> bool:
    if not re.fullmatch(r"\s*[0-9]{4}-[0-9]{2}-[0-9]{2}\s*", written):
        return False
    try:
        return 1769 <= date.fromisoformat(written.strip()).year <= 1821
    except ValueError:
        return False


def _plain(name: str) -> str:
    """Without accents, case, and marks around it."""
    bare = unicodedata.normalize("NFKD", name.replace("’", "'")).encode("ascii", "ignore").decode()
    return " ".join(bare.lower().strip(_MARKS + ".,;:").split())
