"""Checkpoints quantized by compressed-tensors, and by small packers of the AWQ and GPTQ layouts, with their values."""

import json
import re

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import nn

FP8 = {"num_bits": 8, "type": "float"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}
TOKENS = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
INT_TOKENS = QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True)
U8 = {"scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
E4M3 = {"scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn}

SCHEMES = {
    "fp8 per tensor": ({**FP8, "strategy": "tensor"}, TOKENS),
    "fp8 per channel": ({**FP8, "strategy": "channel"}, TOKENS),
    "fp8 in blocks": ({**FP8, "strategy": "block", "block_structure": [16, 16]}, TOKENS),
    "int8 per channel": ({"num_bits": 8, "type": "int", "strategy": "channel"}, INT_TOKENS),
    "int8 packed": ({"num_bits": 8, "type": "int", "strategy": "group", "group_size": 16}, None),
    "int4": ({**INT4, "group_size": 8}, None),
    "int4 per channel": ({**INT4, "strategy": "channel"}, None),
    "int4 asymmetric": ({**INT4, "group_size": 16, "symmetric": False}, None),
    "nvfp4": ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, **E4M3}, None),
    "int8 in groups": ({"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32}, None),
    "int4 in groups": ({**INT4, "group_size": 32}, None),
    "int4 asymmetric in groups": ({**INT4, "group_size": 32, "symmetric": False}, None),
    "mxfp4": ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, **U8}, None),
    "mxfp8": ({**FP8, "strategy": "group", "group_size": 32, **U8}, TOKENS),
}


def scheme_of(kind):
    weights, inputs = SCHEMES[kind]
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=inputs)


def is_linear(name, tensor):
    return tensor.dim() == 2 and "_proj." in name


def _blocks(weight, args):
    """The weight with the values that share a scale in the last dimension."""
    rows, columns = weight.shape
    match args.strategy:
        case "tensor":
            return weight.reshape(1, -1)
        case "channel":
            return weight.reshape(rows, 1, columns)
        case "block":
            r, c = args.block_structure
            padded = nn.functional.pad(weight, (0, -columns % c, 0, -rows % r))
            return padded.unflatten(1, (-1, c)).unflatten(0, (-1, r)).transpose(1, 2).flatten(2)
        case _:
            return weight.unflatten(1, (-1, args.group_size))


def fused_name(name):
    """Weights of one fused layer, which share a global scale."""
    return re.sub(r"(q|k|v|gate|up)_proj", lambda match: "qkv" if match[1] in "qkv" else "gate_up", name)


def compress(weight, scheme, largest):
    """The tensors of one weight, and the values they stand for, by compressed-tensors itself.

    ``largest`` is the largest magnitude of the fused weight.
    """
    args = scheme.weights
    blocks = _blocks(weight, args)
    extra = {}
    if args.strategy == "tensor_group":
        extra["weight_global_scale"] = generate_gparam(-largest, largest)
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, extra.get("weight_global_scale"))
    scale = scale.reshape(1) if args.strategy == "tensor" else scale
    if not args.symmetric:
        extra["weight_zero_point"] = zero.to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(infer_module_format(nn.Linear, scheme).value)
    tensors = compressor.compress({"weight": weight.clone(), "weight_scale": scale, **extra}, scheme)
    if args.num_bits == 4 and args.type == "float":  # its decompress computes in bfloat16
        packed, by_group = (
            tensors["weight_packed"],
            compressor._decompress_scale(tensors["weight_scale"], torch.float32),
        )
        values = unpack_fp4_from_uint8(packed, len(packed), weight.shape[1], dtype=torch.float32)
        total = extra.get("weight_global_scale")
        return tensors, dequantize(values, by_group, args=args, dtype=torch.float32, global_scale=total)
    return tensors, compressor.decompress(tensors, scheme)["weight"].float()


def edit(folder, change, **config):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | config))


