"""Time and memory to load a checkpoint: Miles against transformers and against reading the files alone.

A checkpoint in bfloat16 is written to a temporary folder, then loaded in fresh processes that alternate, with its pages
in the page cache and without. A model is loaded when a byte of every page of it has been read: transformers may map a
file and read it later. Two time limits: reading every byte once into one small buffer, and once into freshly allocated
memory, which costs time of its own and which weights in private memory need. The memory limit is the weights. Memory is
the peak growth of the process: anonymous (its own, sampled) and all resident pages (mapped files too, the kernel's own
count); with a GPU, also what torch allocated there.

    python benchmarks/bench_model_load.py [--gb 2.5] [--rounds 3] [--threads 2] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from miles.models.checkpoint import hf
from miles.models.checkpoint.param_map import build_param_map
from miles.models.checkpoint.safetensors_io import INDEX, write_json
from miles.models.families import config_from_spec
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, RopeSpec

SHARD = 512 << 20
CHUNK = 8 << 20


# -- the checkpoint ---------------------------------------------------------------------------


def build_spec(case: str, layers: int) -> DecoderSpec:
    attention = AttentionSpec(
        num_heads=16, num_kv_heads=4, head_dim=128, rope=RopeSpec(theta=1e6), qk_norm="head", qkv_bias=False
    )
    ffn = (
        MlpSpec(size=6144)
        if case == "dense"
        else MoeSpec(num_experts=32, experts_per_token=4, size=768, norm_topk_prob=True)
    )
    return DecoderSpec(
        family="qwen3" if case == "dense" else "qwen3_moe",
        vocab_size=32768,
        hidden_size=2048,
        norm_eps=1e-6,
        layers=layers * (LayerSpec(mixer=attention, ffn=ffn),),
        tie_embeddings=False,
        max_positions=4096,
        eos_token_ids=(0,),
    )


def list_tensors(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((piece.hf_name, piece.shape) for parts in build_param_map(spec).values() for piece in parts)


def count_bytes(spec: DecoderSpec) -> int:
    return sum(2 * torch.Size(shape).numel() for _, shape in list_tensors(spec))


def write(folder: Path, spec: DecoderSpec) -> None:
    """A shard at a time, so that the checkpoint may be larger than memory."""
    where: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1 << 22, generator=generator).mul_(0.02).to(torch.bfloat16)

    def flush() -> None:
        name = f"model-{len(set(where.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
        where.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in list_tensors(spec):
        count = torch.Size(shape).numel()
        shard[name] = noise.repeat(-(-count // len(noise)))[:count].roll(len(where)).view(shape).contiguous()
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD:
            flush()
    flush()
    write_json(folder / INDEX, {"metadata": {}, "weight_map": where})
    write_json(folder / "config.json", config_from_spec(spec) | {"dtype": "bfloat16"})


# -- one measurement, in a process of its own -------------------------------------------------


def read_proc_status(key: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{key}:"))


def measure_load(load: Callable[[], torch.nn.Module], device: str) -> dict[str, float]:
    most, done = 0, threading.Event()
    torch.zeros(1, device=device)  # a GPU's own start is nobody's to answer for

    def watch() -> None:
        nonlocal most
        while not done.wait(0.01):
            most = max(most, read_proc_status("RssAnon"))

    anonymous, resident = read_proc_status("RssAnon"), read_proc_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    model = load()
    for parameter in model.parameters():
        parameter.detach().reshape(-1).view(torch.uint8)[::4096].sum().item()
    seconds = time.perf_counter() - started
    most = max(most, read_proc_status("RssAnon"))
    done.set()
    watcher.join()
    return {
        "seconds": seconds,
        "anonymous": most - anonymous,
        "resident": read_proc_status("VmHWM") - resident,
        "on the GPU": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        "weights": sum(p.nbytes for p in model.parameters()),
        "sum": sum(p.double().sum().item() for p in model.parameters() if p.dim() == 1 or p.shape[0] == 32768),
    }


def read_files(folder: Path, *, kept: bool = False) -> float:
    """Seconds to read every shard once, and do nothing with it but, perhaps, keep it."""
    shards = sorted(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in shards) if kept else CHUNK
    started = time.perf_counter()
    memory, at = torch.empty(size, dtype=torch.uint8).numpy().data, 0
    for path in shards:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(memory[at : at + CHUNK]):
                at += count if kept else 0
    return time.perf_counter() - started


def child(way: str, folder: Path, device: str) -> dict[str, float]:
    if way in LIMITS:
        return {"seconds": read_files(folder, kept=way == "fresh memory")}
    if way == "miles":
        return measure_load(lambda: hf.load(folder, device=device, dtype=torch.bfloat16), device)
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM  # noqa: F401

    how = {"device_map": device} if device == "cuda" else {}
    return measure_load(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **how), device)


# -- the table --------------------------------------------------------------------------------


def run(way: str, folder: Path, given: argparse.Namespace, *, cached: bool) -> dict[str, float]:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            if not cached:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached:
        read_files(folder)
    command = [sys.executable, __file__, "--child", way, str(folder), "--device", given.device]
    own = os.environ | {"OMP_NUM_THREADS": str(given.threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=own)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def show(case: str, folder: Path, size: int, given: argparse.Namespace) -> None:
    for cached in (True, False):
        ways = (*LIMITS, *WAYS)
        runs = [{way: run(way, folder, given, cached=cached) for way in ways} for _ in range(given.rounds)]
        sums = [turn[way]["sum"] for turn in runs for way in WAYS]
        assert max(sums) - min(sums) <= 1e-6 * abs(max(sums)), "both must hold the same weights"
        limits = {name: statistics.median(turn[name]["seconds"] for turn in runs) for name in LIMITS}
        where = "in the cache" if cached else "from disk"
        rates = (f"{name} {seconds:.2f} s, {size / seconds / 1e9:.1f} GB/s" for name, seconds in limits.items())
        print(f"\n{case}, {size / 1e9:.2f} GB of bfloat16, {where} ({'; '.join(rates)})")
        kinds = ("anonymous", "resident", "on the GPU")[: 3 if given.device == "cuda" else 2]
        print(
            f"{'':14}{'seconds':>9}"
            + "".join(f"  x {name}" for name in limits)
            + "".join(f"{kind:>13}{'x weights':>11}" for kind in kinds)
        )
        for way in WAYS:
            seconds = statistics.median(turn[way]["seconds"] for turn in runs)
            most = [max(turn[way][kind] for turn in runs) for kind in kinds]
            memory = "".join(f"{held / 1e9:10.2f} GB{held / runs[0][way]['weights']:11.3f}" for held in most)
            times = "".join(f"{seconds / limit:{len(name) + 4}.2f}" for name, limit in limits.items())
            print(f"{way:14}{seconds:9.2f}{times}{memory}")


LIMITS = ("reading", "fresh memory")
WAYS = ("miles", "transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--cases", nargs="+", default=["experts", "dense"], choices=["experts", "dense"])
    parser.add_argument("--child", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(given.child[0], Path(given.child[1]), given.device)))
        return
    for case in given.cases:
        one, two = (count_bytes(build_spec(case, layers)) for layers in (1, 2))
        spec = build_spec(case, max(1, round((given.gb * 1e9 - one) / (two - one)) + 1))
        size = count_bytes(spec)
        with tempfile.TemporaryDirectory() as folder:
            free = shutil.disk_usage(folder).free
            if free < 2 * size:
                sys.exit(f"{size / 1e9:.1f} GB are to be written to {folder}, which has {free / 1e9:.1f} GB free.")
            write(Path(folder), spec)
            show(case, Path(folder), size, given)


if __name__ == "__main__":
    main()
