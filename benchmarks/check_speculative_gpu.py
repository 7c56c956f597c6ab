"""Speculative decoding on a GPU: tokens, log-probs and routed experts with drafts against those without, to the bit.

    python benchmarks/check_speculative_gpu.py [CASE...] [--device cuda] [--dtype bfloat16]

Small random models (dense, MoE, MLA with MoE; with gated delta, Kimi delta and Mamba-2 layers) under batch-invariant
kernels, with CUDA graphs on and off, and each kind of draft: n-grams, a draft model, MTP layers, an EAGLE-3 head, as
chains and as trees. Each prompt is sampled several times, greedily and with filters, over two epochs, and over a third
after the engine slept, got other weights of the policy and the head, and woke. A line passes if every bit is that of
the engine without drafts, drafts were accepted, and no page leaked. CASE selects lines by part of their name; the exit
code is 1 if one fails.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.runner.model_runner import DRAFT_PREFIX
from miles.cluster.executor import ThreadExecutor
from miles.core.protocols import Completion, SamplingParams
from miles.core.token_fields import ROUTED_EXPERTS
from miles.core.types import Version
from miles.kernels.numerics import Numerics, configure_cublas
from miles.models.base import CausalLM
from miles.models.checkpoint import hf
from miles.models.decoder import Decoder
from miles.models.draft.base import Draft
from miles.models.draft.checkpoint import init_eagle
from miles.models.draft.mtp import MtpDraft
from miles.models.draft.spec import build_eagle_spec, build_mtp_spec
from miles.models.families.registry import find_family
from miles.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LayerSpec,
    MambaSpec,
    MlaSpec,
    MlpSpec,
    MoeSpec,
    RopeSpec,
)
from miles.sync.manifest import build_manifest

Requests = Sequence[tuple[np.ndarray, SamplingParams]]

PAGE_SIZE = 16
NEW_TOKENS = 48
# Few tokens, so that random drafts are right now and then.
VOCAB_SIZE = 24


def build_specs() -> Mapping[str, DecoderSpec]:
    plain = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, rope=RopeSpec(theta=1e4), qk_norm="head")
    latent = MlaSpec(
        num_heads=4,
        query_rank=96,
        kv_rank=64,
        nope_dim=64,
        rope_dim=32,
        value_dim=64,
        rope=RopeSpec(theta=1e4, interleaved=True),
        scale=96**-0.5,
        norm_eps=1e-6,
    )
    dense = DecoderSpec(
        family="qwen3",
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        norm_eps=1e-6,
        layers=4 * (LayerSpec(mixer=plain, ffn=MlpSpec(size=320)),),
        tie_embeddings=True,
        max_positions=1024,
        eos_token_ids=(),
    )
    recurrent = {
        "delta": GatedDeltaNetSpec(key_heads=2, value_heads=4, key_dim=64, value_dim=64, kernel=4, fused=True),
        "kda": KimiDeltaSpec(num_heads=4, head_dim=64, kernel=4),
        "mamba": MambaSpec(num_heads=8, head_dim=32, state_dim=32, groups=2, kernel=4, conv_bias=True, bias=False),
    }
    experts = MoeSpec(num_experts=16, experts_per_token=4, size=96, norm_topk_prob=True)
    return {
        "dense": dense,
        "moe": replace(dense, family="qwen3_moe", layers=4 * (LayerSpec(mixer=plain, ffn=experts),)),
        "mla": replace(dense, family="deepseek_v3", layers=3 * (LayerSpec(mixer=latent, ffn=experts),)),
        **{
            name: replace(dense, layers=(*(2 * (LayerSpec(mixer=mixer, ffn=MlpSpec(size=320)),)), dense.layers[0]))
            for name, mixer in recurrent.items()
        },
    }


def randomize(parameters: Mapping[str, Tensor], seed: int, scale: float) -> None:
    """Fill weights so that the choices of a model are not all alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            if parameter.dim() > 1:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))


def build_policy(spec: DecoderSpec, where: dict[str, Any]) -> Decoder:
    wide = hf.init_random(spec, seed=0, device="cpu", dtype=torch.float32)
    randomize(dict(wide.named_parameters()), 0, 1.5)
    decoder = Decoder(spec, **where)
    decoder.load_state_dict(wide.state_dict())
    return decoder


