"""Exact arithmetic on one accelerator: that both planes agree to the last bit, and what that costs against ``fast``.

    PYTHONPATH=src python benchmarks/exact.py                                # everything
    PYTHONPATH=src python benchmarks/exact.py --parts matrix
    PYTHONPATH=src python benchmarks/exact.py --parts rollout train --models Qwen3-0.6B Qwen3-4B Qwen3-30B-A3B

Parts: ``matrix`` small models of every mechanism, sampled and read back in many ways, in bf16 and float32, and two
backward passes of each, and two of them on the processor; ``rollout`` 32 prompts of 1,024 tokens x 8 samples x
``--new`` tokens (and one request alone) with recorded steps; ``train`` full steps of the Worker over samples of 2,048
tokens. bf16, random weights of the published shapes. Each measurement is a process of its own, and each figure is one
of ``fast`` and one of ``exact`` from the same run; ``end to end`` is a step of GRPO made of both: a sample of
1,024 + 1,024 tokens, written and trained on. Kernels that start before the one before them is over
are counted from their start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import exact_matrix

PARTS = ("matrix", "rollout", "train")
MODES = ("fast", "exact")
PROMPT, REPLY = 1024, 1024
KINDS = (
    ("attention, backward", ("queries_backward", "keys_backward", "bwd", "backward_d")),
    ("attention", ("attend_items", "attend_tiles", "join_parts", "flash", "fmha", "attn", "mha")),
    ("sampling, log-probs", ("_sum_chunks", "_join_chunks", "_find_targets", "_sum_kept", "_pick", "cutoff")),
    ("sampling, log-probs", ("_sum_rows", "_slope_rows", "softmax")),
    ("norms", ("_norm_rows", "_norm_forward", "_norm_backward", "rms_norm", "layer_norm")),
    ("heads, rotation and cache", ("prepare_heads", "_heads_forward", "_heads_backward")),
    ("gates", ("_gate_rows", "_gate_forward", "_gate_backward")),
    ("routing", ("_route_token", "_place_rows", "_add_choices", "sort", "searchsorted")),
    ("matrix products", ("_one_tile", "_multiply", "gemm", "nvjet", "cutlass", "cublas", "splitk", "grouped", "gemv")),
    ("optimizer", ("adam", "multi_tensor", "lpnorm", "foreach")),
    ("copies, gathers", ("memcpy", "copy", "memset", "gather", "index", "cat", "scatter", "embedding")),
)


def use(mode: str) -> None:
    from miles.kernels import arithmetic

    arithmetic.use("exact" if mode == "exact" else "fast")


def by_kind(seen: Any, steps: float) -> dict[str, float]:
    """Milliseconds a step by what kernels are for."""
    times: dict[str, float] = {}
    for event in seen.key_averages():
        kind = next((k for k, words in KINDS if any(w in event.key.lower() for w in words)), "else")
        times[kind] = times.get(kind, 0.0) + event.self_device_time_total / 1e3 / steps
    return times


# -- the matrix -------------------------------------------------------------------------------


def matrix(args: argparse.Namespace) -> None:
    """One of the models in every way, and what differs."""
    (name,) = args.models
    exact_matrix.matrix(name)


def whole_matrix() -> None:
    """Every model, each in a process of its own: most of the time is the compiler's, which has one core a process."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--child", "matrix", "--models"]
    everyone = [*exact_matrix.models(), "cpu:qwen3", "cpu:qwen3 moe"]
    processes = [subprocess.Popen([*command, name]) for name in everyone]
    failed = sum(process.wait() != 0 for process in processes)
    print(f"matrix: {failed} processes failed, {time.perf_counter() - began:.0f} s", flush=True)


# -- the engine -------------------------------------------------------------------------------


def rollout(args: argparse.Namespace) -> None:
    use(args.mode)
    print("RESULT", json.dumps(asyncio.run(_rollout(args.models[0], args.new))))


async def _rollout(model: str, new: int) -> dict[str, Any]:
    import torch
    from card import spec_named, workload
    from torch.profiler import ProfilerActivity, profile

    from miles.backends.native.config import NativeConfig
    from miles.backends.native.engine import NativeEngine
    from miles.cluster.local import Threaded
    from miles.core.types import Version
    from miles.models.decoder import Decoder
    from miles.sync.publish import Publication

    spec = spec_named(model)
    decoder = Decoder(spec, device="cuda", dtype=torch.bfloat16)
    for parameter in decoder.parameters():
        parameter.data.normal_(std=0.02)
    run = Threaded("engine")
    config = NativeConfig(engine_max_running=256, engine_kv_tokens=420_000)
    engine = NativeEngine(spec, device=torch.device("cuda"), dtype=torch.bfloat16, config=config, run=run, decode=None)
    weights = {name: p.detach() for name, p in decoder.named_parameters()}
    sync = Publication(weights=lambda: weights, engines=[engine], transport="shared", run=run)
    prompts, lone = workload("GRPO")[0], workload("alone")[0]
    await sync.publish(Version())
    await answer(engine, prompts, 8)
    await answer(engine, lone, 8)
    found: dict[str, Any] = {}
    await sync.publish(Version())  # an empty prefix cache
    found["prefill_s"] = await answer(engine, prompts, 1)
    await sync.publish(Version())
    found["tok_s"] = len(prompts) * new / await answer(engine, prompts, new)
    opening = await answer(engine, lone, 16)
    found["alone_ms"] = (await answer(engine, lone, 256) - opening) / 240 * 1e3
    for name, some in (("step", prompts), ("step_alone", lone)):
        await answer(engine, some, 4)
        before = engine.stats()["steps"]
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            await answer(engine, some, 32)
        found[name] = by_kind(seen, engine.stats()["steps"] - before)
    await engine.close()
    run.close()
    return found


