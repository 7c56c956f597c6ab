"""Training service: eight tenants at once against the same eight in turn, and the cost of durability.

Every tenant trains an adapter of its own: forward and backward passes, then updates, each waiting for its results as
a training loop does. At once, requests of several tenants share passes over the base model. Talks to the service
without HTTP, so that only scheduling, journal, passes and updates are measured.

    python benchmarks/bench_service.py
    python benchmarks/bench_service.py --device cuda --hidden 2048 --layers 16
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from miles.backends.service.config import ServiceConfig
from miles.backends.service.fields import Fields
from miles.backends.service.protobuf import write_bytes, write_text, write_varint
from miles.backends.service.sampling import EngineSample, SampleQuery
from miles.backends.service.service import TrainingService
from miles.backends.service.tenants import Quota, Tenant, TenantKeys, digest_key
from miles.backends.service.trainer import MultiLoraTrainer
from miles.cluster.executor import ThreadExecutor
from miles.models.checkpoint import hf
from miles.models.lora.targets import list_targets
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec

BASE = "base"


class NoEngine:
    """An engine that is never asked: this measures training."""

    max_tokens = 4096
    vocab_size = 4096

    async def sample(self, query: SampleQuery) -> EngineSample:
        raise AssertionError("nothing is sampled here")

    def has_adapter(self, name: str) -> bool:
        return False

    async def load_adapter(self, name: str, folder: Path) -> None: ...

    def unload_adapter(self, name: str) -> None: ...


def build_spec(hidden: int, layers: int) -> DecoderSpec:
    attention = AttentionSpec(
        num_heads=max(1, hidden // 64), num_kv_heads=max(1, hidden // 128), head_dim=64, rope=RopeSpec(theta=1e4)
    )
    return DecoderSpec(
        family="qwen3",
        vocab_size=4096,
        hidden_size=hidden,
        norm_eps=1e-6,
        layers=layers * (LayerSpec(mixer=attention, ffn=MlpSpec(size=3 * hidden)),),
        tie_embeddings=True,
        max_positions=4096,
        eos_token_ids=(1,),
    )


def encode_request(run: str, seq: int, tokens_N: np.ndarray) -> bytes:
    """One sequence with cross entropy, as the client encodes it."""

    def tensor(array: np.ndarray, code: int) -> bytes:
        return write_bytes(1, array.tobytes()) + write_varint(3, code) + write_varint(4, len(array))

    chunk = write_bytes(1, write_bytes(1, tokens_N[:-1].astype(np.int32).tobytes()))
    targets = write_text(1, "target_tokens") + write_bytes(2, tensor(tokens_N[1:].astype(np.int64), 2))
    datum = write_bytes(1, chunk) + write_bytes(2, targets)
    return write_text(1, run) + write_varint(2, seq) + write_text(4, "cross_entropy") + write_bytes(3, datum)


async def open_run(service: TrainingService, tenant: str) -> str:
    session = await service.create_session(tenant, Fields({}))
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 16}}
    request = await service.create_model(tenant, Fields(body))
    await service.store.wait(request, 600)
    return request.target


async def train(service: TrainingService, tenant: str, run: str, first: int, steps: int, length: int) -> None:
    """A training loop of one tenant."""
    rng = np.random.default_rng(abs(hash(tenant)) % 1000)
    for step in range(steps):
        seq = first + 2 * step
        body = encode_request(run, seq, rng.integers(0, 4096, length + 1))
        trained = await service.submit_train(tenant, body)
        update = await service.submit_step(
            tenant, Fields({"model_id": run, "seq_id": seq + 1, "adam_params": {"learning_rate": 1e-4}})
        )
        for request in (trained, update):
            if not await service.store.wait(request, 600) or request.outcome is None or request.outcome.error:
                raise SystemExit(f"a request failed: {request.outcome}")


async def measure(arguments: argparse.Namespace, folder: Path) -> None:
    device = torch.device(arguments.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    decoder = hf.init_random(build_spec(arguments.hidden, arguments.layers), seed=0, device=device, dtype=dtype)
    modules = [target.module for target in list_targets(decoder.spec)]
    names = [f"tenant {number}" for number in range(arguments.tenants)]
    tenants = TenantKeys([Tenant(name=name, key_digest=digest_key(name), quota=Quota()) for name in names])
    run_trainer = ThreadExecutor("trainer")
    service = TrainingService(
        MultiLoraTrainer(decoder, modules, device=device),
        NoEngine(),
        tenants,
        folder=folder,
        base_model=BASE,
        config=ServiceConfig(train=True),
        run=run_trainer,
    )
    await service.start()
    runs = [await open_run(service, name) for name in names]
    steps, length = arguments.steps, arguments.length
    await asyncio.gather(*(train(service, n, r, 1, 1, length) for n, r in zip(names, runs, strict=True)))
    tokens = arguments.tenants * steps * length
    seconds: dict[str, float] = {}
    for mode in ("in turn", "at once"):
        first = 3 if mode == "in turn" else 3 + 2 * steps
        passes = service.training.counts.passes
        started = time.perf_counter()
        loops = [train(service, n, r, first, steps, length) for n, r in zip(names, runs, strict=True)]
        if mode == "in turn":
            for loop in loops:
                await loop
        else:
            await asyncio.gather(*loops)
        seconds[mode] = time.perf_counter() - started
        passes = service.training.counts.passes - passes
        print(f"{mode}: {seconds[mode]:6.2f} s, {tokens / seconds[mode]:8.0f} tokens/s, {passes} passes", flush=True)
    print(f"at once is {seconds['in turn'] / seconds['at once']:.2f} times as fast as in turn")
    await service.stop()
    run_trainer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="updates of each tenant")
    parser.add_argument("--length", type=int, default=64, help="tokens of a request")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
