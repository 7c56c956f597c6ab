"""Engine and trainer over one small model: log-probs of the engine, and the trainer's of the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import torch
from tests.models.oracle import KINDS
from tests.models.small_families.small import SMALL

from miles.algo.config import AlgoConfig
from miles.algo.registry import NO_ALGO_HOOKS, build_reducer, select_metric_reducer
from miles.backends.fsdp.local_model import LocalModel
from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import InlineExecutor
from miles.core.protocols import Completion, SamplingParams
from miles.core.types import Sample, Version
from miles.kernels.numerics import BATCH_INVARIANT, Numerics
from miles.models.checkpoint import hf
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.spec import DecoderSpec
from miles.sync.manifest import build_manifest
from miles.train.batch_tensors import MicroBatch, flatten_batch
from miles.train.config import TrainConfig
from miles.train.grad_accumulation import LogprobReader, build_micro_batches
from miles.train.logprobs import compute_logprobs

TEMPERATURE = 0.8


def config_of_kind(kind: str, **changes: object) -> dict[str, object]:
    """The config of a small model of this kind."""
    wanted = KINDS[kind]
    config = wanted.config(**(SMALL | {"eos_token_id": None} | wanted.own | changes))
    return config.to_dict() | {"architectures": [wanted.model.__name__]}


def spec_of_kind(kind: str, **changes: object) -> DecoderSpec:
    """What a small model of this kind is."""
    return spec_from_config(config_of_kind(kind, **changes))


def decoder_of(
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
    numerics: Numerics = BATCH_INVARIANT,
) -> Decoder:
    """A random model with weights large enough that its choices are not all alike."""
    decoder = hf.init_random(spec, seed=seed, device="cpu", dtype=torch.float32, numerics=numerics)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (p for p in decoder.parameters() if p.is_floating_point()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.25 * noise)
    kept = {name: p.dtype for name, p in Decoder(spec, device="meta", dtype=dtype).named_parameters()}
    for name, parameter in decoder.named_parameters():
        parameter.data = parameter.data.to(device, kept[name])
    return decoder


def engine_of(decoder: Decoder, **knobs: object) -> NativeEngine:
    """An engine with these weights and numerics."""
    config = NativeConfig(
        **{name if name.startswith("speculative") else f"engine_{name}": value for name, value in knobs.items()}
    )
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
    tensors = dict(decoder.named_parameters())
    engine.begin(build_manifest(Version(number=0), tensors))
    for name, tensor in tensors.items():
        engine.receive(name, tensor)
    engine.verify()
    engine.commit()
    return engine


def prompts(count: int, vocabulary: int, *, low: int = 3, high: int = 30, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, vocabulary, rng.integers(low, high)).astype(np.int32) for _ in range(count)]


def requests_of(vocabulary: int, *, groups: int = 3, each: int = 3, new: int = 7, **lengths: int):
    """Several samples of each of some prompts."""
    asked = prompts(groups, vocabulary, **lengths)
    how = {"max_new_tokens": new, "temperature": TEMPERATURE, "ignore_eos": True}
    return [(p, SamplingParams(**how, seed=each * i + j)) for i, p in enumerate(asked) for j in range(each)]


def ask(engine: NativeEngine, requests: Sequence[tuple[np.ndarray, SamplingParams]]) -> list[Completion]:
    """All requests at once, and their answers."""

    async def everyone() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(tokens, how) for tokens, how in requests))

    return asyncio.run(everyone())


def samples_of(requests: Sequence[tuple[np.ndarray, SamplingParams]], answers: Sequence[Completion]) -> list[Sample]:
    """What was asked and answered, as the trainer gets it."""
    made: list[Sample] = []
    for number, ((prompt, _), answer) in enumerate(zip(requests, answers, strict=True)):
        written = np.concatenate([span.tokens for span in answer.spans])
        logp = np.concatenate([span.logprobs for span in answer.spans])
        mask = np.arange(len(prompt) + len(written)) >= len(prompt)
        zeros = np.zeros(len(prompt), np.float32)
        made.append(
            Sample(
                prompt_id=int(prompt.sum()),
                trajectory=number,
                tokens=np.concatenate((prompt, written)).astype(np.int32),
                mask=mask,
                logprobs=np.concatenate((zeros, logp)).astype(np.float32),
                advantages=np.where(mask, np.float32(0.5 - number % 3), np.float32(0)),
                versions=np.where(mask, 0, -1).astype(np.int32),
                samples_per_trajectory=1,
                extras={},
            )
        )
    return made


def plan_of(samples: Sequence[Sample], device: torch.device | str = "cpu", **train: object) -> list[MicroBatch]:
    """The samples as micro-batches."""
    algo = AlgoConfig()
    flat = flatten_batch([[s] for s in samples], build_reducer(algo, NO_ALGO_HOOKS), select_metric_reducer(algo))
    return build_micro_batches(flat, TrainConfig(**train), device=torch.device(device), replay=False)


def gap_of(plan: Sequence[MicroBatch], found: Sequence[torch.Tensor]) -> float:
    """The largest difference between what engine and trainer say of a token."""
    pairs = zip(plan, found, strict=True)
    return max(float((rows.engine_logp_R.double() - logp_R.double()).abs().max()) for rows, logp_R in pairs)


def read(model: LocalModel, plan: Sequence[MicroBatch], *, chunk: int | None = None) -> list[torch.Tensor]:
    """The trainer's log-probs, without a gradient."""
    return LogprobReader(temperature=TEMPERATURE, chunk=chunk).compute_frozen(model, plan)


def trained(model: LocalModel, plan: Sequence[MicroBatch]) -> list[torch.Tensor]:
    """The trainer's log-probs with a gradient, which goes to the model's parameters."""
    found: list[torch.Tensor] = []

    def judge(number: int, output):
        logp_R, entropy_R = compute_logprobs(output, plan[number].target_R, temperature=TEMPERATURE)
        found.append(logp_R.detach())
        return -(logp_R * plan[number].advantage_R + 0.01 * entropy_R).sum(), {}

    model.forward_backward(plan, judge)
    return found
