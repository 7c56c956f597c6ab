"""Stock SGLang on one GPU, on the workloads of bench_lora_gpu.py and bench_vision_gpu.py, to be run beside them.

    PYTHONPATH=SGLANG_FOLDER:src:. python benchmarks/bench_sglang_gpu.py lora [--sides base one many] [--attention fa3]
    PYTHONPATH=SGLANG_FOLDER:src:. python benchmarks/bench_sglang_gpu.py images [--model Qwen3-VL-8B] [--attention fa3]

bf16, random weights of the published shapes, log-probs on, temperature 1, no EOS. ``lora``: 256 requests of ``W`` with
no adapter in an engine without LoRA (``base``), all with one adapter of rank 16 (``one``), and with 32 of them
(``many``), on all projections, unmerged. ``images``: 32 prompts of a 1-megapixel image and 64 tokens x 8 samples x 256
new tokens; SGLang's processor reads the images, which are in memory as PIL images, inside of the measured time, as it
does in a rollout. ``--tiny`` is a small model, for a CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ADAPTERS, RANK = 32, 16


def start_engine(folder: Path, args: argparse.Namespace, **options: Any) -> Any:
    import sglang as sgl  # pyright: ignore[reportMissingImports]

    where = (
        {"device": "cpu", "attention_backend": "torch_native"} if args.tiny else {"attention_backend": args.attention}
    )
    options = {"mem_fraction_static": 0.8, "context_length": 4096, "log_level": "warning", **where, **options}
    return sgl.Engine(
        model_path=str(folder), load_format="dummy", sampling_backend="pytorch", dtype="bfloat16", **options
    )


def measure(answer: Callable[[int | None], None], flush: Callable[[], Any], rounds: int = 2) -> float:
    """Seconds of the fastest of some runs behind a short one, each with an empty prefix cache."""
    answer(4)
    seconds = []
    for _ in range(rounds):
        flush()
        began = time.perf_counter()
        answer(None)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


# -- adapters -----------------------------------------------------------------------------------


def make_adapter(spec: Any, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A random adapter on all projections: tensors and ``adapter_config.json`` in PEFT's format."""
    import torch

    from miles.models.lora.targets import list_targets

    random = torch.Generator().manual_seed(seed)
    tensors, names = {}, set()
    for target in list_targets(spec):
        if target.module.startswith("lm_head"):
            continue
        name = f"base_model.model.{target.module.removesuffix('.weight')}"
        names.add(name.rpartition(".")[2])
        for factor, shape in (("A", (RANK, target.inputs)), ("B", (target.outputs, RANK))):
            tensors[f"{name}.lora_{factor}.weight"] = (0.01 * torch.randn(shape, generator=random)).bfloat16()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    return tensors, config | {"target_modules": sorted(names)}


def measure_lora(args: argparse.Namespace, folder: Path) -> None:
    from benchmarks.bench_engine_gpu import spec_named, workload

    from miles.models.families.registry import config_from_spec

    spec = spec_named(args.model)
    (folder / "config.json").write_text(json.dumps(config_from_spec(spec) | {"torch_dtype": "bfloat16"}))
    count = 4 if args.tiny else 256
    prompts, lengths = workload("W", count)
    lengths = [4] * count if args.tiny else lengths
    base = float("nan")
    for side in args.sides:
        many = {"base": 0, "one": 1, "many": 2 if args.tiny else ADAPTERS}[side]
        options: dict[str, Any] = {"skip_tokenizer_init": True}
        adapters = [make_adapter(spec, i) for i in range(many)]
        if many:
            options |= {"enable_lora": True, "max_loras_per_batch": many, "max_lora_rank": RANK}
            options |= {"lora_target_modules": adapters[0][1]["target_modules"]}
        engine = start_engine(folder, args, **options)
        for i, (tensors, config) in enumerate(adapters):
            # From tensors: it refuses adapters of a folder beside weights that are not from one.
            result = engine.load_lora_adapter_from_tensors(f"a{i}", tensors, config)
            assert result.success, result

        def answer(new: int | None, engine: Any = engine, many: int = many) -> None:
            how = [{"max_new_tokens": new or n, "ignore_eos": True, "temperature": 1.0} for n in lengths]
            chosen = [f"a{i % many}" for i in range(count)] if many else None
            out = engine.generate(input_ids=prompts, sampling_params=how, return_logprob=True, lora_path=chosen)
            assert [len(one["meta_info"]["output_token_logprobs"]) for one in out] == [new or n for n in lengths]

        rate = sum(lengths) / measure(answer, engine.flush_cache, args.rounds)
        engine.shutdown()
        base = rate if side == "base" else base
        print(f"sglang lora {args.model} {side}: {rate:,.0f} tok/s, {100 * rate / base:.1f} % of base", flush=True)


