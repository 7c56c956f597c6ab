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


WHERE = "cuda"


def device() -> str:
    """Where the matrix is computed."""
    return WHERE


def by_kind(seen: Any, steps: float) -> dict[str, float]:
    """Milliseconds a step by what kernels are for."""
    times: dict[str, float] = {}
    for event in seen.key_averages():
        kind = next((k for k, words in KINDS if any(w in event.key.lower() for w in words)), "else")
        times[kind] = times.get(kind, 0.0) + event.self_device_time_total / 1e3 / steps
    return times


# -- the matrix -------------------------------------------------------------------------------


def models() -> dict[str, Any]:
    """Small models of every mechanism there is an exact form of."""
    from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlaSpec, MlpSpec, MoeSpec, RopeSpec

    plain = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, rope=RopeSpec(theta=1e4))
    mlp = MlpSpec(size=320)
    dense = DecoderSpec(
        family="qwen3",
        vocab_size=5003,
        hidden_size=256,
        norm_eps=1e-6,
        layers=2 * (LayerSpec(mixer=plain, ffn=mlp),),
        tie_embeddings=True,
        max_positions=4096,
        eos_token_ids=(),
    )

    def of(mixer: Any = plain, ffn: Any = mlp, **changes: Any) -> Any:
        return replace(dense, layers=2 * (LayerSpec(mixer=mixer, ffn=ffn),), **changes)

    windowed = replace(plain, window=70, softcap=30.0, qk_norm="head")
    gelu = MlpSpec(size=320, activation="gelu_tanh")
    gemma = replace(
        dense,
        layers=(
            LayerSpec(mixer=windowed, ffn=gelu, post_norms=True),
            LayerSpec(mixer=replace(windowed, window=None), ffn=gelu, post_norms=True),
        ),
        norm_offset=1.0,
        embedding_scale=16.0,
        logit_softcap=20.0,
    )
    sunk = replace(plain, sinks=True, window=100, qkv_bias=True, output_bias=True)
    clamped = MoeSpec(
        num_experts=8, experts_per_token=2, size=128, activation="swiglu_clamped", interleaved=True, expert_bias=True,
        router_bias=True, norm_topk_prob=True,
    )  # fmt: skip
    latent = MlaSpec(
        num_heads=4, query_rank=96, kv_rank=64, nope_dim=64, rope_dim=32, value_dim=64,
        rope=RopeSpec(theta=1e4, interleaved=True), scale=96**-0.5, norm_eps=1e-6,
    )  # fmt: skip
    sigmoid = MoeSpec(
        num_experts=16, experts_per_token=4, size=64, score="sigmoid", wide_router=True, correction=True, groups=4,
        kept_groups=2, group_top=2, norm_topk_prob=True, scale=2.5, shared=MlpSpec(size=128),
    )  # fmt: skip
    moe = MoeSpec(num_experts=32, experts_per_token=4, size=96, norm_topk_prob=True)
    return {
        "llama": of(tie_embeddings=False),
        "qwen2, biases": of(replace(plain, qkv_bias=True)),
        "qwen3": of(replace(plain, head_dim=128, qk_norm="head")),
        "qwen3 moe": of(replace(plain, qk_norm="head"), moe, family="qwen3_moe"),
        "gemma3, caps": gemma,
        "gpt-oss": of(sunk, clamped, family="gpt_oss"),
        "deepseek v3": of(latent, sigmoid, family="deepseek_v3"),
        "chunks": of(replace(plain, chunk=128, qk_norm="unit")),
    }


def fresh(spec: Any, dtype: Any) -> Any:
    import torch

    from miles.models.decoder import Decoder

    torch.manual_seed(0)
    decoder = Decoder(spec, device=device(), dtype=dtype)
    with torch.no_grad():
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, device=parameter.device)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 3 * noise * parameter.shape[-1] ** -0.5)
    return decoder


