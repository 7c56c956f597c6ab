"""Do two formulas mean the same? Asked of a computer algebra system, in a worker: some questions never end."""

from __future__ import annotations

import logging
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

# It warns that its own alarm is off; the worker that runs this has a harder one.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_WHOLE_BOX = (LatexExtractionConfig(),)


def equivalent(answer: str, truth: str) -> bool:
    r"""Whether ``answer`` means what ``truth`` does; decimals agree to six digits, sets in any order.

    >>> equivalent("x(x+1)", "x^2+x"), equivalent("x(x+1)", "x^2+1")
    (True, False)
    """
    given, wanted = _parsed(answer), _parsed(truth)
    if not given or not wanted:
        return False
    return bool(verify(wanted, given, allow_set_relation_comp=True, timeout_seconds=None))


def _parsed(text: str) -> Any:
    return parse(
        rf"\boxed{{{text}}}",
        extraction_config=_WHOLE_BOX,
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,  # type: ignore[arg-type]
    )
