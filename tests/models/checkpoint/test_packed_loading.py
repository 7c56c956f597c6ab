"""Models with packed weights are loaded tensor by tensor: the wide model is never in memory."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.oracle import hf_model, twin
from tests.models.test_large_checkpoints import filled

from miles.core.errors import CheckpointError
from miles.models.checkpoint import hf
from miles.models.checkpoint.packed import load_packed
from miles.models.packing import pack_params
from miles.models.quantization import plan_quantization
from miles.precision.formats import FORMATS, QuantizationSpec

MEGABYTE = 1 << 20
DENSE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
EXPERTS = DENSE | {"moe_intermediate_size": 128, "head_dim": 32}

# In a fresh fork for each format: loads a model with packed weights and prints in bytes what they take, and how far the
# process grew meanwhile at most.
MEASURE = """
import os, sys, torch
from dataclasses import replace
from pathlib import Path
from miles.models.checkpoint import hf, safetensors_io
from miles.models.families import spec_from_config
from miles.precision.formats import FORMATS, QuantizationSpec

def read_status(key):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key + ":"))
    return int(line.split()[1]) * 1024

small, big = sys.argv[1:]

def load(folder, name):
    spec = spec_from_config(safetensors_io.read_config(folder))
    spec = replace(spec, quantization=QuantizationSpec(format=FORMATS[name], packed=True))
    return hf.load_model(folder, spec, device="cpu", dtype=torch.bfloat16)

for name in ("int4", "fp8"):
    load(small, name)
    if os.fork():
        os.wait()
        continue
    Path("/proc/self/clear_refs").write_text("5")
    before = read_status("VmRSS")
    params = list(load(big, name).parameters())
    print(sum(p.nbytes for p in params), read_status("VmHWM") - before, flush=True)
    os._exit(0)
"""


def packed(spec, name, **more):
    return replace(spec, quantization=QuantizationSpec(format=FORMATS[name], packed=True, **more))


def assert_same_bytes(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and tensor.shape == theirs[name].shape, name
        assert torch.equal(tensor.flatten().view(torch.uint8), theirs[name].flatten().view(torch.uint8)), name


@pytest.mark.parametrize(("kind", "dtype"), [("llama", torch.bfloat16), ("qwen3 moe", torch.float32)])
def test_weights_have_the_bytes_that_a_weight_update_would_pack(kind, dtype, tmp_path):
    hf.export(twin(hf_model(kind, **(DENSE if kind == "llama" else EXPERTS))), tmp_path)
    wide = hf.load(tmp_path, device="cpu", dtype=dtype)
    params = {name: param.detach() for name, param in wide.named_parameters()}
    for number, name in enumerate(FORMATS):
        spec = packed(wide.spec, name, tensor_parallel_size=1 + number % 2)
        loaded = hf.load_model(tmp_path, spec, device="cpu", dtype=dtype)
        assert loaded.spec == spec
        assert_same_bytes(loaded.state_dict(), pack_params(spec, params, dtype))


@pytest.mark.parametrize("name", ["fp8", "int4", "nvfp4"])
def test_a_checkpoint_in_the_same_format_gives_its_own_bytes(name, tmp_path):
    decoder = twin(hf_model("llama", **DENSE), torch.bfloat16)
    spec = packed(decoder.spec, name)
    hf.export(decoder, tmp_path, formats={param: q.format for param, q in plan_quantization(spec).items()})
    stored = pack_params(spec, {param: p.detach() for param, p in decoder.named_parameters()}, torch.bfloat16)
    loaded = hf.load_model(tmp_path, spec, device="cpu", dtype=torch.bfloat16).state_dict()
    totals = [key for key in loaded if key.endswith("_global_scale")]  # stored as a reciprocal
    assert all(torch.allclose(loaded.pop(key), stored.pop(key), rtol=2e-7, atol=0) for key in totals)
    assert_same_bytes(loaded, stored)


def test_a_rank_reads_and_quantizes_its_own_experts(tmp_path):
    model = twin(hf_model("qwen3 moe", **EXPERTS))
    hf.export(model, tmp_path)
    spec = packed(model.spec, "nvfp4")
    plan = {name: quantized.format for name, quantized in plan_quantization(spec).items() if ".moe." in name}
    whole = dict(load_packed(tmp_path, spec, plan))
    parts = [dict(load_packed(tmp_path, spec, plan, rank=rank, world=2)) for rank in range(2)]
    assert all(part.keys() == whole.keys() for part in parts)
    assert_same_bytes({name: torch.cat([part[name] for part in parts]) for name in whole}, whole)


def test_stored_bytes_are_quantized_again_where_they_are_not_to_be_kept(tmp_path):
    """A reference under full training has the bytes of the policy, which quantizes dequantized weights."""
    decoder = twin(hf_model("llama", **DENSE))
    spec = packed(decoder.spec, "fp8")
    hf.export(decoder, tmp_path, formats={param: q.format for param, q in plan_quantization(spec).items()})
    wide = {name: p.detach() for name, p in hf.load(tmp_path, device="cpu", dtype=torch.bfloat16).named_parameters()}
    kept, again = (
        hf.load_model(tmp_path, spec, device="cpu", dtype=torch.bfloat16, keep_stored=keep).state_dict()
        for keep in (True, False)
    )
    assert_same_bytes(again, pack_params(spec, wide, torch.bfloat16))
    scale = "layers.0.attention.qkv.weight_scale"
    assert not torch.equal(again[scale], kept[scale])


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    decoder = twin(hf_model("llama", **DENSE))
    hf.export(decoder, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down\.weight has values that are not finite"):
        hf.load_model(tmp_path, packed(decoder.spec, "fp8"), device="cpu", dtype=torch.float32)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_wide_model_is_never_in_memory(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 512, "vocab_size": 1024}
    sizes |= {"head_dim": 64, "num_experts": 8, "num_hidden_layers": 12, "mlp_only_layers": []}
    big = filled("qwen3 moe", **sizes)
    hf.export(big, tmp_path / "big", max_shard_bytes=40 * MEGABYTE)
    hf.export(twin(hf_model("qwen3 moe", **EXPERTS)), tmp_path / "small")
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "big")]
    # One thread of OpenMP: its others would not survive a fork.
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    wide = sum(param.nbytes for param in big.parameters())
    largest = max(param.nbytes for param in big.parameters())
    (int4, int4_peak), (fp8, fp8_peak) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert wide > 12 * largest and int4 < 0.3 * wide and fp8 < 0.55 * wide
    # Beside the packed weights: buffers of reads in flight, and what quantizes one matrix.
    assert int4_peak < int4 + 7 * largest < wide and fp8_peak < fp8 + 7 * largest < wide
