"""Engine throughput on one GPU against stock SGLang, transformers' continuous batching and the memory bandwidth limit.

    python benchmarks/bench_engine_gpu.py [--models Qwen3-0.6B Qwen3-4B] [--sides ours sglang transformers]
        [--sglang FOLDER] [--sglang-attention fa3]

A side ``ours:fp8`` serves the model in that ``--rollout-precision``, and ``ours:fp8+kv`` also stores the KV cache in
FP8; ``ours:bf16+ngram`` decodes with n-gram drafts. ``sglang:fp8`` is SGLang with ``quantization="fp8"``.

bf16, random weights of the published shapes, log-probs on, temperature 1, no EOS. Two workloads:

- ``W``: 256 requests, prompt and response lengths uniform in 100..1024 (133,966 response tokens);
- ``GRPO``: 32 prompts of 1,024 tokens x 8 samples x 1,024 new tokens.

and ``alone``: one request, its inter-token latency against reading every weight once in the side's format. Each side
runs in its own process; ``--sglang`` is a folder to put on its path (else SGLang must be importable). The limit is to
read weights and KV cache once per step at the GPU's measured copy rate, plus the prefill matmuls at its measured rate,
twice that for FP8; with ``shared`` the keys of a prompt are read once for all its samples.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

Requests = tuple[list[list[int]], list[int]]
ATTENTION_VARIABLE = "BENCH_SGLANG_ATTENTION"


def workload(name: str, count: int = 256) -> Requests:
    """The prompts and how many tokens follow each; the lengths of W, of ``count``, are a common benchmark's, seed 0."""
    random = Random(0)
    if name == "W":
        prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(count)]
        return prompts, [random.randint(100, 1024) for _ in range(count)]
    if name == "GRPO":
        asked = [[random.randint(0, 10000) for _ in range(1024)] for _ in range(32)]
        return [prompt for prompt in asked for _ in range(8)], [1024] * 256
    return [[random.randint(0, 10000) for _ in range(128)]], [512]


def brief() -> Requests:
    """The lone request, cut short: what it takes until tokens follow each other."""
    return workload("alone")[0], [16]


def count_tokens(name: str) -> int:
    """The tokens whose time is counted."""
    return sum(workload(name)[1]) - (sum(brief()[1]) if name == "alone" else 0)


def spec_named(model: str) -> Any:
    from miles.models.accounting.known_models import find_known_config
    from miles.models.families.registry import spec_from_config

    config = find_known_config(model)
    assert config is not None, f"{model} is not among the published shapes"
    return spec_from_config(config)


# -- sides, each in its own process ---------------------------------------------------------


def build_weights(model: str, precision: str) -> tuple[Any, dict[str, Any]]:
    """The engine's spec and random weights, packed if a precision is given."""
    from dataclasses import replace

    import torch

    from miles.models.decoder import Decoder
    from miles.models.packing import pack_params
    from miles.precision.formats import QuantizationSpec, get_format

    spec = spec_named(model)
    decoder = Decoder(spec, device="cuda", dtype=torch.bfloat16)
    for parameter in decoder.parameters():
        parameter.data.normal_(std=0.02)
    weights = {name: p.detach() for name, p in decoder.named_parameters()}
    if precision in ("", "bf16"):
        return spec, weights
    spec = replace(spec, quantization=QuantizationSpec(format=get_format(precision), packed=True))
    return spec, pack_params(spec, weights, torch.bfloat16)


def ours(model: str, names: list[str], profile: bool, folder: str, precision: str = "") -> dict[str, Any]:
    import torch

    from miles.backends.native.config import NativeConfig
    from miles.backends.native.engine.engine import NativeEngine
    from miles.cluster.executor import ThreadExecutor
    from miles.cluster.platform import detect_platform
    from miles.core.types import Version
    from miles.kernels.numerics import numerics_from_parity
    from miles.launch.runtime.gc_tuning import reduce_gc
    from miles.sync.publish import Publication

    platform = detect_platform("cuda")
    precision, *more = precision.split("+")
    spec, weights = build_weights(model, precision)
    torch.cuda.empty_cache()
    run = ThreadExecutor("engine")
    config = NativeConfig(
        engine_max_running=256,
        engine_kv_tokens=420_000,
        speculative_algorithm="ngram" if "ngram" in more else "none",
    )
    engine = NativeEngine(
        spec,
        device=platform.device,
        dtype=torch.bfloat16,
        config=config,
        run=run,
        decode=None,
        numerics=numerics_from_parity("fast", "fp8_e4m3" if "kv" in more else "auto"),
    )
    publication = Publication(weights=lambda: weights, engines=[engine], transport="shared", run=run)

    async def serve() -> dict[str, Any]:
        await publication.publish(Version())
        started = time.perf_counter()
        await engine.warm_up()
        for name in ("W", "GRPO"):  # compilers, too
            await _measure_requests(engine, workload(name)[0], [4] * 256)
        found: dict[str, Any] = {"ready_s": round(time.perf_counter() - started, 1)}
        for name in names:
            await publication.publish(Version())  # an empty prefix cache
            first = await _opening(engine, publication) if name == "alone" else 0.0
            before = dict(engine.stats())
            spent = await _measure_requests(engine, *workload(name)) - first
            done = {k: v - before[k] for k, v in engine.stats().items()}
            found[name] = {"s": spent, "tokens": count_tokens(name), **done}
        if profile:
            found["profile"] = await _profile(engine, workload("GRPO")[0], 64)
            found["profile_alone"] = await _profile(engine, workload("alone")[0], 256)
        return found

    with reduce_gc():  # as a server or a run does
        found = asyncio.run(serve())
    free, there = torch.cuda.mem_get_info()
    found["taken_gib"] = (there - free) / 2**30  # the cache is no memory of torch's
    run.close()
    return found


