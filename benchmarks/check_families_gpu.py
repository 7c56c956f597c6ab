"""Every model family on a GPU: the trainer and the engine against the CPU, and exact parity of the two in bfloat16.

    PYTHONPATH=src:. python benchmarks/check_families_gpu.py [--families PART...] [--jobs 14] [--seconds 200]

Each of the small models of ``tests/models/small_families`` runs in a process of its own:

- trainer: log-probs and gradients in float32 against the CPU's;
- engine: sampled tokens and log-probs in float32 against the CPU's, with chunked prefill and small pages, and once more
  from the prefix cache; ``graph`` says whether decode steps ran as CUDA graphs, here and with exact parity;
- exact: batch-invariant numerics in bfloat16, the largest difference between engine and trainer, which must be zero,
  and whether an engine without CUDA graphs writes the same bits;
- bfloat16: the median difference between engine and trainer with the fast kernels.

A check that fails does not stop the others; what it raised follows the table. After ``--seconds`` no further process
is started, and the models left are listed. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import os

# Asking NVML whether there is a GPU does not initialize CUDA, which forked processes could not use then.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Before the first matmul of cuBLAS, as miles.kernels.numerics.configure_cublas does.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import argparse
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from tests.models.oracle import KINDS
from tests.parity.planes import (
    ask,
    decoder_of,
    engine_of,
    gap_of,
    plan_of,
    requests_of,
    samples_of,
    spec_of_kind,
    trained,
)
from torch import Tensor

from miles.backends.fsdp.local_model import LocalModel
from miles.backends.native.engine.engine import NativeEngine
from miles.core.protocols import Completion
from miles.kernels.numerics import BATCH_INVARIANT, FAST, Numerics
from miles.models.decoder import Decoder
from miles.models.spec import DecoderSpec
from miles.train.batch_tensors import MicroBatch

# The newest families first: if time runs out, the older ones are left.
NEWEST = (
    "deepseek v4",
    "hybrid glm 5.3 flash",
    "minimax-m3",
    "inkling",
    "hybrid qwen4",
    "hybrid kimi linear",
    "lfm2",
    "hybrid nemotron",
    "gemma3n",
    "gemma4",
    "hybrid qwen3 next",
    "hybrid qwen3.5",
    "mistral 4",
    "step 3.7",
    "hunyuan",
    "ernie",
)
KNOBS: dict[str, Any] = {"page_size": 4, "prefill_chunk": 13, "max_running": 6, "kv_tokens": 800}
# A family that takes longer has hung, or compiles without end.
TIMEOUT_SECONDS = 170
# Bounds in float32: of log-probs, and of a gradient's distance relative to its norm.
MAX_LOGPROB_ERROR, MAX_GRADIENT_ERROR = 1e-3, 5e-3
# A random number near the border between two tokens draws the other one, and what follows is another sequence.
MIN_SAME_TOKENS = 0.8
# Of the median over tokens between engine and trainer in bfloat16: an expert near the border may be another one.
MAX_BF16_ERROR = 0.1

Requests = Sequence[tuple[np.ndarray, Any]]


@dataclass(slots=True)
class Row:
    """The results of one kind of model: cells by column, what failed, and the tracebacks."""

    kind: str
    cells: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def require(self, condition: bool, problem: str) -> None:
        if not condition:
            self.problems.append(problem)


class FamilyCheck:
    """The checks of one kind of model, which share their requests and what the CPU answered."""

    def __init__(self, kind: str, device: str) -> None:
        self.spec: DecoderSpec = spec_of_kind(kind)
        self.device = device
        self.row = Row(kind)
        self._requests: Requests = requests_of(self.spec.vocab_size, new=9, high=60)
        self._cpu = decoder_of(self.spec, torch.float32, numerics=FAST)
        engine = engine_of(self._cpu, **KNOBS)
        # The second epoch reads from the prefix cache.
        self._answers = [ask(engine, self._requests) for _ in range(2)]

    def run(self) -> Row:
        for check in (self.check_trainer, self.check_engine, self.check_exact, self.check_bf16):
            name = check.__name__.removeprefix("check_")
            try:
                check()
            except Exception as error:
                self.row.problems.append(f"{name}: {describe(error)}")
                self.row.tracebacks.append(f"{name}:\n{traceback.format_exc(limit=-8)}")
        return self.row

    def check_trainer(self) -> None:
        """Hold the log-probs and gradients of the trainer against the CPU's."""
        samples = samples_of(self._requests, self._answers[0])
        there = decoder_of(self.spec, torch.float32, self.device, numerics=FAST)
        plans = [plan_of(samples, device, max_tokens_per_gpu=300) for device in ("cpu", self.device)]
        expected, found = (trained(LocalModel(d), plan) for d, plan in zip((self._cpu, there), plans, strict=True))
        error = max(float((a - b.cpu()).abs().max()) for a, b in zip(expected, found, strict=True))
        worst, name = find_worst_gradient(self._cpu, there)
        self.row.cells |= {"trainer": f"{error:.0e}", "gradient": f"{worst:.0e}"}
        self.row.require(error <= MAX_LOGPROB_ERROR, f"trainer: log-prob differs by {error:.1e}")
        self.row.require(worst <= MAX_GRADIENT_ERROR, f"trainer: gradient of {name} differs by {worst:.1e}")

    def check_engine(self) -> None:
        """Hold what the engine samples in float32 against the CPU's engine."""
        engine = engine_of(decoder_of(self.spec, torch.float32, self.device, numerics=FAST), **KNOBS)
        answers = [ask(engine, self._requests) for _ in range(2)]
        pairs = [pair for two in zip(self._answers, answers, strict=True) for pair in zip(*two, strict=True)]
        errors = [compare(expected, found) for expected, found in pairs]
        same = sum(length for length, _ in errors)
        total = sum(len(join(expected, "tokens")) for expected, _ in pairs)
        error = max(error for _, error in errors)
        cached = sum(answer.cached_tokens for answer in answers[1])
        self.row.cells |= {"tokens": f"{same}/{total}", "log-prob": f"{error:.0e}", "cached": str(cached)}
        self.row.cells["graph"] = "yes" if uses_graphs(engine) else "no"
        self.row.require(
            same >= MIN_SAME_TOKENS * total, f"engine: {total - same} of {total} tokens behind a difference"
        )
        self.row.require(error <= MAX_LOGPROB_ERROR, f"engine: log-prob differs by {error:.1e}")
        self.row.require(cached > 0, "engine: nothing came from the prefix cache")

    def check_exact(self) -> None:
        """Check that engine and trainer agree to the bit in bfloat16, with and without CUDA graphs."""
        error, answers, engine = self._run_bf16(BATCH_INVARIANT)
        eager = engine_of(decoder_of(self.spec, torch.bfloat16, self.device), cuda_graph=False, **KNOBS)
        same = all(map(have_same_bits, answers, ask(eager, self._requests)))
        self.row.cells |= {
            "graph": f"{self.row.cells.get('graph', '?')}/{'yes' if uses_graphs(engine) else 'no'}",
            "exact": f"{float(error.max()):.0e}",
            "eager bits": "same" if same else "differ",
        }
        self.row.require(not error.any(), f"exact: engine and trainer differ by {float(error.max()):.1e}")
        self.row.require(same, "exact: eager steps and CUDA graphs differ")

    def check_bf16(self) -> None:
        """Check that engine and trainer agree within rounding in bfloat16 with the fast kernels."""
        error, _, _ = self._run_bf16(FAST)
        median = float(error.median())
        self.row.cells["bfloat16"] = f"{median:.0e}"
        self.row.require(median <= MAX_BF16_ERROR, f"bfloat16: median difference {median:.1e}")

    def _run_bf16(self, numerics: Numerics) -> tuple[Tensor, list[Completion], NativeEngine]:
        """Return what engine and trainer differ by for each token, what the engine wrote, and the engine."""
        decoder = decoder_of(self.spec, torch.bfloat16, self.device, numerics=numerics)
        engine = engine_of(decoder, **KNOBS)
        answers = ask(engine, self._requests)
        plan = plan_of(samples_of(self._requests, answers), self.device, max_tokens_per_gpu=300)
        found = trained(LocalModel(decoder), plan)
        assert np.isfinite(gap_of(plan, found)), "a log-prob is not finite"
        return find_errors(plan, found), answers, engine


