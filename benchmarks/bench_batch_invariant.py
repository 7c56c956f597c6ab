"""Batch-invariant numerics (``--parity exact``) on one GPU: bitwise equality of engine and trainer, and its cost.

    PYTHONPATH=src python benchmarks/bench_batch_invariant.py                                # everything
    PYTHONPATH=src python benchmarks/bench_batch_invariant.py --parts matrix
    PYTHONPATH=src python benchmarks/bench_batch_invariant.py --parts rollout train --models Qwen3-0.6B Qwen3-4B

Parts: ``matrix`` small models of every mechanism, sampled and scored in many ways, in bf16 and float32, two backward
passes of each, and two of them on the CPU; ``rollout`` 32 prompts of 1,024 tokens x 8 samples x ``--new`` tokens (and
one request at batch size 1) with CUDA graphs; ``train`` full trainer steps over samples of 2,048 tokens. bf16, random
weights of the published shapes. Each measurement is a process of its own, and each row compares ``fast`` and ``exact``
from the same run; ``end to end`` is a GRPO step made of both: a sample of 1,024 + 1,024 tokens, generated and trained
on. Kernels that overlap the previous one are counted from their start.
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
from typing import Any, Literal

import check_batch_invariance

PARTS = ("matrix", "rollout", "train")
MODES = ("fast", "exact")
PROMPT, REPLY = 1024, 1024
KINDS = (
    ("attention, backward", ("dq_kernel", "dkv_kernel", "row_dot_kernel", "bwd", "backward_d")),
    ("attention", ("paged_decode_kernel", "prefill_kernel", "reduce_splits", "reduce_chunks_kernel", "decode_bs1")),
    ("attention", ("flash", "fmha", "attn", "mha")),
    ("sampling, log-probs", ("_merge_chunks_kernel", "_target_logprobs_kernel", "_reduce_kept", "_pick_token")),
    ("sampling, log-probs", ("_find_threshold", "_reduce_kernel", "_grad_kernel", "softmax")),
    ("QK-norm, RoPE and KV write", ("qk_norm_rope_kernel", "_training_forward_kernel", "_training_backward_kernel")),
    ("activations", ("_gated_inference_kernel", "_gated_forward_kernel", "_gated_backward_kernel")),
    ("norms", ("_rms_norm_kernel", "_forward_kernel", "_backward_kernel", "rms_norm", "layer_norm")),
    ("routing", ("_route_kernel", "_place_rows_kernel", "_combine_kernel", "_sort_kernel", "sort", "searchsorted")),
    ("GEMM", ("_gemm_kernel", "_gemv_kernel", "_gate_up_kernel", "_down_kernel")),
    ("GEMM", ("gemm", "nvjet", "cutlass", "cublas", "splitk", "grouped", "gemv")),
    ("optimizer", ("adam", "multi_tensor", "lpnorm", "foreach")),
    ("copies, gathers", ("memcpy", "copy", "memset", "gather", "index", "cat", "scatter", "embedding")),
)


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
    check_batch_invariance.matrix(name)


def run_matrix() -> None:
    """Every model, each in a process of its own: most of the time is the compiler's, which has one core a process."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--child", "matrix", "--models"]
    everyone = [*check_batch_invariance.models(), "cpu:qwen3", "cpu:qwen3 moe"]
    processes = [subprocess.Popen([*command, name]) for name in everyone]
    failed = sum(process.wait() != 0 for process in processes)
    print(f"matrix: {failed} processes failed, {time.perf_counter() - began:.0f} s", flush=True)


# -- the engine -------------------------------------------------------------------------------


def rollout(args: argparse.Namespace) -> None:
    print("RESULT", json.dumps(asyncio.run(_rollout(args.models[0], args.new, args.mode))))


async def _rollout(model: str, new: int, mode: Literal["fast", "exact"]) -> dict[str, Any]:
    import torch
    from bench_engine_gpu import spec_named, workload
    from torch.profiler import ProfilerActivity, profile

    from miles.backends.native.config import NativeConfig
    from miles.backends.native.engine.engine import NativeEngine
    from miles.cluster.executor import ThreadExecutor
    from miles.core.types import Version
    from miles.kernels.numerics import configure_cublas, numerics_from_parity
    from miles.models.decoder import Decoder
    from miles.sync.publish import Publication

    spec, numerics = spec_named(model), numerics_from_parity(mode)
    configure_cublas(numerics)
    decoder = Decoder(spec, device="cuda", dtype=torch.bfloat16, numerics=numerics)
    for parameter in decoder.parameters():
        parameter.data.normal_(std=0.02)
    run = ThreadExecutor("engine")
    config = NativeConfig(engine_max_running=256, engine_kv_tokens=420_000)
    how: dict[str, Any] = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "numerics": numerics}
    engine = NativeEngine(spec, **how, config=config, run=run, decode=None)
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

    from miles.core.protocols import SamplingParams

    began = time.perf_counter()
    how = [SamplingParams(max_new_tokens=new, ignore_eos=True, seed=i) for i in range(len(prompts))]
    asked = zip(prompts, how, strict=True)
    await asyncio.gather(*(engine.generate(np.array(prompt, np.int32), one) for prompt, one in asked))
    return time.perf_counter() - began


# -- the trainer ------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    import numpy as np
    import torch
    from bench_trainer_gpu import BATCHES, Case, build_step, measure_median, sample, spec_named, trainer
    from torch.profiler import ProfilerActivity, profile

    from miles.kernels.numerics import configure_cublas, numerics_from_parity

    configure_cublas(numerics_from_parity(args.mode))
    model = args.models[0]
    big, experts = model != "Qwen3-0.6B", "A3B" in model
    case = Case(model, 2048, 4 if big else 8, frozen=experts, again=big)
    rng, vocab = np.random.default_rng(0), spec_named(model).vocab_size
    samples = [sample(rng, i, rng.integers(0, vocab, case.length + 1), 1, i) for i in range(case.count * BATCHES)]
    # Nobody sampled these: they are no version's, so that nothing is compared with what an engine said.
    samples = [replace(s, versions=np.where(s.mask, 1 << 20, -1).astype(np.int32)) for s in samples]
    step = build_step(trainer(case, args.mode), samples)
    spent = measure_median(step)
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
        run_matrix()
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