async def _opening(engine: Any, publication: Any) -> float:
    """Seconds until tokens follow each other, so that reading the prompt is no part of the time between two."""
    from miles.core.types import Version

    spent = 0.0
    for _ in range(2):
        spent = await _measure_requests(engine, *brief())
        await publication.publish(Version())
    return spent


async def _measure_requests(engine: Any, prompts: list[list[int]], lengths: list[int]) -> float:
    import numpy as np

    from miles.core.protocols import SamplingParams

    started = time.perf_counter()
    answers = await asyncio.gather(
        *(
            engine.generate(np.array(prompt, np.int32), SamplingParams(max_new_tokens=n, ignore_eos=True, seed=i))
            for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))
        )
    )
    spent = time.perf_counter() - started
    assert [sum(len(span.tokens) for span in answer.spans) for answer in answers] == lengths
    return spent


KINDS = (
    ("attention", ("paged_decode_kernel", "paged_prefill_kernel", "reduce_splits_kernel", "decode_bs1_kernel")),
    ("sampling", ("_reduce_chunks_kernel", "_reduce_kept_kernel", "_pick_token_kernel", "_find_threshold")),
    ("norms, rotation and cache, gates", ("_rms_norm_kernel", "qk_norm_rope_kernel", "_gated_inference_kernel")),
    ("routing", ("_route_kernel", "_place_rows_kernel", "_combine_kernel")),
    ("matrix products, experts'", ("_gemm_kernel", "_gemv_kernel", "_gate_up_kernel", "_down_kernel", "grouped")),
    ("matrix products, the library's", ("gemm", "nvjet", "cutlass", "cublas", "splitk")),
    ("copies", ("memcpy", "copy", "memset", "gather", "index")),
)


