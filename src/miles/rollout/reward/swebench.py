"""SWE-bench's verdict on a test log, by the package's own log parsers and report. Run in a worker process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles.rollout.reward.types import BadLabel


def grade_log(output: str, exit_status: int, task: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the output of a test run resolves a task (``resolved``), and the share of each kind of test that passed.

    ``task`` has ``instance_id``, ``FAIL_TO_PASS``, ``PASS_TO_PASS``, ``log_parser`` and ``eval_type``.
    """
    from swebench.harness import constants, grading  # type: ignore[import-not-found]
    from swebench.harness.log_parsers import PARSER_REGISTRY  # type: ignore[import-not-found]
    from swebench.types import TestSpec  # type: ignore[import-not-found]

    parser = task["log_parser"]
    if parser not in PARSER_REGISTRY:
        raise BadLabel(f"swebench has no log_parser {parser}; it has {', '.join(PARSER_REGISTRY)}")
    spec = TestSpec(
        instance_id=task["instance_id"],
        image="",
        eval_script_list=[],
        repo=str(task.get("repo", "")),
        version=str(task.get("version", "")),
        FAIL_TO_PASS=list(task[constants.FAIL_TO_PASS]),
        PASS_TO_PASS=list(task[constants.PASS_TO_PASS]),
        log_parser=parser,
        eval_type=task["eval_type"],
    )
    log = (
        f"{constants.START_TEST_OUTPUT}\n{output}\n{constants.END_TEST_OUTPUT}\n"
        f"{constants.TEST_EXIT_CODE}: {exit_status}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test_output.txt"
        path.write_text(log, encoding="utf-8", errors="replace")
        prediction = {"instance_id": spec.instance_id, "model_patch": "the workspace"}
        report = grading.get_eval_report(spec, prediction, str(path), include_tests_status=True)[spec.instance_id]
    status = report.get("tests_status", {})
    return {
        "resolved": bool(report["resolved"]),
        "fail_to_pass": _share(status.get(constants.FAIL_TO_PASS), spec.FAIL_TO_PASS),
        "pass_to_pass": _share(status.get(constants.PASS_TO_PASS), spec.PASS_TO_PASS),
    }


def _share(outcome: Mapping[str, Sequence[str]] | None, tests: Sequence[str]) -> float:
    """The share of tests that passed: 0 without a report, 1 where there are none."""
    if outcome is None:
        return 0.0
    return len(outcome["success"]) / len(tests) if tests else 1.0
