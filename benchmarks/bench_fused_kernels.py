"""The engine's fused kernels on a GPU against the same operations in torch, and against memory bandwidth.

    PYTHONPATH=src python benchmarks/bench_fused_kernels.py [--only norm,gated,prepare,draw,experts,route] [--tune]

Each operation is captured several times in a CUDA graph and replayed, so that only device time counts; bytes are the
minimum to be moved, and per cent are of what a large copy reaches in the same run. Small data stays in L2 from
one replay to the next, as it does in a model. ``--tune`` tries tiles for the MoE GEMMs instead and prints the best
configuration for each number of tokens.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from miles.kernels.fused import activation, qk_norm_rope, rms_norm
from miles.kernels.moe import fused_moe, topk_router
from miles.kernels.moe.fused_moe import TILE_CONFIGS, MoeTile, MoeTileConfig
from miles.kernels.numerics import FAST
from miles.kernels.sampling import sample

DEVICE = torch.device("cuda")
TOKENS = (1, 16, 256, 8192)
# hidden, heads, key-value heads, intermediate of an MLP; heads are 128 wide.
MODELS = {"0.6B": (1024, 16, 8, 3072), "4B": (2560, 32, 8, 9728), "30B-A3B": (2048, 32, 4, 768)}
MIXED = (1, 4, 16, 64, 128, 256, 512, 1024, 8192)
VOCABULARY = 151936
EXPERTS, CHOICES, WIDTH, SIZE = 128, 8, 2048, 768
Run = Callable[[], object]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


@contextmanager
def in_torch() -> Iterator[None]:
    """Every operation in plain torch."""
    modules: tuple[ModuleType, ...] = (rms_norm, activation, qk_norm_rope, sample, fused_moe, topk_router)
    for module in modules:
        module.use_triton_inference = lambda x: False
    yield
    for module in modules:
        module.use_triton_inference = USE_TRITON_INFERENCE


USE_TRITON_INFERENCE = rms_norm.use_triton_inference
CHOSEN = fused_moe.select_tile_configs


def seconds(run: Run, *, graph: bool = True, budget: float = 0.02) -> float:
    """The median time of one run, of several in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        begin.record()
        run()
        end.record()
    end.synchronize()
    repeats = max(1, min(50, int(budget / 5 / max(begin.elapsed_time(end) / 1e3, 1e-5))))

    def several() -> None:
        for _ in range(repeats):
            run()

    replay = several
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            several()
        replay = captured.replay
    times: list[float] = []
    for _ in range(6):
        begin.record()
        replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(times[1:])


def copy_bandwidth() -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def row(name: str, shape: str, run: Run, moved: float, best: float, *, graph: bool = True) -> None:
    ours = seconds(run)
    with in_torch():
        theirs = seconds(run, graph=graph)
    note = "" if graph else " (not in a graph)"
    print(
        f"| {name} | {shape} | {1e6 * theirs:.1f}{note} | {1e6 * ours:.1f} | {theirs / ours:.1f} "
        f"| {moved / ours / 1e9:.0f} | {100 * moved / ours / best:.0f} % |",
        flush=True,
    )


# -- one operation each ---------------------------------------------------------------------


def norms(best: float) -> None:
    for (model, (hidden, *_)), tokens in itertools.product(MODELS.items(), TOKENS):
        x, delta, weight = normal(tokens, hidden), normal(tokens, hidden), normal(hidden)
        moved, shape = 2 * tokens * hidden, f"{model}: {tokens} x {hidden}"
        row("rms_norm", shape, partial(rms_norm.rms_norm, x, weight, 1e-6, numerics=FAST), 2 * moved, best)
        row(
            "add_rms_norm",
            shape,
            partial(rms_norm.add_rms_norm, x, delta, weight, 1e-6, numerics=FAST),
            4 * moved,
            best,
        )


def gates(best: float) -> None:
    for (model, (*_, size)), tokens in itertools.product(MODELS.items(), TOKENS):
        tokens *= CHOICES if model == "30B-A3B" else 1
        inner = normal(tokens, 2 * size)
        row(
            "gated",
            f"{model}: {tokens} x {size}",
            partial(activation.gated_activation_inference, inner, "silu"),
            6 * tokens * size,
            best,
        )


def preparations(best: float) -> None:
    table = normal(40960, 2, 128)
    slots = 1 << 15
    for (model, (_, heads, kv_heads, _)), tokens in itertools.product(MODELS.items(), TOKENS):
        qkv, weight = normal(tokens, (heads + 2 * kv_heads) * 128), normal(128)
        params = qk_norm_rope.QKNormRopeParams(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=128,
            rotation=table,
            positions_T=torch.randint(0, 40960, (tokens,), device=DEVICE),
            interleaved=False,
            q_weight_d=weight,
            k_weight_d=weight,
            eps=1e-6,
            offset=0.0,
        )
        given = {"key_slots": normal(slots, kv_heads, 128), "value_slots": normal(slots, kv_heads, 128)}
        given |= {"slots_T": torch.randperm(slots, device=DEVICE)[:tokens]}
        moved = 2 * 2 * qkv.numel() + 2 * 2 * 128 * tokens
        shape = f"{model}: {tokens} x {heads}+{kv_heads}+{kv_heads} x 128"
        row(
            "prepare",
            shape,
            partial(qk_norm_rope.qk_norm_rope_write_kv, qkv, params, **given, numerics=FAST),
            moved,
            best,
            graph=False,
        )


