"""Large checkpoints: memory used while loading, and the bytes each rank reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.models.oracle import hf_model

from miles.core.errors import CheckpointError
from miles.models.checkpoint import hf, load, safetensors_io
from miles.models.checkpoint.param_slices import HfSlice
from miles.models.checkpoint.reader import FileReader
from miles.models.checkpoint.tensor_sources import ParamSource, PlainTensor
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config

MEGABYTE = 1 << 20

# For each dtype, in a fresh fork each time: makes the parameters of a checkpoint, from its files and by filling them,
# and prints in bytes what they take, the largest of them, and how far the process grew meanwhile at most. (Allocators
# take more than they are asked for: only the difference between the two ways is loading's own.)
MEASURE = """
import os, sys, torch
from pathlib import Path
from miles.models.checkpoint import hf, safetensors_io
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config

def read_status(key):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key + ":"))
    return int(line.split()[1]) * 1024

small, folder = sys.argv[1:3]
hf.load(small, device="cpu", dtype=torch.float16)
for dtype in (torch.bfloat16, torch.float32):
    for way in ("loaded", "filled"):
        if os.fork():
            os.wait()
            continue
        Path("/proc/self/clear_refs").write_text("5")
        before = read_status("VmRSS")
        if way == "loaded":
            tensors = list(hf.load(folder, device="cpu", dtype=dtype).parameters())
        else:
            empty = Decoder(spec_from_config(safetensors_io.read_config(folder)), device="meta", dtype=dtype)
            tensors = [torch.ones(p.shape, dtype=p.dtype) for p in empty.parameters()]
        sizes = [t.nbytes for t in tensors]
        print(sum(sizes), max(sizes), read_status("VmHWM") - before, flush=True)
        os._exit(0)
"""


def filled(kind, **changes):
    """A decoder of a kind, other sizes allowed, with a value in each parameter that no other has."""
    decoder = Decoder(spec_from_config(config_of(kind, **changes)), device="cpu", dtype=torch.bfloat16)
    with torch.no_grad():
        for i, parameter in enumerate(decoder.parameters()):
            parameter.fill_(i)
    return decoder


def config_of(kind, **changes):
    model = hf_model(kind)
    return model.config.to_dict() | {"architectures": [type(model).__name__]} | changes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_no_more_than_one_tensor_beside_the_parameters(tmp_path):
    wide = {"hidden_size": 512, "intermediate_size": 2048, "moe_intermediate_size": 512, "vocab_size": 8192}
    sizes = wide | {"num_experts": 12, "num_hidden_layers": 10, "mlp_only_layers": []}
    hf.export(filled("qwen3 moe", **sizes), tmp_path / "big", max_shard_bytes=40 * MEGABYTE)
    hf.export(filled("qwen3 moe"), tmp_path / "small")
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "big")]
    # One thread of OpenMP: its others would not survive a fork.
    reported = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    same, same_filled, wider, wider_filled = (tuple(map(int, line.split())) for line in reported.stdout.splitlines())
    assert same[0] > 190 * MEGABYTE and wider[0] == 2 * same[0]
    assert same[2] - same_filled[2] < 4 * MEGABYTE, "what needs no conversion is read where it stays"
    assert wider[2] - wider_filled[2] < wider[1] + 8 * MEGABYTE


# -- slices -----------------------------------------------------------------------------------

CUT = ["qwen3 moe", "qwen2 tied", "llama linear rope and biases", "llama 4", "deepseek v3", "step 3.7"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of kinds as transformers saves them, made when first asked for."""
    made = {}

    def folder(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("saved")
            hf_model(kind).save_pretrained(made[kind], max_shard_size="20KB")
        return made[kind]

    return folder


@given(length=st.integers(1, 40), world=st.integers(1, 12))
def test_rows_are_cut_as_torch_cuts_them(length, world):
    rows = torch.arange(length)
    cuts = [rows[slice(*load.shard_bounds(length, rank, world))] for rank in range(world)]
    chunks = list(rows.chunk(world)) + [rows[:0]] * world
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(cuts, chunks, strict=False))


