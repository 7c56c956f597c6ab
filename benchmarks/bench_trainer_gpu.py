"""Trainer on one GPU: tokens per second, MFU, and estimated and measured memory.

    PYTHONPATH=src python benchmarks/bench_trainer_gpu.py                       # everything
    PYTHONPATH=src python benchmarks/bench_trainer_gpu.py --parts steps --cases 0.6B-16k 4B-8k --sides ours transformers
    PYTHONPATH=src python benchmarks/bench_trainer_gpu.py --parts profile prefix
    PYTHONPATH=src python benchmarks/bench_trainer_gpu.py --parts steps --cases 30B-A3B-6L-8k --sides ours ours:fp8

bf16, random weights of the published shapes, every token trained, full trainer steps (two micro-batches, then clipping
and AdamW with float32 master weights and moments). Sides: ``ours``; ``torch``, the same without our training kernels;
``transformers``, a hand-written step (its own loss, SDPA, fused AdamW on bf16 weights: six bytes less of state per
parameter). A step that does not fit is repeated with activation checkpointing. MFU counts the FLOPs a step needs,
without recomputation, against the 8192^3 bf16 matmul measured in the same process.

Parts: ``steps`` the table; ``profile`` where a step's time goes, by kernel; ``prefix`` eight samples of one 1,024-token
prompt, computed once and not. Each measurement is a process of its own. Single kernels: ``bench_training_kernels.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

GIB = 2**30
ROUNDS = 3
# Micro-batches of a step: from the second on, gradients and what backward needs are held together.
BATCHES = 2


@dataclass(frozen=True)
class Case:
    """Micro-batches of ``count`` samples of ``length`` tokens; ``frozen`` trains all but the experts.

    ``layers`` of the model are there, or all, of which the first ``again_layers`` (or all) are recomputed if ``again``.
    A ``long`` step has one micro-batch, and is timed once behind another.
    """

    model: str
    length: int
    count: int = 1
    frozen: bool = False
    again: bool = False
    again_layers: int | None = None
    optimizer_state: Literal["float32", "int8"] = "float32"
    layers: int | None = None
    long: bool = False

    @property
    def tokens(self) -> int:
        return self.length * self.count

    @property
    def batches(self) -> int:
        return 1 if self.long else BATCHES


CASES = {
    "0.6B-16k": Case("Qwen3-0.6B", 16384),
    "0.6B-8x2k": Case("Qwen3-0.6B", 2048, 8),
    "4B-8k": Case("Qwen3-4B", 8192),
    "4B-8k-again": Case("Qwen3-4B", 8192, again=True),
    "8B-8k-int8": Case("Qwen3-8B", 8192, again=True, optimizer_state="int8"),
    "30B-A3B-frozen-8k": Case("Qwen3-30B-A3B", 8192, frozen=True, again=True),
    "30B-A3B-frozen-8k-16": Case("Qwen3-30B-A3B", 8192, frozen=True, again=True, again_layers=16),
    "4B-131k": Case("Qwen3-4B", 131072, again=True, long=True),
    "30B-A3B-6L-8k": Case("Qwen3-30B-A3B", 8192, layers=6),
}
PREFIX, REPLY, GROUP = 1024, 1024, 8
PARTS = ("steps", "profile", "prefix")


def spec_named(model: str, layers: int | None = None) -> Any:
    from miles.models.accounting.known_models import find_known_config
    from miles.models.families.registry import spec_from_config

    config = find_known_config(model)
    assert config is not None, f"{model} is not among the published shapes"
    return spec_from_config(config if layers is None else {**config, "num_hidden_layers": layers})


def expert_parameters(spec: Any) -> tuple[int, int]:
    """All parameters of the experts, and those one token meets."""
    from miles.models.spec import MoeSpec

    layers = [layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoeSpec)]
    each = [3 * ffn.size * spec.hidden_size for ffn in layers]
    held = sum(n * ffn.num_experts for n, ffn in zip(each, layers, strict=True))
    return held, sum(n * ffn.experts_per_token for n, ffn in zip(each, layers, strict=True))


def operations(case: Case) -> float:
    """Of one step: forward, gradients of activations, and gradients of the weights that are trained."""
    from miles.models.accounting.params import forward_flops_per_token

    spec = spec_named(case.model, case.layers)
    tokens = case.tokens * case.batches
    forward = forward_flops_per_token(spec, case.length / 2) * tokens
    idle = 2.0 * expert_parameters(spec)[1] * tokens if case.frozen else 0.0
    return 3 * forward - idle


def quantize_spec(spec: Any, precision: str) -> Any:
    """The spec with --train-precision, and an E4M3 backward if it is FP8; as it is without."""
    from miles.precision.formats import QuantizationSpec, get_format

    if not precision:
        return spec
    form, backward = get_format(precision), "e4m3" if "fp8" in precision else "wide"
    quantization = QuantizationSpec(format=form, packed=False, backward=backward)
    return replace(spec, quantization=quantization)


def estimate_gib(case: Case, precision: str = "") -> float:
    """GiB that `miles plan` would say."""
    from miles.cluster.parallel_dims import ParallelDims
    from miles.launch.plan.layout_memory import (
        estimate_rank_activations,
        estimate_rank_memory,
        estimate_single_peak,
    )
    from miles.models.accounting.params import parameter_count
    from miles.train.config import TrainConfig

    spec = quantize_spec(spec_named(case.model, case.layers), precision)
    layers = case.again_layers
    knobs: dict[str, Any] = {"gradient_checkpointing": case.again, "max_tokens_per_gpu": case.tokens}
    if layers is not None:
        knobs |= {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}
    train = TrainConfig(**knobs)
    held = estimate_rank_memory(spec, ParallelDims(), "bfloat16", moments=case.optimizer_state)
    if case.batches == 1 and not case.frozen:
        peak = estimate_single_peak(spec, held.gradients, "bfloat16", case.tokens, train, fused=True)
        return (held.weights + held.optimizer + peak.gradients + peak.activations) / GIB
    share = 1 - expert_parameters(spec)[0] / parameter_count(spec) if case.frozen else 1.0
    kept = estimate_rank_activations(spec, ParallelDims(), "bfloat16", case.tokens, train, fused=True)
    return (held.weights + share * (held.gradients + held.optimizer) + kept - unsaved_bytes(case, spec)) / GIB


def unsaved_bytes(case: Case, spec: Any) -> int:
    """Inputs of frozen experts, which only the gradients of their weights would need; of layers that save anything."""
    from miles.models.spec import MoeSpec

    saving = spec.layers[case.again_layers or 0 :] if not case.again or case.again_layers else ()
    experts = [layer.ffn for layer in saving if isinstance(layer.ffn, MoeSpec)] if case.frozen else []
    return sum(2 * case.tokens * ffn.experts_per_token * (spec.hidden_size + ffn.size) for ffn in experts)


# -- a step of ours ---------------------------------------------------------------------------


def sample(rng: Any, index: int, tokens: Any, prompt: int, prompt_id: int) -> Any:
    import numpy as np

    from miles.core.types import Sample

    mask = np.arange(len(tokens)) >= prompt
    return Sample(
        prompt_id=prompt_id,
        trajectory=index,
        tokens=tokens.astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, np.float32(-12), np.float32(0)),
        advantages=np.where(mask, np.float32(rng.normal()), np.float32(0)),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )


def trainer(case: Case, parity: Literal["fast", "exact"] = "fast", precision: str = "", **knobs: Any) -> Any:
    """The trainer of a case; ``precision`` is that of --train-precision, with an E4M3 backward if it is FP8."""
    import torch

    from miles.algo.config import AlgoConfig
    from miles.backends.fsdp.local_model import LocalModel
    from miles.cluster.executor import InlineExecutor
    from miles.kernels.numerics import numerics_from_parity
    from miles.models.decoder import Decoder
    from miles.train.config import TrainConfig
    from miles.train.policy_trainer import PolicyTrainer

    numerics = numerics_from_parity(parity)
    spec = quantize_spec(spec_named(case.model, case.layers), precision)
    spec = replace(spec, max_positions=max(spec.max_positions, case.length))
    decoder = Decoder(spec, device="cuda", dtype=torch.bfloat16, numerics=numerics)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.0, 0.02)
    if case.frozen:
        for name, parameter in decoder.named_parameters():
            parameter.requires_grad_(".moe.gate_up" not in name and ".moe.down" not in name)
    train = TrainConfig(max_tokens_per_gpu=case.tokens, optimizer_state_dtype=case.optimizer_state, **knobs)
    decoder.recompute_num_layers = case.again_layers
    model = LocalModel(decoder, gradient_checkpointing=case.again)
    return PolicyTrainer(
        model, algo=AlgoConfig(), train=train, steps=1, updates=100, temperature=1.0, run=InlineExecutor()
    )


def build_step(worker: Any, samples: Any) -> Callable[[], Any]:
    import asyncio

    from miles.core.types import Batch

    batch = Batch(step=0, samples=tuple(samples), num_groups=len(samples))
    return lambda: asyncio.run(worker.step(batch))


def ours(case: Case, *, plain: bool = False, precision: str = "", changes: tuple[str, ...] = ()) -> Callable[[], Any]:
    import numpy as np

    if plain:
        without_kernels()
    rng, vocab = np.random.default_rng(0), spec_named(case.model, case.layers).vocab_size
    # A sample is read up to its last token but one.
    samples = [sample(rng, 0, rng.integers(0, vocab, case.length + 1), 1, i) for i in range(case.count * case.batches)]
    return build_step(trainer(case, precision=precision), samples)


def without_kernels() -> None:
    """Switch every training kernel to plain torch."""
    from miles.kernels.fused import activation, rms_norm
    from miles.models.layers import attention
    from miles.train import logprobs

    modules: tuple[Any, ...] = (rms_norm, activation, attention, logprobs)
    for module in modules:
        module.use_triton_training = lambda x: False


# -- a step of theirs -------------------------------------------------------------------------


def theirs(case: Case) -> Callable[[], Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from miles.models.families.registry import config_from_spec

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_from_spec(spec_named(case.model, case.layers))))
        config = AutoConfig.from_pretrained(folder)
    torch.set_default_device("cuda")
    network: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    if case.again:
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(not (case.frozen and ".experts." in name))
    trained = [p for p in network.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(trained, lr=1e-6, fused=True)
    tokens = torch.randint(0, config.vocab_size, (case.count, case.length))

    def step() -> None:
        for _ in range(case.batches):
            network(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)

    return step


SIDES: dict[str, Callable[[Case], Callable[[], Any]]] = {
    "ours": ours,
    **{
        f"ours:{name}": partial(ours, precision=name)
        for name in ("fp8", "fp8_pow2", "fp8_channel", "mxfp8", "nvfp4", "int4_g32")
    },
    "torch": lambda case: ours(case, plain=True),
    "transformers": theirs,
}


# -- measuring --------------------------------------------------------------------------------


def measure_median(run: Callable[[], Any], rounds: int = ROUNDS, warm: int = 2) -> float:
    """The median seconds of a run that is warm."""
    import torch

    times: list[float] = []
    for number in range(warm + rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if number >= warm:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def rate() -> float:
    """Operations a second of the card's own product."""
    import torch

    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / measure_median(lambda: square @ square, rounds=10)


