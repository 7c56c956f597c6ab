"""A training step of the Megatron backend on a GPU against the FSDP trainer in one process on the CPU in float32.

    PYTHONPATH=src:.:FOLDER_OF_MEGATRON_CORE python benchmarks/check_megatron_gpu.py [WORD...] [--at-once 16]

Each line is a tiny model of a family, one for every kind of layer that Megatron's or the decoder's modules have: the
loss and gradient norm of a GRPO step, relative to those of the CPU, and the error of its gradients in float32 (the
worst of all parameters, relative to its largest element) and in bfloat16 (of all gradients as one vector). WORDs choose
lines by a part of the family or of the mechanism. A case runs in a process of its own, and none stops the others.
`--device cpu` runs all of it over gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

LIMIT_SECONDS = 110
FLOAT32, BFLOAT16 = "float32", "bfloat16"


class Case(NamedTuple):
    """A kind of ``tests.models.oracle``, what it covers, and how far its gradients may be from the CPU's."""

    kind: str
    mechanism: str
    float32: float = 2e-3
    bfloat16: float = 0.1


# In bfloat16 indexers select other tokens, and the states of recurrent layers are far from those in float32. Gradients
# of KDA's rates, and those through the iterations of mixing matrices, are differences of larger numbers.
CASES = (
    Case("qwen3", "dense, Megatron's own modules"),
    Case("qwen3 moe normalised", "experts, Megatron's own modules"),
    Case("deepseek v3", "MLA, Megatron's own modules"),
    Case("gpt-oss", "attention sinks, experts with biases"),
    Case("hybrid qwen3 next", "Gated DeltaNet", bfloat16=0.6),
    Case("hybrid kimi linear", "KDA", float32=1e-2, bfloat16=0.6),
    Case("hybrid nemotron 3", "Mamba-2", bfloat16=0.6),
    Case("lfm2", "short convolution"),
    Case("deepseek v3.2", "DSA indexer", bfloat16=0.6),
    Case("minimax-m3", "block indexer", bfloat16=0.6),
    Case("hybrid glm 5.3 flash", "hyper-connections, KDA, pool indexer", float32=1e-2, bfloat16=0.6),
    Case("deepseek v4", "hyper-connections, compressed keys, hash routing", float32=1e-2, bfloat16=0.6),
    Case("hybrid qwen4", "gated hyper-connections, n-gram embeddings, pool indexer", float32=1e-2, bfloat16=0.6),
    Case("gemma3n", "AltUp, per-layer inputs, shared keys"),
    Case("gemma4 with experts", "experts beside an MLP, values that are keys"),
    Case("inkling", "convolutions of outputs, relative bias"),
)


# -- one case, in a process of its own ------------------------------------------------------