@pytest.mark.parametrize("kind", CUT)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_the_ranks_slices_are_the_whole_and_each_reads_its_own_bytes_only(kind, world, saved):
    whole = dict(hf.load(saved(kind), device="cpu", dtype=torch.float32).named_parameters())
    readers = [FileReader() for _ in range(world)]
    ranks = [
        dict(hf.load_slices(saved(kind), rank=rank, world=world, device="cpu", dtype=torch.float32, reader=reader))
        for rank, reader in enumerate(readers)
    ]
    assert len({tuple(slices) for slices in ranks}) == 1, "all ranks get them in one order"
    assert ranks[0].keys() == whole.keys()
    for name, parameter in whole.items():
        assert torch.equal(torch.cat([slices[name] for slices in ranks]), parameter)
    for slices, reader in zip(ranks, readers, strict=True):
        assert reader.bytes_read == sum(tensor.nbytes for tensor in slices.values())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_matrix_that_lies_transposed_is_read_whole_and_cut(world, tmp_path):
    wanted = torch.randn(7, 5)
    save_file({"theirs": wanted.T.contiguous()}, tmp_path / safetensors_io.WEIGHTS)
    stored = safetensors_io.stored_tensors(tmp_path)["theirs"]
    plan = {"ours": [ParamSource(HfSlice("theirs", (5, 7), 0, 7, None, transposed=True), PlainTensor(stored))]}
    readers = [FileReader() for _ in range(world)]
    found = [
        load.load_params(plan, {"ours": wanted}, rank=rank, world=world, device="cpu", reader=reader)
        for rank, reader in enumerate(readers)
    ]
    assert torch.equal(torch.cat([tensor for slices in found for _, tensor in slices]), wanted)
    assert all(reader.bytes_read == wanted.nbytes for reader in readers)


@pytest.mark.parametrize("tile", [64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_tiles_end_makes_no_difference(tile, dtype, saved, monkeypatch):
    for kind in CUT:
        wanted = hf.load(saved(kind), device="cpu", dtype=dtype).state_dict()
        with monkeypatch.context() as changed:
            changed.setattr(load, "_TILE", tile)
            found = hf.load(saved(kind), device="cpu", dtype=dtype).state_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# -- failures ---------------------------------------------------------------------------------


def open_files(folder):
    """The files of a folder that this process holds open."""
    descriptors = Path("/proc/self/fd").iterdir()
    return [link for number in descriptors if (link := os.path.realpath(number)).startswith(str(folder))]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_cut_short_while_it_is_read_is_named_and_nothing_stays_open(tmp_path):
    hf_model("qwen3 moe").save_pretrained(tmp_path)
    slices = hf.load_slices(tmp_path, rank=0, world=1, device="cpu")
    os.truncate(tmp_path / safetensors_io.WEIGHTS, (tmp_path / safetensors_io.WEIGHTS).stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"cannot be read from .*model\.safetensors: it ends at byte \d+"):
        dict(slices)
    assert not open_files(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_slices_nobody_wants_any_more_leave_nothing_open(tmp_path):
    hf_model("qwen3 moe").save_pretrained(tmp_path)
    slices = hf.load_slices(tmp_path, rank=0, world=1, device="cpu")
    next(slices)
    assert open_files(tmp_path)
    slices.close()
    assert not open_files(tmp_path)


def test_checks_are_made_before_the_first_slice_is_asked_for(tmp_path):
    hf_model("qwen3 moe").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / safetensors_io.WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / safetensors_io.WEIGHTS)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        hf.load_slices(tmp_path, rank=0, world=2, device="cpu")


def test_a_tensor_with_other_bytes_than_its_shape_takes_is_named(tmp_path):
    hf_model("qwen3").save_pretrained(tmp_path)
    path = tmp_path / safetensors_io.WEIGHTS
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header["model.norm.weight"]["dtype"] = "BF16"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight in .* has 128 bytes, .* shape \(32,\) in BF16"):
        hf.load(tmp_path, device="cpu")
