"""Backends of ``miles parity``: each runs the same tokens and returns the activations of every operation.

Shapes: T tokens of all sequences, V vocabulary, D hidden.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles.algo.loss_aggregation import mean_per_trajectory
from miles.backends.fsdp.local_model import LocalModel
from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.engine.request import GenerateRequest
from miles.backends.native.runner.model_runner import ModelRunner
from miles.cluster.executor import InlineExecutor
from miles.core.errors import UsageError
from miles.core.protocols import SamplingParams
from miles.core.types import Sample, Tokens, Version
from miles.kernels.fused.lm_head import compute_logits
from miles.launch.parity.backend import MAX_VALUES, TIMEOUT, Activations, ParityBackend, ParityModel
from miles.launch.parity.sglang_backend import trace_external_server, trace_sglang
from miles.models.activation_hooks import ActivationTrace, capture_activations, trace_attention
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.decoder import Decoder
from miles.models.hf_adapter.activation_hooks import capture_hf_activations
from miles.models.hf_adapter.model_class import find_hf_class
from miles.sync.publish import Publication
from miles.train.batch_tensors import MicroBatch, flatten_batch, pack_micro_batch
from miles.train.logprobs import HeadOutput, compute_logprobs
from miles.train.prefix_sharing import build_attention


def get_backend(name: str, *, sglang_python: str | None = None) -> ParityBackend:
    """The backend of that name; a URL is that of a server with SGLang's API."""
    if name.startswith(("http://", "https://")):
        return lambda model, sequences: trace_external_server(name, model, sequences)
    if name not in BACKENDS:
        raise UsageError(f"{name} is not a backend; there are {', '.join(BACKENDS)}, or the URL of an SGLang server.")
    if name == "transformers" and find_spec("transformers") is None:
        raise UsageError("transformers is not installed; pip install transformers.")
    if name == "megatron" and find_spec("megatron") is None:
        raise UsageError("megatron needs Megatron-Core, which is not installed; pip install miles-rl[megatron].")
    if name == "sglang" and sglang_python is None and find_spec("sglang") is None:
        raise UsageError(
            "sglang is not installed in this environment; name an interpreter that has it with --sglang-python, or "
            "give the URL of a server instead."
        )
    return BACKENDS[name]


# -- the engine -----------------------------------------------------------------------------


def _trace_native(model: ParityModel, sequences: Sequence[Tokens]) -> Activations:
    """The native engine with a paged KV cache and chunked prefill, one request after the other."""
    return asyncio.run(_trace_engine(model, sequences))