async def answer(engine: Any, prompts: list[list[int]], new: int) -> float:
    """Seconds until everyone has so many tokens."""
    import numpy as np

    from miles.core.protocols import Sampling

    began = time.perf_counter()
    how = [Sampling(max_new_tokens=new, ignore_eos=True, seed=i) for i in range(len(prompts))]
    asked = zip(prompts, how, strict=True)
    await asyncio.gather(*(engine.generate(np.array(prompt, np.int32), one) for prompt, one in asked))
    return time.perf_counter() - began


# -- the trainer ------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    import numpy as np
    import torch
    from torch.profiler import ProfilerActivity, profile
    from trainer_card import BATCHES, Case, sample, spec_named, step_of, timed, trainer

    use(args.mode)
    model = args.models[0]
    big, experts = model != "Qwen3-0.6B", "A3B" in model
    case = Case(model, 2048, 4 if big else 8, frozen=experts, again=big)
    rng, vocab = np.random.default_rng(0), spec_named(model).vocab_size
    samples = [sample(rng, i, rng.integers(0, vocab, case.length + 1), 1, i) for i in range(case.count * BATCHES)]
    # Nobody sampled these: they are no version's, so that nothing is compared with what an engine said.
    samples = [replace(s, versions=np.where(s.mask, 1 << 20, -1).astype(np.int32)) for s in samples]
    step = step_of(trainer(case), samples)
    spent = timed(step)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    found = {"tok_s": BATCHES * case.tokens / spent, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    print("RESULT", json.dumps(found | {"step": by_kind(seen, 1)}))


# -- tables -----------------------------------------------------------------------------------


def child(part: str, mode: str, model: str, new: int) -> dict[str, Any] | None:
    """One measurement in a process of its own."""
    flags = ["--child", part, "--mode", mode, "--models", model, "--new", str(new)]
    done = subprocess.run([sys.executable, __file__, *flags], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        print(f"-- {part} {mode} {model} failed:\n{done.stdout[-800:]}\n{done.stderr[-2500:]}", flush=True)
        return None
    return json.loads(lines[-1].removeprefix("RESULT "))


def show_kinds(title: str, fast: dict[str, float], exact: dict[str, float]) -> None:
    print(f"    {title} (ms): fast, exact")
    for kind in sorted(fast | exact, key=lambda k: -exact.get(k, 0.0)):
        print(f"      {fast.get(kind, 0.0):9.3f} {exact.get(kind, 0.0):9.3f}  {kind}")
    print(f"      {sum(fast.values()):9.3f} {sum(exact.values()):9.3f}  all kernels", flush=True)


def show(model: str, found: dict[str, dict[str, Any] | None], part: str) -> None:
    fast, exact = found["fast"], found["exact"]
    if fast is None or exact is None:
        return
    rates = fast["tok_s"], exact["tok_s"]
    loss = 100 * (1 - rates[1] / rates[0])
    print(f"  {model} {part}: fast {rates[0]:,.0f} tok/s, exact {rates[1]:,.0f} tok/s, {loss:.1f} % lost", flush=True)
    if part == "rollout":
        print(f"    prompts: fast {fast['prefill_s']:.2f} s, exact {exact['prefill_s']:.2f} s")
        print(f"    alone: fast {fast['alone_ms']:.3f} ms a token, exact {exact['alone_ms']:.3f} ms")
        show_kinds("a step of one row", fast["step_alone"], exact["step_alone"])
        show_kinds("a step of 256 rows", fast["step"], exact["step"])
    else:
        print(f"    peak memory: fast {fast['peak_gib']:.1f} GiB, exact {exact['peak_gib']:.1f} GiB")
        show_kinds("a step", fast["step"], exact["step"])


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--models", nargs="+", default=["Qwen3-0.6B", "Qwen3-4B"])
    parser.add_argument("--new", type=int, default=512, help="tokens each request is answered with")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        {"matrix": matrix, "rollout": rollout, "train": train}[args.child](args)
        return
    if "matrix" in args.parts:
        whole_matrix()
    for model in args.models:
        rates: dict[str, list[float]] = {mode: [] for mode in MODES}
        for part in (part for part in ("rollout", "train") if part in args.parts):
            found = {mode: child(part, mode, model, args.new) for mode in MODES}
            show(model, found, part)
            for mode, one in found.items():
                rates[mode] += [] if one is None else [one["tok_s"]]
        if all(len(each) == 2 for each in rates.values()):
            cost = {mode: REPLY / write + (PROMPT + REPLY) / read for mode, (write, read) in rates.items()}
            loss = 100 * (1 - cost["fast"] / cost["exact"])
            shares = ", ".join(f"{mode} {1e3 * seconds:.1f} ms" for mode, seconds in cost.items())
            print(f"  {model} end to end, a sample: {shares}, {loss:.1f} % lost", flush=True)


if __name__ == "__main__":
    main()