def draws(best: float) -> None:
    for rows, filters, dtype in itertools.product((1, 16, 64, 256), (False, True), (torch.float32, torch.bfloat16)):
        if dtype == torch.bfloat16 and filters:
            continue
        logits = (2.5 * normal(rows, VOCABULARY, dtype=torch.float32)).to(dtype)
        given = {"tokens_out_B": torch.empty(rows, dtype=torch.int64, device=DEVICE), "filters": filters}
        given |= {"logprobs_out_B": torch.empty(rows, device=DEVICE)}
        given |= {"top_k_B": torch.full((rows,), 50, device=DEVICE), "min_p_B": torch.zeros(rows, device=DEVICE)}
        given |= {"top_p_B": torch.full((rows,), 0.95, device=DEVICE)}
        heat, uniform = torch.full((rows,), 0.9, device=DEVICE), torch.rand(rows, device=DEVICE)
        name = "draw, top-k 50 and top-p 0.95" if filters else "draw"
        shape = f"{rows} x {VOCABULARY}, {str(dtype).removeprefix('torch.')}"
        row(
            name,
            shape,
            partial(sample.sample_tokens, logits, heat, uniform, **given),
            logits.nbytes,
            best,
            graph=not filters,
        )
        if filters:
            given["top_k_B"] = torch.zeros_like(given["top_k_B"])
            run = partial(sample.sample_tokens, logits, heat, uniform, **given)
            row("draw, top-p 0.95", shape, run, logits.nbytes, best, graph=False)


def mixture(tokens: int) -> tuple[tuple[Tensor, ...], float]:
    """What ``moe_forward`` takes, and the bytes of the weights of all experts somebody chose."""
    logits = normal(tokens, EXPERTS, dtype=torch.float32)
    weights, chosen = topk_router.route_topk(logits, CHOICES, normalise=True, scale=1.0, dtype=torch.bfloat16)
    moved = 2 * chosen.unique().numel() * 3 * WIDTH * SIZE + 4 * tokens * WIDTH
    return (normal(tokens, WIDTH), weights, chosen), moved


def matrices() -> tuple[Tensor, Tensor]:
    first, down = (torch.empty(EXPERTS, *shape, dtype=torch.bfloat16, device=DEVICE) for shape in SHAPES)
    return first.normal_(std=WIDTH**-0.5), down.normal_(std=SIZE**-0.5)


SHAPES = ((2 * SIZE, WIDTH), (WIDTH, SIZE))


def mixtures(best: float) -> None:
    weights = matrices()
    for tokens in MIXED:
        given, moved = mixture(tokens)
        row(
            "moe_forward",
            f"{tokens} tokens",
            partial(fused_moe.moe_forward, *given, *weights, activation="silu", numerics=FAST),
            moved,
            best,
        )


def routes(best: float) -> None:
    for tokens in TOKENS:
        logits = normal(tokens, EXPERTS)
        how = {"normalise": True, "scale": 1.0, "dtype": torch.bfloat16}
        row(
            "route",
            f"{tokens} x {EXPERTS}",
            partial(topk_router.route_topk, logits, CHOICES, **how),
            2 * logits.numel(),
            best,
        )


# -- tiles ----------------------------------------------------------------------------------

TILES = [MoeTile(n, k, 4, stages) for n in (32, 64, 128) for k, stages in ((64, 4), (64, 6), (128, 3), (128, 4))]
TILES += [MoeTile(128, 64, 8, 4), MoeTile(128, 128, 8, 3)]


def tune(best: float) -> None:
    """The best rows and tiles for each number of tokens: those of one product after those of the other."""
    weights = matrices()
    for tokens in MIXED[:-1]:
        given, moved = mixture(tokens)
        mean = tokens * CHOICES / EXPERTS
        found: dict[MoeTileConfig, float] = {}
        run = partial(fused_moe.moe_forward, *given, *weights, activation="silu", numerics=FAST)
        for rows in (16, 32, 64, 128):
            if not mean / 2 <= rows <= max(16, 6 * mean):
                continue
            plan = MoeTileConfig(1e9, rows, *TILE_CONFIGS[0][2:])
            for which in ("first", "second"):
                tried = [plan._replace(**{which: tile}) for tile in TILES]
                found |= {each: measure_config(run, each) for each in tried if each not in found}
                plan = min(tried, key=found.__getitem__)
        for plan, taken in sorted(found.items(), key=lambda item: item[1])[:3]:
            share = 100 * moved / taken / best
            print(f"{tokens} tokens: {1e6 * taken:.1f} us, {share:.0f} % of a copy, {plan[1:]}", flush=True)


def measure_config(run: Run, plan: MoeTileConfig) -> float:
    fused_moe.select_tile_configs = lambda device: (plan,)
    try:
        return seconds(run, budget=0.01)
    except OutOfResources:
        return float("inf")
    finally:
        fused_moe.select_tile_configs = CHOSEN


ALL = {"norm": norms, "gated": gates, "prepare": preparations, "draw": draws, "experts": mixtures, "route": routes}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ALL), help="operations, by commas")
    parser.add_argument("--tune", action="store_true", help="try tiles for the experts' products instead")
    args = parser.parse_args()
    torch.manual_seed(0)
    best = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a copy moves {best / 1e12:.2f} TB/s\n", flush=True)
    if args.tune:
        return tune(best)
    print("| operation | shape | torch, us | ours, us | times | GB/s | of a copy |\n|---|---|--:|--:|--:|--:|--:|")
    for name in args.only.split(","):
        ALL[name](best)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
