"""Whole small runs on one GPU: `miles train` of each model family, with adapters, replay and Megatron, and the service.

    PYTHONPATH=src:. python benchmarks/check_runs_gpu.py [WORD...] [--device cuda] [--at-once 6]

Each case is two steps of GRPO on a model of two to four layers in a process of its own. A line passes if engine and
trainer gave every sampled token the same log-prob: to the bit in cases named ``exact``, to 1e-4 in float32. Cases named
``bf16`` only print their difference. ``service`` trains an adapter over HTTP, samples from it and compares the sampled
log-probs with those of a forward pass. WORDs choose cases by a part of their name. Megatron-Core must be importable for
its cases.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

EXACT = ("--parity", "exact")
BF16 = ("--dtype", "bfloat16")
ADAPTER = ("--lora-rank", "4", "--lora-alpha", "8")
MEGATRON = ("--train-backend", "megatron")
DISTRIBUTED = (*MEGATRON, "--megatron-use-distributed-optimizer")
TOLERANCE = 1e-4
LIMIT_SECONDS = 400
# Models are made one at a time: torch's generator is one for all threads.
_SEEDED = threading.Lock()


@dataclass(frozen=True)
class Case:
    """A run: the kind of its model (``dense`` and ``moe`` are the demo's) and its flags."""

    name: str
    kind: str
    flags: tuple[str, ...] = ()
    config: tuple[tuple[str, object], ...] = ()

    @property
    def tolerance(self) -> float:
        return 0.0 if "exact" in self.name else float("inf") if "bf16" in self.name else TOLERANCE


RECURRENT = ("hybrid qwen3 next", "hybrid qwen3.5 moe", "hybrid nemotron 3", "hybrid kimi linear", "lfm2")
SPARSE = ("deepseek v3.2", "glm 5 shared choices")
NEWEST = (
    *("deepseek v4", "hybrid glm 5.3 flash", "minimax-m3", "gemma3n", "ernie 4.5 moe", "hunyuan moe"),
    *("mistral 4", "gemma4 with experts"),
)
MEGATRON_KINDS = ("qwen3", "qwen3 moe normalised", "kimi k2")
SHORT_INDEXER = (("index_topk", 4),)
UNTIED = (("tie_word_embeddings", False),)


def list_cases() -> Iterator[Case]:
    named = ("--no-lora-merge", "--lora-versions", "2", *ADAPTER)
    experts = ("--target-modules", "attn,experts")
    head = ("--target-modules", "all-linear,lm_head")
    yield Case("lora versions exact", "dense", (*named, *EXACT))
    yield Case("lora versions bf16 asynchronous", "dense", (*named, *BF16, "--max-weight-staleness", "2"))
    yield Case("lora versions experts exact", "moe", (*named, *experts, *EXACT))
    yield Case("lora output layer exact", "qwen3", (*ADAPTER, *head, "--no-lora-merge", *EXACT), UNTIED)
    yield Case("lora output layer merged exact bf16", "qwen3", (*ADAPTER, *head, *EXACT, *BF16), UNTIED)
    for kind in (*RECURRENT, *SPARSE):
        short = SHORT_INDEXER if kind in SPARSE else ()
        yield Case(f"{kind} exact", kind, EXACT, short)
        yield Case(f"{kind} exact bf16", kind, (*EXACT, *BF16), short)
    for kind in NEWEST:
        yield Case(kind, kind)
        yield Case(f"{kind} bf16", kind, BF16)
    replay = ("--use-rollout-indexer-replay", "--rollout-dtype", "bfloat16", "--dtype", "float32", "--lr", "0")
    yield Case("indexer replay bf16", "deepseek v3.2", replay, SHORT_INDEXER)
    for kind in MEGATRON_KINDS:
        yield Case(f"megatron {kind}", kind, MEGATRON)
        yield Case(f"megatron {kind} exact bf16", kind, (*MEGATRON, *EXACT, *BF16))
        yield Case(f"megatron {kind} distributed optimizer bf16", kind, (*DISTRIBUTED, *BF16))
    torch_dist = ("--ckpt-format", "torch_dist")
    yield Case("megatron torch_dist exact", "qwen3", (*DISTRIBUTED, *EXACT, *torch_dist))


def write_model(case: Case, folder: Path) -> Path:
    from tests.launch.small_run import write_inputs
    from tests.launch.test_family_runs import ids_of
    from tests.models.oracle import hf_model

    inputs = write_inputs(folder, moe=case.kind == "moe")
    if case.kind not in ("dense", "moe"):
        changes: dict[str, Any] = ids_of(inputs) | dict(case.config)
        hf_model(case.kind, **changes).save_pretrained(inputs)
    return inputs


def train(case: Case, inputs: Path, run: Path, device: str) -> list[dict[str, float]]:
    """The rows of the run's steps."""
    from tests.launch.small_run import flags

    words = flags(inputs, run, *case.flags, "--device", device, "--engine-kv-tokens", "4096", steps=2)
    if device != "cpu":
        words = drop_option(words, "--num-threads")
    command = [sys.executable, "-m", "miles.launch.main", "train", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout)[-1500:])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]


