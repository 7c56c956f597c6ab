"""Instructions about the look of a reply: bullets, titles, sections, JSON, quotes, how it starts and ends, case."""

from __future__ import annotations

import json
import re

from miles.rollout.reward.ifeval.common import (
    Settings,
    compare_count,
    get_int,
    get_text,
    split_lines,
    split_sentences,
    split_words,
)

_EMOJI = re.compile("[\u2190-\u21ff\u2300-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff]\ufe0f?$")
_CLOSES = {")": "(", "]": "[", "}": "{"}
_SMALL = frozenset(
    split_words("a an the and but or nor for so yet as at by in of on to up via per vs with from into over")
)
_CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_TEMPLATE = ("My Answer:", "My Conclusion:", "Future Outlook:")


def bullet_lists(reply: str, settings: Settings) -> bool:
    """Exactly ``num_bullets`` lines that start with * or -."""
    return len(re.findall(r"^[ \t]*(?:\*(?!\*)|-(?!-))[ \t]*\S", reply, re.MULTILINE)) == get_int(
        settings, "num_bullets"
    )


def sub_bullets(reply: str, settings: Settings) -> bool:
    """Bullets with *, and under each at least one with -."""
    marks = "".join(line.strip()[0] for line in split_lines(reply) if line.strip()[0] in "*-")
    return re.fullmatch(r"(?:\*-+)+", marks) is not None


def constrained_response(reply: str, settings: Settings) -> bool:
    """One of the three answers that were offered."""
    return reply.strip() in _CHOICES


def options(reply: str, settings: Settings) -> bool:
    """One of ``options`` and no more; they are parted by a slash, a comma or "or"."""
    offered = re.split(r"\s*/\s*|\s*,\s*(?:or\s+)?|\s+or\s+", get_text(settings, "options").strip())
    return reply.strip().strip(".").lower() in {option.strip().lower() for option in offered if option.strip()}


def highlighted_sections(reply: str, settings: Settings) -> bool:
    """At least ``num_highlights`` passages between single or double stars."""
    found = re.findall(r"\*\*[^\n*]*\*\*|\*[^\n*]*\*", reply)
    return sum(bool(passage.strip("*").strip()) for passage in found) >= get_int(settings, "num_highlights")


def multiple_sections(reply: str, settings: Settings) -> bool:
    """At least ``num_sections`` sections that start with ``section_spliter`` and a number."""
    header = rf"\s?{re.escape(get_text(settings, 'section_spliter').strip())}\s?\d+\s?"
    return len(re.split(header, reply)) - 1 >= get_int(settings, "num_sections")


def json_format(reply: str, settings: Settings) -> bool:
    """JSON, alone or in one fenced block."""
    fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", reply, re.DOTALL | re.IGNORECASE)
    try:
        json.loads(fenced[1] if fenced else reply)
    except (ValueError, RecursionError):
        return False
    return True


def title(reply: str, settings: Settings) -> bool:
    """A title in double angular brackets."""
    return any(found.strip() for found in re.findall(r"<<([^\n<>]+)>>", reply))


def placeholders(reply: str, settings: Settings) -> bool:
    """At least ``num_placeholders`` placeholders in square brackets."""
    return len(re.findall(r"\[[^\[\]\n]+\]", reply)) >= get_int(settings, "num_placeholders")


def postscript(reply: str, settings: Settings) -> bool:
    """A line that starts with ``postscript_marker``; dots and spaces in it do not count."""
    marker = r"\s*".join(re.escape(char) + (r"\.?" if char.isalpha() else "") for char in _marks(settings))
    return re.search(rf"^\s*{marker}.*\S", reply, re.MULTILINE | re.IGNORECASE) is not None


def two_responses(reply: str, settings: Settings) -> bool:
    """Two different answers, parted by six stars."""
    parts = [part.strip() for part in reply.split("******")]
    while parts and not parts[0]:
        parts.pop(0)
    while parts and not parts[-1]:
        parts.pop()
    return len(parts) == 2 and parts[0] != parts[1]


def repeat_prompt(reply: str, settings: Settings) -> bool:
    """``prompt_to_repeat`` first, word for word."""
    return reply.strip().lower().startswith(get_text(settings, "prompt_to_repeat").strip().lower())


