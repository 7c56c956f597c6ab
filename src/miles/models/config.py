"""Options of the model: checkpoint folder, implementation, precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles.config.option import option
from miles.kernels.numerics import Numerics, numerics_from_parity
from miles.precision.formats import FORMATS, FormatName, QuantizationSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model is loaded, by which implementation, and in what precision."""

    hf_checkpoint: str | None = option(
        None,
        "Folder of a Hugging Face checkpoint, its name on the hub such as Qwen/Qwen3-0.6B, or a URL such as s3://.",
        path=True,
        hub="model",
    )
    model_impl: Literal["auto", "native", "transformers"] = option(
        "auto",
        "Model implementation: native is the built-in decoder, transformers is that library's own module (slower, for "
        "architectures without a spec here), auto is native, or an error where it has no spec.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "Precision of the weights; auto is the checkpoint's own on an accelerator and float32 on a CPU."
    )
    rollout_dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "Precision of the engine's weights, rounded at each weight update; auto is that of --dtype."
    )
    rollout_precision: Literal["auto", FormatName] = option(
        "auto",
        "Format of the engine's quantized weights, such as fp8, int4 or nvfp4, quantized at each weight update; auto "
        "is that of --train-precision, or --rollout-dtype without it.",
    )
    train_precision: Literal["auto", FormatName] = option(
        "auto",
        "Format that the trainer's forward quantizes weights to, as the engine's, such as fp8 or int4: float32 masters "
        "are trained, or LoRA adapters beside a packed base; auto trains in --dtype.",
    )
    fp8_format: Literal["e4m3", "hybrid"] | None = option(
        None,
        "FP8 format of gradients in the backward GEMMs of an FP8 --train-precision: e4m3, or hybrid for E5M2; left "
        "out, these are computed in --dtype.",
    )
    first_last_layers_bf16: bool = option(
        False,
        "Do not quantize the first --num-layers-at-start-in-bf16 and the last --num-layers-at-end-in-bf16 layers, in "
        "engine and trainer.",
    )
    num_layers_at_start_in_bf16: int = option(
        1, "Layers at the start that --first-last-layers-bf16 does not quantize.", unit="N", ge=0
    )
    num_layers_at_end_in_bf16: int = option(
        1, "Layers at the end that --first-last-layers-bf16 does not quantize.", unit="N", ge=0
    )
    quantize_experts_only: bool = option(
        False, "Quantize the routed experts of a mixture of experts, and no other weights."
    )
    parity: Literal["fast", "exact"] = option(
        "fast",
        "Numerics of engine and trainer: fast uses the fastest kernels, exact uses batch-invariant kernels that give "
        "a token bitwise the same log-prob in both, and stops the run if they differ.",
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = option(
        "auto",
        "Storage of keys and values in the engine: auto is the model's precision; fp8_e4m3 is FP8 with a scale per "
        "token and head, in half the memory, and the trainer rounds its own alike.",
    )
    trust_remote_code: bool = option(
        False,
        "Allow a checkpoint's tokenizer, and its model with --model-impl transformers, to run its own Python code.",
    )

    @property
    def numerics(self) -> Numerics:
        """The numerics of ``--parity`` and ``--kv-cache-dtype``, for a run's models, engines and trainer."""
        return numerics_from_parity(self.parity, self.kv_cache_dtype)

    @property
    def rollout_format(self) -> FormatName | None:
        """The format of the engine's weights; None if they are not quantized."""
        wanted = self.train_precision if self.rollout_precision == "auto" else self.rollout_precision
        return None if wanted == "auto" else wanted

    def rollout_quantization(self, tensor_parallel_size: int) -> QuantizationSpec | None:
        """The quantization of an engine of ``tensor_parallel_size`` ranks, which holds packed weights."""
        return self._quantization(self.rollout_format, packed=True, tensor_parallel_size=tensor_parallel_size)

    def train_quantization(self, *, packed: bool = False) -> QuantizationSpec | None:
        """The quantization of the trainer: in the forward, or ``packed`` if the weights are frozen."""
        return self._quantization(None if self.train_precision == "auto" else self.train_precision, packed=packed)

    def _quantization(
        self, name: FormatName | None, *, packed: bool, tensor_parallel_size: int = 1
    ) -> QuantizationSpec | None:
        if name is None:
            return None
        keeps = self.first_last_layers_bf16
        return QuantizationSpec(
            format=FORMATS[name],
            packed=packed,
            layers_at_start=self.num_layers_at_start_in_bf16 if keeps else 0,
            layers_at_end=self.num_layers_at_end_in_bf16 if keeps else 0,
            experts_only=self.quantize_experts_only,
            tensor_parallel_size=tensor_parallel_size,
            backward="wide" if self.fp8_format is None else self.fp8_format,
        )
