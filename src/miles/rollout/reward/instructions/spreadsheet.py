"""Instructions to write tables: their columns, how many rows, what is quoted."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence

from miles.rollout.reward.instructions.settings import Settings

_FENCED = re.compile(r"\s*```\w*[ \t]*\n(.*?)\n?```\s*", re.DOTALL)
_IN_QUOTES = re.compile(r'(?:^|,)[ \t]*"([^"]*)"[ \t]*(?=,|$)')
_QUOTED = re.compile(r'[ ]*"(?:[^"]|"")*"[ ]*')


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