def measure_step(case: Case, side: str) -> dict[str, Any]:
    """With layers recomputed where it does not fit otherwise."""
    import torch

    top = rate()
    for tried in (case, *([] if case.again else [replace(case, again=True)])):
        try:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            spent = measure_median(SIDES[side](tried), *((1, 1) if case.long else ()))
        except torch.OutOfMemoryError:
            continue
        peak = torch.cuda.max_memory_allocated() / GIB
        done = {"s": spent, "tok_s": tried.batches * tried.tokens / spent, "peak_gib": peak}
        done["mfu"] = operations(tried) / spent / top
        said = estimate_gib(tried, side.partition(":")[2]) if side != "transformers" else None
        return done | {"again": tried.again, "said_gib": said, "matmul_tflops": top / 1e12}
    return {"does not fit": True}


KINDS = (
    ("attention", ("flash", "fmha", "attn", "mha", "softmax_warp")),
    ("log-probs: sums and slopes", ("_reduce_kernel", "_grad_kernel", "log_softmax", "logsoftmax")),
    ("activations", ("_gated_forward_kernel", "_gated_backward_kernel", "silu")),
    ("QK-norm and RoPE", ("_qk_forward_kernel", "_qk_backward_kernel")),
    ("norms", ("_forward_kernel", "_backward_kernel", "rms_norm", "layer_norm", "rmsnorm", "layernorm")),
    ("optimizer", ("adam", "multi_tensor", "lpnorm", "foreach")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "cublas", "splitk", "xmma", "grouped")),
    (
        "copies, gathers",
        (
            "memcpy",
            "copy",
            "memset",
            "gather",
            "add_grad",
            "choices",
            "spread",
            "index",
            "cat",
            "scatter",
            "sort",
            "embedding",
        ),
    ),
    ("other elementwise and sums", ("elementwise", "reduce", "fill")),
)