ENGINES: dict[str, dict[str, Any]] = {
    "at once": {"page_size": 16},
    "no graphs, chunks of 37": {"page_size": 16, "graphs": False, "prefill_chunk": 37},
    "tight, pages of 8": {"page_size": 8, "kv_tokens": 1536, "max_running": 5, "prefill_chunk": 100},
    "no prefix cache": {"page_size": 64, "prefix_cache": False},
}
TRAINERS: dict[str, dict[str, Any]] = {
    "packed": {"max_tokens_per_gpu": 100_000},
    "micro-batches": {"max_tokens_per_gpu": 700},
    "shared prefixes": {"max_tokens_per_gpu": 100_000, "share_prefix": True},
}


def matrix(args: argparse.Namespace) -> None:
    """One of the models in every way, and what differs."""
    import torch

    global WHERE
    use("exact")
    (name,) = args.models
    where, _, name = name.rpartition(":")
    WHERE = where or WHERE
    for dtype in (torch.bfloat16, torch.float32):
        began = time.perf_counter()
        try:
            lines = check(models()[name], dtype)
        except Exception as error:  # the others are still to be told of
            lines = [f"FAILED {type(error).__name__}: {str(error)[:300]}"]
        spent = time.perf_counter() - began
        told = "; ".join(lines) if lines else "equal to the last bit"
        print(f"  {WHERE:4s} {name:14s} {str(dtype)[6:]:8s} {told} ({spent:.0f} s)", flush=True)


