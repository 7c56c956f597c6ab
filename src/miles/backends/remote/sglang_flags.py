"""Pass-through flags of SGLang's server, except those that Miles sets itself. No torch.

SGLang validates names and values when it starts, and its error message is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

PREFIX = "--sglang-"
EMPTY: Mapping[str, Sequence[str]] = {}

_RESERVED: Mapping[str, str] = {
    **dict.fromkeys(("model", "model-path"), "is set by --hf-checkpoint"),
    **dict.fromkeys(("host", "port", "nccl-port", "dist-init-addr", "nnodes", "node-rank"), "is set by Miles"),
    **dict.fromkeys(("tp", "tp-size", "tensor-parallel-size"), "is set by --rollout-num-gpus-per-engine"),
    "dtype": "is set by --rollout-dtype, or --dtype",
    "device": "is set by --device",
    "base-gpu-id": "is set by --rollout-num-gpus",
    "weight-version": "is set by Miles, which numbers versions",
    "enable-return-routed-experts": "is set by --use-rollout-routing-replay",
    "trust-remote-code": "is set by --trust-remote-code",
    "router-policy": "is for a router, which is miles route here; a run balances its requests itself",
    "router-ip": "is for a router, which is miles route here; a run balances its requests itself",
    "router-port": "is for a router, which is miles route here; a run balances its requests itself",
    "server-concurrency": "is not a flag of SGLang's server; use --sglang-max-running-requests",
    "config": "is not supported; give SGLang's flags one by one",
}


def parse_flag_names(argv: Sequence[str]) -> list[str]:
    """The flag names of a command line, without dashes and values."""
    return [word[2:].partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")]


def get_flag_value(argv: Sequence[str], name: str) -> str | None:
    """The value of a flag that is given last, without its dashes; None if it is not given."""
    found: str | None = None
    for index, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if word.startswith("--") and flag[2:].replace("_", "-") == name:
            found = value if equals else argv[index + 1] if index + 1 < len(argv) else None
    return found


def find_flag_problems(argv: Sequence[str]) -> Iterator[str]:
    """A sentence about each flag that cannot be passed through."""
    for name in parse_flag_names(argv):
        if name in _RESERVED:
            yield f"{PREFIX}{name} {_RESERVED[name]}; remove it."


def build_command(
    python: str,
    folder: str,
    argv: Sequence[str],
    *,
    device: str,
    dtype: str,
    kv_cache_dtype: str = "auto",
    ranks: int,
    routed_experts: bool,
    trust_remote_code: bool,
    triton_fp8: bool = False,
    images: bool = False,
    lora: Mapping[str, Sequence[str]] = EMPTY,
) -> tuple[str, ...]:
    """The command line of a server without its address, with defaults that suit a run.

    ``triton_fp8``: its FP8 kernels are those in Triton, which take weights and scales as the checkpoint has them.
    ``images``: images are resized by Pillow, as the run does, and not by torchvision, which gives other pixels.
    ``lora`` are the flags of a server that is sent adapters.
    """
    given = set(parse_flag_names(argv))
    command = [python, "-m", "sglang.launch_server", "--model-path", folder]
    command += ["--dtype", dtype, "--tp-size", str(ranks)]
    # Incremental events of several tokens keep streaming cheap.
    defaults: dict[str, Sequence[str]] = {"incremental-streaming-output": (), "stream-interval": ("8",), **lora}
    if kv_cache_dtype != "auto":
        defaults["kv-cache-dtype"] = (kv_cache_dtype,)
    if triton_fp8:
        defaults |= {"fp8-gemm-backend": ("triton",), "moe-runner-backend": ("triton",)}
    if images:
        defaults["disable-fast-image-processor"] = ()
    if device == "cpu":
        command += ["--device", "cpu"]
        defaults |= {"attention-backend": ("torch_native",), "sampling-backend": ("pytorch",)}
        defaults |= {"disable-overlap-schedule": (), "sleep-on-idle": ()}
    if routed_experts:
        command.append("--enable-return-routed-experts")
    if trust_remote_code:
        command.append("--trust-remote-code")
    for name, values in defaults.items():
        if name not in given:
            command += [f"--{name}", *values]
    return (*command, *argv)


def build_environment(device: str) -> dict[str, str]:
    """Environment variables of SGLang's server."""
    return {"SGLANG_USE_CPU_ENGINE": "1"} if device == "cpu" else {}
