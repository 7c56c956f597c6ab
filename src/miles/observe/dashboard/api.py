"""Queries of the dashboard: a name and its parameters to a JSON value, for the server and for reports alike.

Nothing that a client sends becomes part of a path: runs, steps and files are looked up in what was found on disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from miles.core.errors import MilesError
from miles.observe.dashboard.health import assess_run
from miles.observe.dashboard.run_index import RunIndex, clean, summarize_run
from miles.observe.dashboard.run_reader import RunReader, SeriesQuery, flatten_difference
from miles.observe.dashboard.step_time import list_slowest, split_step_time
from miles.observe.dashboard.timeline import Timeline
from miles.observe.dashboard.trajectories import SORT_KEYS, LoadTokenizer, RolloutBrowser, TrajectoryQuery
from miles.observe.metric import RATES, SECONDS, SPECULATION, find_metric

Params = Mapping[str, Sequence[str]]
ROLLOUT_QUERIES = frozenset({"trajectories", "trajectory", "tokens", "slowest"})
"""Queries that read rollout files, which may take seconds; another thread may answer them."""
MAX_POINTS = 5000
_GAUGE_SECONDS = 600.0
"""Over how long gauges are averaged for the advice on what is slow."""
MAX_TOKENS = 4000
MAX_ROWS = 200
_MAX_LOG_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PAGE = re.compile(r"[a-z0-9_]+\.md")


class QueryError(Exception):
    """A query that cannot be answered: HTTP status and a sentence."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class DashboardApi:
    """Answers queries about the runs of an index.

    ``choose_tolerance`` gives the parity tolerance of a run; ``docs`` is the folder of the documentation, if here.
    """

    def __init__(
        self,
        index: RunIndex,
        *,
        load_tokenizer: LoadTokenizer,
        choose_tolerance: Callable[[Path], float],
        clock: Callable[[], float],
        docs: Path | None = None,
    ) -> None:
        self._index = index
        self._load_tokenizer = load_tokenizer
        self._choose_tolerance = choose_tolerance
        self._clock = clock
        self._docs = docs
        self._browsers: dict[Path, RolloutBrowser] = {}
        self._timelines: dict[Path, Timeline] = {}
        self._handlers: dict[str, Callable[[Params], Any]] = {
            "runs": self._list_runs,
            "state": self._read_state,
            "overview": self._read_overview,
            "metrics": self._list_metrics,
            "series": self._read_series,
            "config": self._read_config,
            "time": self._read_time,
            "slowest": lambda params: list_slowest(self._rollout_run(params)),
            "timeline": self._read_timeline,
            "steps": self._list_steps,
            "trajectories": self._list_trajectories,
            "trajectory": self._read_trajectory,
            "tokens": self._read_tokens,
            "events": self._list_events,
            "log": self._read_log,
            "docs": self._read_docs,
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all queries."""
        return tuple(self._handlers)

    def query(self, name: str, params: Params) -> Any:
        """Answer a query; QueryError if that is not possible."""
        if name not in self._handlers:
            raise QueryError(404, f"{name} is no query; there are {', '.join(self._handlers)}.")
        try:
            return self._handlers[name](params)
        except MilesError as error:  # a damaged rollout file
            raise QueryError(422, str(error)) from error

    # -- runs -------------------------------------------------------------------------------

    def _run(self, params: Params) -> RunReader:
        runs = self._runs(params)
        if len(runs) != 1:
            raise QueryError(400, "Name one run with run=.")
        return runs[0]

    def _runs(self, params: Params) -> list[RunReader]:
        return self._find_runs(params, self._index.get)

    def _rollout_run(self, params: Params) -> RunReader:
        """Return the run of a query of ``ROLLOUT_QUERIES``, whose logs are left as they are."""
        runs = self._find_runs(params, self._index.find)
        if len(runs) != 1:
            raise QueryError(400, "Name one run with run=.")
        return runs[0]

    def _find_runs(self, params: Params, find: Callable[[str], RunReader]) -> list[RunReader]:
        try:
            return [find(name) for name in params.get("run", ())]
        except KeyError as error:
            raise QueryError(404, f"There is no run {error.args[0]}.") from error

    def _list_runs(self, params: Params) -> Any:
        self._index.refresh()
        now = self._clock()
        return {"runs": [summarize_run(self._index.get(name), now) for name in self._index.names()]}

    def _read_state(self, params: Params) -> Any:
        return {"runs": {run.name: [run.revision, run.step] for run in self._runs(params)}}

    def _read_overview(self, params: Params) -> Any:
        run = self._run(params)
        health = assess_run(run, self._choose_tolerance(run.path))
        return {"run": summarize_run(run, self._clock())} | health

    def _list_metrics(self, params: Params) -> Any:
        found: dict[str, dict[str, str]] = {}
        for run in self._runs(params):
            names = [*run.metrics.names("train"), *run.metrics.names("eval")]
            found |= {name: _describe(name) for name in names}
            for name in (*run.timings.names("train"), *run.timings.names("eval")):
                found[f"seconds/{name}"] = _describe_timing(name)
        return {"metrics": [{"name": name} | about for name, about in sorted(found.items())]}

    def _read_series(self, params: Params) -> Any:
        query = SeriesQuery(
            smoothing=_int(params, "smooth", 0, low=0, high=10_000),
            limit=_int(params, "points", 1000, low=4, high=MAX_POINTS),
            since=_int(params, "since", None),
        )
        names = params.get("name", ())
        return {"series": [run.read_series(name, query) for run in self._runs(params) for name in names]}

    def _read_config(self, params: Params) -> Any:
        runs = self._runs(params)
        if len(runs) == 2:
            first, second = (run.flat_config() for run in runs)
            return {"difference": [list(row) for row in flatten_difference(first, second)]}
        return {"config": self._run(params).read_config()}

    # -- time -------------------------------------------------------------------------------

    def _read_time(self, params: Params) -> Any:
        run = self._run(params)
        gauges = self._open_timeline(run).mean_counters(_GAUGE_SECONDS)
        return split_step_time(run, newest=_int(params, "newest", 50, low=1), gauges=gauges)

    def _read_timeline(self, params: Params) -> Any:
        timeline = self._open_timeline(self._run(params))
        return timeline.read_window(_float(params, "start"), _float(params, "end"))

    def _open_timeline(self, run: RunReader) -> Timeline:
        timeline = self._timelines.setdefault(run.path, Timeline(run.path / "trace"))
        timeline.update()
        return timeline

    # -- reading ----------------------------------------------------------------------------

    def _browser(self, run: RunReader) -> RolloutBrowser:
        return self._browsers.setdefault(run.path, RolloutBrowser(run.path, self._load_tokenizer))

    def _list_steps(self, params: Params) -> Any:
        run = self._run(params)
        steps_T, rewards_T = run.metrics.series("train", "reward")
        rewards = dict(zip(steps_T.tolist(), rewards_T.tolist(), strict=True))
        steps = run.rollout_steps()
        return {"steps": steps, "rewards": [clean(rewards.get(step)) for step in steps]}

    def _step(self, run: RunReader, params: Params) -> int:
        step = _int(params, "step", None)
        if step is None or step not in run.rollout_steps():
            raise QueryError(404, f"{run.name} has no rollouts of this step.")
        return step

    def _list_trajectories(self, params: Params) -> Any:
        run, query = self._rollout_run(params), _trajectory_query(params)
        if _text(params, "step") == "all":
            return self._browser(run).search_steps(run.rollout_steps(), query)
        return self._browser(run).list_trajectories(self._step(run, params), query)

    def _read_trajectory(self, params: Params) -> Any:
        run = self._rollout_run(params)
        try:
            return self._browser(run).read_trajectory(self._step(run, params), _int(params, "index", 0, low=0))
        except IndexError as error:
            raise QueryError(404, "The step has no trajectory of this number.") from error

    def _read_tokens(self, params: Params) -> Any:
        run = self._rollout_run(params)
        first, limit = _int(params, "first", 0, low=0), _int(params, "limit", 2000, low=1, high=MAX_TOKENS)
        index, branch = _int(params, "index", 0, low=0), _int(params, "branch", 0, low=0)
        layer = _int(params, "layer", 0, low=0)
        try:
            return self._browser(run).read_tokens(self._step(run, params), index, branch, first, limit, layer)
        except IndexError as error:
            raise QueryError(404, "The step has no such trajectory or branch.") from error

    def find_image(self, params: Params) -> Path:
        """Return the file of an image of a run by the hash of its content; QueryError if there is none."""
        run, source = self._rollout_run(params), _text(params, "source")
        if _SHA256.fullmatch(source):
            for file in (run.path / "media").glob(f"{source}.*"):
                return file
        raise QueryError(404, "The run has no such image.")

    # -- cluster ----------------------------------------------------------------------------

    def _list_events(self, params: Params) -> Any:
        run = self._run(params)
        config = run.read_config()
        placement = {name: config.get(name, {}) for name in ("cluster", "ray", "parallel", "sglang", "fault_tolerance")}
        return {"events": run.sessions[-2000:], "placement": placement, "logs": run.stall_files()}

    def _read_log(self, params: Params) -> Any:
        run, name = self._run(params), _text(params, "name")
        if name not in run.stall_files():
            raise QueryError(404, f"{run.name} has no such log.")
        data = (run.path / "logs" / name).read_bytes()
        return {"name": name, "text": data[-_MAX_LOG_BYTES:].decode("utf-8", "replace")}

    def _read_docs(self, params: Params) -> Any:
        page = _text(params, "page")
        if self._docs is None or not _PAGE.fullmatch(page) or not (self._docs / page).is_file():
            raise QueryError(404, f"The page {page} is not on this machine; read it in the folder docs of the sources.")
        return {"page": page, "text": (self._docs / page).read_text(encoding="utf-8")}


def format_query(name: str, params: Params) -> str:
    """Return a query as text, with its parameters in one order; the pages spell it the same way.

    >>> format_query("series", {"run": ["a b"], "name": ["x", "y"]})
    'series?name=x&name=y&run=a%20b'
    """
    pairs = [(key, value) for key in sorted(params) for value in params[key]]
    return name + "?" + "&".join(f"{quote(k, safe=_UNRESERVED)}={quote(v, safe=_UNRESERVED)}" for k, v in pairs)


_UNRESERVED = "!*'()"
"""Characters that JavaScript's encodeURIComponent leaves as they are, beside letters, digits and ``-_.~``."""


def _describe(name: str) -> dict[str, str]:
    metric = find_metric(name)
    return {"unit": metric.unit, "meaning": metric.meaning} if metric is not None else {"unit": "", "meaning": ""}


def _describe_timing(name: str) -> dict[str, str]:
    found = next((metric for metric in (*SECONDS, *RATES, *SPECULATION) if metric.matches(name)), None)
    return {"unit": found.unit, "meaning": found.meaning} if found is not None else {"unit": "seconds", "meaning": ""}


def _trajectory_query(params: Params) -> TrajectoryQuery:
    sort, advantage = _text(params, "sort") or "index", _text(params, "advantage")
    if sort not in SORT_KEYS:
        raise QueryError(400, f"sort={sort} is not one of {', '.join(SORT_KEYS)}.")
    if advantage not in ("", "positive", "negative", "zero"):
        raise QueryError(400, f"advantage={advantage} is not one of positive, negative, zero.")
    return TrajectoryQuery(
        text=_text(params, "q"),
        status=_text(params, "status"),
        min_reward=_float(params, "min_reward"),
        max_reward=_float(params, "max_reward"),
        min_length=_int(params, "min_length", None),
        max_length=_int(params, "max_length", None),
        advantage=cast(Any, advantage),
        with_tools=_text(params, "tools") == "1",
        group=_int(params, "group", None),
        sort=sort,
        descending=_text(params, "order") == "desc",
        offset=_int(params, "offset", 0, low=0),
        limit=_int(params, "limit", 50, low=1, high=MAX_ROWS),
    )


def _text(params: Params, name: str) -> str:
    values = params.get(name, ())
    return values[-1] if values else ""


def _int(params: Params, name: str, default: Any, *, low: int | None = None, high: int | None = None) -> Any:
    text = _text(params, name)
    if not text:
        return default
    try:
        value = int(text)
    except ValueError as error:
        raise QueryError(400, f"{name}={text[:40]} is not a whole number.") from error
    if (low is not None and value < low) or (high is not None and value > high) or abs(value) >= 2**63:
        raise QueryError(400, f"{name}={text[:40]} is out of range.")
    return value


def _float(params: Params, name: str) -> float | None:
    text = _text(params, name)
    try:
        return float(text) if text else None
    except ValueError as error:
        raise QueryError(400, f"{name}={text[:40]} is not a number.") from error