def build_draft(kind: str, policy: Decoder, where: dict[str, Any]) -> CausalLM | Draft | None:
    """Return the draft of a kind: a policy with some noise, or a random head."""
    if kind == "draft-model":
        draft = Decoder(policy.spec, **where)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in draft.named_parameters():
                weight = policy.get_parameter(name).float().cpu()
                noise = torch.randn(weight.shape, generator=generator) * weight.std(unbiased=False)
                parameter.copy_(weight + 0.05 * noise)
        return draft
    head: Draft | None = None
    if kind == "mtp":
        layout = find_family("mimo").mtp
        assert layout is not None
        head = MtpDraft(build_mtp_spec(policy.spec, layout, 2), **where)
    elif kind == "eagle3":
        head = init_eagle(build_eagle_spec(policy.spec), seed=1, **where)
    if head is not None:
        randomize(dict(head.named_parameters()), 2, 1.5)
    return head


def build_requests() -> Requests:
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCAB_SIZE, length).astype(np.int32) for length in (5, 16, 33, 64, 100)]
    variants: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 0.6, "top_p": 0.8},
        {"temperature": 0.5, "top_k": 4, "min_p": 0.02},
    ]
    return [
        (prompt, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, seed=10 * i + j, **variant))
        for i, prompt in enumerate(prompts)
        for j, variant in enumerate(variants)
    ]


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: a model, its numerics, a draft and the engine's options."""

    model: str
    kind: str
    kv_cache: str
    graphs: bool
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        words = [self.model, self.kind, f"kv-{self.kv_cache}", "graphs" if self.graphs else "eager"]
        return " ".join([*words, *(f"{name.removeprefix('speculative_')}={value}" for name, value in self.options)])


BRANCHES = (("speculative_num_branches", 3), ("speculative_num_draft_tokens", 6))


def list_cases() -> list[Case]:
    kinds = ("ngram", "draft-model", "mtp", "eagle3")
    return [
        *(Case(model, kind, "auto", True) for model in ("dense", "moe", "mla") for kind in kinds),
        *(Case(model, "ngram", "auto", graphs) for model in ("delta", "kda", "mamba") for graphs in (True, False)),
        *(Case(model, kind, "auto", True) for model in ("delta", "mamba") for kind in ("mtp", "eagle3")),
        *(Case(model, kind, "auto", False) for model in ("dense", "moe") for kind in kinds),
        *(Case(model, kind, "auto", True, BRANCHES) for model in ("dense", "moe") for kind in kinds),
        *(Case("moe", kind, "fp8_e4m3", True, options) for kind in kinds for options in ((), BRANCHES)),
    ]


def publish(engine: NativeEngine, version: Version, tensors: Mapping[str, Tensor]) -> None:
    """Send weights to an engine and commit them."""
    engine.begin(build_manifest(version, dict(tensors)))
    for name, tensor in tensors.items():
        engine.receive(name, tensor)
    engine.verify()
    engine.commit()


def run_engine(
    policy: Decoder, requests: Requests, *, graphs: bool, draft: CausalLM | Draft | None = None, **options: Any
) -> tuple[list[list[Completion]], Mapping[str, float], float]:
    """Return the completions of three epochs, what the engine counted, and its seconds."""
    like = policy.embedding.weight
    run = ThreadExecutor("engine")
    config = NativeConfig(
        engine_page_size=PAGE_SIZE, engine_kv_tokens=8192, engine_max_running=160, engine_cuda_graph=graphs, **options
    )
    engine = NativeEngine(
        policy.spec,
        device=like.device,
        dtype=like.dtype,
        config=config,
        run=run,
        decode=None,
        numerics=policy.numerics,
        draft=draft,
    )
    tensors = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    if isinstance(draft, Draft):
        tensors |= {DRAFT_PREFIX + name: parameter.detach() for name, parameter in draft.named_parameters()}
    publish(engine, Version(), tensors)

    async def generate() -> list[list[Completion]]:
        epochs = []
        for epoch in range(3):
            if epoch == 2:
                await engine.sleep()
                publish(engine, Version(number=1), {name: tensor * 0.875 for name, tensor in tensors.items()})
                await engine.wake()
            epochs.append(await asyncio.gather(*(engine.generate(tokens, how) for tokens, how in requests)))
        return epochs

    started = time.perf_counter()
    epochs = asyncio.run(generate())
    seconds = time.perf_counter() - started
    engine.check()
    stats = engine.stats()
    asyncio.run(engine.close())
    run.close()
    return epochs, stats, seconds