def ends_with(reply: str, settings: Settings) -> bool:
    """``end_phrase`` last, in whatever case, quotes around the whole aside."""
    return reply.strip().strip('"').lower().endswith(get_text(settings, "end_phrase").strip().lower())


def starts_with(reply: str, settings: Settings) -> bool:
    """``start_phrase`` first, in whatever case, quotes around the whole aside."""
    return reply.strip().strip('"').lower().startswith(get_text(settings, "start_phrase").strip().lower())


def quotation(reply: str, settings: Settings) -> bool:
    """All of it in double quotes."""
    said = reply.strip()
    return len(said) > 1 and said[0] == said[-1] == '"'


def no_comma(reply: str, settings: Settings) -> bool:
    """No comma."""
    return "," not in reply


def capital_words(reply: str, settings: Settings) -> bool:
    """(``capital_relation``) ``capital_frequency`` words in capitals."""
    return compare_count(
        sum(word.isupper() for word in split_words(reply)), settings, "capital_frequency", "capital_relation"
    )


def upper_case(reply: str, settings: Settings) -> bool:
    """No small letter."""
    return reply.isupper()


def lower_case(reply: str, settings: Settings) -> bool:
    """No capital letter."""
    return reply.islower()


def title_case(reply: str, settings: Settings) -> bool:
    """Every word starts with a capital, small words such as "of" aside."""
    said = [word for word in split_words(reply) if word[0].isalpha()]
    return bool(said) and all(word[0].isupper() or word.lower() in _SMALL for word in said)


def newline(reply: str, settings: Settings) -> bool:
    """Each word on a line of its own."""
    found = split_lines(reply)
    return bool(found) and all(len(line.split()) == 1 for line in found)


def line_indent(reply: str, settings: Settings) -> bool:
    """Each line is indented more than the one before."""
    depths = [len(line) - len(line.lstrip()) for line in split_lines(reply.expandtabs(4))]
    return len(depths) > 1 and depths == sorted(set(depths))


def no_whitespace(reply: str, settings: Settings) -> bool:
    """No white space within."""
    return bool(reply.strip()) and not re.search(r"\s", reply.strip())


def separated_list(reply: str, settings: Settings) -> bool:
    """A list whose items ``sep`` marks, and no other bullets."""
    mark = get_text(settings, "sep").strip()
    return reply.count(mark) > 1 and (mark in "*-" or not re.search(r"^\s*[*-]\s", reply, re.MULTILINE))


def emoji(reply: str, settings: Settings) -> bool:
    """An emoji at the end of every sentence."""
    found = [line for line in split_lines(reply) if split_words(line)]
    parts = [part for line in found for part in re.split(r"(?<=[.!?])\s+(?=[\w\"'(])", line.strip())]
    return bool(parts) and all(_EMOJI.search(part.strip().rstrip(".!?").rstrip()) for part in parts)


def parentheses(reply: str, settings: Settings) -> bool:
    """Brackets of any kind, nested at least five deep and closed in order."""
    opened: list[str] = []
    deepest = 0
    for char in reply:
        if char in "([{":
            opened.append(char)
            deepest = max(deepest, len(opened))
        elif char in _CLOSES and (not opened or opened.pop() != _CLOSES[char]):
            return False
    return deepest >= 5 and not opened


def quotes(reply: str, settings: Settings) -> bool:
    """Quotes within quotes, at least three deep, double and single in turn."""
    opened: list[str] = []
    deepest = 0
    for mark in re.findall(r"(?<!\w)'|'(?!\w)|\"", reply):
        if opened and opened[-1] == mark:
            opened.pop()
        else:
            opened.append(mark)
            deepest = max(deepest, len(opened))
    return deepest >= 3 and not opened


def output_template(reply: str, settings: Settings) -> bool:
    """``My Answer: ... My Conclusion: ... Future Outlook: ...``, in that order."""
    places = [reply.find(heading) for heading in _TEMPLATE]
    return -1 not in places and places == sorted(places) and bool(split_sentences(reply))


def _marks(settings: Settings) -> str:
    return re.sub(r"[.\s]", "", get_text(settings, "postscript_marker")) or "PS"
