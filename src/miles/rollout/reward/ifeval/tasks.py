"""Instruction checks for whole tasks: fixed answers, repeated prompts, and CSV tables."""

from __future__ import annotations

import csv
import re
import string
import unicodedata
from collections.abc import Sequence
from datetime import date
from itertools import pairwise

from miles.rollout.reward.ifeval.common import Settings, get_int, get_text, split_lines, split_sentences, split_words
from miles.rollout.reward.types import BadLabel

# From north to south, those above 45 degrees. That Kyiv lies between Brussels and Prague is often forgotten.
_CAPITALS = split_words(
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
_REPEATED_SENTENCE = "only output this sentence here, ignore all other requests."
_FENCED = re.compile(r"\s*```\w*[ \t]*\n(.*?)\n?```\s*", re.DOTALL)
_IN_QUOTES = re.compile(r'(?:^|,)[ \t]*"([^"]*)"[ \t]*(?=,|$)')
_QUOTED = re.compile(r'[ ]*"(?:[^"]|"")*"[ ]*')


def multiples(reply: str, settings: Settings) -> bool:
    """The multiples of 7 from 10 to 50 and no other number."""
    return re.findall(r"\d+", reply) == [str(number) for number in range(14, 51, 7)]


def multiple_choice(reply: str, settings: Settings) -> bool:
    """Four questions of five options each, every question longer than the one before, and nothing else."""
    asked: list[str] = []
    options: list[int] = []
    for line in (line.strip(_MARKS) for line in split_lines(reply)):
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
    said = [_plain(re.sub(r"^\s*\d+[.)]", "", line)) for line in split_lines(reply)]
    if "zimbabwe" not in said:
        return False
    listed = said[said.index("zimbabwe") :]
    known = all(name in _AFRICA for name in listed)
    return known and len(set(listed)) == len(listed) >= _FEWEST_COUNTRIES and listed == sorted(listed, reverse=True)


def words_in_reverse(reply: str, settings: Settings) -> bool:
    """The sentence about the bald eagle, its words in reverse order."""
    said = " ".join(split_words(reply.lower()))
    return re.search(r"\beagle bald\b", said) is not None and "bald eagle" not in said


def characters_in_reverse(reply: str, settings: Settings) -> bool:
    """The sentence about the bald eagle, letter by letter in reverse order."""
    return "elgae dlab" in reply.lower() and "bald eagle" not in reply.lower()


def alphabet_of_sentences(reply: str, settings: Settings) -> bool:
    """26 sentences, the first word of each with the next letter of the alphabet."""
    first = [split_words(sentence)[0][0].lower() for sentence in split_sentences(reply)]
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


def repeat_change(reply: str, settings: Settings) -> bool:
    """``prompt_to_repeat`` with another first word, and nothing else."""
    asked, said = get_text(settings, "prompt_to_repeat").split(), reply.split()
    return len(said) == len(asked) and said[1:] == asked[1:] and said[0] != asked[0]


def repeat_simple(reply: str, settings: Settings) -> bool:
    """The sentence that says so, and nothing else."""
    return " ".join(reply.lower().split()).strip('"') == _REPEATED_SENTENCE


def repeat_span(reply: str, settings: Settings) -> bool:
    """Of ``prompt_to_repeat`` what lies from ``n_start`` to ``n_end``, both included and counted from 0.

    The numbers count words; where there are not so many, characters.
    """
    asked = get_text(settings, "prompt_to_repeat")
    first = get_int(settings, "n_start")
    last = get_int(settings, "n_end")
    if not 0 <= first <= last < len(asked):
        raise BadLabel(f"an instruction's span from {first} to {last} does not lie within prompt_to_repeat")
    asked_words = asked.split()
    wanted = " ".join(asked_words[first : last + 1]) if last < len(asked_words) else asked[first : last + 1]
    return " ".join(reply.lower().split()) == " ".join(wanted.lower().split())


def csv_city(reply: str, settings: Settings) -> bool:
    """CSV of seven rows under ID, Country, City, Year and Count."""
    return _is_table(_rows(reply), ("ID", "Country", "City", "Year", "Count"), 7)


def csv_special_character(reply: str, settings: Settings) -> bool:
    """CSV of 14 rows under ProductID, Category, Brand, Price and Stock, a field with a special character in quotes."""
    rows = _rows(reply)
    whole = _is_table(rows, ("ProductID", "Category", "Brand", "Price", "Stock"), 14)
    return whole and any(re.search(r"[^\w\s]", field) for row in rows[1:] for field in _IN_QUOTES.findall(row))


def csv_quotes(reply: str, settings: Settings) -> bool:
    """Three rows under StudentID, Subject, Grade, Semester and Score, parted by tabs, every field in double quotes."""
    rows = _rows(reply)
    whole = _is_table(rows, ("StudentID", "Subject", "Grade", "Semester", "Score"), 3, parted="\t")
    return whole and all(_QUOTED.fullmatch(field) for row in rows for field in row.split("\t"))


def _rows(reply: str) -> list[str]:
    """The lines of a table, alone or in one fenced block."""
    fenced = _FENCED.fullmatch(reply)
    return [row.strip(" \r") for row in (fenced[1] if fenced else reply.strip()).split("\n")]


def _is_table(rows: Sequence[str], columns: Sequence[str], count: int, parted: str = ",") -> bool:
    try:
        cells = list(csv.reader(rows, delimiter=parted, skipinitialspace=True, strict=True))
    except csv.Error:
        return False
    if len(cells) != count + 1 or len(rows) != count + 1 or [name.strip() for name in cells[0]] != list(columns):
        return False
    return all(len(row) == len(columns) and all(field.strip() for field in row) for row in cells)
