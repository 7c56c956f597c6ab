"""What a rank writes: the bytes that were in memory at the time, checked, or nothing and a sentence."""

import json
import resource
import shutil
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.models.test_vision_checkpoints import TEXT, VISION
from tests.tiers import examples
from tests.train.checkpoint_ranks import VERSION, alone, on_disk, optimizer_for, same, save_alone, stepped
from tests.train.small_trainer import DENSE, MOE
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

from miles.backends.fsdp.local_model import LocalModel
from miles.core import markers
from miles.core.errors import CheckpointError
from miles.models.checkpoint import hf, save
from miles.models.checkpoint.safetensors_io import TensorHeader
from miles.models.checkpoint.save_plan import CODES
from miles.train.checkpoint import checkpoint, staging
from miles.train.checkpoint import writer as tensor_files
from miles.train.checkpoint.checkpoint import CheckpointSaver
from miles.train.checkpoint.staging import StagingPool
from miles.train.checkpoint.writer import ShardWriter, read_tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float64, torch.bool]


def described(name, tensor):
    return TensorHeader(name, CODES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)


def trained(config=DENSE, dtype=torch.bfloat16):
    model = alone(config, dtype)
    optimizer = optimizer_for(model)
    stepped(model, optimizer)
    return model, optimizer


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data(), bounded=st.booleans(), block=st.integers(1, 200))
def test_what_is_written_is_what_safetensors_reads_however_small_the_blocks(tmp_path_factory, data, bounded, block):
    folder = tmp_path_factory.mktemp("files")
    files = []
    for _ in range(data.draw(st.integers(1, 3))):
        shapes = data.draw(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=4))
        tensors = [torch.randint(0, 2, shape).to(data.draw(st.sampled_from(DTYPES))) for shape in shapes]
        files.append({f"t{n}": t.mT if t.dim() >= 2 and n % 2 else t for n, t in enumerate(tensors)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "BLOCK_BYTES", block)
        patch.setattr(save, "_COPY_BYTES", 16)
        blocks = StagingPool()
        writer = ShardWriter(folder, blocks, bounded=bounded, verify=True)
        for number, tensors in enumerate(files):
            writer.begin(str(number), [described(name, t) for name, t in tensors.items()])
            for tensor in tensors.values():
                writer.tensor(tensor)
            writer.end()
        writer.close(lambda _: None)
        writer.wait()
    assert writer.failure is None and list(writer.files) == [str(n) for n in range(len(files))]
    assert not bounded or blocks.allocated <= staging.MAX_BLOCKS
    for number, tensors in enumerate(files):
        same({name: t.contiguous() for name, t in tensors.items()}, load_file(folder / str(number)))
        same(load_file(folder / str(number)), dict(read_tensors(folder, str(number))))


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_a_save_in_the_background_is_of_the_moment_it_was_asked_for(tmp_path, config, monkeypatch):
    """Training goes on, and even loads something else, before the first byte is written."""
    monkeypatch.setattr(staging, "BLOCK_BYTES", 4096)
    model, optimizer = trained(config)
    save_alone(tmp_path / "waited for", model, optimizer)
    may, work = threading.Event(), ShardWriter._run
    monkeypatch.setattr(ShardWriter, "_run", lambda writer: (may.wait(60), work(writer)))
    (tmp_path / "behind").mkdir()
    behind = CheckpointSaver(background=True)
    checkpoint.save(tmp_path / "behind", model, optimizer, VERSION, saver=behind)
    stepped(model, optimizer, seed=5)
    assert markers.list_missing_ranks(tmp_path / "behind") == [0]
    may.set()
    behind.wait()
    assert markers.list_missing_ranks(tmp_path / "behind") == []
    for stem in ("model", "optimizer"):
        same(on_disk(tmp_path / "waited for", stem), on_disk(tmp_path / "behind", stem))
    names = [{p.name: p.read_bytes() for p in (tmp_path / f).glob("[!.]*")} for f in ("waited for", "behind")]
    assert names[0] == names[1]


def test_saves_in_the_background_use_the_memory_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "BLOCK_BYTES", 4096)
    model, optimizer = trained()
    behind = CheckpointSaver(background=True)
    made = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        checkpoint.save(tmp_path / str(number), model, optimizer, VERSION, saver=behind)
        made.append(behind._pool.allocated)
    behind.wait()
    whole = sum(written.bytes for written in markers.collect_files(tmp_path / "2").values())
    assert made[0] == made[1] == made[2] <= whole // 4096 + 2


def test_the_files_are_those_an_export_makes(tmp_path):
    """Config, tokenizer, a tower that is no part of the model, and weights to the bit."""
    pictures = Gemma3Config(text_config=dict(TEXT), vision_config=SiglipVisionConfig(**VISION), mm_tokens_per_image=1)
    Gemma3ForConditionalGeneration(pictures).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    decoder = hf.load(tmp_path / "base", device="cpu", dtype=torch.bfloat16)
    model = LocalModel(decoder, like=tmp_path / "base")
    model.save(tmp_path / "exported")
    save_alone(tmp_path / "saved", model, optimizer_for(model))
    exported, saved = ({p.name: p.read_bytes() for p in (tmp_path / f).iterdir()} for f in ("exported", "saved"))
    assert exported.items() <= saved.items()
    assert any("vision_tower" in name for name in on_disk(tmp_path / "saved", "model"))


