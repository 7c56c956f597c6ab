"""Symbolic equivalence of formulas with math-verify, in a worker process: some comparisons never finish."""

from __future__ import annotations

import logging
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

# It warns that its own timeout is off; the worker process has a stricter one.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_WHOLE_BOX = (LatexExtractionConfig(),)


def is_equivalent(answer: str, truth: str) -> bool:
    r"""Whether two formulas are equivalent; decimals agree to six digits, sets in any order.

    >>> is_equivalent("x(x+1)", "x^2+x"), is_equivalent("x(x+1)", "x^2+1")
    (True, False)
    """
    parsed_answer, parsed_truth = _parse_boxed(answer), _parse_boxed(truth)
    if not parsed_answer or not parsed_truth:
        return False
    return bool(verify(parsed_truth, parsed_answer, allow_set_relation_comp=True, timeout_seconds=None))


def _parse_boxed(text: str) -> Any:
    return parse(
        rf"\boxed{{{text}}}",
        extraction_config=_WHOLE_BOX,
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,  # type: ignore[arg-type]
    )