async def _profile(engine: Any, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Where the device's time goes in a decode of these rows, in milliseconds a step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    await _measure_requests(engine, prompts, [8] * len(prompts))
    before = dict(engine.stats())
    with profiled(activities=[ProfilerActivity.CUDA]) as seen:
        spent = await _measure_requests(engine, prompts, [tokens] * len(prompts))
    steps = engine.stats()["steps"] - before["steps"]
    times: dict[str, float] = {}
    names: dict[str, float] = {}
    for name, (count, busy) in summarize_kernels(seen).items():
        kind = next((k for k, words in KINDS if any(w in name.lower() for w in words)), "other")
        times[kind] = times.get(kind, 0.0) + busy / 1e3 / steps
        names[f"{name[:60]} x{count / steps:.0f}"] = busy / 1e3 / steps
    times["no kernel running (host, launches)"] = spent * 1e3 / steps - sum(times.values())
    top = sorted(names.items(), key=lambda pair: -pair[1])[:28]
    return {"a step": spent * 1e3 / steps, **times, "|": 0.0, **dict(top)}


def summarize_kernels(seen: Any, gaps: bool = False) -> dict[str, tuple[int, float]]:
    """How many there were of each kernel, and their microseconds.

    Of kernels that run at once, as one that waits for the one before it does, time is the one's that ends first; with
    ``gaps``, so is the time before it in which none ran.
    """
    events = [event for event in seen.events() or () if event.device_type.name == "CUDA"]
    spans = sorted((event.time_range.end, event.time_range.start, event.name) for event in events)
    # When any of those that have not ended yet began.
    begins = list(itertools.accumulate((start for _, start, _ in reversed(spans)), min))[::-1]
    found: dict[str, tuple[int, float]] = {}
    before = begins[0] if begins else 0.0
    for (end, _, name), begin in zip(spans, begins, strict=True):
        count, busy = found.get(name, (0, 0.0))
        found[name] = count + 1, busy + end - (before if gaps else max(before, begin))
        before = end
    return found


def sglang(model: str, names: list[str], profile: bool, folder: str, precision: str = "") -> dict[str, Any]:
    import sglang as sgl  # pyright: ignore[reportMissingImports]

    started = time.perf_counter()
    engine = sgl.Engine(
        model_path=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        quantization=precision or None,
        attention_backend=os.environ.get(ATTENTION_VARIABLE, "triton"),
        sampling_backend="pytorch",
        dtype="bfloat16",
        mem_fraction_static=0.8,
        context_length=4096,
        log_level="warning",
    )

    def answer(prompts: list[list[int]], lengths: list[int]) -> float:
        how = [{"max_new_tokens": n, "ignore_eos": True, "temperature": 1.0} for n in lengths]
        began = time.perf_counter()
        out = engine.generate(input_ids=prompts, sampling_params=how, return_logprob=True)
        spent = time.perf_counter() - began
        assert [len(one["meta_info"]["output_token_logprobs"]) for one in out] == lengths
        return spent

    for name in ("W", "GRPO"):
        answer(workload(name)[0], [4] * 256)
    found: dict[str, Any] = {"ready_s": round(time.perf_counter() - started, 1)}
    for name in names:
        engine.flush_cache()
        first = 0.0
        if name == "alone":
            answer(*brief())
            engine.flush_cache()
            first = answer(*brief())
            engine.flush_cache()
        found[name] = {"s": answer(*workload(name)) - first, "tokens": count_tokens(name)}
    engine.shutdown()
    return found


def transformers(model: str, names: list[str], profile: bool, folder: str) -> dict[str, Any]:
    """Continuous batching of W, 64 new tokens each: all of it would take minutes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(folder)
    torch.set_default_device("cuda")
    network: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    how = GenerationConfig(max_new_tokens=64, do_sample=True, eos_token_id=-1, pad_token_id=0)
    prompts, _ = workload("W")
    network.generate_batch(inputs=prompts[:8], generation_config=how)
    started = time.perf_counter()
    out = network.generate_batch(inputs=prompts, generation_config=how)
    spent = time.perf_counter() - started
    return {"W": {"s": spent, "tokens": sum(len(one.generated_tokens) for one in out.values())}}


SIDES: dict[str, Callable[..., dict[str, Any]]] = {"ours": ours, "sglang": sglang, "transformers": transformers}


def limits(models: list[str], names: list[str], sides: list[str]) -> dict[str, Any]:
    """The card's own rates, and how fast the bytes and products of each workload could go by, for each side."""
    import torch

    from miles.models.accounting.params import forward_flops_per_token

    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    copy = 8 * source.numel() / _seconds(lambda: target.copy_(source))
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = 2 * 8192**3 / _seconds(lambda: square @ square)
    found: dict[str, Any] = {"copy_tb": copy / 1e12, "matmul_tflops": product / 1e12}
    for model, side in itertools.product(models, sides):
        precision = side.partition(":")[2]
        flops = forward_flops_per_token(spec_named(model), 512.0)
        weights, alone, kv = count_bytes(model, precision)
        rate = 2 * product if precision.startswith("fp8") else product
        found[f"{model} {side}"] = {"weights_gb": weights / 1e9, "alone_ms": alone / copy * 1e3} | {
            name: _limit(*workload(name), weights, kv, flops, copy, rate) for name in names if name != "alone"
        }
    return found


def count_bytes(model: str, precision: str) -> tuple[float, float, float]:
    """The bytes of weights that a full batch reads, those one request alone reads, and those of a token's KV cache."""
    from dataclasses import replace

    from miles.kernels.numerics import numerics_from_parity
    from miles.models.accounting.params import (
        active_parameter_count,
        kv_bytes_per_token,
        packed_weight_bytes,
        parameter_count,
    )
    from miles.precision.formats import QuantizationSpec, get_format

    precision, *more = precision.split("+")
    spec = spec_named(model)
    embedding = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size
    if precision not in ("", "bf16"):
        spec = replace(spec, quantization=QuantizationSpec(format=get_format(precision), packed=True))
    weights = packed_weight_bytes(spec, "bfloat16") - 2 * embedding
    alone = weights * (active_parameter_count(spec) - embedding) / (parameter_count(spec) - embedding)
    cache = kv_bytes_per_token(spec, "bfloat16", numerics_from_parity("fast", "fp8_e4m3" if "kv" in more else "auto"))
    return weights, alone, cache


def _limit(
    prompts: list[list[int]], lengths: list[int], read: float, kv: float, flops: float, copy: float, product: float
) -> dict[str, float]:
    """Tokens a second with every prompt's keys read by each of its samples, and by all of them together."""
    unique = {id(prompt): len(prompt) for prompt in prompts}
    prefill = sum(unique.values()) * flops / product
    apart = together = prefill
    for step in range(1, max(lengths)):
        live = [i for i, n in enumerate(lengths) if n > step]
        own = len(live) * step
        shared = sum({id(prompts[i]): len(prompts[i]) for i in live}.values())
        weights = max(read / copy, len(live) * flops / product)
        apart += weights + (own + sum(len(prompts[i]) for i in live)) * kv / copy
        together += weights + (own + shared) * kv / copy
    return {"apart": sum(lengths) / apart, "shared": sum(lengths) / together}


def _seconds(work: Any) -> float:
    import torch

    times: list[float] = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times[2:])[3]