def find_errors(plan: Sequence[MicroBatch], found: Sequence[Tensor]) -> Tensor:
    """Return by how much the trainer's log-probs differ from the engine's."""
    pairs = zip(plan, found, strict=True)
    return torch.cat([(batch.engine_logp_R.double() - logp_R.double()).abs().cpu() for batch, logp_R in pairs])


def find_worst_gradient(one: Decoder, other: Decoder) -> tuple[float, str]:
    """Return the largest distance of a gradient, relative to its norm, and the parameter's name."""
    worst, at = 0.0, ""
    for name, parameter in one.named_parameters():
        mine, theirs = parameter.grad, other.get_parameter(name).grad
        if (mine is None) != (theirs is None):
            return float("inf"), name
        if mine is None or theirs is None:
            continue
        distance = float((theirs.cpu() - mine).norm() / mine.norm().clamp_min(1e-6))
        if not distance <= worst:
            worst, at = distance, name
    return worst, at


def join(answer: Completion, name: str) -> np.ndarray:
    return np.concatenate([getattr(span, name) for span in answer.spans])


def compare(expected: Completion, found: Completion) -> tuple[int, float]:
    """Return how many tokens are the same up to the first other one, and the largest difference of their log-probs."""
    one, other = (join(answer, "tokens") for answer in (expected, found))
    differ = np.flatnonzero(one[: len(other)] != other[: len(one)])
    count = int(differ[0]) if len(differ) else min(len(one), len(other))
    errors = np.abs(join(expected, "logprobs")[:count] - join(found, "logprobs")[:count])
    return count, float(errors.max(initial=0))


