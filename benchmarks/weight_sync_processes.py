"""The two processes of ``bench_weight_sync.py``: a model of random weights, and a server of it.

The server reads commands from standard input: ``plain`` makes it overwrite weights in place without checksums, which is
what an unverified update would take; ``proven`` switches checksums on again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

TINY = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
}
SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
EXPERTS = {
    **{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True, "decoder_sparse_step": 1},
    **{"mlp_only_layers": []},
}
SHAPES = {
    "tiny": TINY,
    "many": TINY | SMALL | {"num_hidden_layers": 36},
    "experts": TINY | SMALL | EXPERTS | {"num_hidden_layers": 48},
}
"""``many``: as many tensors as Qwen3-4B has, all small; ``experts``: as many as a model of 48 layers of 128 experts."""


def build_model(model: str, seed: int) -> tuple[Any, Any, Any]:
    """The shape, the device, and a model with random weights there."""
    import torch

    from miles.cluster.platform import detect_platform
    from miles.models.accounting.known_models import find_known_config
    from miles.models.decoder import Decoder
    from miles.models.families.registry import spec_from_config

    config = SHAPES.get(model) or find_known_config(model)
    assert config is not None, f"{model} is not among the published shapes"
    spec, platform = spec_from_config(config), detect_platform("auto")
    torch.manual_seed(seed)
    decoder = Decoder(spec, device=platform.device, dtype=torch.bfloat16)
    for parameter in decoder.parameters():
        parameter.data.normal_(std=0.02)
    return spec, platform, decoder


def build_engine(spec: Any, platform: Any, run: Any) -> Any:
    import torch

    from miles.backends.native.config import NativeConfig
    from miles.backends.native.engine.engine import NativeEngine

    config = NativeConfig(engine_max_running=4, engine_kv_tokens=4096)
    return NativeEngine(spec, device=platform.device, dtype=torch.bfloat16, config=config, run=run, decode=None)


async def serve(args: argparse.Namespace) -> None:
    """Until the other side hangs up."""
    from miles.backends.native.server.app import EngineServer
    from miles.backends.native.server.weights import ipc_inplace as writing
    from miles.cluster.executor import InlineExecutor, ThreadExecutor
    from miles.core.types import Version
    from miles.sync.publish import Publication

    spec, platform, decoder = build_model(args.model, 1)
    run = ThreadExecutor("engine")
    engine = build_engine(spec, platform, run)
    weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    await Publication(weights=lambda: weights, engines=[engine], transport="shared", run=InlineExecutor()).publish(
        Version()
    )
    weights.clear()
    del decoder
    server = EngineServer(engine, None)
    _watch(writing.InplaceWriter)
    print(f"port {await server.start('127.0.0.1', 0)}", flush=True)
    counted = writing.ChecksumBatch
    while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
        writing.ChecksumBatch = Plain if word == "plain" else counted
        server.admin._staging.writer._prepared_for = None
        print("heard", flush=True)
    os._exit(0)


def _watch(writing: Any) -> None:
    """Have what is written in place told with the seconds it took here."""
    write, prepare = writing.write, writing._prepare
    spent: dict[str, float] = {}

    def prepared(self: Any, *how: Any) -> None:
        started = time.perf_counter()
        prepare(self, *how)
        spent["prepare"] = time.perf_counter() - started

    def written(self: Any, fields: Any) -> dict[str, Any]:
        started = time.perf_counter()
        reported = write(self, fields)
        return {**reported, "seconds": {**spent, "write": time.perf_counter() - started}}

    writing._prepare, writing.write = prepared, written


class Plain:
    """In the place of ``kernels.runtime.checksum.ChecksumBatch``: only a copy; every checksum is 0."""

    def __init__(self, tensors: Any, into: Any = None) -> None:
        self._tensors, self._into = list(tensors), into

    def start(self) -> None:
        for to, tensor in zip(self._into or (), self._tensors, strict=False):
            to.copy_(tensor)

    def read(self) -> Any:
        import numpy as np
        import torch

        if self._into is not None and self._tensors[0].is_cuda:
            torch.cuda.synchronize()
        return np.zeros((len(self._tensors), 2), np.uint64)


# -- packages that may be missing -------------------------------------------------------------


def stand_in() -> None:
    """Where a package that only metrics or files need is not installed, one that is enough for this."""
    if find_spec("prometheus_client") is None:
        sys.modules["prometheus_client"] = MagicMock()
    if find_spec("safetensors") is None:
        package, part = ModuleType("safetensors"), ModuleType("safetensors.torch")
        vars(package).update(torch=part, SafetensorError=ValueError, safe_open=None)
        vars(part).update(save=_save, load=_load)
        sys.modules |= {"safetensors": package, "safetensors.torch": part}


def _save(tensors: dict[str, Any]) -> bytes:
    import torch

    head, parts, at = {}, [], 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        head[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at := at + tensor.nbytes]}
        parts.append(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    words = json.dumps(head).encode()
    words += b" " * (-len(words) % 64 + 56)
    return b"".join([len(words).to_bytes(8, "little"), words, *parts])


def _load(raw: bytes) -> dict[str, Any]:
    import torch

    start = 8 + int.from_bytes(raw[:8], "little")
    found = {}
    for name, reported in json.loads(raw[8:start]).items():
        begin, end = reported["data_offsets"]
        part = torch.frombuffer(bytearray(raw[start + begin : start + end]), dtype=torch.uint8)
        found[name] = part.view(getattr(torch, reported["dtype"])).view(reported["shape"])
    return found