def test_a_checkpoint_that_safetensors_itself_wrote_is_read(tmp_path):
    model, optimizer = trained()
    model.save(tmp_path)
    save_file(
        {name: value.contiguous() for name, value in optimizer.state().items()}, tmp_path / "optimizer.safetensors"
    )
    numbers = {"format": 1, "version": {"policy": "actor", "number": 7}, "updates": 1}
    (tmp_path / "trainer.json").write_text(json.dumps(numbers))
    other = alone(DENSE, torch.bfloat16, seed=9)
    again = optimizer_for(other)
    assert checkpoint.load(tmp_path, other, again) == VERSION and again.updates == 1
    same(dict(optimizer.state()), dict(again.state()))
    same(dict(model.parameters()), dict(other.parameters()))


def test_a_model_that_only_saves_itself_is_saved_too(tmp_path, monkeypatch):
    model, optimizer = trained()
    save_alone(tmp_path / "outlined", model, optimizer)
    monkeypatch.setattr(model, "save_plan", lambda: None)
    (tmp_path / "itself").mkdir()
    behind = CheckpointSaver(background=True)
    checkpoint.save(tmp_path / "itself", model, optimizer, VERSION, saver=behind)
    behind.wait()
    for stem in ("model", "optimizer"):
        same(on_disk(tmp_path / "outlined", stem), on_disk(tmp_path / "itself", stem))


# -- what goes wrong --------------------------------------------------------------------------


def test_a_disk_that_gives_back_something_else_is_found_out(tmp_path, monkeypatch):
    real = tensor_files.hash_file_on_disk

    def flipped(path):
        if path.name == "optimizer.safetensors":
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        return real(path)

    monkeypatch.setattr(tensor_files, "hash_file_on_disk", flipped)
    model, optimizer = trained()
    with pytest.raises(CheckpointError, match=r"rank 0 could not write optimizer\.safetensors: .* reads back"):
        checkpoint.save(tmp_path, model, optimizer, VERSION)
    assert not list(tmp_path.glob("*.safetensors"))
    checkpoint.save(
        tmp_path, model, optimizer, VERSION, saver=CheckpointSaver(verify=False)
    )  # who does not ask does not know


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_a_sentence_and_leaves_room(tmp_path, background):
    model, optimizer = trained()
    how, before = CheckpointSaver(background=background), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        if background:
            checkpoint.save(tmp_path, model, optimizer, VERSION, saver=how)
            how.wait()
        else:
            with pytest.raises(CheckpointError, match=r"rank 0 could not write .*: File too large"):
                checkpoint.save(tmp_path, model, optimizer, VERSION, saver=how)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(CheckpointError, match=r"rank 0 could not write .*: File too large"):
        markers.collect_files(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    checkpoint.save(tmp_path, model, optimizer, VERSION, saver=how)
    how.wait()
    assert markers.collect_files(tmp_path).keys() == {"model.safetensors", "optimizer.safetensors"}


def test_a_folder_that_vanishes_stops_nothing(tmp_path, monkeypatch):
    """A draft may be given up while a rank still writes into it; its thread has no one to raise to."""
    model, optimizer = trained()
    folder, behind = tmp_path / "gone", CheckpointSaver(background=True)
    folder.mkdir()
    work = ShardWriter._run
    monkeypatch.setattr(ShardWriter, "_run", lambda writer: (shutil.rmtree(folder, ignore_errors=True), work(writer)))
    checkpoint.save(folder, model, optimizer, VERSION, saver=behind)
    behind.wait()
    assert not folder.exists()
    monkeypatch.undo()
    folder.mkdir()
    checkpoint.save(folder, model, optimizer, VERSION, saver=behind)
    behind.wait()
    assert markers.collect_files(folder)


def test_weights_trained_in_float32_are_exported_in_the_dtype_asked_for_and_resumed_exactly(tmp_path):
    model = LocalModel(alone(DENSE, torch.float32)._decoder, save_dtype=torch.bfloat16)
    optimizer = optimizer_for(model)
    stepped(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer, VERSION)
    exported = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    trained_weights = {name: tensor.detach().clone() for name, tensor in model.parameters().items()}
    other = LocalModel(alone(DENSE, torch.float32)._decoder, save_dtype=torch.bfloat16)
    other_optimizer = optimizer_for(other)
    assert checkpoint.load(tmp_path, other, other_optimizer) == VERSION
    same(trained_weights, {name: tensor.detach() for name, tensor in other.parameters().items()})
    stepped(model, optimizer)
    stepped(other, other_optimizer)
    same(
        {name: tensor.detach() for name, tensor in model.parameters().items()},
        {name: tensor.detach() for name, tensor in other.parameters().items()},
    )
