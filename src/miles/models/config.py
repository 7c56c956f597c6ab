"""Options of the model: checkpoint folder, implementation, precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles.config.option import option
from miles.kernels.numerics import Numerics, numerics_from_parity


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
