"""``miles serve``: serve a checkpoint over HTTP, on the native engine or as a reward model, until a signal.

What a server needs is imported when one is started.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from miles.backends.native.server.config import ServeConfig
from miles.cluster import stack_dump
from miles.cluster.hub_client import name_from_folder
from miles.config.cli import parse, split_argv
from miles.core.errors import UsageError
from miles.kernels.numerics import configure_cublas
from miles.launch.config import ServeRoot
from miles.launch.hub.resolve import NameResolver
from miles.launch.plan.drafts import choose_served_speculation
from miles.launch.plan.lora import build_lora, get_adapter_folder
from miles.launch.rules.paths import find_checkpoint_problem, find_newest_checkpoint, read_spec_or_none
from miles.launch.rules.precision import find_quantization_problems
from miles.launch.runtime.http_service import API_KEY, find_key_problem, read_key, select_event_loop
from miles.models.capabilities import check_batch_invariance
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.config import ModelConfig
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.indexer_layout import build_indexer_layout
from miles.models.lora.layout import adapter_spec

if TYPE_CHECKING:
    from miles.backends.fsdp.reward_inference import BatchedScorer
    from miles.backends.fsdp.reward_server import RewardServer
    from miles.backends.native.engine.engine import NativeEngine
    from miles.backends.native.server.app import EngineServer
    from miles.backends.service.http_server import ServiceServer
    from miles.cluster.executor import Executor
    from miles.models.lora.targets import LoraSpec
    from miles.models.spec import DecoderSpec
    from miles.models.tokenizer import HfTokenizer
    from miles.observe.view import ProgressStage, View

_PACKAGES = {"aiohttp": "aiohttp", "prometheus_client": "prometheus-client"}
# Prompt lengths that compile all prefill kernels: a long one, and one that is not a round number.
_WARMUP_LENGTHS = (2048, 37)


def serve(config: ServeRoot, environment: Mapping[str, str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    environment = os.environ if environment is None else environment
    key = read_key("--api-key-file", config.serve.api_key_file, environment.get(API_KEY))
    unauthenticated = config.serve.allow_unauthenticated or config.service.has_keys
    if problem := find_key_problem(config.serve.host, key, allow_unauthenticated=unauthenticated):
        raise UsageError(problem)
    stack_dump.register_process(f"server {config.serve.port}")
    configure_cublas(config.models.numerics)
    with asyncio.Runner(loop_factory=select_event_loop()) as runner:
        runner.run(_serve_training(config, key) if config.service.train else _serve(config, key))
    return 0


def read_serve_config(argv: Sequence[str]) -> ServeRoot:
    """The config of the server; raises UsageError with every problem."""
    words, _ = split_argv(argv)
    flags, problems = list(argv[len(words) :]), list[str]()
    if len(words) > 1:
        problems.append(f"miles serve takes one model, but was given {len(words)}: {' '.join(words)}.")
    if words:
        flags = ["--hf-checkpoint", str(find_newest_checkpoint(Path(words[0])) or words[0]), *flags]
    result = parse(ServeRoot, flags)
    problems += result.problems
    names = NameResolver()
    if result.config is not None:
        result = replace(result, config=_name_served_model(names.resolve(result.config)))
        assert result.config is not None
        problems += names.problems or [*_check_model(result.config.models), *_check_adapters(result.config)]
        problems += [*_check_lora_serving(result.config), *_check_training(result.config)]
        problems += _check_packages()
    if problems or result.config is None:
        raise UsageError(problems)
    return result.config


def _name_served_model(config: ServeRoot) -> ServeRoot:
    """The config with the model's name on the hub as its name in the API, where it has no other."""
    name = name_from_folder(config.models.hf_checkpoint or "")
    if name is None or config.serve.served_model_name is not None:
        return config
    return replace(config, serve=replace(config.serve, served_model_name=name.repo))


def _check_model(config: ModelConfig) -> Iterator[str]:
    if config.hf_checkpoint is None:
        yield "The model is missing: name the folder of a checkpoint or of a run, as in miles serve MODEL."
    elif problem := find_checkpoint_problem(Path(config.hf_checkpoint)):
        yield f"{config.hf_checkpoint} {problem}"
    spec = read_spec_or_none(config.hf_checkpoint, config.model_impl) if config.parity == "exact" else None
    if spec is not None and (problem := check_batch_invariance(spec)) is not None:
        yield f"--parity exact does not work with this model: {problem}; remove it."
    if config.rollout_format is not None:
        yield from find_quantization_problems(config)
    if config.kv_cache_dtype != "auto" and config.model_impl == "transformers":
        kept = f"--kv-cache-dtype {config.kv_cache_dtype}"
        yield f"{kept} needs the native model; remove it, or --model-impl transformers."


