"""Checkpoint save time: how long training waits, in the foreground and background, and write throughput.

A random model of about ``--gb`` of weights in bfloat16, with float32 master weights and Adam moments (seven times as
much in all), is saved alternately in the foreground and in the background, each with and without reading the files
back. Two limits: copying the same bytes once in memory, and writing them once into plain files with fsync. The first
save of each kind pays for fresh memory and is not counted.

    python benchmarks/bench_checkpoint.py [--gb 0.25] [--rounds 3] [--folder DIR]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from miles.backends.fsdp.local_model import LocalModel
from miles.core import markers
from miles.core.types import Version
from miles.models.decoder import Decoder
from miles.models.families import config_from_spec
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from miles.train.checkpoint import checkpoint
from miles.train.config import TrainConfig
from miles.train.optim.lr_scheduler import build_lr_schedule
from miles.train.optim.optimizer import Optimizer

CHUNK = 16 << 20


def build_spec(gigabytes: float) -> DecoderSpec:
    attention = AttentionSpec(
        num_heads=8, num_kv_heads=2, head_dim=128, rope=RopeSpec(theta=1e6), qk_norm="head", qkv_bias=False
    )
    layer = LayerSpec(mixer=attention, ffn=MlpSpec(size=3072))
    each = 2 * (2 * 1024 * 1024 + 2 * 256 * 1024 + 3 * 3072 * 1024)
    return DecoderSpec(
        family="qwen3",
        vocab_size=16384,
        hidden_size=1024,
        norm_eps=1e-6,
        layers=max(1, round(gigabytes * 1e9 / each)) * (layer,),
        tie_embeddings=True,
        max_positions=4096,
        eos_token_ids=(0,),
    )


def build_trained_model(spec: DecoderSpec) -> tuple[LocalModel, Optimizer]:
    """A model after its first update."""
    decoder = Decoder(spec, device="cpu", dtype=torch.bfloat16)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model, config = LocalModel(decoder, config=config_from_spec(spec)), TrainConfig()
    optimizer = Optimizer(dict(model.parameters()), config, build_lr_schedule(config, updates=2))
    for parameter in model.parameters().values():
        parameter.sum().backward()
    optimizer.step()
    return model, optimizer


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_save(
    folder: Path, model: LocalModel, optimizer: Optimizer, saving: checkpoint.CheckpointSaver
) -> tuple[float, float, int]:
    """How long training waits, how long it takes till all is on disk, and how many bytes that is."""
    folder.mkdir()
    began = time.perf_counter()
    checkpoint.save(folder, model, optimizer, Version(), saver=saving)
    waited = time.perf_counter() - began
    saving.wait()
    whole = time.perf_counter() - began
    size = sum(written.bytes for written in markers.collect_files(folder).values())
    shutil.rmtree(folder)
    return waited, whole, size


def plain(folder: Path, size: int) -> None:
    """As many bytes into one file, forced to disk."""
    chunk = torch.randint(256, (CHUNK,), dtype=torch.uint8).numpy().data
    path = folder / "plain"
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, CHUNK):
            file.write(chunk[: size - start])
        os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    asked = parser.parse_args()
    torch.set_num_threads(2)
    model, optimizer = build_trained_model(build_spec(asked.gb))
    kinds = {
        f"{'background' if background else 'training waits'}, {'verified' if verify else 'unverified'}": (
            checkpoint.CheckpointSaver(background=background, verify=verify)
        )
        for background in (False, True)
        for verify in (False, True)
    }
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        size = [measure_save(folder / "first", model, optimizer, saving)[2] for saving in kinds.values()][-1]
        source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        limits: dict[str, list[float]] = {"copy in memory": [], "plain file": []}
        for _ in range(asked.rounds):
            for kind, saving in kinds.items():
                found[kind].append(measure_save(folder / "again", model, optimizer, saving)[:2])
            limits["copy in memory"].append(seconds(lambda: target.copy_(source)))
            limits["plain file"].append(seconds(lambda: plain(folder, size)))
    print(f"{size / 1e9:.2f} GB a checkpoint, medians of {asked.rounds} rounds")
    print(f"{'':<28}{'waits s':>10}{'on disk s':>11}{'GB/s':>8}")
    for kind, rounds in found.items():
        waits, whole = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{kind:<28}{waits:>10.3f}{whole:>11.3f}{size / whole / 1e9:>8.2f}")
    for kind, rounds in limits.items():
        spent = statistics.median(rounds)
        print(f"{kind:<28}{'':>10}{spent:>11.3f}{size / spent / 1e9:>8.2f}")


if __name__ == "__main__":
    main()
