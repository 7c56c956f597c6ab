"""Bitwise comparison of small models of every mechanism, sampled and scored in many ways, with batch-invariant kernels.

The part ``matrix`` of ``bench_batch_invariant.py``, which runs every model in its own process.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

WHERE = "cuda"


def device() -> str:
    """Where the matrix is computed."""
    return WHERE


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

    from miles.kernels.numerics import BATCH_INVARIANT
    from miles.models.decoder import Decoder

    torch.manual_seed(0)
    decoder = Decoder(spec, device=device(), dtype=dtype, numerics=BATCH_INVARIANT)
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


def matrix(name: str) -> None:
    """One of the models in every way, and what differs."""
    import torch

    from miles.kernels.numerics import BATCH_INVARIANT, configure_cublas

    global WHERE
    configure_cublas(BATCH_INVARIANT)
    where, _, name = name.rpartition(":")
    WHERE = where or WHERE
    for dtype in (torch.bfloat16, torch.float32):
        began = time.perf_counter()
        try:
            lines = check(models()[name], dtype)
        except Exception as error:  # the others are still to be told of
            lines = [f"FAILED {type(error).__name__}: {str(error)[:300]}"]
        spent = time.perf_counter() - began
        reported = "; ".join(lines) if lines else "equal to the last bit"
        print(f"  {WHERE:4s} {name:14s} {str(dtype)[6:]:8s} {reported} ({spent:.0f} s)", flush=True)


def check(spec: Any, dtype: Any) -> list[str]:
    """What differs between an engine and a trainer, each in several manners; empty where nothing does."""
    decoder = fresh(spec, dtype)
    asked = requests(spec.vocab_size)
    found: list[str] = []
    first: list[Any] | None = None
    for number, (name, knobs) in enumerate(ENGINES.items()):
        answers = run_rollout(decoder, asked, knobs)
        written = [[list(span.tokens) for span in answer.spans] for answer in answers]
        first = first or written
        if written != first:
            found.append(f"{name}: other tokens than at once")
        for again, train in list(TRAINERS.items())[: len(TRAINERS) if number == 0 else 1]:
            found += compare(decoder, asked, answers, train, f"{name}, {again}")
    return found + repeat(decoder, asked, run_rollout(decoder, asked, ENGINES["at once"]))


def requests(vocabulary: int) -> list[Any]:
    import numpy as np

    from miles.core.protocols import SamplingParams

    rng = np.random.default_rng(0)
    lengths = (5, 130, 600) if device() == "cuda" else (5, 40)
    prompts = [rng.integers(2, vocabulary, n).astype(np.int32) for n in lengths]
    how = {"max_new_tokens": 24 if device() == "cuda" else 4, "temperature": 0.8, "ignore_eos": True}
    return [(p, SamplingParams(**how, seed=3 * i + j)) for i, p in enumerate(prompts) for j in range(3)]


def run_rollout(decoder: Any, asked: list[Any], knobs: dict[str, Any]) -> list[Any]:
    from miles.backends.native.config import NativeConfig
    from miles.backends.native.engine.engine import NativeEngine
    from miles.cluster.executor import InlineExecutor
    from miles.core.types import Version
    from miles.sync.publish import Publication

    given: dict[str, Any] = {"kv_tokens": 16384} | knobs
    config = NativeConfig(**{f"engine_{key}": value for key, value in given.items()})
    like = decoder.embedding.weight
    engine = NativeEngine(
        decoder.spec,
        device=like.device,
        dtype=like.dtype,
        config=config,
        run=InlineExecutor(),
        decode=None,
        numerics=decoder.numerics,
    )
    weights = {name: p.detach() for name, p in decoder.named_parameters()}

    async def everyone() -> list[Any]:
        sync = Publication(weights=lambda: weights, engines=[engine], transport="shared", run=InlineExecutor())
        await sync.publish(Version())
        answers = await asyncio.gather(*(engine.generate(tokens, how) for tokens, how in asked))
        await engine.close()
        return answers

    return asyncio.run(everyone())


def build_samples(asked: list[Any], answers: list[Any]) -> list[Any]:
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


def build_micro_batch_plan(asked: list[Any], answers: list[Any], train: dict[str, Any]) -> list[Any]:
    import torch

    from miles.algo.config import AlgoConfig
    from miles.algo.registry import NO_ALGO_HOOKS, build_reducer, select_metric_reducer
    from miles.train.batch_tensors import flatten_batch
    from miles.train.config import TrainConfig
    from miles.train.grad_accumulation import build_micro_batches

    algo = AlgoConfig()
    flat = flatten_batch(
        [[s] for s in build_samples(asked, answers)], build_reducer(algo, NO_ALGO_HOOKS), select_metric_reducer(algo)
    )
    return build_micro_batches(flat, TrainConfig(**train), device=torch.device(device()), replay=False)


def compare(decoder: Any, asked: list[Any], answers: list[Any], train: dict[str, Any], name: str) -> list[str]:
    from miles.backends.fsdp.local_model import LocalModel
    from miles.models.capabilities import check_prefix_sharing
    from miles.train.grad_accumulation import LogprobReader

    if train.get("share_prefix") and check_prefix_sharing(decoder.spec) is not None:
        return []
    plan = build_micro_batch_plan(asked, answers, train)
    found = LogprobReader(temperature=0.8, chunk=None).compute_frozen(LocalModel(decoder), plan)
    gaps = [(rows.engine_logp_R - logp_R).abs() for rows, logp_R in zip(plan, found, strict=True)]
    wrong, total = sum(int((gap != 0).sum()) for gap in gaps), sum(len(gap) for gap in gaps)
    most = max(float(gap.max()) for gap in gaps)
    return [f"{name}: {wrong} of {total} tokens differ, by up to {most:.2e}"] if wrong else []


def repeat(decoder: Any, asked: list[Any], answers: list[Any]) -> list[str]:
    """Two backward passes, and one whose layers are recomputed: forward alike in all, gradients alike in the first."""
    import torch

    from miles.backends.fsdp.local_model import LocalModel
    from miles.train.logprobs import compute_logprobs

    plan = build_micro_batch_plan(asked, answers, {"max_tokens_per_gpu": 100_000})
    lines: list[str] = []
    grads: list[dict[str, Any]] = []
    for again in (False, False, True):
        decoder.zero_grad(set_to_none=True)
        model, seen = LocalModel(decoder, gradient_checkpointing=again), []

        def judge(number: int, output: Any, seen: list[Any] = seen) -> Any:
            logp_R, entropy_R = compute_logprobs(output, plan[number].target_R, temperature=0.8)
            seen.append((logp_R.detach() != plan[number].engine_logp_R).sum())
            return -(logp_R * plan[number].advantage_R + 0.01 * entropy_R).sum(), {}

        model.forward_backward(plan, judge)
        if wrong := int(sum(seen)):
            lines.append(f"{wrong} tokens differ in training{' with recomputed layers' if again else ''}")
        grads.append({name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None})
    odd = [name for name, grad in grads[0].items() if not torch.equal(grad, grads[1][name])]
    return lines + ([f"gradients do not repeat, as of {odd[0]}"] if odd else [])