def _check_adapters(config: ServeRoot) -> Iterator[str]:
    """Adapters are applied beside quantized weights, or beside others if they are not to be merged."""
    models, lora = config.models, config.lora
    if not lora.is_enabled:
        return
    if models.rollout_format is None and lora.lora_merge:
        yield (
            "--lora-rank and --lora-adapter-path are applied beside the weights here; add --no-lora-merge, or serve a "
            "checkpoint with the adapter merged into its weights."
        )
        return
    spec = read_spec_or_none(models.hf_checkpoint, models.model_impl)
    if spec is None or isinstance(spec, HfAdapterSpec):
        return
    try:
        build_lora(lora, spec)
    except UsageError as error:
        yield from error.problems


def _check_lora_serving(config: ServeRoot) -> Iterator[str]:
    """Adapters that requests choose are applied beside weights without an adapter of their own."""
    lora = config.lora_serving
    if not lora.is_enabled:
        return
    if config.lora.is_enabled:
        yield "--enable-lora serves adapters by name; load that of --lora-adapter-path with --lora-paths instead."
    if config.models.model_impl == "transformers":
        yield "--enable-lora needs the native model; remove it, or --model-impl transformers."
    if lora.max_loaded_loras is not None and lora.max_loaded_loras < lora.max_loras_per_batch:
        yield (
            f"--max-loaded-loras {lora.max_loaded_loras} is less than --max-loras-per-batch "
            f"{lora.max_loras_per_batch}; raise it."
        )


def _check_training(config: ServeRoot) -> Iterator[str]:
    """The training service applies adapters beside weights in their own precision, on one device."""
    models = config.models
    if not config.service.train:
        if config.service.service_tenants is not None:
            yield "--service-tenants names the tenants of the training service; add --train."
        return
    refused = {
        "--model-impl transformers": models.model_impl == "transformers",
        "--rollout-precision": models.rollout_format is not None,
        "--enable-lora, which is implied": config.lora_serving.is_enabled,
        "--lora-rank and --lora-adapter-path": config.lora.is_enabled,
        "--tensor-parallel-size": config.serve.tensor_parallel_size > 1,
        "--skip-tokenizer-init": config.serve.skip_tokenizer_init,
        "--speculative-algorithm": config.native.drafts,
    }
    for flag, is_given in refused.items():
        if is_given:
            yield f"--train does not go together with {flag}; remove it."


def _check_packages() -> Iterator[str]:
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        yield f"miles serve needs {' and '.join(missing)}: pip install 'miles-rl[serve]'."


async def _serve(config: ServeRoot, key: str | None) -> None:
    from miles.cluster.executor import ThreadExecutor
    from miles.launch.runtime.gc_tuning import reduce_gc

    run = ThreadExecutor("engine")
    started = time.perf_counter()
    assert config.models.hf_checkpoint is not None
    native: NativeEngine | None = None
    if is_reward_model(config.models.hf_checkpoint):
        server, engine = await build_reward_server(config, key, run)
        name = server.served_model_name
    else:
        server, native = await build_server(config, key, run)
        engine, name = native, server.model_info.served_model_name
    try:
        speculation = choose_served_speculation(config)
        if native is not None and speculation.reason and speculation.algorithm != "none":
            print(speculation.describe(), flush=True)
        if native is not None and config.serve.server_warmup:
            await _warm_up_with_progress(native, config.serve)
        port = await _listen(server, config.serve)
        host = f"[{config.serve.host}]" if ":" in config.serve.host else config.serve.host
        seconds = time.perf_counter() - started
        print(f"Serving {name} at http://{host}:{port} (ready in {seconds:.1f} s).", flush=True)
        with reduce_gc():
            await _wait_for_signal()
        print(f"Finishing requests in flight, for up to {config.serve.drain_seconds:g} s.", file=sys.stderr, flush=True)
        await server.drain(config.serve.drain_seconds)
    finally:
        await server.stop()
        await engine.close()
        run.close()


