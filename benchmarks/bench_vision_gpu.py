"""Images in the engine on one GPU: vision tower throughput against its matmul limit, and rollouts with images.

    python benchmarks/bench_vision_gpu.py [--models Qwen3-VL-8B Qwen3-VL-2B] [--parts check tower rollout]

bf16, random weights of the published shapes, log-probs on, temperature 1, no EOS. Images have one megapixel, 1024 x
1024 pixels: 4,096 patches, 1,024 features.

- ``check``: a tiny model in float32; log-probs of responses to prompts with images, sampled on the GPU (with CUDA
  graphs, a prefix cache and chunked prefill), against those that the same engine computes on the CPU for the same
  tokens;
- ``tower``: images a second through the vision tower, with the copy of their pixels to the GPU and without, against
  its FLOPs at the GPU's peak and at the measured rate of a large matmul;
- ``rollout``: 32 prompts of one image and 64 tokens x 8 samples x 256 new tokens, and the same with text in place of
  the image. Each image is encoded once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

PEAK_TFLOPS, MEASURED_TFLOPS = 990.0, 780.0
SIDE = 1024
PROMPTS, SAMPLES, NEW, TEXT = 32, 8, 256, 64
IMAGE_TOKEN, VISION_START, VISION_END = 151655, 151652, 151653


def build_config(model: str) -> dict[str, Any]:
    """The ``config.json`` of a published shape, or of a tiny one."""
    text: dict[str, Any]
    vision: dict[str, Any]
    if model == "Qwen3-VL-8B":
        text = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288}
        vision = {"hidden_size": 1152, "depth": 27, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
    elif model == "Qwen3-VL-2B":
        text = {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144}
        vision = {"hidden_size": 1024, "depth": 24, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
    else:
        assert model == "tiny", f"{model} is not among the shapes of this benchmark"
        text = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
        vision = {"hidden_size": 64, "depth": 4, "intermediate_size": 128, "deepstack_visual_indexes": [0, 2]}
    tiny = model == "tiny"
    sections = [6, 5, 5] if tiny else [24, 20, 20]
    text |= {
        "model_type": "qwen3_vl_text",
        "num_key_value_heads": 2 if tiny else 8,
        "head_dim": 32 if tiny else 128,
        "vocab_size": 151936,
        "max_position_embeddings": 4096 if tiny else 262144,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": sections, "rope_type": "default"},
    }
    vision |= {
        "model_type": "qwen3_vl",
        "num_heads": 4 if tiny else 16,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "num_position_embeddings": 2304,
        "out_hidden_size": text["hidden_size"],
        "hidden_act": "gelu_pytorch_tanh",
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": 151656,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "tie_word_embeddings": model != "Qwen3-VL-8B",
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


def make_image(seed: int, height: int = SIDE, width: int = SIDE) -> Any:
    """A processed image of noise, as Qwen3-VL's processor would give it."""
    import numpy as np

    from miles.core.media import make_image_input

    rows, columns = height // 16, width // 16
    pixels = np.random.default_rng(seed).standard_normal((rows * columns, 3 * 2 * 16 * 16), np.float32)
    arrays = {"pixel_values": pixels, "image_grid_thw": np.array([[1, rows, columns]], np.int64)}
    return make_image_input(arrays, rows * columns // 4)


def make_prompt(images: list[Any], text: int, seed: int) -> tuple[Any, Any]:
    """Tokens and placed images: some text, each image between its marks, some text."""
    import numpy as np

    from miles.core.media import PlacedImage

    rng = np.random.default_rng(seed)
    tokens, placed = rng.integers(0, 10_000, text // 2).tolist(), []
    for image in images:
        tokens.append(VISION_START)
        placed.append(PlacedImage(start=len(tokens), length=image.num_features, image=image))
        tokens += [IMAGE_TOKEN] * image.num_features + [VISION_END]
    tokens += rng.integers(0, 10_000, text - text // 2).tolist()
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


def check() -> dict[str, Any]:
    """The largest difference between log-probs that the GPU sampled and those of the CPU for the same tokens."""
    import numpy as np
    import torch

    from miles.backends.native.engine.request import GenerateRequest
    from miles.core.protocols import SamplingParams

    decoder = build_decoder("tiny", "cpu", torch.float32, std=0.1)
    images = [make_image(0, 128, 192), make_image(1, 64, 64), make_image(2, 256, 96)]
    first, second, both = images[:1], images[1:2], images[1:]
    prompts = [make_prompt(each, 40, i) for i, each in enumerate((first, second, both, both, []))]
    prompts.append((prompts[0][0], prompts[0][1]))
    on_gpu = build_decoder("tiny", "cpu", torch.float32, std=0.1).to("cuda")

    async def sample(engine: Any, asked: list[Any]) -> list[Any]:
        how = SamplingParams(max_new_tokens=48, ignore_eos=True, seed=7)
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
        engine, _, run = build_engine(on_gpu, page_size=16, kv_tokens=16384, **options)
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


def measure_tower(model: str, count: int = 8) -> dict[str, Any]:
    import torch

    decoder = build_decoder(model, "cuda", torch.bfloat16)
    tower, spec = decoder.vision, decoder.spec
    images = [make_image(seed) for seed in range(count)]
    with torch.inference_mode():
        whole = seconds(lambda: tower(images)) / count
        alone = seconds(lambda: tower(images[:1]))
        busy = device_seconds(lambda: tower(images)) / count
    flops = count_tower_flops(spec, (SIDE // spec.vision.tower.patch_size) ** 2)
    return {
        "images_per_s": 1 / whole,
        "one_at_a_time_per_s": 1 / alone,
        "device_images_per_s": 1 / busy,
        "tflop_per_image": flops / 1e12,
        "limit_measured_per_s": MEASURED_TFLOPS * 1e12 / flops,
        "limit_peak_per_s": PEAK_TFLOPS * 1e12 / flops,
        "device_share_of_measured": flops / busy / (MEASURED_TFLOPS * 1e12),
    }


def measure_rollout(model: str) -> dict[str, Any]:
    import numpy as np
    import torch

    from miles.core.protocols import SamplingParams
    from miles.core.types import Version
    from miles.launch.runtime.gc_tuning import reduce_gc

    decoder = build_decoder(model, "cuda", torch.bfloat16)
    engine, publication, run = build_engine(decoder, max_running=256, kv_tokens=420_000)
    with_images = [make_prompt([make_image(i)], TEXT, i) for i in range(PROMPTS)]
    text = [(np.random.default_rng(i).integers(0, 10_000, len(with_images[0][0])), ()) for i in range(PROMPTS)]
    other = [make_prompt([make_image(1000 + i)], TEXT, i) for i in range(PROMPTS)]

    async def rollout(prompts: list[Any], new: int) -> float:
        await publication.publish(Version())  # an empty prefix cache
        started = time.perf_counter()
        await asyncio.gather(
            *(
                engine.generate(tokens, SamplingParams(max_new_tokens=new, ignore_eos=True, seed=8 * i + j), images)
                for i, (tokens, images) in enumerate(prompts)
                for j in range(SAMPLES)
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
            spent = await rollout(prompts, NEW)
            done = {key: value - before[key] for key, value in engine.stats().items()}
            found[name] = {
                "s": spent,
                "tokens_per_s": PROMPTS * SAMPLES * NEW / spent,
                "encoded_images": done["encoded_images"],
                "prefilled_tokens": done["prefilled_tokens"],
            }
        return found

    with reduce_gc():
        found = asyncio.run(measure())
    free, there = torch.cuda.mem_get_info()
    found["taken_gib"] = (there - free) / 2**30
    asyncio.run(engine.close())
    run.close()
    return found


def seconds(what: Callable[[], Any], times: int = 5) -> float:
    """Wall-clock seconds of one call, after two to warm up."""
    import torch

    for _ in range(2):
        what()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        what()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / times


def device_seconds(what: Callable[[], Any], times: int = 3) -> float:
    """Seconds in which kernels run, without copies from the host."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    what()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(times):
            what()
        torch.cuda.synchronize()
    events = [event for event in seen.events() or () if event.device_type.name == "CUDA"]
    return sum(event.time_range.elapsed_us() for event in events if "Memcpy" not in event.name) / 1e6 / times


def print_table(found: dict[str, Any]) -> None:
    if "check" in found:
        print("\ncheck: largest difference of log-probs, GPU against CPU, float32")
        for name, value in found["check"].items():
            print(f"  {name:32} {value if isinstance(value, bool) else format(value, '.2e')}")
    for model, parts in found.items():
        if model == "check":
            continue
        print(f"\n{model}")
        if tower := parts.get("tower"):
            print(
                f"  tower    {tower['images_per_s']:7.1f} images/s with pixels from the host, "
                f"{tower['device_images_per_s']:.1f} on the device "
                f"({tower['device_share_of_measured']:.0%} of {MEASURED_TFLOPS:.0f} TFLOP/s; limit "
                f"{tower['limit_measured_per_s']:.1f}, at peak {tower['limit_peak_per_s']:.1f}); "
                f"one at a time {tower['one_at_a_time_per_s']:.1f}"
            )
        if rollout := parts.get("rollout"):
            for name in ("images", "text"):
                row = rollout[name]
                print(
                    f"  rollout  {row['tokens_per_s']:7.0f} tokens/s with {name} in the prompts: {row['s']:.2f} s, "
                    f"{row['encoded_images']:.0f} images encoded, {row['prefilled_tokens']:.0f} tokens prefilled"
                )
            print(f"           {rollout['taken_gib']:.1f} GiB of GPU memory taken")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["Qwen3-VL-8B", "Qwen3-VL-2B"])
    parser.add_argument("--parts", nargs="+", default=["check", "tower", "rollout"])
    parser.add_argument("--json", help="also write the numbers to this file")
    args = parser.parse_args()
    import torch

    found: dict[str, Any] = {}
    if "check" in args.parts:
        found["check"] = check()
    for model in args.models:
        parts: dict[str, Any] = {}
        if "tower" in args.parts:
            parts["tower"] = measure_tower(model)
            torch.cuda.empty_cache()
        if "rollout" in args.parts:
            parts["rollout"] = measure_rollout(model)
            torch.cuda.empty_cache()
        if parts:
            found[model] = parts
    print_table(found)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