def whole_matrix() -> None:
    """Every model, each in a process of its own: most of the time is the compiler's, which has one core a process."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--child", "matrix", "--models"]
    everyone = [*models(), "cpu:qwen3", "cpu:qwen3 moe"]
    processes = [subprocess.Popen([*command, name]) for name in everyone]
    failed = sum(process.wait() != 0 for process in processes)
    print(f"matrix: {failed} processes failed, {time.perf_counter() - began:.0f} s", flush=True)


def check(spec: Any, dtype: Any) -> list[str]:
    """What differs between an engine and a trainer, each in several manners; empty where nothing does."""
    decoder = fresh(spec, dtype)
    asked = requests(spec.vocab_size)
    found: list[str] = []
    first: list[Any] | None = None
    for number, (name, knobs) in enumerate(ENGINES.items()):
        answers = rollout_of(decoder, asked, knobs)
        written = [[list(span.tokens) for span in answer.spans] for answer in answers]
        first = first or written
        if written != first:
            found.append(f"{name}: other tokens than at once")
        for again, train in list(TRAINERS.items())[: len(TRAINERS) if number == 0 else 1]:
            found += compare(decoder, asked, answers, train, f"{name}, {again}")
    return found + repeat(decoder, asked, rollout_of(decoder, asked, ENGINES["at once"]))


def requests(vocabulary: int) -> list[Any]:
    import numpy as np

    from miles.core.protocols import Sampling

    rng = np.random.default_rng(0)
    lengths = (5, 130, 600) if device() == "cuda" else (5, 40)
    prompts = [rng.integers(2, vocabulary, n).astype(np.int32) for n in lengths]
    how = {"max_new_tokens": 24 if device() == "cuda" else 4, "temperature": 0.8, "ignore_eos": True}
    return [(p, Sampling(**how, seed=3 * i + j)) for i, p in enumerate(prompts) for j in range(3)]


def rollout_of(decoder: Any, asked: list[Any], knobs: dict[str, Any]) -> list[Any]:
    from miles.backends.native.config import NativeConfig
    from miles.backends.native.engine import NativeEngine
    from miles.cluster.local import Inline
    from miles.core.types import Version
    from miles.sync.publish import Publication

    given: dict[str, Any] = {"kv_tokens": 16384} | knobs
    config = NativeConfig(**{f"engine_{key}": value for key, value in given.items()})
    like = decoder.embedding.weight
    engine = NativeEngine(decoder.spec, device=like.device, dtype=like.dtype, config=config, run=Inline(), decode=None)
    weights = {name: p.detach() for name, p in decoder.named_parameters()}

    async def everyone() -> list[Any]:
        sync = Publication(weights=lambda: weights, engines=[engine], transport="shared", run=Inline())
        await sync.publish(Version())
        answers = await asyncio.gather(*(engine.generate(tokens, how) for tokens, how in asked))
        await engine.close()
        return answers

    return asyncio.run(everyone())


def samples_of(asked: list[Any], answers: list[Any]) -> list[Any]:
    import numpy as np

    from miles.core.types import Sample

    made: list[Any] = []
    for number, ((prompt, _), answer) in enumerate(zip(asked, answers, strict=True)):
        written = np.concatenate([span.tokens for span in answer.spans])
        logp = np.concatenate([span.logprobs for span in answer.spans])
        mask = np.arange(len(prompt) + len(written)) >= len(prompt)
        made.append(
            Sample(
                prompt_id=len(prompt),
                trajectory=number,
                tokens=np.concatenate((prompt, written)).astype(np.int32),
                mask=mask,
                logprobs=np.concatenate((np.zeros(len(prompt), np.float32), logp)).astype(np.float32),
                advantages=np.where(mask, np.float32(1 - number % 3), np.float32(0)),
                versions=np.where(mask, 0, -1).astype(np.int32),
            )
        )
    return made


def plan_of(asked: list[Any], answers: list[Any], train: dict[str, Any]) -> list[Any]:
    import torch

    from miles.algo.config import AlgoConfig
    from miles.algo.table import NO_PLUGS, mean_of, reducer_of
    from miles.train.config import TrainConfig
    from miles.train.rows import flatten
    from miles.train.steps import micro_batches

    algo = AlgoConfig()
    flat = flatten([[s] for s in samples_of(asked, answers)], reducer_of(algo, NO_PLUGS), mean_of(algo))
    return micro_batches(flat, TrainConfig(**train), device=torch.device(device()), replay=False)


def compare(decoder: Any, asked: list[Any], answers: list[Any], train: dict[str, Any], name: str) -> list[str]:
    from miles.backends.fsdp.model import FsdpModel
    from miles.models.sharing import misfit
    from miles.train.steps import Reader

    if train.get("share_prefix") and misfit(decoder.spec) is not None:
        return []
    plan = plan_of(asked, answers, train)
    found = Reader(temperature=0.8, chunk=None).frozen(FsdpModel(decoder), plan)
    gaps = [(rows.engine_logp_R - logp_R).abs() for rows, logp_R in zip(plan, found, strict=True)]
    wrong, total = sum(int((gap != 0).sum()) for gap in gaps), sum(len(gap) for gap in gaps)
    most = max(float(gap.max()) for gap in gaps)
    return [f"{name}: {wrong} of {total} tokens differ, by up to {most:.2e}"] if wrong else []


def repeat(decoder: Any, asked: list[Any], answers: list[Any]) -> list[str]:
    """Two backward passes, and one whose layers are recomputed: forward alike in all, gradients alike in the first."""
    import torch

    from miles.backends.fsdp.model import FsdpModel
    from miles.train.logits import logprobs

    plan = plan_of(asked, answers, {"max_tokens_per_gpu": 100_000})
    lines: list[str] = []
    grads: list[dict[str, Any]] = []
    for again in (False, False, True):
        decoder.zero_grad(set_to_none=True)
        model, seen = FsdpModel(decoder, gradient_checkpointing=again), []

        def judge(number: int, output: Any, seen: list[Any] = seen) -> Any:
            logp_R, entropy_R = logprobs(output, plan[number].target_R, temperature=0.8)
            seen.append((logp_R.detach() != plan[number].engine_logp_R).sum())
            return -(logp_R * plan[number].advantage_R + 0.01 * entropy_R).sum(), {}

        model.each(plan, judge)
        if wrong := int(sum(seen)):
            lines.append(f"{wrong} tokens differ in training{' with recomputed layers' if again else ''}")
        grads.append({name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None})
    odd = [name for name, grad in grads[0].items() if not torch.equal(grad, grads[1][name])]
    return lines + ([f"gradients do not repeat, as of {odd[0]}"] if odd else [])


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
