"""Load and save models as Hugging Face checkpoints: the decoder itself, or the transformers adapter behind it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from miles.core.errors import UsageError
from miles.kernels.numerics import FAST, Numerics
from miles.models.base import CausalLM
from miles.models.capabilities import check_batch_invariance
from miles.models.checkpoint import load as loading
from miles.models.checkpoint.packed import load_packed
from miles.models.checkpoint.param_slices import param_shape
from miles.models.checkpoint.reader import FileReader
from miles.models.checkpoint.safetensors_io import config_dtype, read_config, stored_tensors
from miles.models.checkpoint.save import export, iter_hf_tensors
from miles.models.checkpoint.save_plan import SavePlan, plan_decoder_save
from miles.models.checkpoint.tensor_sources import locate_tensors, read_quant_config
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.hf_adapter import checkpoint as hf_adapter
from miles.models.hf_adapter.decoder import HfDecoder
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.layers.moe import MoeMlp
from miles.models.layers.ngram_embedding import NGRAM_CONSTANTS, NgramEmbedding
from miles.models.layers.norm import RMSNorm
from miles.models.lora.layout import build_factor_map
from miles.models.quantization import plan_quantization
from miles.models.spec import DecoderSpec
from miles.models.vision.spec import CLIP_BOUNDS

__all__ = [
    "build_engine_model",
    "choose_dtype",
    "export",
    "init_random",
    "iter_hf_tensors",
    "iter_model_tensors",
    "load",
    "load_decoder_params",
    "load_model",
    "load_slices",
    "plan_model_save",
    "read_config",
    "sample_params",
    "save_model",
    "zero_factors",
]

_INIT_STD = 0.02
# Recurrent layers: ranges of the decay rates of heads and of their time steps.
_DECAY_RATES = (1.0, 16.0)
_TIME_STEPS = (0.001, 0.1)


# -- either implementation ------------------------------------------------------------------


def load_model(
    folder: Path | str,
    spec: DecoderSpec,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    numerics: Numerics = FAST,
    trust_remote_code: bool = False,
    keep_stored: bool = True,
) -> CausalLM:
    """Load the model in ``folder`` by the implementation ``spec`` is for (see ``resolve_spec``).

    Weights that ``spec`` has packed are quantized tensor by tensor, or are the bytes of a checkpoint in the same format
    if those are to be kept (``keep_stored``): the wide model is never in memory.
    """
    if numerics.batch_invariant and (problem := check_batch_invariance(spec)) is not None:
        raise UsageError(f"--parity exact does not support {folder}: {problem}; remove --parity exact.")
    if isinstance(spec, HfAdapterSpec):
        return hf_adapter.load(folder, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    found = spec_from_config(read_config(folder))
    spec = replace(found, max_positions=spec.max_positions, quantization=spec.quantization, adapters=spec.adapters)
    decoder = Decoder(spec, device="meta", dtype=dtype, numerics=numerics)
    tensors = load_decoder_params(folder, spec, device=device, dtype=dtype, keep_stored=keep_stored)
    decoder.load_state_dict(dict(tensors), assign=True)
    return decoder


def build_engine_model(model: CausalLM) -> CausalLM | None:
    """Build the instance an engine fills with published weights; None if the engine builds one from the spec."""
    return model.empty_copy() if isinstance(model, HfDecoder) else None


def save_model(model: CausalLM, folder: Path, *, like: Path | None, config: Mapping[str, Any] | None) -> None:
    """Write a folder that transformers loads, with the tokenizer files of ``like``."""
    if isinstance(model, HfDecoder):
        hf_adapter.export(model, folder, like=like, config=config)
        return
    assert isinstance(model, Decoder)
    export(model, folder, like=like, config=config)


def plan_model_save(model: CausalLM, *, like: Path | None, config: Mapping[str, Any] | None) -> SavePlan | None:
    """Plan what ``save_model`` would write; None if transformers writes the checkpoint."""
    return plan_decoder_save(model, like=like, config=config) if isinstance(model, Decoder) else None


def iter_model_tensors(model: CausalLM, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Read a checkpoint of the same architecture, one tensor at a time, by the names of ``model``'s parameters."""
    head = model.head()
    if isinstance(model, HfDecoder):
        tensors, own = hf_adapter.tensors(folder, like=model, dtype=head.dtype), dict(model.named_parameters())
        return ((name, tensor) for name, tensor in tensors.items() if name in own)  # a tied head is there twice
    return load_decoder_params(folder, model.spec, device=head.device, dtype=head.dtype)


# -- the decoder ----------------------------------------------------------------------------


def choose_dtype(wanted: str, config: Mapping[str, Any], device: torch.device | str) -> torch.dtype:
    """Resolve ``--dtype``: ``auto`` is the config's dtype on an accelerator and float32 on a CPU."""
    if wanted == "auto":
        wanted = "float32" if torch.device(device).type == "cpu" else config_dtype(config) or "float32"
    known = {str(dtype).removeprefix("torch."): dtype for dtype in loading.DTYPES.values()}
    if wanted not in known:
        raise UsageError(f"dtype {wanted} is not one of float32, bfloat16 and float16: choose one with --dtype.")
    return known[wanted]


def load(
    folder: Path | str,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    numerics: Numerics = FAST,
) -> Decoder:
    """Load the decoder in a checkpoint folder; ``dtype`` None is ``choose_dtype`` of ``auto``.

    Parameters are allocated one at a time on ``device`` and filled from disk in place, so that no more than one extra
    tensor is in memory. Quantized weights are dequantized. Anything missing, unknown, mis-shaped or truncated
    raises a CheckpointError before any weight is read.
    """
    decoder, tensors = _open_checkpoint(folder, 0, 1, device, dtype, numerics)
    decoder.load_state_dict(dict(tensors), assign=True)
    return decoder


