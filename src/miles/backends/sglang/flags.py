"""Flags of SGLang's own server: given on as they are, but for those that follow from what a run is. No torch.

Names and values are SGLang's to check: it refuses what it does not know when it starts, and its words are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

PREFIX = "--sglang-"

_OURS: Mapping[str, str] = {
    **dict.fromkeys(("model", "model-path"), "follows from --hf-checkpoint"),
    **dict.fromkeys(("host", "port", "nccl-port", "dist-init-addr", "nnodes", "node-rank"), "is decided by Miles"),
    **dict.fromkeys(("tp", "tp-size", "tensor-parallel-size"), "follows from --rollout-num-gpus-per-engine"),
    "dtype": "follows from --rollout-dtype, or --dtype",
    "device": "follows from --device",
    "base-gpu-id": "follows from --rollout-num-gpus",
    "weight-version": "is decided by Miles, which numbers versions",
    "enable-return-routed-experts": "follows from --use-rollout-routing-replay",
    "trust-remote-code": "follows from --trust-remote-code",
    "router-policy": "is for a router, which is miles route here; a run deals its requests out itself",
    "router-ip": "is for a router, which is miles route here; a run deals its requests out itself",
    "router-port": "is for a router, which is miles route here; a run deals its requests out itself",
    "server-concurrency": "is no flag of SGLang's own; use --sglang-max-running-requests",
    "config": "is no flag of SGLang's own here; give its flags one by one",
}


def names_of(words: Sequence[str]) -> list[str]:
    """The flags among the words, without dashes and values."""
    return [word[2:].partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]


def problems(words: Sequence[str]) -> Iterator[str]:
    """What cannot be given on, a sentence each."""
    for name in names_of(words):
        if name in _OURS:
            yield f"{PREFIX}{name} {_OURS[name]}; leave it out."


def command(
    python: str,
    folder: str,
    words: Sequence[str],
    *,
    device: str,
    dtype: str,
    ranks: int,
    routed: bool,
    trusted: bool,
) -> tuple[str, ...]:
    """How a server is started, but for its address. What it does without being told otherwise suits a run."""
    given = set(names_of(words))
    own = [python, "-m", "sglang.launch_server", "--model-path", folder]
    own += ["--dtype", dtype, "--tp-size", str(ranks)]
    # Each piece of an answer carries what is new, and a piece has several tokens: a stream costs little then.
    wanted: dict[str, tuple[str, ...]] = {"incremental-streaming-output": (), "stream-interval": ("8",)}
    if device == "cpu":
        own += ["--device", "cpu"]
        wanted |= {"attention-backend": ("torch_native",), "sampling-backend": ("pytorch",)}
        wanted |= {"disable-overlap-schedule": (), "sleep-on-idle": ()}
    if routed:
        own.append("--enable-return-routed-experts")
    if trusted:
        own.append("--trust-remote-code")
    for name, values in wanted.items():
        if name not in given:
            own += [f"--{name}", *values]
    return (*own, *words)


def environment(device: str) -> dict[str, str]:
    """What SGLang reads from its environment."""
    return {"SGLANG_USE_CPU_ENGINE": "1"} if device == "cpu" else {}