async def _serve_training(config: ServeRoot, key: str | None) -> None:
    """Serve the Tinker API: training and sampling of adapters on one base model."""
    from miles.backends.service.http_server import ServiceServer
    from miles.cluster.executor import ThreadExecutor
    from miles.launch.build.service import build_service, build_tenants
    from miles.launch.runtime.gc_tuning import reduce_gc

    started = time.perf_counter()
    run_engine, run_trainer = ThreadExecutor("engine"), ThreadExecutor("trainer")
    service, engine = await build_service(config, build_tenants(config, key), run_engine, run_trainer)
    server = ServiceServer(service, max_body_mib=config.serve.max_body_mib)
    try:
        if config.serve.server_warmup:
            await _warm_up_with_progress(engine, config.serve)
        await service.start()
        port = await _listen(server, config.serve)
        host = f"[{config.serve.host}]" if ":" in config.serve.host else config.serve.host
        seconds = time.perf_counter() - started
        print(f"Training on {service.base_model} at http://{host}:{port} (ready in {seconds:.1f} s).", flush=True)
        with reduce_gc():
            await _wait_for_signal()
        print("Saving adapters; requests that wait are computed after the next start.", file=sys.stderr, flush=True)
    finally:
        await server.stop()
        await service.stop()
        await engine.close()
        run_engine.close()
        run_trainer.close()


async def _warm_up_with_progress(engine: NativeEngine, config: ServeConfig) -> None:
    from miles.cluster import platform
    from miles.observe.factory import build_view

    if platform.detect_platform(config.device).kind == "cpu":
        return
    view = build_view("auto", stream=sys.stderr)
    try:
        await warm_up(engine, view)
    finally:
        view.close()


async def warm_up(engine: NativeEngine, view: View) -> None:
    """Capture the CUDA graphs and compile the kernels of prefill, so that no request waits; nothing on a CPU."""
    import numpy as np

    from miles.core.protocols import SamplingParams

    stages: list[ProgressStage] = []

    def show_progress(done: int, total: int) -> None:
        if done == 1:
            stages.append(view.stage("Capturing CUDA graphs", total))
        stages[0]()

    await engine.warm_up(show_progress)
    if not stages:
        return
    limit = min(engine.kv_tokens, engine.spec.max_positions) - 1
    with view.stage("Prefilling prompts", len(_WARMUP_LENGTHS)) as advance:
        for token, length in enumerate(_WARMUP_LENGTHS):  # different tokens, so that no prefix is cached
            prompt = np.full(min(length, limit), token, np.int32)
            await engine.generate(prompt, SamplingParams(max_new_tokens=1, ignore_eos=True))
            advance()
    await engine.flush_cache()


async def _listen(server: EngineServer | RewardServer | ServiceServer, config: ServeConfig) -> int:
    try:
        return await server.start(config.host, config.port)
    except OSError as error:
        raise UsageError(
            f"--host {config.host} --port {config.port} is not available: {error.strerror}; choose another."
        ) from None


async def build_server(config: ServeRoot, key: str | None, run: Executor) -> tuple[EngineServer, NativeEngine]:
    """The engine with the checkpoint's weights as version 0, and its server."""
    from miles.backends.native.engine.engine import NativeEngine
    from miles.backends.native.server.app import EngineServer
    from miles.backends.native.server.model_info import load_model_info
    from miles.cluster import platform
    from miles.cluster.executor import InlineExecutor
    from miles.core.types import Version
    from miles.launch.build.draft_model import load_engine_draft, name_head_weights
    from miles.launch.build.engines import build_lora_serving, load_adapters
    from miles.models.checkpoint import hf
    from miles.models.lora.adapters import load_engine_factors
    from miles.models.resolve import resolve_spec
    from miles.sync.publish import Publication

    assert config.models.hf_checkpoint is not None
    folder = Path(config.models.hf_checkpoint)
    raw, trusted = read_config(folder), config.models.trust_remote_code
    spec = resolve_spec(folder, config.models.model_impl)
    tokenizer = None if config.serve.skip_tokenizer_init else _load_processor(config, folder)
    lora_serving = build_lora_serving(config.lora_serving, spec, config.models.numerics)
    device = platform.detect_platform(config.serve.device, threads=config.serve.num_threads).device
    dtype = hf.choose_dtype(config.models.dtype, raw, device)
    devices = platform.consecutive_devices(device, config.serve.tensor_parallel_size)
    lora = build_lora(config.lora, spec)
    spec = _prepare_spec(config, spec, lora, len(devices))
    load_device = device if len(devices) == 1 else "cpu"  # the whole model need not fit on one GPU
    numerics = config.models.numerics
    model = hf.load_model(folder, spec, device=load_device, dtype=dtype, numerics=numerics, trust_remote_code=trusted)
    engine = NativeEngine(
        model.spec,
        device=device,
        dtype=dtype,
        config=choose_served_speculation(config).apply(config.native),
        run=run,
        decode=None if tokenizer is None else tokenizer.decode,
        numerics=numerics,
        model=hf.build_engine_model(model),
        devices=devices,
        draft=load_engine_draft(config.native, folder, model.spec, device=device, dtype=dtype, numerics=numerics),
        lora=None if lora_serving is None else lora_serving.shape,
        return_indexer_topk=config.native.engine_return_indexer_topk,
    )
    load_adapters(engine, lora_serving)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights |= {} if engine.draft_head is None else name_head_weights(engine.draft_head)
    if lora is not None and (adapter := get_adapter_folder(config.lora)) is not None:
        weights |= load_engine_factors(adapter, lora, device=load_device, dtype=dtype)
    await Publication(weights=lambda: weights, engines=[engine], transport="shared", run=InlineExecutor()).publish(
        Version()
    )
    model_info = load_model_info(
        folder,
        raw,
        config.serve.served_model_name,
        created=int(time.time()),
        use_model_defaults=config.serve.sampling_defaults == "model",
    )
    return EngineServer(engine, tokenizer, config=config.serve, model_info=model_info, api_key=key), engine


