"""Engine tokens per second against ``transformers.generate``: same model, prompts, lengths and device, one run.

64 concurrent requests, 8 prompts x 8 samples, temperature 1, log-probs on in ours. Two workloads: ``mixed``, where
responses end at different lengths (a padded batch runs to the longest; only requested tokens count), and ``uniform``,
where all are equally long and only prefix sharing and overhead can differ. The limit is the time of the matmuls alone,
for exactly the rows the engine computes.

    python benchmarks/bench_engine.py [--rounds 3] [--threads 2] [--dtype float32]
    python benchmarks/bench_engine.py --device cuda [--models Qwen3-0.6B Qwen3-4B] [--sglang FOLDER] [--profile]

With ``--device cuda`` this runs ``bench_engine_gpu.py``, whose flags these are.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import InlineExecutor
from miles.cluster.platform import detect_platform
from miles.core.protocols import SamplingParams
from miles.core.types import Version
from miles.models.checkpoint import hf
from miles.models.decoder import Decoder
from miles.sync.manifest import build_manifest

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "pad_token_id": 0,
}
PROMPTS, SAMPLES = 8, 8


def workload(kind: str) -> tuple[list[np.ndarray], list[int]]:
    """The prompts, and how many tokens each of the 64 requests wants."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, SIZES["vocab_size"], n).astype(np.int32) for n in rng.integers(128, 257, PROMPTS)]
    lengths = rng.integers(16, 129, PROMPTS * SAMPLES) if kind == "mixed" else np.full(PROMPTS * SAMPLES, 96)
    return prompts, lengths.tolist()


def build(device: torch.device, dtype: torch.dtype) -> tuple[Any, Decoder]:
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        decoder = hf.load(folder, device=device, dtype=dtype)
    return model.to(device=device, dtype=dtype), decoder


def publish(engine: NativeEngine, decoder: Decoder) -> None:
    """Give the engine its weights, and with them an empty prefix cache."""
    tensors = dict(decoder.named_parameters())
    engine.begin(build_manifest(Version(), tensors))
    for name, tensor in tensors.items():
        engine.receive(name, tensor)
    engine.commit()


def ours(engine: NativeEngine, decoder: Decoder, prompts: list[np.ndarray], lengths: Sequence[int]) -> None:
    """All requests at once, nothing known of the prompts before."""
    publish(engine, decoder)

    async def everyone() -> None:
        answers = await asyncio.gather(
            *(
                engine.generate(prompts[i // SAMPLES], SamplingParams(max_new_tokens=n, ignore_eos=True, seed=i))
                for i, n in enumerate(lengths)
            )
        )
        assert [sum(map(len, answer.spans)) for answer in answers] == list(lengths)

    asyncio.run(everyone())


def theirs(model: Any, prompts: list[np.ndarray], lengths: Sequence[int], device: torch.device) -> None:
    """One padded batch, sampled until the longest response is done."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row in range(len(lengths)):
        prompt = prompts[row // SAMPLES]
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, width - len(prompt) :] = 1
    with torch.inference_mode():
        model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=max(lengths),
            pad_token_id=0,
        )


def limit(decoder: Decoder, prompts: list[np.ndarray], lengths: Sequence[int]) -> None:
    """Only the matrix products: every prompt once, then each step's live rows."""
    matrices = [p for name, p in decoder.named_parameters() if p.dim() == 2 and "embedding" not in name]
    head = decoder.head()
    rows = [sum(map(len, prompts))] + [sum(n > step for n in lengths) for step in range(1, max(lengths))]
    with torch.inference_mode():
        for step, count in enumerate(rows):
            inputs = {m.shape[1]: torch.ones(count, m.shape[1], device=m.device, dtype=m.dtype) for m in matrices}
            for matrix in matrices:
                torch.nn.functional.linear(inputs[matrix.shape[1]], matrix)
            drawn = len(prompts) if step == 0 else count
            torch.nn.functional.linear(inputs[head.shape[1]][:drawn], head)


def spend(work: Callable[[], object], synchronize: Callable[[], None]) -> tuple[float, float]:
    """Seconds on the wall, and seconds of processor time, which neighbours on a busy machine disturb less."""
    synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(kind: str, model: Any, decoder: Decoder, rounds: int, device: str) -> None:
    platform = detect_platform(device)
    prompts, lengths = workload(kind)
    engine = NativeEngine(
        decoder.spec,
        device=platform.device,
        dtype=decoder.head().dtype,
        config=NativeConfig(),
        run=InlineExecutor(),
        decode=None,
    )
    contests: dict[str, Callable[[], object]] = {
        "miles": lambda: ours(engine, decoder, prompts, lengths),
        "transformers": lambda: theirs(model, prompts, lengths, platform.device),
        "bare matmuls": lambda: limit(decoder, prompts, lengths),
    }
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in contests}
    for turn in range(rounds + 1):  # the first warms up; sides take turns, so a busy machine slows all alike
        for name, work in contests.items():
            pair = spend(work, platform.synchronize)
            if turn:
                spent[name].append(pair)
    wall, cpu = ({name: statistics.median(p[i] for p in pairs) for name, pairs in spent.items()} for i in (0, 1))
    total = sum(lengths)
    print(f"\n{kind}: {len(prompts)} prompts x {SAMPLES} samples, {total} tokens asked for")
    for name, pairs in spent.items():
        every = ", ".join(f"{one:.2f}" for one, _ in pairs)
        print(
            f"  {name:13s} {total / wall[name]:7.0f} tok/s {wall[name]:7.2f} s (rounds {every}), CPU {cpu[name]:.2f} s"
        )
    print(f"  miles / transformers: {wall['transformers'] / wall['miles']:.2f}x by the wall, ", end="")
    print(f"{cpu['transformers'] / cpu['miles']:.2f}x by processor time; ", end="")
    print(f"bare matmuls are {100 * wall['bare matmuls'] / wall['miles']:.0f} % of miles' time")
    stats = {name: value / (rounds + 1) for name, value in engine.stats().items()}
    print(
        f"  a run: {stats['prefilled_tokens']:.0f} prompt tokens computed, {stats['cached_tokens']:.0f} shared, ",
        end="",
    )
    print(f"{stats['steps']:.0f} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args, others = parser.parse_known_args()
    if args.device == "cuda":
        from bench_engine_gpu import main as on_a_card

        on_a_card(others)
        return
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    platform = detect_platform(args.device, threads=args.threads)
    print(f"{platform.name}, torch {torch.__version__}, {args.dtype}; Qwen3 of 256 x 4 layers, vocabulary 4096")
    model, decoder = build(platform.device, getattr(torch, args.dtype))
    for kind in ("mixed", "uniform"):
        compare(kind, model, decoder, args.rounds, args.device)


if __name__ == "__main__":
    main()
