"""Images on one GPU: vision tower throughput against its matmul limit, rollouts with images, and training on them.

    PYTHONPATH=src python benchmarks/bench_vision_gpu.py                       # everything
    PYTHONPATH=src python benchmarks/bench_vision_gpu.py --models Qwen3-VL-8B --parts tower rollout
    PYTHONPATH=src python benchmarks/bench_vision_gpu.py --device cpu --tiny   # every part in seconds, on any machine

bf16, random weights of the published shapes, log-probs on, temperature 1, no EOS. Images have one megapixel, 1024 x
1024 pixels: 4,096 patches, 1,024 features. Each part of each model is a process of its own, so that one that fails
leaves the others; its numbers are printed, and written with --json, as soon as they are there.

- ``check``: a tiny model in float32; log-probs of responses to prompts with images, sampled on the GPU (with CUDA
  graphs, a prefix cache and chunked prefill), against those that the same engine computes on the CPU for the same
  tokens;
- ``tower``: images a second through the vision tower, with the copy of their pixels to the GPU and without, against
  its FLOPs at the measured rate of a large matmul;
- ``profile`` (only if asked for): the time of each piece of a block, of implementations of its attention, and of the
  top CUDA kernels of a forward;
- ``rollout``: 32 prompts of one image and 64 tokens x 8 samples x 256 new tokens, and the same with text in place of
  the image. Each image is encoded once;
- ``train``: tokens a second and peak memory of trainer steps (two micro-batches, then clipping and AdamW with float32
  master weights and moments; tower, projectors and language model are trained) beside the memory that ``miles plan``
  says for them. A sample is one image, 64 tokens and 256 trained ones. A step that does not fit is repeated with
  activation checkpointing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

GIB = 2**30
# The published models have one placeholder of images, the tiny one another. Texts have tokens below both.
IMAGE_TOKEN, TINY_IMAGE_TOKEN = 151655, 1000
PARTS = ("check", "tower", "rollout", "train")
EXTRA_PARTS = ("profile",)
# Micro-batches of a trainer step: from the second on, gradients and what backward needs are held together.
MICRO_BATCHES = 2


@dataclass(frozen=True, slots=True)
class Workload:
    """Pixels of an image's side, what is generated, and what a micro-batch of the trainer holds."""

    side: int = 1024
    prompts: int = 32
    samples: int = 8
    new: int = 256
    text: int = 64
    kv_tokens: int = 420_000
    max_running: int = 256
    tower_images: int = 8
    train_samples: int = 6

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.side // 16) ** 2

    @property
    def train_tokens(self) -> int:
        """Tokens that the trainer reads in a micro-batch: a sample is read up to its last token but one."""
        return self.train_samples * (self.patches // 4 + self.text + self.new)


FULL = Workload()
TINY = Workload(
    side=64, prompts=2, samples=2, new=6, text=8, kv_tokens=1024, max_running=8, tower_images=2, train_samples=2
)


def build_config(model: str) -> dict[str, Any]:
    """The ``config.json`` of a published shape, or of a tiny one."""
    from miles.models.accounting.known_models import find_known_config

    if model != "tiny":
        config = find_known_config(f"{model}-Instruct")
        assert config is not None, f"{model} is not among the published shapes"
        return dict(config)
    text = {
        "model_type": "qwen3_vl_text",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "head_dim": 32,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
    }
    vision = {
        "model_type": "qwen3_vl",
        "hidden_size": 64,
        "depth": 4,
        "num_heads": 4,
        "intermediate_size": 128,
        "deepstack_visual_indexes": [0, 2],
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "num_position_embeddings": 2304,
        "out_hidden_size": 128,
        "hidden_act": "gelu_pytorch_tanh",
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": TINY_IMAGE_TOKEN,
        "video_token_id": TINY_IMAGE_TOKEN + 1,
        "vision_start_token_id": TINY_IMAGE_TOKEN + 2,
        "vision_end_token_id": TINY_IMAGE_TOKEN + 3,
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": vision,
    }


def build_decoder(model: str, device: str, dtype: Any, std: float = 0.02) -> Any:
    import torch

    from miles.models.decoder import Decoder
    from miles.models.families.registry import spec_from_config

    decoder = Decoder(spec_from_config(build_config(model)), device=device, dtype=dtype)
    torch.manual_seed(0)
    for name, parameter in decoder.named_parameters():
        is_norm = "norm" in name and name.endswith("weight")
        parameter.data.normal_(mean=1.0 if is_norm else 0.0, std=std)
    return decoder.requires_grad_(False)


def make_image(seed: int, height: int, width: int) -> Any:
    """A processed image of noise, as Qwen3-VL's processor would give it."""
    import numpy as np

    from miles.core.media import make_image_input

    rows, columns = height // 16, width // 16
    pixels = np.random.default_rng(seed).standard_normal((rows * columns, 3 * 2 * 16 * 16), np.float32)
    arrays = {"pixel_values": pixels, "image_grid_thw": np.array([[1, rows, columns]], np.int64)}
    return make_image_input(arrays, rows * columns // 4)


def make_prompt(model: str, images: list[Any], text: int, seed: int) -> tuple[Any, Any]:
    """Tokens and placed images: some text, the images, some text."""
    import numpy as np

    from miles.core.media import PlacedImage

    rng = np.random.default_rng(seed)
    image_token = TINY_IMAGE_TOKEN if model == "tiny" else IMAGE_TOKEN
    tokens, placed = rng.integers(0, TINY_IMAGE_TOKEN, text // 2).tolist(), []
    for image in images:
        placed.append(PlacedImage(start=len(tokens), length=image.num_features, image=image))
        tokens += [image_token] * image.num_features
    tokens += rng.integers(0, TINY_IMAGE_TOKEN, text - text // 2).tolist()
    return np.array(tokens, np.int32), tuple(placed)


def build_engine(decoder: Any, **options: Any) -> Any:
    """An engine with a decoder's weights, on its device and in its dtype."""
    from miles.backends.native.config import NativeConfig
    from miles.backends.native.engine.engine import NativeEngine
    from miles.cluster.executor import ThreadExecutor
    from miles.core.types import Version
    from miles.sync.publish import Publication

    like = decoder.embedding.weight
    run = ThreadExecutor("engine")
    engine = NativeEngine(
        decoder.spec,
        device=like.device,
        dtype=like.dtype,
        config=NativeConfig(**{f"engine_{name}": value for name, value in options.items()}),
        run=run,
        decode=None,
    )
    weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    publication = Publication(weights=lambda: weights, engines=[engine], transport="shared", run=run)
    asyncio.run(publication.publish(Version()))
    return engine, publication, run


# -- parts ----------------------------------------------------------------------------------


def check(device: str, workload: Workload) -> dict[str, Any]:
    """The largest difference between log-probs that the device sampled and those of the CPU for the same tokens."""
    import numpy as np
    import torch

    from miles.backends.native.engine.request import GenerateRequest
    from miles.core.protocols import SamplingParams

    decoder = build_decoder("tiny", "cpu", torch.float32, std=0.1)
    images = [make_image(0, 128, 192), make_image(1, 64, 64), make_image(2, 256, 96)]
    first, second, both = images[:1], images[1:2], images[1:]
    prompts = [make_prompt("tiny", each, 40, i) for i, each in enumerate((first, second, both, both, []))]
    prompts.append((prompts[0][0], prompts[0][1]))
    on_device = build_decoder("tiny", "cpu", torch.float32, std=0.1).to(device)

    async def sample(engine: Any, asked: list[Any]) -> list[Any]:
        how = SamplingParams(max_new_tokens=min(48, workload.new), ignore_eos=True, seed=7)
        return await asyncio.gather(*(engine.generate(tokens, how, images) for tokens, images in asked))

    async def score(engine: Any, asked: list[Any], responses: list[Any]) -> list[Any]:
        outputs = []
        for (tokens, images), response in zip(asked, responses, strict=True):
            request = GenerateRequest(
                tokens=np.concatenate((tokens, response)),
                sampling=SamplingParams(max_new_tokens=0),
                logprob_start_len=len(tokens),
                images=images,
            )
            output = engine.submit(request)
            await output.completion()
            outputs.append(np.array(output.prompt_logprobs.logprobs, np.float32))
        return outputs

    found: dict[str, Any] = {}
    reference, _, reference_run = build_engine(decoder, page_size=4, kv_tokens=4096)
    for name, options in {
        "default": {},
        "chunks of 13 tokens": {"prefill_chunk": 13},
        "no CUDA graphs": {"cuda_graph": False},
        "no prefix cache": {"prefix_cache": False},
    }.items():
        engine, _, run = build_engine(on_device, page_size=16, kv_tokens=16384, **options)
        for kind, asked in {"together": prompts, "alone": prompts[:1], "again": prompts}.items():
            answers = asyncio.run(sample(engine, asked))
            responses = [answer.spans[0].tokens for answer in answers]
            expected = asyncio.run(score(reference, asked, responses))
            apart = max(
                float(np.abs(answer.spans[0].logprobs - values).max())
                for answer, values in zip(answers, expected, strict=True)
            )
            found[f"{name}, {kind}"] = apart
        asyncio.run(engine.close())
        run.close()
    reference_run.close()
    worst = max(found.values())
    found["ok"] = worst < 2e-3
    return found


def count_tower_flops(spec: Any, patches: int) -> float:
    """FLOPs of one image of one frame: matmuls and attention of every patch to every other."""
    tower, merge = spec.vision.tower, spec.vision.merge_size
    width, inner = tower.hidden_size, tower.mlp.size
    block = 4 * width**2 + (3 if tower.mlp.gated else 2) * width * inner
    merged = width * merge**2
    merger = (1 + len(tower.deepstack_layers)) * (merged**2 + merged * spec.hidden_size) / merge**2
    return patches * 2 * (tower.patch_values * width + tower.num_layers * block + merger) + (
        tower.num_layers * 4 * patches**2 * width
    )


def measure_tower(model: str, device: str, workload: Workload) -> dict[str, Any]:
    import torch

    decoder = build_decoder(model, device, training_dtype(device))
    tower, spec, count = decoder.vision, decoder.spec, workload.tower_images
    images = [make_image(seed, workload.side, workload.side) for seed in range(count)]
    with torch.inference_mode():
        whole = measure_seconds(lambda: tower(images), device) / count
        alone = measure_seconds(lambda: tower(images[:1]), device)
        busy = measure_device_seconds(lambda: tower(images), device) / count
    flops = count_tower_flops(spec, workload.patches)
    rate = measure_matmul_rate(device)
    return {
        "images_per_s": 1 / whole,
        "one_at_a_time_per_s": 1 / alone,
        "device_images_per_s": 1 / busy,
        "tflop_per_image": flops / 1e12,
        "matmul_tflops": rate / 1e12,
        "limit_per_s": rate / flops,
        "device_share_of_limit": flops / busy / rate,
    }


def profile(model: str, device: str, workload: Workload) -> dict[str, Any]:
    tower = build_decoder(model, device, training_dtype(device)).vision
    images = [make_image(seed, workload.side, workload.side) for seed in range(workload.tower_images)]
    return load_profile_module().profile_tower(tower, images, device)


def load_profile_module() -> Any:
    """``benchmarks.vision_profile``, also if this file runs as a script."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    return import_module("benchmarks.vision_profile")


def measure_rollout(model: str, device: str, workload: Workload) -> dict[str, Any]:
    import numpy as np

    from miles.core.protocols import SamplingParams
    from miles.core.types import Version
    from miles.launch.runtime.gc_tuning import reduce_gc

    decoder = build_decoder(model, device, training_dtype(device))
    options = {"max_running": workload.max_running, "kv_tokens": workload.kv_tokens}
    engine, publication, run = build_engine(decoder, **options)
    count, side = workload.prompts, workload.side
    with_images = [make_prompt(model, [make_image(i, side, side)], workload.text, i) for i in range(count)]
    text = [(np.random.default_rng(i).integers(0, TINY_IMAGE_TOKEN, len(with_images[0][0])), ()) for i in range(count)]
    other = [make_prompt(model, [make_image(1000 + i, side, side)], workload.text, i) for i in range(count)]

    async def rollout(prompts: list[Any], new: int) -> float:
        await publication.publish(Version())  # an empty prefix cache
        started = time.perf_counter()
        await asyncio.gather(
            *(
                engine.generate(tokens, SamplingParams(max_new_tokens=new, ignore_eos=True, seed=8 * i + j), images)
                for i, (tokens, images) in enumerate(prompts)
                for j in range(workload.samples)
            )
        )
        return time.perf_counter() - started

    async def measure() -> dict[str, Any]:
        await engine.warm_up()
        await rollout(other, 4)  # compilers, too
        await rollout(text, 4)
        found: dict[str, Any] = {}
        for name, prompts in {"images": with_images, "text": text}.items():
            before = dict(engine.stats())
            spent = await rollout(prompts, workload.new)
            done = {key: value - before[key] for key, value in engine.stats().items()}
            found[name] = {
                "s": spent,
                "tokens_per_s": count * workload.samples * workload.new / spent,
                "encoded_images": done["encoded_images"],
                "prefilled_tokens": done["prefilled_tokens"],
            }
        return found

    with reduce_gc():
        found = asyncio.run(measure())
    found["taken_gib"] = taken_gib(device)
    asyncio.run(engine.close())
    run.close()
    return found


# -- training -------------------------------------------------------------------------------


def make_sample(model: str, index: int, workload: Workload) -> Any:
    """A prompt with one image, and a trained response with one token more, which is predicted and not read."""
    import numpy as np

    from miles.core.types import Sample

    rng = np.random.default_rng(index)
    prompt, images = make_prompt(model, [make_image(index, workload.side, workload.side)], workload.text, index)
    tokens = np.concatenate((prompt, rng.integers(0, TINY_IMAGE_TOKEN, workload.new + 1))).astype(np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    return Sample(
        prompt_id=index,
        trajectory=index,
        tokens=tokens,
        mask=mask,
        logprobs=np.where(mask, np.float32(-12), np.float32(0)),
        advantages=np.where(mask, np.float32(rng.normal()), np.float32(0)),
        versions=np.where(mask, 0, -1).astype(np.int32),
        images=images,
    )


def build_trainer(model: str, device: str, workload: Workload, recompute: bool) -> Any:
    from miles.algo.config import AlgoConfig
    from miles.backends.fsdp.local_model import LocalModel
    from miles.cluster.executor import InlineExecutor
    from miles.train.config import TrainConfig
    from miles.train.policy_trainer import PolicyTrainer

    decoder = build_decoder(model, device, training_dtype(device)).requires_grad_(True)
    return PolicyTrainer(
        LocalModel(decoder, gradient_checkpointing=recompute),
        algo=AlgoConfig(),
        train=TrainConfig(max_tokens_per_gpu=workload.train_tokens),
        steps=1,
        updates=100,
        temperature=1.0,
        run=InlineExecutor(),
    )


def plan_gib(model: str, device: str, workload: Workload, recompute: bool) -> dict[str, float]:
    """What ``miles plan`` counts for a step with these many tokens and patches at once."""
    from miles.cluster.parallel_dims import ParallelDims
    from miles.launch.plan.layout_memory import estimate_rank_activations, estimate_rank_memory
    from miles.models.accounting.params import BYTES
    from miles.models.accounting.vision import vision_activation_bytes
    from miles.models.families.registry import spec_from_config
    from miles.train.config import TrainConfig

    spec, dtype = spec_from_config(build_config(model)), str(training_dtype(device)).removeprefix("torch.")
    tokens, patches = workload.train_tokens, workload.train_samples * workload.patches
    train, fused = TrainConfig(gradient_checkpointing=recompute), device != "cpu"
    held = estimate_rank_memory(spec, ParallelDims(), dtype)
    parts = {
        "weights, gradients, optimizer": held.weights + held.gradients + held.optimizer,
        "activations": estimate_rank_activations(spec, ParallelDims(), dtype, tokens, train, fused=fused),
        "tower": vision_activation_bytes(spec, patches, size=BYTES[dtype], fused=fused, recomputed=recompute),
    }
    return {name: size / GIB for name, size in parts.items()}


def measure_train(model: str, device: str, workload: Workload) -> dict[str, Any]:
    """A trainer step, with activation checkpointing where it does not fit otherwise."""
    import torch

    there = torch.cuda.mem_get_info()[1] / GIB if device == "cuda" else float("inf")
    for recompute in (False, True):
        if sum(plan_gib(model, device, workload, recompute).values()) > 1.1 * there:
            continue  # by far too large, and filling it takes a while
        gc.collect()
        torch.cuda.empty_cache()
        try:
            return measure_train_step(model, device, workload, recompute)
        except torch.OutOfMemoryError:
            continue
    return {"does_not_fit": True, "planned_gib": sum(plan_gib(model, device, workload, True).values())}


def measure_train_step(model: str, device: str, workload: Workload, recompute: bool) -> dict[str, Any]:
    import torch

    from miles.core.types import Batch
    from miles.models.accounting.params import forward_flops_per_token
    from miles.models.families.registry import spec_from_config

    rate = measure_matmul_rate(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    spec = spec_from_config(build_config(model))
    trainer = build_trainer(model, device, workload, recompute)
    count = MICRO_BATCHES * workload.train_samples
    batch = Batch(step=0, samples=tuple(make_sample(model, i, workload) for i in range(count)), num_groups=count)
    spent = measure_seconds(lambda: asyncio.run(trainer.step(batch)), device, times=3)
    peak = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 0.0
    tokens, planned = MICRO_BATCHES * workload.train_tokens, plan_gib(model, device, workload, recompute)
    flops = forward_flops_per_token(spec, workload.train_tokens / workload.train_samples / 2) * tokens
    flops += count_tower_flops(spec, workload.patches) * count
    return {
        "s": spent,
        "tokens_per_s": tokens / spent,
        "trained_tokens_per_s": count * workload.new / spent,
        "images_per_s": count / spent,
        "mfu": 3 * flops / spent / rate,
        "recomputed": recompute,
        "peak_gib": peak,
        "planned_gib": sum(planned.values()),
        "planned_parts_gib": planned,
    }


# -- measuring ------------------------------------------------------------------------------


def training_dtype(device: str) -> Any:
    import torch

    return torch.float32 if device == "cpu" else torch.bfloat16


def synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def taken_gib(device: str) -> float:
    """Memory of the GPU that is not free."""
    import torch

    if device == "cpu":
        return 0.0
    free, there = torch.cuda.mem_get_info()
    return (there - free) / GIB


def measure_seconds(what: Callable[[], Any], device: str, times: int = 5) -> float:
    """Median wall-clock seconds of one call, after two to warm up."""
    spent: list[float] = []
    for _ in range(2 + times):
        synchronize(device)
        started = time.perf_counter()
        what()
        synchronize(device)
        spent.append(time.perf_counter() - started)
    return statistics.median(spent[2:])


def measure_matmul_rate(device: str) -> float:
    """FLOPs a second of a large matmul."""
    import torch

    size = 8192 if device == "cuda" else 256
    square = torch.randn(size, size, device=device, dtype=training_dtype(device))
    return 2 * size**3 / measure_seconds(lambda: square @ square, device, times=10)


def measure_device_seconds(what: Callable[[], Any], device: str, times: int = 3) -> float:
    """Seconds in which kernels run, without copies from the host; on a CPU those of the call."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if device == "cpu":
        return measure_seconds(what, device, times)
    what()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(times):
            what()
        torch.cuda.synchronize()
    events = [event for event in seen.events() or () if event.device_type.name == "CUDA"]
    return sum(event.time_range.elapsed_us() for event in events if "Memcpy" not in event.name) / 1e6 / times


# -- processes and the table ----------------------------------------------------------------


def measure_part(part: str, model: str, device: str, workload: Workload) -> dict[str, Any]:
    if part == "check":
        return check(device, workload)
    measures = {"tower": measure_tower, "profile": profile, "rollout": measure_rollout, "train": measure_train}
    return measures[part](model, device, workload)


def spawn_part(part: str, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """The numbers of one part, measured in a process of its own; ``error`` if it failed."""
    command = [sys.executable, __file__, "--one", part, model, "--device", args.device]
    command += ["--tiny"] if args.tiny else []
    environment = os.environ | ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if part == "train" else {})
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        return {"error": f"exit status {done.returncode}\n{done.stderr[-3000:]}"}
    return json.loads(lines[-1].removeprefix("RESULT "))


def describe_check(found: dict[str, Any]) -> list[str]:
    values = (
        f"{name:32} {value if isinstance(value, bool) else format(value, '.2e')}" for name, value in found.items()
    )
    return ["largest difference of log-probs from those of a CPU, float32", *values]


def describe_tower(found: dict[str, Any]) -> list[str]:
    return [
        f"{found['images_per_s']:7.1f} images/s with pixels from the host, "
        f"{found['device_images_per_s']:.1f} on the device ({found['device_share_of_limit']:.0%} of "
        f"{found['limit_per_s']:.1f}, the limit at {found['matmul_tflops']:.0f} TFLOP/s); "
        f"one at a time {found['one_at_a_time_per_s']:.1f}"
    ]


def describe_rollout(found: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for name in ("images", "text"):
        row = found[name]
        lines.append(
            f"{row['tokens_per_s']:7.0f} tokens/s with {name} in the prompts: {row['s']:.2f} s, "
            f"{row['encoded_images']:.0f} images encoded, {row['prefilled_tokens']:.0f} tokens prefilled"
        )
    return [*lines, f"{found['taken_gib']:.1f} GiB of GPU memory taken"]


def describe_train(found: dict[str, Any]) -> list[str]:
    if "does_not_fit" in found:
        return [f"does not fit; planned {found['planned_gib']:.1f} GiB with activation checkpointing"]
    planned = ", ".join(f"{name} {size:.1f}" for name, size in found["planned_parts_gib"].items())
    return [
        f"{found['tokens_per_s']:7.0f} tokens/s ({found['images_per_s']:.1f} images/s, MFU {found['mfu']:.0%}), "
        f"{found['s']:.2f} s a step{', layers recomputed' if found['recomputed'] else ''}",
        f"peak {found['peak_gib']:.1f} GiB, planned {found['planned_gib']:.1f} GiB ({planned})",
    ]


def describe_profile(found: dict[str, Any]) -> list[str]:
    return load_profile_module().describe_profile(found)


DESCRIBE = {
    "check": describe_check,
    "tower": describe_tower,
    "profile": describe_profile,
    "rollout": describe_rollout,
    "train": describe_train,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["Qwen3-VL-8B", "Qwen3-VL-4B", "Qwen3-VL-2B"])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS + EXTRA_PARTS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model and workload, to see that every part runs")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        part, model = args.one
        print("RESULT", json.dumps(measure_part(part, model, args.device, TINY if args.tiny else FULL)))
        return
    models = ["tiny"] if args.tiny else args.models
    tasks = [("check", "tiny")] if "check" in args.parts else []
    tasks += [(part, model) for model in models for part in args.parts if part != "check"]
    results: dict[str, Any] = {}
    for part, model in tasks:
        found = spawn_part(part, model, args)
        results.setdefault(model, {})[part] = found
        lines = [found["error"]] if "error" in found else DESCRIBE[part](found)
        print(f"{model} {part}:", *lines, sep="\n  ", flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    sys.exit(any("error" in found for parts in results.values() for found in parts.values()))


if __name__ == "__main__":
    main()