def _prepare_spec(config: ServeRoot, spec: DecoderSpec, lora: LoraSpec | None, num_ranks: int) -> DecoderSpec:
    """The spec with the quantization and the adapter to serve; refuses what cannot be sharded."""
    from miles.models.parallel.tp_sharding import compute_tp_shards, shard_spec

    if config.native.engine_return_indexer_topk and build_indexer_layout(spec) is None:
        raise UsageError(
            "--engine-return-indexer-topk is for sparse-attention models with an indexer, which "
            f"{config.models.hf_checkpoint} is not; remove it."
        )
    spec = replace(
        spec,
        quantization=config.models.rollout_quantization(num_ranks),
        adapters=None if lora is None else adapter_spec(lora),
    )
    if num_ranks > 1:
        shard_spec(spec, num_ranks)
        compute_tp_shards(spec)
    return spec


def _load_processor(config: ServeRoot, folder: Path) -> HfTokenizer:
    from miles.models.processor import load_processor

    return load_processor(
        folder,
        media=config.media.build_store(),
        trust_remote_code=config.models.trust_remote_code,
        cache_bytes=config.media.image_cache_mib << 20,
    )


async def build_reward_server(config: ServeRoot, key: str | None, run: Executor) -> tuple[RewardServer, BatchedScorer]:
    """A reward model, a sequence classifier with one label, and its server with ``/classify``."""
    from miles.backends.fsdp.reward_inference import BatchedScorer
    from miles.backends.fsdp.reward_model import load_reward_model
    from miles.backends.fsdp.reward_server import RewardServer
    from miles.cluster import platform
    from miles.models.checkpoint import hf
    from miles.models.tokenizer import load_tokenizer

    assert config.models.hf_checkpoint is not None
    if config.serve.tensor_parallel_size > 1:
        raise UsageError("--tensor-parallel-size is not for reward models, which are served on one GPU; remove it.")
    folder = Path(config.models.hf_checkpoint)
    device = platform.detect_platform(config.serve.device, threads=config.serve.num_threads).device
    dtype = hf.choose_dtype(config.models.dtype, read_config(folder), device)
    model = load_reward_model(folder, device=device, dtype=dtype, numerics=config.models.numerics)
    tokenizer = None
    if not config.serve.skip_tokenizer_init:
        tokenizer = load_tokenizer(folder, config.models.trust_remote_code)
    scorer = BatchedScorer(model, run=run)
    server = RewardServer(
        scorer,
        tokenizer,
        model.spec,
        name=config.serve.served_model_name or str(folder),
        api_key=key,
        body_mib=config.serve.max_body_mib,
    )
    return server, scorer


def is_reward_model(folder: str | Path) -> bool:
    """Whether the checkpoint is a sequence classifier."""
    architectures = read_config(folder).get("architectures") or ()
    return any(str(name).endswith("ForSequenceClassification") for name in architectures)


async def _wait_for_signal() -> None:
    """Wait for SIGTERM or SIGINT; a second one ends the process at once."""
    loop, received = asyncio.get_running_loop(), asyncio.Event()

    def receive(number: signal.Signals) -> None:
        received.set()
        loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, receive, number)
    await received.wait()
