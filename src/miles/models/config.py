"""The knobs of the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, who computes it, and in what precision it is held."""

    hf_checkpoint: str | None = knob(
        None, "The folder of a Hugging Face checkpoint: config.json, safetensors and tokenizer.", path=True
    )
    model_impl: Literal["auto", "native", "transformers"] = knob(
        "auto",
        "Who computes the model: native is the decoder of this program, transformers is that library's own module "
        "(slower, for architectures with no spec here), and auto is native or a refusal.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = knob(
        "auto", "The precision of the weights; auto is the checkpoint's own on an accelerator and float32 on a CPU."
    )
    rollout_dtype: Literal["auto", "float32", "bfloat16"] = knob(
        "auto", "The precision the engine samples in, its weights rounded at each publication; auto is --dtype's."
    )
    parity: Literal["fast", "exact"] = knob(
        "fast",
        "The arithmetic of engine and trainer: fast takes the quickest form of every operation, exact forms that give "
        "a token the same log-prob in both, to the last bit, or stop the run.",
    )
    trust_remote_code: bool = knob(
        False,
        "Let a checkpoint's tokenizer, and its model with --model-impl transformers, run Python code it came with.",
    )