# -- the table ------------------------------------------------------------------------------


def write_config(model: str, folder: str) -> None:
    from miles.models.families.registry import config_from_spec

    config = config_from_spec(spec_named(model)) | {"torch_dtype": "bfloat16"}
    (Path(folder) / "config.json").write_text(json.dumps(config))


def run_side(side: str, arguments: list[str], folder: str | None) -> dict[str, Any] | None:
    environment = dict(os.environ)
    if side.startswith("sglang") and folder is not None:
        environment |= {"PYTHONPATH": folder, "SGLANG_IS_FLASHINFER_AVAILABLE": "false"}
    command = [sys.executable, __file__, "--side", side, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        print(f"-- {side} {' '.join(arguments)} failed:\n{done.stdout[-2500:]}\n{done.stderr[-3500:]}", flush=True)
        return None
    print(side, *arguments, lines[-1], flush=True)
    return json.loads(lines[-1].removeprefix("RESULT "))


def show(model: str, limit: dict[str, Any], found: dict[str, dict[str, Any] | None], names: list[str]) -> None:
    print(f"\n{model}")
    for name in names:
        for side, result in found.items():
            if result is None or name not in result:
                continue
            one, most = result[name], limit[f"{model} {side}"]
            if name == "alone":
                each = one["s"] / one["tokens"] * 1e3
                print(f"  alone {side:13s} {each:7.3f} ms a token, {each / most['alone_ms']:.2f}x the weights")
                continue
            rate = one["tokens"] / one["s"]
            extra = f"; {one['prefilled_tokens']:,.0f} prompt tokens computed" if "prefilled_tokens" in one else ""
            parts = [f"{100 * rate / value:.0f} % of {value:,.0f} ({kind})" for kind, value in most[name].items()]
            bytes_read = f"{most['weights_gb']:.1f} GB of weights a step"
            print(f"  {name:5s} {side:16s} {rate:8,.0f} tok/s, {', '.join(parts)}; {bytes_read}{extra}")
    profiles = (("profile", "256 rows"), ("profile_alone", "one row"))
    for (side, mine), (name, rows) in itertools.product(found.items(), profiles):
        if mine is not None and name in mine:
            print(f"  where a step of {rows} goes (ms), {side}:")
            for part, value in mine[name].items():
                print(f"    {value:8.3f}  {part}")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["Qwen3-0.6B", "Qwen3-4B", "Qwen3-30B-A3B"])
    parser.add_argument("--sides", nargs="+", default=["ours", "sglang", "transformers"])
    parser.add_argument("--workloads", nargs="+", default=["W", "GRPO", "alone"])
    parser.add_argument("--sglang", help="a folder with SGLang and what it needs")
    parser.add_argument("--sglang-attention", default="triton", help="its attention backend; fa3 is its best on Hopper")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.side is not None:
        if args.side == "limits":
            result = limits(args.models, args.workloads, args.sides)
        else:
            side, _, precision = args.side.partition(":")
            extra = (precision,) if precision else ()
            result = SIDES[side](args.models[0], args.workloads, args.profile, args.folder, *extra)
        print("RESULT", json.dumps(result))
        return
    os.environ[ATTENTION_VARIABLE] = args.sglang_attention
    asked = ["--models", *args.models, "--workloads", *args.workloads, "--sides", *args.sides]
    limit = run_side("limits", asked, None)
    assert limit is not None
    print(f"copy {limit['copy_tb']:.2f} TB/s, bf16 matmul {limit['matmul_tflops']:.0f} TFLOP/s")
    tables = []
    for model in args.models:
        found: dict[str, dict[str, Any] | None] = {}
        with tempfile.TemporaryDirectory() as folder:
            write_config(model, folder)
            flags = ["--models", model, "--workloads", *args.workloads, "--folder", folder]
            for side in args.sides:
                if side != "transformers" or model == args.models[0]:
                    found[side] = run_side(side, [*flags, *(["--profile"] if args.profile else [])], args.sglang)
        tables.append((model, found))
    for model, found in tables:
        show(model, limit, found, args.workloads)


if __name__ == "__main__":
    main()
