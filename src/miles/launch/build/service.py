"""Build the training service: one base model in memory, which a trainer of adapters and the native engine share."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.engine.lora import LoraShape
from miles.backends.native.engine.request import GenerateRequest
from miles.backends.native.runner.lora import list_served_modules
from miles.backends.service.sampling import EngineSample, PromptScores, SampleQuery
from miles.backends.service.service import TrainingService
from miles.backends.service.tenants import DEFAULT, Quota, Tenant, TenantKeys, digest_key, read_tenants
from miles.backends.service.trainer import MultiLoraTrainer
from miles.cluster import platform
from miles.cluster.executor import Executor, InlineExecutor
from miles.core.types import Version
from miles.launch.config import ServeRoot
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.decoder import Decoder
from miles.models.lora.factors import read_factors
from miles.models.lora.targets import EXPERTS, LM_HEAD
from miles.models.resolve import resolve_spec
from miles.models.tokenizer import load_tokenizer
from miles.sync.publish import Publication

__all__ = ["EngineSampler", "build_service", "build_tenants"]

# Adapters that the engine keeps in host memory; others are read from their folders again.
_MAX_LOADED = 64


class EngineSampler:
    """Samples on the native engine, with adapters beside the weights."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine

    @property
    def max_tokens(self) -> int:
        """The most tokens of prompt and response together."""
        return min(self._engine.spec.max_positions, self._engine.kv_tokens)

    @property
    def vocab_size(self) -> int:
        return self._engine.spec.vocab_size

    async def sample(self, query: SampleQuery) -> EngineSample:
        """Sample one sequence."""
        output = self._engine.submit(
            GenerateRequest(
                tokens=np.array(query.tokens, np.int32),
                sampling=query.sampling,
                logprob_start_len=query.score_from,
                top_logprobs_num=query.top_k,
                token_ids_logprob=query.token_ids,
                lora=query.adapter,
                return_routed_experts=False,
            )
        )
        completion = await output.completion()
        scores, req = output.prompt_logprobs, output.req
        prompt = None
        if scores is not None:
            prompt = PromptScores(
                first=scores.first,
                logprobs=list(scores.logprobs),
                top=list(scores.top_logprobs),
                named=list(scores.token_ids_logprobs),
            )
        return EngineSample(
            tokens=[int(token) for span in completion.spans for token in span.tokens],
            logprobs=list(req.logprobs),
            stopped=completion.finish_reason == "stop",
            top=list(req.top_logprobs),
            prompt=prompt,
            cached_tokens=completion.cached_tokens,
        )

    def has_adapter(self, name: str) -> bool:
        """Return whether an adapter of this name can be sampled from."""
        return self._engine.lora is not None and name in self._engine.lora.adapters

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter from a folder, which is read again whenever host memory was short."""
        factors = await asyncio.to_thread(read_factors, folder, self._engine.spec)
        await asyncio.to_thread(lambda: self._engine.load_lora(name, factors, folder=folder))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        self._engine.unload_lora(name)


def build_tenants(config: ServeRoot, key: str | None) -> TenantKeys:
    """The tenants of the file, or one tenant, with the server's key or with any."""
    service = config.service
    quota = Quota(
        max_adapters=service.service_max_adapters,
        max_queued=service.service_max_queued,
        max_stored_bytes=int(service.service_max_stored_gib * (1 << 30)),
    )
    if service.service_tenants is not None:
        return read_tenants(Path(service.service_tenants), quota)
    return TenantKeys([Tenant(name=DEFAULT, key_digest=None if key is None else digest_key(key), quota=quota)])


async def build_service(
    config: ServeRoot, tenants: TenantKeys, run_engine: Executor, run_trainer: Executor
) -> tuple[TrainingService, NativeEngine]:
    """Load the base model once, and build trainer, engine and service on it."""
    assert config.models.hf_checkpoint is not None
    folder, service = Path(config.models.hf_checkpoint), config.service
    spec, numerics = resolve_spec(folder, config.models.model_impl), config.models.numerics
    device = platform.detect_platform(config.serve.device, threads=config.serve.num_threads).device
    dtype = hf.choose_dtype(config.models.dtype, read_config(folder), device)
    model = hf.load_model(
        folder,
        spec,
        device=device,
        dtype=dtype,
        numerics=numerics,
        trust_remote_code=config.models.trust_remote_code,
    )
    assert isinstance(model, Decoder), "the training service needs the native model"
    experts = (EXPERTS,) if model.spec.moe is not None else ()
    words = config.lora_serving.lora_target_modules or ("all", *experts, LM_HEAD)
    modules = list_served_modules(model.spec, words, numerics)
    trainer = MultiLoraTrainer(
        model, modules, device=device, gradient_checkpointing=service.service_gradient_checkpointing
    )
    shape = LoraShape(
        num_slots=config.lora_serving.max_loras_per_batch,
        max_rank=service.service_max_rank,
        modules=modules,
        max_loaded=config.lora_serving.max_loaded_loras or _MAX_LOADED,
    )
    engine = NativeEngine(
        model.spec,
        device=device,
        dtype=dtype,
        config=config.native,
        run=run_engine,
        decode=load_tokenizer(folder, config.models.trust_remote_code).decode,
        numerics=numerics,
        lora=shape,
    )
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    await Publication(weights=lambda: weights, engines=[engine], transport="shared", run=InlineExecutor()).publish(
        Version()
    )
    name = config.serve.served_model_name or str(folder.resolve())
    service_built = TrainingService(
        trainer,
        EngineSampler(engine),
        tenants,
        folder=Path(service.service_directory),
        base_model=name,
        tokenizer_id=name if config.serve.served_model_name else str(folder.resolve()),
        config=service,
        run=run_trainer,
    )
    return service_built, engine