def write_plain(model, folder, values):
    model.save_pretrained(folder)
    edit(folder, lambda tensors: tensors.update(values))
    return folder


def write_compressed(model, folder, kind, keep=(), dtype=torch.float32):
    """The model as a compressed-tensors checkpoint; beside it one with the values it stands for, whose folder returns.

    Modules whose name contains one of ``keep`` are in the config's ``ignore``.
    """
    scheme, values, ignore = scheme_of(kind), {}, ["lm_head"]
    scheme.format = infer_module_format(nn.Linear, scheme)

    def quantize(tensors):
        names = [name for name, tensor in tensors.items() if is_linear(name, tensor)]
        largest = {}
        for name in names:
            here = tensors[name].abs().max()
            largest[fused_name(name)] = torch.maximum(largest.get(fused_name(name), here), here)
        for name in names:
            module = name.removesuffix(".weight")
            if any(word in name for word in keep):
                ignore.append(module)
                continue
            parts, values[name] = compress(tensors.pop(name).to(dtype), scheme, largest[fused_name(name)])
            tensors |= {f"{module}.{part}": tensor for part, tensor in parts.items()}

    model.save_pretrained(folder)
    edit(folder, quantize)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=scheme.format, quantization_status="compressed", ignore=ignore
    )
    edit(folder, lambda tensors: None, quantization_config=json.loads(json.dumps(config.model_dump(), default=str)))
    return write_plain(model, folder / "plain", values)


def _shift(values, bits):
    """Words of the last dimension's values, the first in the lowest bits."""
    shifts = torch.arange(values.shape[-1]) * bits
    words = (values.long() << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def pack_awq(weight, group, generator):
    """AWQ "gemm": words along the outputs, of the columns 0, 2, 4, 6, 1, 3, 5, 7."""
    n, k = weight.shape
    q, z = (torch.randint(0, 16, shape, generator=generator) for shape in ((k, n), (k // group, n)))
    scales = (torch.rand(k // group, n, generator=generator) * 0.1 + 0.01).half()
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        "qweight": _shift(q.view(k, n // 8, 8)[..., order], 4),
        "qzeros": _shift(z.view(k // group, n // 8, 8)[..., order], 4),
        "scales": scales,
    }
    index = torch.arange(k) // group
    return tensors, ((q - z[index]).float() * scales[index].float()).T.contiguous()


def pack_gptq(weight, group, bits, generator, *, act_order=False, offset=1, symmetric=False):
    """GPTQ: words along the inputs; zero points, of which 1 is subtracted in version 1, in words along the outputs."""
    (n, k), each = weight.shape, 32 // bits
    q = torch.randint(0, 2**bits, (k, n), generator=generator)
    z = torch.randint(offset, 2**bits, (k // group, n), generator=generator)
    z = torch.full_like(z, 2 ** (bits - 1)) if symmetric else z
    scales = (torch.rand(k // group, n, generator=generator) * 0.1 + 0.01).half()
    index = torch.arange(k) // group
    index = index[torch.randperm(k, generator=generator)] if act_order else index
    tensors = {
        "qweight": _shift(q.view(k // each, each, n).transpose(1, 2), bits),
        "qzeros": _shift((z - offset).view(k // group, n // each, each), bits),
        "scales": scales,
        "g_idx": index.int(),
    }
    return tensors, ((q - z[index]).float() * scales[index].float()).T.contiguous()


def write_packed(model, folder, pack, config):
    """The model with linear weights by ``pack(weight, generator)``; as ``write_compressed`` otherwise."""
    generator, values = torch.Generator().manual_seed(0), {}

    def quantize(tensors):
        for name in [name for name, tensor in tensors.items() if is_linear(name, tensor)]:
            parts, values[name] = pack(tensors.pop(name), generator)
            tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}

    model.save_pretrained(folder)
    edit(folder, quantize, quantization_config=config)
    return write_plain(model, folder / "plain", values)
