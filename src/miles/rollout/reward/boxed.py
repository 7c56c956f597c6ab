"""The answer inside the last ``\\boxed{...}`` of a text."""

import re

_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def boxed(text: str) -> str | None:
    r"""What the last complete box holds (of boxes in boxes, the innermost), or None without one.

    >>> boxed(r"so \boxed{\frac{1}{2}}, that is \boxed{0.5} or \boxed{")
    '0.5'
    """
    opened: list[int] = []  # one entry an open brace: where its box's content begins, or -1 for a plain brace
    found = (-1, -1)
    for token in _TOKEN.finditer(text):
        if token[0] == "{":
            opened.append(-1)
        elif token[0].endswith("{") and len(token[0]) > 2:
            opened.append(token.end())
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start > found[0]:  # otherwise a plain brace, or a box around the one found
                found = (start, token.start())
    return None if found[0] < 0 else text[found[0] : found[1]].strip()