def measure_profile(case: Case, side: str) -> dict[str, Any]:
    """Milliseconds of a step by the kernels' names, the largest kernels, and the head's whole part measured alone."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    step = SIDES[side](case)
    spent = measure_median(step)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    kinds: dict[str, float] = {}
    names: dict[str, float] = {}
    for event in seen.key_averages():
        took = event.self_device_time_total / 1e3
        kind = next((k for k, words in KINDS if any(w in event.key.lower() for w in words)), "else")
        kinds[kind] = kinds.get(kind, 0.0) + took
        names[f"{event.key[:70]} x{event.count}"] = took
    kinds["no kernel running (host)"] = spent * 1e3 - sum(kinds.values())
    found = {"step": spent * 1e3, **dict(sorted(kinds.items(), key=lambda pair: -pair[1]))}
    top = dict(sorted(names.items(), key=lambda pair: -pair[1])[:16])
    del step
    return {"ms": found, "head alone": measure_lm_head(case), "largest": top}


def measure_lm_head(case: Case) -> float:
    """Milliseconds of log-probs and entropies, forward and backward, products among them."""
    import torch

    from miles.train.logprobs import HeadOutput, compute_logprobs

    spec = spec_named(case.model, case.layers)
    made = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    hidden = torch.randn(case.tokens, spec.hidden_size, **made)
    head = torch.randn(spec.vocab_size, spec.hidden_size, **made)
    target = torch.randint(0, spec.vocab_size, (case.tokens,), device="cuda")

    def run() -> None:
        logp, _ = compute_logprobs(HeadOutput(hidden_RD=hidden, head_VD=head), target)
        logp.sum().backward()
        hidden.grad = head.grad = None

    return measure_median(run) * 1e3


def measure_prefix(model: str) -> dict[str, Any]:
    """Seconds of a step over one group, each sample by itself and what they share once."""
    import numpy as np

    rng, vocab = np.random.default_rng(0), spec_named(model).vocab_size
    prompt = rng.integers(0, vocab, PREFIX)
    replies = [rng.integers(0, vocab, REPLY + 1) for _ in range(GROUP)]
    samples = [sample(rng, i, np.concatenate((prompt, reply)), PREFIX, 0) for i, reply in enumerate(replies)]
    case = Case(model, PREFIX + REPLY, GROUP)
    found = {}
    for shared in (False, True):
        found["shared" if shared else "apart"] = measure_median(build_step(trainer(case, share_prefix=shared), samples))
    return found | {
        "faster": found["apart"] / found["shared"],
        "fewer tokens": GROUP * (PREFIX + REPLY) / (PREFIX + GROUP * REPLY),
    }


# -- processes and the table ------------------------------------------------------------------


def one(part: str, case: str, side: str) -> dict[str, Any]:
    if part == "prefix":
        return measure_prefix(case)
    return (measure_step if part == "steps" else measure_profile)(CASES[case], side)


def spawn(part: str, case: str, side: str) -> dict[str, Any] | None:
    command = [sys.executable, __file__, "--one", part, case, side]
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        reason = "out of memory" if "OutOfMemoryError" in done.stderr else done.stderr[-1500:]
        print(f"-- {part} {case} {side} failed: {reason}", flush=True)
        return None
    result = json.loads(lines[-1].removeprefix("RESULT "))
    print(part, case, side, json.dumps(result), flush=True)
    return result


def show(rows: list[tuple[str, str, dict[str, Any]]]) -> None:
    print("\n| case | side | tok/s | MFU | step | peak | planned |\n|---|---|--:|--:|--:|--:|--:|")
    for case, side, found in rows:
        if "tok_s" not in found:
            print(f"| {case} | {side} | does not fit |")
            continue
        name = f"{case}, layers recomputed" if found["again"] else case
        said = "" if found["said_gib"] is None else f"{found['said_gib']:.1f} GiB"
        speed = f"{found['tok_s']:,.0f} | {100 * found['mfu']:.0f} % | {found['s'] * 1e3:.0f} ms"
        print(f"| {name} | {side} | {speed} | {found['peak_gib']:.1f} GiB | {said} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--sides", nargs="+", default=["ours", "torch", "transformers"], choices=list(SIDES))
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        part, case, side = args.one
        print("RESULT", json.dumps(one(part, case, side)))
        return
    rows: list[tuple[str, str, dict[str, Any]]] = []
    for part in args.parts:
        cases = ("Qwen3-0.6B", "Qwen3-4B") if part == "prefix" else args.cases
        for case in cases:
            for side in ("ours",) if part == "prefix" else args.sides:
                found = spawn(part, case, side)
                if part == "steps" and found is not None:
                    rows.append((case, side, found))
    show(rows)


if __name__ == "__main__":
    main()