def drop_option(words: list[str], name: str) -> list[str]:
    at = words.index(name)
    return words[:at] + words[at + 2 :]


def check(case: Case, root: Path, device: str) -> tuple[bool, str]:
    """Whether the case passes, and the figures of its line."""
    folder = root / case.name.replace(" ", "_")
    began = time.perf_counter()
    with _SEEDED:
        inputs = write_model(case, folder / "model")
    rows = train(case, inputs, folder / "run", device)
    largest = max((row["parity_max_abs"] for row in rows if "parity_max_abs" in row), default=float("nan"))
    mean = max((row["parity_mean_abs"] for row in rows if "parity_mean_abs" in row), default=float("nan"))
    figures = f"largest {largest:.1e}, mean {mean:.1e}, {time.perf_counter() - began:.0f} s"
    return largest <= case.tolerance, figures


def read_samples(result: bytes) -> Iterator[tuple[list[int], list[float]]]:
    """Tokens and log-probs of the sequences in a sampling result."""
    from miles.backends.service.protobuf import read_fields

    for number, value in read_fields(result):
        if number == 1 and isinstance(value, bytes):
            sequence = {key: part for key, part in read_fields(value) if isinstance(part, bytes)}
            yield np.frombuffer(sequence[2], np.int32).tolist(), np.frombuffer(sequence[3], np.float32).tolist()


def check_service(root: Path, device: str) -> tuple[bool, str]:
    """An adapter of all layers and the output layer, trained over HTTP: what it samples, and what a pass says of it."""
    from tests.backends.service.live import ALICE, serving
    from tests.backends.service.raw import Raw, read_loss

    from miles.launch.commands import demo_task

    model = root / "service model"
    model.mkdir(parents=True)
    demo_task.write_checkpoint(model, moe=False, seed=1)
    prompt = [5, 17, 20, 24, 8, 9]
    with serving(model, root / "service", "--service-max-rank", "8", "--device", device) as live:
        client = Raw(live.url, ALICE)
        run = client.open_run(str(model))
        losses = []
        for step in range(4):
            losses.append(read_loss(client.result(client.train(run, 2 * step + 1, [[*prompt, 12, 7, 3]]))))
            client.result(client.step(run, 2 * step + 2))
        saved = client.post("save_weights_for_sampler", model_id=run, seq_id=9, sampling_session_seq_id=0)
        sampler = client.result(saved)["sampling_session_id"]
        body = {
            "prompt": {"chunks": [{"tokens": prompt, "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 8, "seed": 3},
            "num_samples": 4,
        }
        sampled = client.result(client.post("asample", sampling_session_id=sampler, seq_id=0, **body))
        gaps = []
        for number, (tokens, logprobs) in enumerate(read_samples(sampled)):
            whole = [*prompt, *tokens]
            passed = read_loss(client.result(client.train(run, 10 + 2 * number, [whole], forward_only=True)))
            before = read_loss(client.result(client.train(run, 11 + 2 * number, [prompt], forward_only=True)))
            gaps.append(abs(before - passed - sum(logprobs)) / len(tokens))
    figures = f"loss {losses[0]:.3f} to {losses[-1]:.3f}, sampled against a pass {max(gaps):.1e} a token"
    return losses[-1] < losses[0] and max(gaps) < TOLERANCE, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--at-once", type=int, default=6)
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    cases = [case for case in list_cases() if not args.words or any(word in case.name for word in args.words)]
    passed = total = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.at_once) as pool:
        root = Path(folder)
        jobs = {case.name: pool.submit(check, case, root, args.device) for case in cases}
        if not args.words or any(word in "service" for word in args.words):
            jobs["service"] = pool.submit(check_service, root, args.device)
        for name, job in jobs.items():
            total += 1
            try:
                good, figures = job.result()
            except Exception as error:
                good, figures = False, f"{type(error).__name__}: {error}"
            passed += good
            print(f"{'ok  ' if good else 'FAIL'} {name:48} {figures}", flush=True)
    print(f"{passed} of {total} cases passed")
    sys.exit(passed != total)


if __name__ == "__main__":
    main()
