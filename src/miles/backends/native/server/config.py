"""Options of the engine's HTTP server."""

from dataclasses import dataclass
from typing import Literal

from miles.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Where the server listens, who may send requests, and how it replies."""

    host: str = option("127.0.0.1", "The address to listen on; any but a loopback address needs an API key.")
    port: int = option(30000, "The port to listen on; 0 picks a free one, which is printed.", ge=0, le=65535)
    served_model_name: str | None = option(None, "The model's name in the API, instead of its folder's.")
    api_key_file: str | None = option(
        None,
        "A file with the API key clients must send; by default the environment's MILES_API_KEY, if set.",
        path=True,
    )
    allow_unauthenticated: bool = option(
        False, "Serve other machines without an API key: whoever reaches the port may send requests."
    )
    skip_tokenizer_init: bool = option(False, "Load no tokenizer: requests send input_ids and get output_ids.")
    server_warmup: bool = option(
        True,
        "On a GPU, capture CUDA graphs and compile the prefill kernels before listening.",
        off="--skip-server-warmup",
    )
    drain_seconds: float = option(
        60.0, "How long running requests may continue when the server is stopped.", unit="seconds", ge=0
    )
    max_body_mib: int = option(
        64, "The largest request body; bodies of weights are limited by the model's size.", unit="MiB", ge=1
    )
    tool_call_parser: Literal[
        "auto", "none", "qwen", "qwen3_coder", "glm", "mistral", "deepseek", "llama3", "kimi", "minimax", "gemma"
    ] = option("auto", "The format of the model's tool calls; auto detects it from the chat template.")
    reasoning_parser: Literal["none", "think"] = option(
        "none", "Whether <think> blocks of a chat reply are returned as reasoning_content."
    )
    sampling_defaults: Literal["model", "openai"] = option(
        "model", "Default sampling parameters of a chat: those of generation_config.json, or OpenAI's."
    )
    weight_version: str = option("default", "The weight_version until an update sets another.")
    incremental_streaming_output: bool = option(
        False, "Stream only the new part of a completion from /generate, not all of it each time."
    )
    enable_cache_report: bool = option(False, "Report cached prompt tokens in OpenAI's usage.")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "The device to run on; auto picks a GPU if there is one.")
    num_threads: int | None = option(None, "CPU threads of one operation; by default torch's.", unit="threads", ge=1)
    tensor_parallel_size: int = option(1, "Tensor-parallel GPUs.", unit="devices", aliases=("--tp-size",), ge=1)
