"""What a run of the suite found, kept in results.json, and the tables of docs/http_api.md that are made of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server_api.differences import DIFFERENCES
from tests.server_api.exchange import Exchange

FILE = Path(__file__).with_name("results.json")
MODULES = (
    *("test_weights_checker", "test_control", "test_experts", "test_generate", "test_openai_client", "test_sessions"),
    *("test_stream", "test_weights"),
)
KINDS = ("miles", "sglang")
WORST_FIRST = ("no", "differs", "not run", "yes")
_checks: dict[str, dict[str, str]] = {}
_measured: dict[str, float] = {}


def keep(item: pytest.Item, report: pytest.TestReport) -> None:
    """Note how a test went on the server it ran against; tests that name no endpoint are not about the wire."""
    place = item.get_closest_marker("endpoint")
    kind = _kind_of(item)
    if place is None or kind is None or _exchange_of(item) is not None:
        return
    assert isinstance(item, pytest.Function)
    row = _checks.setdefault(item.originalname, {"endpoint": place.args[0]})
    row[kind] = min(_word(report), row.get(kind, "yes"), key=WORST_FIRST.index)


def _kind_of(item: pytest.Item) -> str | None:
    given = item.callspec.params if isinstance(item, pytest.Function) and "callspec" in vars(item) else {}
    return given.get("_any_server") or given.get("_any_server_with_experts")


def _exchange_of(item: pytest.Item) -> Exchange | None:
    return item.callspec.params.get("exchange") if isinstance(item, pytest.Function) else None


def _word(report: pytest.TestReport) -> str:
    if report.passed:
        return "yes"
    return "differs" if "wasxfail" in vars(report) else "not run" if report.skipped else "no"


def measure(name: str, value: float) -> None:
    """Keep the largest of a number."""
    _measured[name] = max(value, _measured.get(name, 0.0))


def behaviours() -> set[str]:
    """The tests there are."""
    files = [Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8") for module in MODULES]
    return {name for text in files for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}


def store() -> None:
    """Write down what was found, over what was known of the same tests and servers."""
    known: dict[str, Any] = load()
    checks = {test: known["checks"].get(test, {}) | _checks.get(test, {}) for test in behaviours()}
    checks = {test: row for test, row in checks.items() if row}
    known["measured"] |= {name: float(f"{value:.1e}") for name, value in _measured.items()}
    known = {"measured": dict(sorted(known["measured"].items())), "checks": dict(sorted(checks.items()))}
    FILE.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def load() -> dict[str, Any]:
    if not FILE.exists():
        return {"measured": {}, "checks": {}}
    return json.loads(FILE.read_text(encoding="utf-8"))


# -- tables ---------------------------------------------------------------------------------


def endpoints_table(exchanges: list[Exchange], recorded: dict[str, Any]) -> Iterator[str]:
    """One line an endpoint: how many requests both answer alike, where they differ, what else is checked."""
    checks = load()["checks"]
    places = dict.fromkeys([*(place_of(e) for e in exchanges), *(row["endpoint"] for row in checks.values())])
    yield "| endpoint | requests | answered alike | on purpose not alike | behaviours | ours | SGLang |"
    yield "|---|--:|--:|--:|--:|---|---|"
    for place in sorted(places):
        mine = [e for e in exchanges if place_of(e) == place]
        rows = [row for row in checks.values() if row["endpoint"] == place]
        words = " | ".join(_summary([row.get(kind, "not run") for row in rows]) for kind in KINDS)
        alike = sum(not e.why and e.name in recorded for e in mine)
        yield f"| `{place}` | {len(mine)} | {alike} | {len(mine) - alike} | {len(rows)} | {words} |"


def place_of(exchange: Exchange) -> str:
    """Its endpoint; of paths with a name in them the pattern."""
    return "/v1/models/{model}" if exchange.path.startswith("/v1/models/") else exchange.path


def _summary(words: list[str]) -> str:
    found = {word: words.count(word) for word in dict.fromkeys(words) if word != "yes"}
    return ", ".join(f"{count} {word}" for word, count in found.items()) or "yes"


def checks_table() -> Iterator[str]:
    """One line a behaviour."""
    why = {(each.test, each.server): each.why for each in DIFFERENCES}
    yield "| endpoint | behaviour | ours | SGLang | note |"
    yield "|---|---|---|---|---|"
    for test, row in sorted(load()["checks"].items(), key=lambda pair: (pair[1]["endpoint"], pair[0])):
        note = "; ".join(why[test, kind] for kind in KINDS if (test, kind) in why)
        words = " | ".join(row.get(kind, "not run") for kind in KINDS)
        yield f"| `{row['endpoint']}` | {test.removeprefix('test_').replace('_', ' ')} | {words} | {note} |"


def differences_table(exchanges: list[Exchange], recorded: dict[str, Any]) -> Iterator[str]:
    """One line a request that is answered otherwise on purpose."""
    yield "| endpoint | request | ours | SGLang | why |"
    yield "|---|---|---|---|---|"
    for each in exchanges:
        if each.why:
            theirs = "ends" if each.fatal else recorded[each.name]["status"]
            yield f"| `{each.path}` | {each.name} | {each.ours} | {theirs} | {each.why} |"


def measured_table() -> Iterator[str]:
    yield "| measured | largest difference |"
    yield "|---|--:|"
    yield from (f"| {name} | {value:.1e} |" for name, value in load()["measured"].items())
