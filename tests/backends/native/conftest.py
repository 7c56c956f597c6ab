"""Small real engines for the tests of the native backend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import InlineExecutor
from miles.core.protocols import Completion, SamplingParams
from miles.core.types import Version
from miles.models.checkpoint import hf
from miles.models.decoder import Decoder
from miles.models.draft.base import Draft
from miles.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    MambaSpec,
    MlpSpec,
    MoeSpec,
    RopeSpec,
)
from miles.sync.manifest import build_manifest

ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeSpec(theta=1e4), qk_norm="head")
DELTA = GatedDeltaNetSpec(key_heads=2, value_heads=4, key_dim=4, value_dim=6, kernel=4, fused=True)
MAMBA = MambaSpec(num_heads=4, head_dim=4, state_dim=6, groups=2, kernel=4, conv_bias=True, bias=False)
EXPERTS = MoeSpec(num_experts=6, experts_per_token=2, size=16, norm_topk_prob=True)

ALONE: dict[tuple[object, ...], Completion] = {}


class Tiny:
    """A tiny model, engines over it, and helpers of the tests. Engines have ``depth`` steps in flight."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth

    spec = DecoderSpec(
        family="qwen3",
        vocab_size=61,
        hidden_size=32,
        norm_eps=1e-6,
        layers=2 * (LayerSpec(mixer=ATTENTION, ffn=MlpSpec(size=48)),),
        tie_embeddings=True,
        max_positions=256,
        eos_token_ids=(1,),
    )
    moe_spec = replace(
        spec,
        family="qwen3_moe",
        layers=2 * (LayerSpec(mixer=ATTENTION, ffn=EXPERTS),),
    )

    hybrid_spec = replace(
        spec,
        layers=tuple(
            LayerSpec(mixer=mixer, ffn=None if mixer is MAMBA else MlpSpec(size=48))
            for mixer in (DELTA, replace(ATTENTION, window=9), MAMBA, ATTENTION)
        ),
    )

    def decoder(self, seed: int = 0, spec: DecoderSpec | None = None, scale: float = 12.0) -> Decoder:
        """A random decoder with weights large enough that its choices are not all alike."""
        decoder = hf.init_random(spec or self.spec, seed=seed, device="cpu", dtype=torch.float32)
        with torch.no_grad():
            for parameter in decoder.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(scale)
        return decoder

    def publish(self, engine: NativeEngine, decoder: Decoder, number: int = 0, head: Draft | None = None) -> None:
        tensors = dict(decoder.named_parameters())
        if head is not None:
            tensors |= {f"draft.{name}": parameter for name, parameter in head.named_parameters()}
        engine.begin(build_manifest(Version(number=number), tensors))
        for name, tensor in tensors.items():
            engine.receive(name, tensor)
        engine.verify()
        engine.commit()

    def engine(
        self,
        decoder: Decoder | None = None,
        *,
        decode=None,
        run=None,
        clock=None,
        draft=None,
        head=None,
        lora=None,
        **options,
    ) -> NativeEngine:
        """An engine with this decoder's weights and numerics, on its device and in its dtype."""
        decoder = decoder or self.decoder()
        config = NativeConfig(
            **{name if name.startswith("speculative_") else f"engine_{name}": value for name, value in options.items()}
        )
        like = decoder.embedding.weight
        engine = NativeEngine(
            decoder.spec,
            device=like.device,
            dtype=like.dtype,
            config=config,
            run=run or InlineExecutor(),
            decode=decode,
            clock=clock or time.perf_counter,
            numerics=decoder.numerics,
            draft=draft,
            lora=lora,
            _depth=self.depth,
        )
        self.publish(engine, decoder, head=head)
        return engine

    def prompts(self, count: int, *, seed: int = 0, low: int = 3, high: int = 40) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [rng.integers(2, self.spec.vocab_size, rng.integers(low, high)).astype(np.int32) for _ in range(count)]

    def generate_all(
        self, engine: NativeEngine, requests: Sequence[tuple[np.ndarray, SamplingParams]], *, checked: bool = True
    ) -> list[Completion]:
        """Submit all requests at once and return their completions."""

        async def everyone() -> list[Completion]:
            return await asyncio.gather(*(engine.generate(tokens, how) for tokens, how in requests))

        answers = asyncio.run(everyone())
        if checked:
            self.check(engine)
        return answers

    def generate_staggered(
        self, engine: NativeEngine, requests: Sequence[tuple[np.ndarray, SamplingParams]], first: int = 2
    ) -> list[Completion]:
        """Submit the ``first`` requests at once and the others one by one, while these decode."""

        async def everyone() -> list[Completion]:
            asked = [asyncio.create_task(engine.generate(*each)) for each in requests[:first]]
            for each in requests[first:]:
                await asyncio.sleep(0)
                asked.append(asyncio.create_task(engine.generate(*each)))
            return await asyncio.gather(*asked)

        answers = asyncio.run(everyone())
        self.check(engine)
        return answers

    def mixed(self, count: int, *, new: int = 30) -> list[tuple[np.ndarray, SamplingParams]]:
        """Requests with various sampling parameters."""
        variants = [
            {},
            {"temperature": 0.7},
            {"temperature": 0.0},
            {"top_k": 5},
            {"top_p": 0.8, "temperature": 1.3},
            {"min_p": 0.05},
        ]
        return [
            (prompt, SamplingParams(max_new_tokens=new, seed=100 + i, **variants[i % len(variants)]))
            for i, prompt in enumerate(self.prompts(count))
        ]

    def alone(self, request: tuple[np.ndarray, SamplingParams], **options) -> Completion:
        """The completion of an engine that runs only this request, without overlap."""
        prompt, how = request
        key = (prompt.tobytes(), how, *sorted(options.items()))
        if key not in ALONE:
            ALONE[key] = self.generate_all(Tiny().engine(**options), [request])[0]
        return ALONE[key]

    def same(self, one: Completion, other: Completion) -> None:
        assert self.tokens(one) == self.tokens(other)
        assert (one.status, one.finish_reason) == (other.status, other.finish_reason)
        np.testing.assert_allclose(self.logprobs(one), self.logprobs(other), atol=5e-5)

    def check(self, engine: NativeEngine) -> None:
        """Nothing runs, nothing is in flight, and no page leaked."""
        engine.check()
        assert not engine._outputs
        assert not engine._inflight.steps
        assert not list(engine._scheduler.iter_reqs())

    def tokens(self, completion: Completion) -> list[int]:
        return [int(token) for span in completion.spans for token in span.tokens]

    def logprobs(self, completion: Completion) -> np.ndarray:
        return np.concatenate([span.logprobs for span in completion.spans if span.logprobs is not None])


@pytest.fixture(params=[0, 1], ids=["at once", "overlapped"])
def tiny(request: pytest.FixtureRequest) -> Tiny:
    """Engines without and with overlap scheduling."""
    return Tiny(request.param)
