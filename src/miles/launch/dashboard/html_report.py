"""A report: the pages of the dashboard and what they show of some runs, as one HTML file without a server.

The answers of all queries that the pages make are put into the file as JSON under the text of the query. A
Content-Security-Policy allows only the scripts and styles in the file, by their hashes, and no request to anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from miles.observe.dashboard.api import DashboardApi, Params, QueryError, format_query
from miles.observe.dashboard.web_files import join_modules, read_web_file

_TOKENS = 2000


def build_report(api: DashboardApi, *, max_trajectories: int) -> str:
    """Return the HTML of a report on all runs of ``api``."""
    values: dict[str, Any] = {}
    runs = api.query("runs", {})
    values["runs?"] = runs
    names = [run["name"] for run in runs["runs"]]
    share = max_trajectories // len(names)
    for name in names:
        for query, params in _list_queries(api, name, max_trajectories=share):
            values[format_query(query, params)] = api.query(query, params)
        _use_listed_steps(values, name)
    for first in names:
        for second in names:
            if first != second:
                pair = {"run": [first, second]}
                values[format_query("config", pair)] = api.query("config", pair)
    return render_html(values)


def _list_queries(api: DashboardApi, run: str, *, max_trajectories: int) -> Iterator[tuple[str, Params]]:
    """Yield the queries that the pages make about a run."""
    one = {"run": [run]}
    for name in ("overview", "metrics", "config", "time", "slowest", "timeline", "events", "steps"):
        yield name, one
    for metric in api.query("metrics", one)["metrics"]:
        yield "series", one | {"name": [metric["name"]]}
    for log in api.query("events", one)["logs"]:
        yield "log", one | {"name": [log]}
    pages = {check["page"].partition("#")[0] for check in api.query("overview", one)["checks"]}
    pages |= {advice["page"] for advice in api.query("time", one)["advice"]}
    for page in sorted(pages):
        if _is_answered(api, "docs", {"page": [page]}):
            yield "docs", {"page": [page]}
    steps = choose_steps(api.query("steps", one)["steps"]) if max_trajectories else []
    for step in steps:
        yield from _list_step_queries(api, run, step, max(1, max_trajectories // len(steps)))


def _list_step_queries(api: DashboardApi, run: str, step: int, count: int) -> Iterator[tuple[str, Params]]:
    at = {"run": [run], "step": [str(step)]}
    yield "trajectories", at
    for row in api.query("trajectories", at | {"limit": [str(min(count, 200))]})["rows"]:
        one = at | {"index": [str(row["index"])]}
        yield "trajectory", one
        yield "tokens", one | {"branch": ["0"], "first": ["0"], "limit": [str(_TOKENS)]}


def _is_answered(api: DashboardApi, query: str, params: Params) -> bool:
    try:
        api.query(query, params)
    except QueryError:
        return False
    return True


def choose_steps(steps: Sequence[int]) -> list[int]:
    """Return the first, the middle and the last step.

    >>> choose_steps([1, 2, 3, 4, 5]), choose_steps([7]), choose_steps([])
    ([1, 3, 5], [7], [])
    """
    return sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []


def _use_listed_steps(values: dict[str, Any], run: str) -> None:
    """Leave in the lists of steps and trajectories what the file can show."""
    listed = values[format_query("steps", {"run": [run]})]
    kept = [
        (step, reward)
        for step, reward in zip(listed["steps"], listed["rewards"], strict=True)
        if format_query("trajectories", {"run": [run], "step": [str(step)]}) in values
    ]
    values[format_query("steps", {"run": [run]})] = {
        "steps": [step for step, _ in kept],
        "rewards": [reward for _, reward in kept],
    }
    for step, _ in kept:
        at = {"run": [run], "step": [str(step)]}
        found = values[format_query("trajectories", at)]
        shown = [
            row for row in found["rows"] if format_query("trajectory", at | {"index": [str(row["index"])]}) in values
        ]
        values[format_query("trajectories", at)] = found | {"rows": shown, "matched": len(shown)}


def render_html(values: dict[str, Any]) -> str:
    """Return the page with these values; text in them cannot end the element they are in."""
    scripts = [read_web_file("uplot.min.js").decode(), join_modules()]
    styles = [read_web_file(name).decode() for name in ("uplot.min.css", "style.css")]
    data = json.dumps(values, ensure_ascii=True, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src {_hash_sources(scripts)}; style-src {_hash_sources(styles)}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    page = read_web_file("index.html").decode()
    body = page[page.index("<body>") : page.index("</body>")]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>Miles</title>',
            *(f"<style>{style}</style>" for style in styles),
            f"</head>\n{body.rstrip()}",
            f'<script type="application/json" id="embedded">{data}</script>',
            f"<script>{scripts[0]}</script>",
            f'<script type="module">{scripts[1]}</script>',
            f"<!-- Charts: uPlot.\n{read_web_file('uplot.LICENSE').decode()}-->",
            "</body>\n</html>\n",
        ]
    )


def _hash_sources(texts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
