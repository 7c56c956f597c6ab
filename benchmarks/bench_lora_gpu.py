"""Unmerged LoRA adapters in the engine on one GPU: throughput with none, one and many of them, beside the byte limit.

    python benchmarks/bench_lora_gpu.py [--model Qwen3-8B] [--parts check kernels throughput] [--sides base one many]
    python benchmarks/bench_lora_gpu.py --parts grpo [--targets attn experts] [--rank 16] [--shared-outer]
    python benchmarks/bench_lora_gpu.py --parts grpo --tiny        # runs on a CPU

bf16, random weights of the published shape, random adapters on all projections, log-probs on, temperature 1, no EOS.

- ``check``: the grouped kernels against float64 on this GPU, for decode and prefill rows, mixed ranks, rows without an
  adapter; with exact parity, the bits of the batch-invariant ``add_lora``, and of a row alone;
- ``kernels``: microseconds of one layer's shrink and expand launches for 256 rows, in a CUDA graph, beside the time to
  read their factors once;
- ``throughput``: 256 requests, prompt and response lengths uniform in 100..1024 (``W`` of bench_engine_gpu.py);
- ``grpo``: a whole GRPO step of Qwen3-30B-A3B with adapters unmerged, the base shared between trainer and engine: 32
  prompts of 1,024 tokens, 8 responses of 1,024 tokens each (lora_grpo_step.py).

Sides, each in its own process: ``base`` (an engine without adapters), ``idle`` (slots for 32 adapters, no request has
one), ``one`` (all requests the same adapter of rank 16), ``many`` (32 adapters of rank 16, eight requests each),
``mixed`` (32 adapters of ranks 8, 16, 32 and 64), ``half`` (like ``many``, every other request without an adapter). The
limit is to read weights, the factors of the adapters among the running requests and the KV cache once per step at the
measured copy rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

SLOTS = 32
RANKS = {"idle": [16], "one": [16], "many": [16], "mixed": [8, 16, 32, 64], "half": [16]}
SIDES = ("base", "idle", "one", "many", "mixed", "half")


def find_spec(model: str) -> Any:
    from miles.models.accounting.known_models import find_known_config
    from miles.models.families.registry import spec_from_config

    config = find_known_config(model)
    assert config is not None, f"{model} is not among the published shapes"
    return spec_from_config(config)


def choose_adapters(side: str, count: int) -> list[str | None]:
    """The adapter of each of ``count`` requests."""
    if side in ("base", "idle"):
        return [None] * count
    if side == "one":
        return ["a0"] * count
    if side == "half":
        return [f"a{i // 2 % SLOTS}" if i % 2 else None for i in range(count)]
    return [f"a{i % SLOTS}" for i in range(count)]


def random_factors(spec: Any, rank: int, seed: int) -> Any:
    """Factors of every projection, as large as a trained adapter's."""
    import torch

    from miles.models.lora.factors import LoraFactors, ModuleFactors
    from miles.models.lora.targets import list_targets

    random = torch.Generator(device="cuda").manual_seed(seed)
    projections = [target for target in list_targets(spec) if not target.module.startswith("lm_head")]

    def draw(*shape: int) -> Any:
        return (0.01 * torch.randn(*shape, generator=random, device="cuda")).bfloat16().cpu()

    return LoraFactors(
        {
            target.module: ModuleFactors(draw(rank, target.inputs), draw(target.outputs, rank), 2.0)
            for target in projections
            if not target.is_vision
        }
    )


# -- throughput ------------------------------------------------------------------------------


