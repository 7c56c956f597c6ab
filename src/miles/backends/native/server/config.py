"""Knobs of the HTTP server."""

from dataclasses import dataclass
from typing import Literal

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Where the server listens, who may ask, and how it answers."""

    host: str = knob("127.0.0.1", "The address to listen on; another than this machine's own needs an API key.")
    port: int = knob(30000, "The port to listen on; 0 takes a free one, which is printed.")
    served_model_name: str | None = knob(None, "What the model is called, instead of its folder's name.")
    api_key_file: str | None = knob(
        None,
        "A file that holds the key clients must send; without it the environment's MILES_API_KEY, if set.",
        path=True,
    )
    allow_unauthenticated: bool = knob(
        False, "Listen to other machines without a key: whoever reaches the port may ask."
    )
    skip_tokenizer_init: bool = knob(False, "Load no tokenizer: requests bring input_ids and get output_ids back.")
    server_warmup: bool = knob(
        True,
        "On an accelerator, record the engine's steps and compile what prompts take before listening.",
        off="--skip-server-warmup",
    )
    drain_seconds: float = knob(
        60.0, "How long requests under way may go on when the server is told to stop.", unit="seconds"
    )
    max_body_mib: int = knob(64, "The largest body of a request; weights are limited by the model's size.", unit="MiB")
    tool_call_parser: Literal["auto", "none", "qwen", "qwen3_coder", "glm", "mistral", "deepseek", "llama3"] = knob(
        "auto", "How the model marks tool calls; auto looks at its chat template."
    )
    reasoning_parser: Literal["none", "think"] = knob(
        "none", "Whether <think> blocks of a chat reply are told apart from its content."
    )
    sampling_defaults: Literal["model", "openai"] = knob(
        "model", "Where a chat that names no temperature and the like gets them: generation_config.json, or OpenAI's."
    )
    weight_version: str = knob("default", "What the weights are called until an update names others.")
    incremental_streaming_output: bool = knob(
        False, "Stream what is new of an answer from /generate, and not each time all of it."
    )
    enable_cache_report: bool = knob(False, "Tell OpenAI clients how many prompt tokens were found computed.")
    device: Literal["auto", "cpu", "cuda"] = knob(
        "auto", "What to compute on; auto takes an accelerator if there is one."
    )
    num_threads: int | None = knob(None, "CPU threads for one operation; without it torch decides.", unit="threads")
    tensor_parallel_size: int = knob(1, "Devices that share the model.", unit="devices", aliases=("--tp-size",))