def run_case(case: Case, device: str) -> dict[str, Any]:
    """Return the relative errors of both dtypes."""
    import torch
    from tests.backends.megatron import cases
    from tests.backends.megatron.family_cases import family_samples, spec_of, write_family

    batch = family_samples(case.kind)
    # The loss of a policy gradient alone is that of the advantages at a first step.
    algo: dict[str, Any] = {"entropy_coef": 0.1}
    if spec_of(case.kind).moe is not None:
        algo["use_rollout_routing_replay"] = True
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary) / "model"
        write_family(folder, case.kind)
        expected = cases.alone(folder, batch, algo)
        if device == "cpu":
            from tests.backends.megatron.shim import on_cpu

            stack.enter_context(on_cpu())
        backend = "gloo" if device == "cpu" else "nccl"
        torch.distributed.init_process_group(backend, init_method=f"file://{temporary}/store", rank=0, world_size=1)
        out: dict[str, Any] = {}
        for name in (FLOAT32, BFLOAT16):
            try:
                found = take_step(folder, batch, algo, getattr(torch, name), torch.device(device))
                out[name] = compare(found, expected)
            except Exception as error:  # the other dtype is tried too
                out[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        torch.distributed.destroy_process_group()
    return out


def take_step(folder: Path, batch: Any, algo: dict[str, Any], dtype: Any, device: Any) -> dict[str, Any]:
    """Take the step with Megatron's model of the folder."""
    import torch
    from tests.backends.megatron import cases

    from miles.backends.megatron.model import load_megatron_model
    from miles.backends.megatron.parallel_state import destroy_parallel_state
    from miles.cluster.parallel_dims import ParallelDims
    from miles.models.checkpoint.safetensors_io import read_config
    from miles.models.families import spec_from_config

    where = device if device.type == "cpu" else torch.device("cuda", 0)
    try:
        model = load_megatron_model(
            folder,
            spec_from_config(read_config(folder)),
            ParallelDims(),
            dtype=dtype,
            device=where,
            transformer_engine=False,
        )
        return cases.stepped(model, batch, model.dp_group, algo)
    finally:
        destroy_parallel_state()


def compare(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Return relative errors of the metrics and of the gradients, each and all together."""
    names = sorted(expected["grads"])
    missing = sorted(expected["grads"].keys() ^ found["grads"].keys())
    if missing:
        return {"error": f"gradients of one side only: {', '.join(missing)}"}
    pairs = {n: (found["grads"][n].detach().float().cpu(), expected["grads"][n].detach().float()) for n in names}
    apart = {n: float((a - b).abs().max() / (b.abs().max() + 1e-6)) for n, (a, b) in pairs.items()}
    worst = max(names, key=lambda n: apart[n])
    square = sum(float((a - b).square().sum()) for a, b in pairs.values())
    total = sum(float(b.square().sum()) for _, b in pairs.values())
    out: dict[str, Any] = {"worst": apart[worst], "name": worst, "together": (square / total) ** 0.5}
    for key in ("loss", "grad_norm"):
        a, b = float(found["metrics"][key]), float(expected["metrics"][key])
        out[key] = abs(a - b) / max(abs(b), 0.1)
    return out


# -- all cases ------------------------------------------------------------------------------


def start_case(case: Case, device: str, limit: float) -> tuple[dict[str, Any], float]:
    """Run the case in a process and return its errors and seconds."""
    begin = time.perf_counter()
    words = [sys.executable, __file__, "--one", case.kind, "--device", device]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=limit, env=os.environ | {"OMP_NUM_THREADS": "2"}
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {limit:.0f} s"}, time.perf_counter() - begin
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    said = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1]
    found = json.loads(lines[-1]) if lines else {"error": f"exit {done.returncode}: {said}"}
    return found, time.perf_counter() - begin


def write_line(case: Case, found: dict[str, Any], seconds: float) -> tuple[str, bool]:
    """Return the line of a case and whether it passed."""
    words, passed = [f"{case.kind:22.22}"], True
    for name, key, limit in ((FLOAT32, "worst", case.float32), (BFLOAT16, "together", case.bfloat16)):
        errors = found if "error" in found else found[name]
        if "error" in errors:
            words.append(f"{name} {errors['error'][:200]}")
            passed = False
            continue
        within = errors[key] < limit and errors["loss"] < min(limit, 0.05) and errors["grad_norm"] < limit
        passed &= within
        words.append(
            f"{errors['loss']:8.1e} {errors['grad_norm']:8.1e} {errors[key]:8.1e} ({limit:.0e})"
            + ("" if within else f" at {errors['name']}")
        )
    verdict = "ok" if passed else "FAILED"
    return f"{' | '.join(words)} | {seconds:4.0f} s | {verdict:6} | {case.mechanism}", passed


def parse_words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--limit-seconds", type=float, default=LIMIT_SECONDS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    words = parse_words()
    if words.one is not None:
        case = next(case for case in CASES if case.kind == words.one)
        print(json.dumps(run_case(case, words.device)), flush=True)
        return 0
    cases = [
        case for case in CASES if not words.words or any(w in f"{case.kind} {case.mechanism}" for w in words.words)
    ]
    print(f"{'family':22} | float32: loss, grad norm, worst gradient | bfloat16: loss, grad norm, all gradients | time")
    failed = 0
    with ThreadPoolExecutor(words.at_once) as pool:
        tasks = {pool.submit(start_case, case, words.device, words.limit_seconds): case for case in cases}
        for task in as_completed(tasks):
            line, passed = write_line(tasks[task], *task.result())
            failed += not passed
            print(line, flush=True)
    print(f"{len(cases) - failed} of {len(cases)} passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