def measure_side(model: str, side: str, count: int) -> dict[str, Any]:
    """Serve the workload with the adapters of one side; return tokens a second and what was read."""
    import torch
    from benchmarks.bench_engine_gpu import workload

    from miles.cluster.executor import ThreadExecutor
    from miles.core.types import Version
    from miles.launch.runtime.gc_tuning import reduce_gc
    from miles.sync.publish import Publication

    spec = find_spec(model)
    weights = _random_weights(spec)
    ranks = RANKS.get(side, [])
    run = ThreadExecutor("engine")
    engine = _build_engine(spec, max(ranks, default=0), count, run)
    publication = Publication(weights=lambda: weights, engines=[engine], transport="shared", run=run)
    prompts, lengths = workload("W", count)
    chosen = choose_adapters(side, count)
    names = sorted({name for name in chosen if name is not None}, key=lambda name: int(name[1:]))
    started = time.perf_counter()
    for number, name in enumerate(names):
        engine.load_lora(name, random_factors(spec, ranks[number % len(ranks)], number))
    loaded = time.perf_counter() - started

    async def serve() -> dict[str, Any]:
        await publication.publish(Version())
        started = time.perf_counter()
        await engine.warm_up()
        await _serve_requests(engine, prompts, [4] * count, chosen)  # compile, and fill the slots
        ready = time.perf_counter() - started
        seconds: list[float] = []
        steps = 0.0
        for _ in range(2):
            await publication.publish(Version())  # an empty prefix cache
            before = dict(engine.stats())
            seconds.append(await _serve_requests(engine, prompts, lengths, chosen))
            steps = engine.stats()["steps"] - before["steps"]
        return {
            "tokens_s": sum(lengths) / min(seconds),
            "seconds": seconds,
            "steps": steps,
            "adapters": len(names),
            "adapter_mb": sum(_adapter_bytes(spec, ranks[i % len(ranks)]) for i in range(len(names))) / 1e6,
            "load_s": loaded,
            "ready_s": ready,
        }

    with reduce_gc():
        found = asyncio.run(serve())
    found["peak_gib"] = torch.cuda.max_memory_reserved() / 2**30
    found["limit_tokens_s"] = compute_limit(model, side, count, measure_copy_rate())
    run.close()
    return found


def _build_engine(spec: Any, max_rank: int, count: int, run: Any) -> Any:
    import torch

    from miles.backends.native.config import NativeConfig
    from miles.backends.native.engine.engine import NativeEngine
    from miles.backends.native.engine.lora import LoraShape
    from miles.backends.native.runner.lora import list_served_modules
    from miles.cluster.platform import detect_platform
    from miles.kernels.numerics import FAST

    lora = None
    if max_rank:
        lora = LoraShape(num_slots=SLOTS, max_rank=max_rank, modules=list_served_modules(spec, (), FAST))
    return NativeEngine(
        spec,
        device=detect_platform("cuda").device,
        dtype=torch.bfloat16,
        config=NativeConfig(engine_max_running=count, engine_kv_tokens=420_000),
        run=run,
        decode=None,
        lora=lora,
    )


def _random_weights(spec: Any) -> dict[str, Any]:
    import torch

    from miles.models.decoder import Decoder

    decoder = Decoder(spec, device="cuda", dtype=torch.bfloat16)
    for parameter in decoder.parameters():
        parameter.data.normal_(std=0.02)
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}


async def _serve_requests(engine: Any, prompts: list[list[int]], lengths: list[int], chosen: list[str | None]) -> float:
    import numpy as np

    from miles.backends.native.engine.request import GenerateRequest
    from miles.core.protocols import SamplingParams

    started = time.perf_counter()
    outputs = [
        engine.submit(
            GenerateRequest(
                tokens=np.array(prompt, np.int32),
                sampling=SamplingParams(max_new_tokens=length, ignore_eos=True, seed=i),
                lora=name,
            )
        )
        for i, (prompt, length, name) in enumerate(zip(prompts, lengths, chosen, strict=True))
    ]
    answers = await asyncio.gather(*(output.completion() for output in outputs))
    spent = time.perf_counter() - started
    assert [sum(len(span.tokens) for span in answer.spans) for answer in answers] == lengths
    return spent


def _adapter_bytes(spec: Any, rank: int) -> int:
    from miles.models.lora.targets import list_targets

    return 2 * rank * sum(target.inputs + target.outputs for target in list_targets(spec) if not target.is_vision)


def measure_copy_rate() -> float:
    """Bytes a second that a large copy reads and writes."""
    import torch

    torch.cuda.empty_cache()
    source = torch.empty(2**28, device="cuda")
    target = torch.empty_like(source)
    return 8 * source.numel() / _seconds(lambda: target.copy_(source))


def compute_limit(model: str, side: str, count: int, rate: float) -> float:
    """Tokens a second if every step only read weights, adapters of running requests and keys, once each."""
    from benchmarks.bench_engine_gpu import workload

    from miles.kernels.numerics import FAST
    from miles.models.accounting.params import forward_flops_per_token, kv_bytes_per_token, parameter_count

    spec, (prompts, lengths) = find_spec(model), workload("W", count)
    chosen, ranks = choose_adapters(side, count), RANKS.get(side, [16])
    embedding = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size
    read, kv = 2 * (parameter_count(spec) - embedding), kv_bytes_per_token(spec, "bfloat16", FAST)
    seconds = sum(map(len, prompts)) * forward_flops_per_token(spec, 512.0) / 780e12
    for step in range(1, max(lengths)):
        live = [i for i, length in enumerate(lengths) if length > step]
        adapters = {name for i in live if (name := chosen[i]) is not None}
        factors = sum(_adapter_bytes(spec, ranks[int(name[1:]) % len(ranks)]) for name in adapters)
        seconds += (read + factors + sum(len(prompts[i]) + step for i in live) * kv) / rate
    return sum(lengths) / seconds