def compare(expected: Completion, found: Completion) -> str:
    """Return what differs first between two completions; nothing if all bits are equal."""
    one, other = (np.concatenate([span.tokens for span in each.spans]) for each in (expected, found))
    if len(one) != len(other) or (one != other).any():
        return f"token {int((one[: len(other)] != other[: len(one)]).argmax())}"
    one, other = (
        np.concatenate([span.logprobs for span in each.spans if span.logprobs is not None])
        for each in (expected, found)
    )
    if one.tobytes() != other.tobytes():
        return f"log-prob by {np.abs(one - other).max():.1e}"
    experts = [
        [span.extras[ROUTED_EXPERTS] for span in each.spans if ROUTED_EXPERTS in span.extras]
        for each in (expected, found)
    ]
    if len(experts[0]) != len(experts[1]) or any((a != b).any() for a, b in zip(*experts, strict=True)):
        return "routed experts"
    return ""


class Checker:
    """Runs cases on a device, and keeps what engines without drafts sampled."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._specs = build_specs()
        self._requests = build_requests()
        self._policies: dict[tuple[str, str], Decoder] = {}
        self._expected: dict[tuple[str, str], tuple[list[list[Completion]], float]] = {}

    def check(self, case: Case) -> bool:
        """Run one case and print its line."""
        try:
            problem, figures = self._find_problem(case)
        except Exception as error:
            traceback.print_exc()
            problem, figures = f"{type(error).__name__}: {str(error)[:200]}", ""
        print(f"{'FAIL' if problem else 'PASS'}  {case.name:58} {figures}  {problem}".rstrip(), flush=True)
        return not problem

    def _find_problem(self, case: Case) -> tuple[str, str]:
        numerics = Numerics(batch_invariant=True, kv_cache_dtype="fp8_e4m3" if case.kv_cache == "fp8_e4m3" else "auto")
        where: dict[str, Any] = {"device": self._device, "dtype": self._dtype, "numerics": numerics}
        key = (case.model, case.kv_cache)
        policy = self._policies.get(key)
        if policy is None:
            self._policies[key] = policy = build_policy(self._specs[case.model], where)
            epochs, _, seconds = run_engine(policy, self._requests, graphs=case.graphs)
            self._expected[key] = epochs, seconds
        expected, seconds_without = self._expected[key]
        options = {"speculative_num_draft_tokens": 4, "speculative_adaptive": False} | dict(case.options)
        draft = build_draft(case.kind, policy, where)
        found, stats, seconds = run_engine(
            policy, self._requests, graphs=case.graphs, draft=draft, speculative_algorithm=case.kind, **options
        )
        drafted, accepted = stats["drafted_tokens"], stats["accepted_draft_tokens"]
        figures = (
            f"{accepted:5.0f} of {drafted:5.0f} accepted, {stats['steps']:4.0f} steps, {seconds:5.1f} s "
            f"(without {seconds_without:.1f} s)"
        )
        differences = [
            f"epoch {epoch} request {i}: {difference}"
            for epoch, (without, drafting) in enumerate(zip(expected, found, strict=True))
            for i, (one, other) in enumerate(zip(without, drafting, strict=True))
            if (difference := compare(one, other))
        ]
        if differences:
            return f"{len(differences)} requests differ, first in {differences[0]}", figures
        if case.options == BRANCHES and not stats["accepted_draft_branches"]:
            return "no branch was accepted", figures
        return ("" if accepted else "no draft was accepted"), figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="parts of the names of cases to run; all by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    args = parser.parse_args()
    configure_cublas(Numerics(batch_invariant=True))
    checker = Checker(args.device, getattr(torch, args.dtype))
    cases = [case for case in list_cases() if all(part in case.name for part in args.cases)]
    passed = [checker.check(case) for case in cases]
    print(f"{sum(passed)} of {len(passed)} passed")
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