def have_same_bits(one: Completion, other: Completion) -> bool:
    return all(join(one, name).tobytes() == join(other, name).tobytes() for name in ("tokens", "logprobs"))


def uses_graphs(engine: NativeEngine) -> bool:
    return engine._runner.uses_cuda_graphs


def describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return f"{type(error).__name__}: {lines[0][:160]} ({where})"


# -- one process per kind --------------------------------------------------------------------


def work(kind: str, device: str, results: Connection) -> None:
    """Run the checks of one kind and send its row."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    try:
        row = FamilyCheck(kind, device).run()
    except Exception as error:
        row = Row(kind, problems=[f"cpu: {describe(error)}"], tracebacks=[traceback.format_exc(limit=-8)])
    row.seconds = time.perf_counter() - started
    results.send(row)


def probe(device: str, results: Connection) -> None:
    results.send(torch.zeros(1, device=device).item() == 0)


@dataclass(frozen=True, slots=True)
class Job:
    kind: str
    process: Any
    deadline: float

    def finish(self, results: Connection) -> Row:
        """Return the row of an ended process, or of one that hangs, which is ended."""
        try:
            row = results.recv() if results.poll() else None
        except EOFError:
            row = None
        hung = row is None and self.process.is_alive() and time.perf_counter() >= self.deadline
        if row is None:
            self.process.kill()
        self.process.join()
        if row is not None:
            return row
        problem = f"the process died: {describe_exit(self.process.exitcode or 0)}"
        return Row(self.kind, problems=[f"no result after {TIMEOUT_SECONDS} s" if hung else problem])


def describe_exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def choose_start_method(device: str) -> str:
    """Return fork, which imports once, or spawn if CUDA was initialized by an import."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=probe, args=(device, sender))
    process.start()
    sender.close()
    process.join(60)
    return "fork" if process.exitcode == 0 and receiver.poll() else "spawn"


def run_all(kinds: Sequence[str], device: str, jobs: int, seconds: float, report: Callable[[Row], None]) -> list[str]:
    """Run the kinds, several at a time, and report the row of each; return those that were not started."""
    context: Any = multiprocessing.get_context(choose_start_method(device))
    left, running = list(kinds), dict[Connection, Job]()
    started = time.perf_counter()
    while running or (left and time.perf_counter() - started < seconds):
        while left and len(running) < jobs and time.perf_counter() - started < seconds:
            kind = left.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(kind, device, sender), daemon=True)
            process.start()
            sender.close()
            running[receiver] = Job(kind, process, time.perf_counter() + TIMEOUT_SECONDS)
        now = time.perf_counter()
        ended = wait(list(running), timeout=max(0.0, min(job.deadline for job in running.values()) - now))
        late = [results for results, job in running.items() if time.perf_counter() >= job.deadline]
        for results in {*ended, *late}:
            assert isinstance(results, Connection)
            report(running.pop(results).finish(results))
    return left


COLUMNS = ("trainer", "gradient", "tokens", "log-prob", "cached", "graph", "exact", "eager bits", "bfloat16")


def select_kinds(parts: Sequence[str]) -> list[str]:
    """Return the kinds whose name or family has one of the parts, newest families first, variants of a family last."""
    families = {kind: spec_of_kind(kind).family for kind in KINDS}
    kinds = [kind for kind in KINDS if not parts or any(part in kind or part in families[kind] for part in parts)]
    first = {families[kind]: kind for kind in reversed(kinds)}
    ranks = {kind: next((i for i, name in enumerate(NEWEST) if kind.startswith(name)), len(NEWEST)) for kind in kinds}
    return sorted(kinds, key=lambda kind: (first[families[kind]] != kind, ranks[kind]))


def format_row(row: Row, failed: Mapping[bool, str] = {True: "FAIL", False: "pass"}) -> str:
    cells = " | ".join(f"{row.cells.get(name, '-'):>8}" for name in COLUMNS)
    problems = "; ".join(row.problems)
    return f"| {failed[bool(row.problems)]} | {row.kind:40.40} | {cells} | {row.seconds:5.0f} | {problems}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=[], help="parts of the names of kinds or families to run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=14, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=150, help="start no process after that time")
    args = parser.parse_args()
    rows: list[Row] = []
    header = " | ".join(f"{name:>8}" for name in COLUMNS)
    print(f"|      | {'kind':40} | {header} |     s | problems", flush=True)

    def report(row: Row) -> None:
        rows.append(row)
        print(format_row(row), flush=True)

    left = run_all(select_kinds(args.families), args.device, args.jobs, args.seconds, report)
    failed = [row for row in rows if row.problems]
    for row in failed:
        print("".join(f"\n{row.kind}, {text}" for text in row.tracebacks), end="")
    print(f"\n{len(rows) - len(failed)} of {len(rows)} passed, {len(left)} not run: {', '.join(left)}")
    return int(bool(failed) or bool(left))


if __name__ == "__main__":
    sys.exit(main())