async def _trace_engine(model: ParityModel, sequences: Sequence[Tokens]) -> Activations:
    longest, decoder = max(map(len, sequences)), _load_decoder(model)
    config = NativeConfig(
        engine_max_running=1,
        engine_kv_tokens=-(-(longest + 2) // 16) * 16 + 16,
        engine_prefill_chunk=model.prefill_chunk,
        engine_prefix_cache=False,
        engine_cuda_graph=False,
    )
    engine = NativeEngine(
        model.spec,
        device=model.device,
        dtype=model.dtype,
        config=config,
        run=InlineExecutor(),
        decode=None,
        numerics=model.numerics,
    )
    weights = {name: p.detach() for name, p in decoder.named_parameters()}
    await Publication(weights=lambda: weights, engines=[engine], transport="shared", run=InlineExecutor()).publish(
        Version()
    )
    runner, trace = engine._runner, ActivationTrace()
    assert isinstance(runner, ModelRunner) and isinstance(runner.decoder, Decoder)
    build_attention = runner._build_attention
    setattr(runner, "_build_attention", lambda *args: trace_attention(build_attention(*args), trace))  # noqa: B010
    scores: list[float] = []
    with capture_activations(runner.decoder, trace):
        for tokens in sequences:
            request = GenerateRequest(tokens=tokens, sampling=SamplingParams(max_new_tokens=0), logprob_start_len=0)
            output = engine.submit(request)
            await output.completion()
            assert output.prompt_logprobs is not None
            scores += [float(score) for score in output.prompt_logprobs.logprobs[1:] if score is not None]
    await engine.close()
    return _finish_trace(model, trace, decoder.head(), torch.tensor(scores))


# -- trainers -------------------------------------------------------------------------------


@torch.no_grad()
def _trace_fsdp(model: ParityModel, sequences: Sequence[Tokens]) -> Activations:
    """The fsdp trainer on all sequences, packed."""
    decoder, trace = _load_decoder(model), ActivationTrace()
    actor = LocalModel(decoder, frozen=True)
    lengths = [len(tokens) for tokens in sequences]
    tokens_T = torch.from_numpy(np.concatenate(sequences).astype(np.int64)).to(model.device)
    positions_T = torch.cat([torch.arange(n) for n in lengths]).to(model.device)
    with capture_activations(decoder, trace):
        attn_backend = build_attention(lengths, (), model.device, numerics=actor.numerics)
        hidden_TD = decoder(tokens_T, positions_T, trace_attention(attn_backend, trace))
    before_R, target_R = _list_predictions(lengths, tokens_T)
    output = HeadOutput(
        hidden_RD=hidden_TD[before_R],
        head_VD=actor.head(),
        softcap=model.spec.logit_softcap,
        numerics=actor.numerics,
    )
    return _finish_trace(model, trace, actor.head(), compute_logprobs(output, target_R)[0])


@torch.no_grad()
def _trace_transformers(model: ParityModel, sequences: Sequence[Tokens]) -> Activations:
    """The module of transformers with eager attention, one sequence after the other."""
    model_class = find_hf_class(read_config(model.folder), trust_remote_code=model.trust_remote_code)
    try:
        module: Any = model_class.from_pretrained(
            model.folder,
            dtype=model.dtype,
            attn_implementation="eager",
            trust_remote_code=model.trust_remote_code,
            use_safetensors=True,
        )
    except (ValueError, OSError) as error:
        raise UsageError(f"transformers cannot open {model.folder}: {str(error).splitlines()[0]}") from error
    module = module.to(model.device).eval()
    trace, found = ActivationTrace(), list[Tensor]()
    with capture_hf_activations(module, model.spec, trace):
        for tokens in sequences:
            ids_T = torch.from_numpy(tokens.astype(np.int64)).to(model.device)
            logits_TV: Tensor = module(ids_T[None], use_cache=False).logits[0]
            if _keeps_logits(model, sequences):
                trace.record(model.spec.num_layers, "logits", logits_TV)
            scores_TV = logits_TV[:-1].float().log_softmax(-1)
            found.append(scores_TV.gather(-1, ids_T[1:, None])[:, 0])
    trace.record(model.spec.num_layers, "log-probs", torch.cat(found)[:, None])
    return trace.concatenate()


@torch.no_grad()
def _trace_megatron(model: ParityModel, sequences: Sequence[Tokens]) -> Activations:
    """Megatron-Core on one rank with all sequences packed."""
    from miles.backends.megatron.activation_hooks import capture_megatron_activations
    from miles.backends.megatron.model import load_megatron_model
    from miles.backends.megatron.parallel_state import destroy_parallel_state
    from miles.cluster.parallel_dims import ParallelDims
    from miles.cluster.process_group import destroy_process_group, init_process_group
    from miles.cluster.spmd import RankContext

    _require_accelerator()
    # A trainer skips tokens that predict nothing; one more token makes it compute the last ones too.
    batch = _build_micro_batch([np.append(s, s[-1]) for s in sequences], model.device)
    trace, logprobs = ActivationTrace(), list[Tensor]()

    def collect(_: int, output: HeadOutput) -> tuple[None, Mapping[str, Tensor]]:
        logprobs.append(compute_logprobs(output, batch.target_R)[0])
        return None, {}

    with tempfile.TemporaryDirectory() as folder:
        context = RankContext(
            group_name="parity",
            rank=0,
            world_size=1,
            device=str(model.device),
            exclusive_devices=True,
            folder=Path(folder),
            timeout=TIMEOUT,
        )
        init_process_group(context)
        try:
            actor = load_megatron_model(
                model.folder,
                model.spec,
                ParallelDims(),
                dtype=model.dtype,
                frozen=True,
                device=model.device,
                numerics=model.numerics,
            )
            (module,) = actor.chunks().values()
            with capture_megatron_activations(module, model.spec, trace):
                actor.forward_backward([batch], collect)
        finally:
            destroy_parallel_state()
            destroy_process_group()
    real_R = np.concatenate([np.arange(len(tokens)) < len(tokens) - 1 for tokens in sequences])
    return _finish_trace(
        model, trace, module.head().detach(), logprobs[0][torch.from_numpy(real_R).to(logprobs[0].device)]
    )


def _require_accelerator() -> None:
    """Megatron needs CUDA, wherever its tensors are."""
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise UsageError("megatron needs an accelerator, which this machine does not have.") from error


BACKENDS: Mapping[str, ParityBackend] = {
    "native": _trace_native,
    "sglang": trace_sglang,
    "transformers": _trace_transformers,
    "fsdp": _trace_fsdp,
    "megatron": _trace_megatron,
}


# -- helpers --------------------------------------------------------------------------------


def _load_decoder(model: ParityModel) -> Decoder:
    return hf.load(model.folder, device=model.device, dtype=model.dtype, numerics=model.numerics)


def _build_micro_batch(sequences: Sequence[Tokens], device: torch.device) -> MicroBatch:
    """One micro-batch of all sequences, in which every token but the first is trained on."""
    samples = [_build_sample(index, tokens) for index, tokens in enumerate(sequences)]
    flat = flatten_batch([[sample] for sample in samples], mean_per_trajectory)
    return pack_micro_batch(flat, range(len(samples)), device=device, replay=False)


def _build_sample(index: int, tokens: Tokens) -> Sample:
    zeros, mask = np.zeros(len(tokens), np.float32), np.ones(len(tokens), bool)
    mask[0] = False
    versions = np.where(mask, 0, -1).astype(np.int32)
    return Sample(
        prompt_id=index, trajectory=0, tokens=tokens, mask=mask, logprobs=zeros, advantages=zeros, versions=versions
    )


def _list_predictions(lengths: Sequence[int], tokens_T: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the tokens of packed sequences that predict another, and those predicted tokens."""
    ends = np.cumsum(lengths)
    last = np.zeros(len(tokens_T), bool)
    last[ends - 1] = True
    before_R = torch.from_numpy(np.flatnonzero(~last)).to(tokens_T.device)
    return before_R, tokens_T[before_R + 1]


def _keeps_logits(model: ParityModel, sequences: Sequence[Tokens]) -> bool:
    return model.spec.vocab_size * sum(map(len, sequences)) <= MAX_VALUES


def _finish_trace(model: ParityModel, trace: ActivationTrace, head_VD: Tensor, scores_R: Tensor) -> Activations:
    """Add the logits, unless they are large, and the log-probs."""
    layers = model.spec.num_layers
    hidden_TD = trace.concatenate()[layers, "final norm"]
    if len(hidden_TD) * model.spec.vocab_size <= MAX_VALUES:
        hidden_TD, softcap = hidden_TD.to(head_VD.device), model.spec.logit_softcap
        logits_TV = compute_logits(hidden_TD, head_VD, softcap, numerics=model.numerics)
        trace.record(layers, "logits", logits_TV)
    trace.record(layers, "log-probs", scores_R[:, None])
    return trace.concatenate()
