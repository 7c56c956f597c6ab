"""Stock SGLang in FP8 on a GPU: log-probs after weight updates with our packed tensors, against our own engine's.

    PYTHONPATH=SGLANG_FOLDER python benchmarks/check_sglang_fp8_gpu.py [dense|moe]... [--attention BACKEND]

For a small dense and a small MoE model with random weights: SGLang is started on the quantized checkpoint of one set of
weights, updated to another set, back, and to the other again, and asked for the log-probs of some prompts each time.
"bytes" says whether it computes bitwise what it did after loading the files of these weights, "moved" how far it is
from that; the other columns are differences of log-probs to our packed decoder with the same tensors (FP8), and to a
decoder with the same weights in bfloat16. About two minutes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles.backends.remote.transports.buckets import iter_hf_named
from miles.kernels.fused.lm_head import compute_logits
from miles.kernels.numerics import FAST
from miles.models.checkpoint import hf
from miles.models.checkpoint.convert import convert_checkpoint, plan_conversion
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.packing import pack_params
from miles.models.spec import DecoderSpec
from miles.precision.formats import FORMATS, QuantizationSpec
from miles.train.prefix_sharing import build_attention

VOCABULARY = 4096
COMMON = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
MOE = {"moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **COMMON},
    "moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **COMMON,
        **MOE,
    },
}
LENGTHS = (37, 150, 256, 8)


@dataclass(frozen=True)
class Weights:
    """One set of random weights: parameters in bfloat16, packed tensors, and the quantized checkpoint."""

    wide: dict[str, Tensor]
    packed: dict[str, Tensor]
    folder: Path


def make_weights(root: Path, kind: str, spec: DecoderSpec, seed: int) -> Weights:
    model = hf.init_random(replace(spec, quantization=None), seed=seed, device="cpu", dtype=torch.bfloat16)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3 if param.dim() > 1 else 1)  # so that log-probs are not all alike
    source, target = root / f"{kind}-{seed}", root / f"{kind}-{seed}-fp8"
    hf.export(model, source, like=None, config=MODELS[kind])
    plan = plan_conversion(source, format=None, dtype=torch.bfloat16, quantization=spec.quantization)
    convert_checkpoint(plan, target)
    wide = {name: param.detach() for name, param in model.named_parameters()}
    return Weights(wide, pack_params(spec, wide, torch.bfloat16), target)


def score_here(spec: DecoderSpec, params: dict[str, Tensor], prompts: list[list[int]], device: str) -> np.ndarray:
    """The log-probs of the prompts' tokens but the first, by our decoder."""
    decoder = Decoder(spec, device="meta", dtype=torch.bfloat16, numerics=FAST)
    decoder.load_state_dict({name: tensor.to(device) for name, tensor in params.items()}, assign=True)
    lengths = [len(prompt) for prompt in prompts]
    tokens = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    with torch.inference_mode():
        hidden = decoder(tokens, positions, build_attention(lengths, (), tokens.device, numerics=FAST))
        logits = compute_logits(hidden, decoder.head(), spec.logit_softcap, numerics=FAST).float()
        scores = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0].cpu().numpy()
    ends = np.cumsum(lengths)[:-1] - 1  # the next token is another prompt's
    return np.delete(scores, ends)


def score_there(engine: Any, prompts: list[list[int]]) -> np.ndarray:
    """The same by SGLang, whose cache is empty after an update."""
    sampling = {"max_new_tokens": 1, "temperature": 0.0}
    replies = engine.generate(
        input_ids=prompts, sampling_params=sampling, return_logprob=True, logprob_start_len=[0] * len(prompts)
    )
    engine.flush_cache()
    return np.array([each[0] for reply in replies for each in reply["meta_info"]["input_token_logprobs"][1:]])


def check(root: Path, kind: str, format: str, attention: str, device: str) -> list[str]:
    sglang: Any = importlib.import_module("sglang")
    quantization = QuantizationSpec(format=FORMATS[format], packed=True)
    spec = replace(spec_from_config(MODELS[kind]), quantization=quantization)
    first, second = (make_weights(root / format, kind, spec, seed) for seed in (0, 1))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, length).tolist() for length in LENGTHS]
    started = time.perf_counter()
    engine = sglang.Engine(
        model_path=str(first.folder),
        skip_tokenizer_init=True,
        attention_backend=attention,
        sampling_backend="pytorch",
        dtype="bfloat16",
        device=device,
        mem_fraction_static=0.2,
        max_total_tokens=8192,
        disable_overlap_schedule=True,
        context_length=1024,
        disable_cuda_graph=True,
        log_level="warning",
    )
    lines: list[str] = []
    try:
        print(f"# {kind}: SGLang {sglang.__version__} started in {time.perf_counter() - started:.0f} s", flush=True)
        loaded = score_there(engine, prompts)
        for number, weights in enumerate((second, first, second)):
            named = [(name, t.to(device).contiguous()) for name, t in iter_hf_named(spec, weights.packed, "checkpoint")]
            engine.update_weights_from_tensor(named_tensors=named)
            found = score_there(engine, prompts)
            bytes_equal = str(np.array_equal(found, loaded)) if weights is first else "-"
            fp8 = np.abs(found - score_here(spec, weights.packed, prompts, device))
            wide = np.abs(found - score_here(replace(spec, quantization=None), weights.wide, prompts, device))
            moved = np.abs(found - loaded).mean()
            lines.append(
                f"{kind:6} {format:9} {number + 1:6} {bytes_equal:>6} {moved:9.1e} {fp8.mean():10.1e} {fp8.max():9.1e} "
                f"{wide.mean():11.1e} {wide.max():9.1e}"
            )
    finally:
        engine.shutdown()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help="dense, moe")
    parser.add_argument("--format", default="fp8", choices=("fp8", "fp8_pow2"))
    parser.add_argument("--attention", default="triton", help="SGLang's attention backend; torch_native on a CPU")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as root:
        for kind in args.models:
            lines += check(Path(root), kind, args.format, args.attention, args.device)
    print("model  format    update  bytes     moved   fp8 mean   fp8 max   bf16 mean  bf16 max")
    print("\n".join(lines))
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(json.dumps({"device": name, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