def _seconds(work: Any, repeats: int = 8) -> float:
    import torch

    times: list[float] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times[2:])[(repeats - 2) // 2]


# -- kernels ---------------------------------------------------------------------------------


def build_slots(spans: Any, inputs: int, ranks: list[int], max_rank: int) -> Any:
    import torch

    from miles.kernels.lora.grouped import LoraSlots, split_columns

    outputs, half = sum(stop - start for start, stop in spans), torch.bfloat16
    return LoraSlots(
        a_SPRI=0.05 * torch.randn(len(ranks), len(spans), max_rank, inputs, device="cuda", dtype=half),
        b_SOR=0.05 * torch.randn(len(ranks), outputs, max_rank, device="cuda", dtype=half),
        ranks_SP=torch.tensor([[rank] * len(spans) for rank in ranks], dtype=torch.int32, device="cuda"),
        scales_SP=torch.full((len(ranks), len(spans)), 2.0, device="cuda"),
        columns_C4=torch.from_numpy(split_columns(spans)).cuda(),
        spans=tuple(spans),
    )


def build_plan(slots_T: Any, tile_rows: int, num_tiles: int = 0) -> Any:
    """The plan of these rows, with padding up to ``num_tiles`` tiles, as CUDA graphs have it."""
    import numpy as np
    import torch

    from miles.kernels.lora.grouped import LoraPlan, build_tiles

    rows, tiles = build_tiles(slots_T, tile_rows)
    tiles = np.pad(tiles, ((0, max(0, num_tiles - len(tiles))), (0, 0)))
    return LoraPlan(
        rows_T=torch.from_numpy(rows).cuda(),
        tiles_G3=torch.from_numpy(tiles).cuda(),
        tile_rows=tile_rows,
    )


def check_kernels() -> dict[str, Any]:
    """Compare the kernels with float64, and with exact parity with the batch-invariant linear layer, bit for bit."""
    import numpy as np
    import torch

    from miles.kernels.lora.grouped import add_grouped_lora, choose_tile_rows
    from miles.kernels.numerics import FAST, numerics_from_parity
    from miles.models.layers.lora import add_lora
    from miles.models.lora.layout import LoraLayout

    exact = numerics_from_parity("exact")
    ranks = [16, 8, 64, 32, 1, 17, 64, 16]
    random = np.random.default_rng(0)
    worst, bits_equal, alone_equal = 0.0, True, True
    for spans, inputs in ((((0, 4096), (4096, 5120), (5120, 6144)), 4096), (((0, 4096),), 12288), (((3, 700),), 1000)):
        slots = build_slots(spans, inputs, ranks, 64)
        width = spans[-1][1] + 5
        for rows in (1, 7, 256, 3000):
            slots_T = random.integers(-1, len(ranks), rows)
            x_TI = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            y_TN = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
            wanted = y_TN.double()
            for slot, rank in enumerate(ranks):
                index = torch.from_numpy((slots_T == slot).nonzero()[0]).cuda()
                first = 0
                for target, (start, stop) in enumerate(spans):
                    xa = x_TI[index].double() @ slots.a_SPRI[slot, target, :rank].double().T * 2.0
                    b_Or = slots.b_SOR[slot, first : first + stop - start, :rank].double()
                    wanted[:, start:stop].index_add_(0, index, xa @ b_Or.T)
                    first += stop - start
            for numerics in (FAST, exact):
                tile_rows = choose_tile_rows(rows, x_TI.device, numerics)
                with torch.inference_mode():
                    got = add_grouped_lora(y_TN.clone(), x_TI, slots, build_plan(slots_T, tile_rows), numerics=numerics)
                    worst = max(worst, float((got.double() - wanted).norm() / wanted.norm()))
                    if numerics is FAST:
                        continue
                    own = torch.from_numpy((slots_T == 3).nonzero()[0]).cuda()
                    layout = LoraLayout(rows=spans, rank=32, scale=2.0)
                    a_XI = slots.a_SPRI[3, :, :32].reshape(-1, inputs).contiguous()
                    beside = add_lora(y_TN, x_TI, a_XI, slots.b_SOR[3, :, :32].contiguous(), layout, numerics=exact)
                    bits_equal &= torch.equal(got[own], beside[own])
                    last = build_plan(slots_T[-1:], choose_tile_rows(1, x_TI.device, exact))
                    alone = add_grouped_lora(y_TN[-1:].clone(), x_TI[-1:], slots, last, numerics=exact)
                    alone_equal &= torch.equal(alone, got[-1:])
    return {"relative_error": worst, "exact_bits_of_add_lora": bits_equal, "exact_bits_of_a_row_alone": alone_equal}


def check_expert_kernels() -> dict[str, Any]:
    """Compare the fused MoE with adapters of experts to experts that they are merged into, in float64."""
    import torch

    from miles.kernels.lora.experts import ExpertFactors, ExpertLora
    from miles.kernels.moe.fused_moe import moe_forward
    from miles.kernels.numerics import FAST

    count, width, size, rank, half = 128, 2048, 768, 16, torch.bfloat16

    def draw(*shape: int) -> Any:
        return 0.03 * torch.randn(*shape, device="cuda", dtype=half)

    weights = draw(count, 2 * size, width), draw(count, width, size)
    first = ExpertFactors(
        a_SPXRI=draw(1, 2, count, rank, width), b_SPXOR=draw(1, 2, count, size, rank), first_column=0, scale=2.0
    )
    down = ExpertFactors(
        a_SPXRI=draw(1, 1, count, rank, size), b_SPXOR=draw(1, 1, count, width, rank), first_column=0, scale=2.0
    )
    merged = [
        weight.float() + torch.cat((2.0 * (f.b_SPXOR[0].float() @ f.a_SPXRI[0].float())).unbind(), 1)
        for weight, f in zip(weights, (first, down), strict=True)
    ]
    worst: dict[str, float] = {}
    for tokens in (1, 16, 256, 4096):
        x_TD, experts_Tk = (
            torch.randn(tokens, width, device="cuda", dtype=half),
            torch.rand(tokens, count, device="cuda"),
        )
        experts_Tk = experts_Tk.topk(8).indices
        weights_Tk = torch.rand(tokens, 8, device="cuda", dtype=half)
        lora = ExpertLora(first=first, down=down)
        with torch.inference_mode():
            got = moe_forward(x_TD, weights_Tk, experts_Tk, *weights, activation="silu", numerics=FAST, lora=lora)
        with torch.no_grad():
            args = (x_TD.float(), weights_Tk.float(), experts_Tk)
            wanted = moe_forward(*args, *merged, activation="silu", numerics=FAST)
        worst[f"expert_error_{tokens}"] = float((got.float() - wanted).norm() / wanted.norm())
    return worst


def time_kernels(model: str) -> list[dict[str, Any]]:
    """Microseconds of a layer's launches in a CUDA graph, for 256 rows of 1 and of 32 adapters."""
    import numpy as np
    import torch

    from miles.kernels.fused.activation import gated_activation
    from miles.kernels.lora.grouped import (
        choose_splits,
        count_tiles,
        covers_gate_and_up,
        launch_gated_lora,
        launch_grouped_lora,
    )
    from miles.models.lora.targets import list_targets

    spec = find_spec(model)
    projections: dict[str, list[Any]] = {}
    for target in list_targets(spec):
        if target.param_name.startswith("layers.0."):
            projections.setdefault(target.param_name, []).append(target)
    rate, found = measure_copy_rate(), list[dict[str, Any]]()
    for name, targets in projections.items():
        spans = tuple((target.piece.start, target.piece.stop) for target in targets)
        inputs, width = targets[0].inputs, spans[-1][1]
        for adapters, max_rank in ((1, 16), (32, 16), (32, 64)):
            slots = build_slots(spans, inputs, [max_rank] * 32, max_rank)
            x_TI = torch.randn(256, inputs, device="cuda", dtype=torch.bfloat16)
            y_TN = torch.zeros(256, width, device="cuda", dtype=torch.bfloat16)
            plan = build_plan(np.arange(256) % adapters, 16, count_tiles(256, 32, 16))
            row: dict[str, Any] = {"projection": name.removeprefix("layers.0."), "adapters": adapters, "rank": max_rank}
            for splits in sorted({1, 4, choose_splits(inputs, max_rank)}):
                row[f"us_{splits}_splits"] = round(
                    1e6
                    * _time_graph(
                        lambda y=y_TN, x=x_TI, s=slots, p=plan, z=splits: launch_grouped_lora(y, x, s, p, splits=z)
                    ),
                    2,
                )
            if covers_gate_and_up(slots, width):
                row["us_gated"] = round(
                    1e6 * _time_graph(lambda y=y_TN, x=x_TI, s=slots, p=plan: launch_gated_lora(y, x, s, p, "silu")), 2
                )
                row["us_activation"] = round(1e6 * _time_graph(lambda y=y_TN: gated_activation(y, "silu")), 2)
            factors = 2 * adapters * max_rank * (len(spans) * inputs + sum(stop - start for start, stop in spans))
            row["us_of_bytes"] = round(1e6 * (factors + 2 * 256 * (inputs + 2 * width)) / rate, 2)
            found.append(row)
            print(json.dumps(row), flush=True)
    return found


def _time_graph(work: Any, repeats: int = 50) -> float:
    import torch

    with torch.inference_mode():
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                work()
    return _seconds(graph.replay) / repeats


# -- the table -------------------------------------------------------------------------------


def run_side(args: list[str]) -> dict[str, Any] | None:
    command = [sys.executable, __file__, *args]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        print(f"-- {' '.join(args)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}", flush=True)
        return None
    return json.loads(lines[-1].removeprefix("RESULT "))


def show(side: str, found: dict[str, Any], base: float) -> None:
    share = f"{100 * found['tokens_s'] / base:5.1f} % of base" if not math.isnan(base) else ""
    limit = f"{100 * found['tokens_s'] / found['limit_tokens_s']:.0f} % of the limit of {found['limit_tokens_s']:,.0f}"
    print(
        f"  {side:6s} {found['tokens_s']:8,.0f} tok/s  {share}  {limit}; {found['adapters']} adapters of "
        f"{found['adapter_mb']:,.0f} MB together, loaded in {found['load_s']:.1f} s; {found['peak_gib']:.0f} GiB",
        flush=True,
    )


def measure_grpo_targets(args: argparse.Namespace, targets: str) -> dict[str, Any]:
    from benchmarks.lora_grpo_step import build_case, measure_grpo

    model = "Qwen3-30B-A3B" if args.model == "Qwen3-8B" else args.model
    case = build_case(model, targets, tiny=args.tiny, rank=args.rank, shared_outer=args.shared_outer)
    return measure_grpo(case, args.steps)


def run_grpo(args: argparse.Namespace) -> None:
    """Measure the GRPO step for each choice of targets, in a process of its own."""
    from benchmarks.lora_grpo_step import show_grpo

    flags = ["--model", args.model, "--rank", str(args.rank), "--steps", str(args.steps)]
    flags += (["--tiny"] if args.tiny else []) + (["--shared-outer"] if args.shared_outer else [])
    for targets in args.targets:
        found = run_side([*flags, "--grpo", targets])
        if found is not None:
            print(json.dumps(found), flush=True)
            show_grpo(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-8B")
    parser.add_argument("--parts", nargs="+", default=["check", "kernels", "throughput"])
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--targets", nargs="+", default=["attn", "experts"], choices=["attn", "experts"])
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters of part grpo")
    parser.add_argument("--shared-outer", action="store_true", help="experts share their outer factors in part grpo")
    parser.add_argument("--steps", type=int, default=3, help="steps of part grpo, of which the last is reported")
    parser.add_argument("--tiny", action="store_true", help="part grpo with a small model on the CPU")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--grpo", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.grpo is not None:
        print("RESULT", json.dumps(measure_grpo_targets(args, args.grpo)))
        return
    if args.side is not None:
        print("RESULT", json.dumps(measure_side(args.model, args.side, args.requests)))
        return
    if "check" in args.parts:
        print("check", json.dumps(check_kernels()), flush=True)
        print("check", json.dumps(check_expert_kernels()), flush=True)
    if "kernels" in args.parts:
        time_kernels(args.model)
    base = math.nan
    for side in args.sides if "throughput" in args.parts else ():
        found = run_side(["--model", args.model, "--requests", str(args.requests), "--side", side])
        if found is None:
            continue
        base = found["tokens_s"] if side == "base" else base
        print(json.dumps({"side": side, **found}), flush=True)
        show(side, found, base)
    if "grpo" in args.parts:
        run_grpo(args)


if __name__ == "__main__":
    main()