def load_slices(
    folder: Path | str,
    *,
    rank: int,
    world: int,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    reader: FileReader | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and rank ``rank``'s rows of every parameter, sharded over ``world`` ranks as by ``torch.chunk``.

    FSDP2 shards the first dimension the same way (``Shard(0)``); the last ranks may have fewer rows, or none. Only the
    bytes of those rows are read, except for matrices that are transposed on disk. All ranks get the parameters in the
    same order, that of the files. Checks are made at once, as in ``load``. ``reader`` counts the bytes read, and is
    closed at the end.
    """
    return _open_checkpoint(folder, rank, world, device, dtype, FAST, reader)[1]


def load_decoder_params(
    folder: Path | str,
    spec: DecoderSpec,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    keep_stored: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of a decoder of ``spec`` from a checkpoint of its architecture, packed where it is packed.

    Weights that are quantized here are rounded to ``dtype`` first. One parameter at a time is in memory beside what was
    yielded. LoRA factors of the decoder are zeros. Checks are made at once, as in ``load``.
    """
    plan = {name: quantized for name, quantized in plan_quantization(spec).items() if quantized.packed}
    _, wide = _open_checkpoint(folder, 0, 1, device, dtype, FAST, skip=plan.keys())
    wide = chain(wide, zero_factors(spec, device, dtype))
    if not plan:
        return wide
    packed = load_packed(
        folder,
        spec,
        {name: quantized.format for name, quantized in plan.items()},
        device=device,
        dtype=dtype,
        tensor_parallel_size=next(iter(plan.values())).tensor_parallel_size,
        keep_stored=keep_stored,
    )
    return chain(wide, packed)


def zero_factors(spec: DecoderSpec, device: torch.device | str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the LoRA factors of a decoder as zeros, which add nothing."""
    for name, slices in build_factor_map(spec).items():
        yield name, torch.zeros(param_shape(slices), device=device, dtype=dtype)


def _open_checkpoint(
    folder: Path | str,
    rank: int,
    world: int,
    device: torch.device | str,
    dtype: torch.dtype | None,
    numerics: Numerics,
    reader: FileReader | None = None,
    skip: Collection[str] = (),
) -> tuple[Decoder, Iterator[tuple[str, Tensor]]]:
    """Return a decoder without storage, after all checks, and the iterator of its parameters but those to ``skip``."""
    assert 0 <= rank < world
    config = read_config(folder)
    spec = spec_from_config(config)
    sources = locate_tensors(spec, stored_tensors(folder), read_quant_config(config), Path(folder))
    dtype = dtype or choose_dtype("auto", config, device)
    decoder = Decoder(spec, device="meta", dtype=dtype, numerics=numerics)
    assert not list(decoder.buffers()), "a decoder has no buffers: a checkpoint would not hold them"
    params = dict(decoder.named_parameters())
    assert params.keys() == sources.keys(), params.keys() ^ sources.keys()
    reader = reader or FileReader()
    sources = {name: own for name, own in sources.items() if name not in skip}
    return decoder, loading.load_params(sources, params, rank=rank, world=world, device=device, reader=reader)


# -- random initialization ------------------------------------------------------------------


def init_random(
    spec: DecoderSpec, *, seed: int, device: torch.device | str, dtype: torch.dtype, numerics: Numerics = FAST
) -> Decoder:
    """Build a decoder with random weights: matrices normal with std 0.02, norm scales one, biases zero.

    Values are sampled on the CPU in float32, one parameter at a time: a seed gives the same bits on every device.
    """
    decoder = Decoder(spec, device="meta", dtype=dtype, numerics=numerics)
    decoder.load_state_dict(sample_params(decoder, seed=seed, device=device), assign=True)
    return decoder


def sample_params(module: nn.Module, *, seed: int, device: torch.device | str) -> dict[str, Tensor]:
    """Sample every parameter of ``module``, which needs no storage, as ``init_random`` does."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, param in module.named_parameters():
        owner, _, param_name = name.rpartition(".")
        value = _init_param(param_name, module.get_submodule(owner), param.shape, generator)
        tensors[name] = value.to(device=device, dtype=param.dtype)
    return tensors


def _deal_experts(module: nn.Module, shape: torch.Size) -> Tensor:
    """Return different experts for each token, all of them equally often."""
    assert isinstance(module, MoeMlp)
    tokens, each = shape
    return torch.arange(tokens * each).view(shape) % module.spec.num_experts


def _init_param(name: str, module: nn.Module, shape: torch.Size, generator: torch.Generator) -> Tensor:
    if name == "A_log":
        return torch.linspace(*_DECAY_RATES, shape.numel()).log().view(shape)
    if name == "dt_bias":
        steps = torch.linspace(math.log(_TIME_STEPS[0]), math.log(_TIME_STEPS[1]), shape[0]).exp()
        return steps.expm1().log()  # the inverse of softplus
    if name in CLIP_BOUNDS:
        return torch.full(shape, -math.inf if name.endswith("min") else math.inf)
    if name == "expert_table":
        return _deal_experts(module, shape)
    if isinstance(module, NgramEmbedding) and name in NGRAM_CONSTANTS:
        return module.constants()[name]
    if name.endswith("bias") or name in ("sinks", "correction"):
        return torch.zeros(shape)
    if len(shape) == 1 and name != "class_token":
        return torch.full(shape, 1.0 - module.offset if isinstance(module, RMSNorm) else 1.0)
    # A convolution has few inputs: its std follows from their number.
    std = shape[-1] ** -0.5 if name.startswith("conv") else _INIT_STD
    return torch.empty(shape).normal_(0.0, std, generator=generator)