# -- images -------------------------------------------------------------------------------------


def write_vision_model(folder: Path, model: str, side: int) -> None:
    """Config, tokenizer and processor: the published shape, with the tokens of a small tokenizer."""
    from benchmarks.bench_vision_gpu import build_config
    from tests.models.small_vision import write_processor
    from transformers import AutoTokenizer

    write_processor(folder, "qwen3_vl", patch_size=16)
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text()) | {"size": {"shortest_edge": 4096, "longest_edge": side * side}}
    path.write_text(json.dumps(settings))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    words = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    words |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    ids = {name: tokenizer.convert_tokens_to_ids(word) for name, word in words.items()}
    config: dict[str, Any] = build_config(model) | ids | {"torch_dtype": "bfloat16", "model_type": "qwen3_vl"}
    config["text_config"] |= {"model_type": "qwen3_vl_text"}
    config["vision_config"] |= {"model_type": "qwen3_vl"}
    (folder / "config.json").write_text(json.dumps(config))


def measure_images(args: argparse.Namespace, folder: Path) -> None:
    import numpy as np
    from PIL import Image
    from transformers import AutoTokenizer

    side, count, samples, new = (64, 2, 2, 6) if args.tiny else (1024, 32, 8, 256)
    write_vision_model(folder, args.model, side)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = tokenizer("in the text " * 40).input_ids[:32]
    image_ids = tokenizer("<|vision_start|><|image_pad|><|vision_end|>").input_ids
    prompts = [[*text[i % 8 :], *image_ids, *text] for i in range(count)]

    def draw(seed: int) -> Image.Image:
        return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8))

    engine = start_engine(folder, args, disable_fast_image_processor=args.tiny, mm_attention_backend=args.mm_attention)
    rounds = iter(range(10))

    def answer(length: int | None) -> None:
        first = 1000 * next(rounds)  # new images each time: embeddings are cached, too
        images = [draw(first + i) for i in range(count)]
        tokens = length or new
        # One request of n samples: its image is read and encoded once.
        how = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "n": samples}
        began = time.perf_counter()
        out = engine.generate(
            input_ids=prompts, image_data=[[image] for image in images], sampling_params=how, return_logprob=True
        )
        spent.append(time.perf_counter() - began)
        lengths = {one["meta_info"]["prompt_tokens"] for one in out}
        assert len(out) == count * samples
        assert all(len(one["meta_info"]["output_token_logprobs"]) == tokens for one in out)
        print(f"  {spent[-1]:.2f} s, prompts of {min(lengths)} to {max(lengths)} tokens", flush=True)

    spent: list[float] = []
    measure(answer, engine.flush_cache)
    engine.shutdown()
    rate = count * samples * new / min(spent[1:])
    print(f"sglang images {args.model}: {rate:,.0f} tok/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("lora", "images"))
    parser.add_argument("--model")
    parser.add_argument("--sides", nargs="+", default=["base", "one", "many"], choices=("base", "one", "many"))
    parser.add_argument("--attention", default="fa3")
    parser.add_argument("--mm-attention", default=None, help="attention backend of SGLang's vision tower")
    parser.add_argument("--rounds", type=int, default=2, help="measured runs of a side of lora")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.model = args.model or ("Qwen3-8B" if args.part == "lora" else "tiny" if args.tiny else "Qwen3-VL-8B")
    with tempfile.TemporaryDirectory() as folder:
        {"lora": measure_lora, "images": measure_images}[args.part](args, Path(folder))


if __name__ == "__main__":
    main()
