"""Checkpoint folders: read, refused, written, and read again by transformers."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.each_kind import each_kind
from tests.models.oracle import KINDS, hf_model, published, twin, used
from transformers import AutoModelForCausalLM

from miles.core.errors import CheckpointError, UsageError
from miles.models.checkpoint import hf, safetensors_io, save
from miles.models.decoder import Decoder

META = {"device": "meta", "dtype": torch.float32}


def same(decoder, other):
    ours, theirs = dict(decoder.named_parameters()), dict(other.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def load(folder):
    return hf.load(folder, device="cpu", dtype=torch.float32)


@pytest.fixture
def folder(tmp_path):
    hf.export(twin(hf_model("qwen3 moe")), tmp_path / "model")
    return tmp_path / "model"


def change(folder, edit):
    """Rewrite the weights of a one-file checkpoint."""
    tensors = load_file(folder / safetensors_io.WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / safetensors_io.WEIGHTS)


# -- in ---------------------------------------------------------------------------------------


def test_shards_that_transformers_wrote_are_loaded_to_the_bit(tmp_path):
    model = hf_model("qwen3 moe")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    same(load(tmp_path), twin(model))


def test_experts_stored_as_one_tensor_are_read_too(tmp_path):
    model = hf_model("qwen3 moe in some layers")
    model.save_pretrained(tmp_path)
    tensors = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    assert "model.layers.3.mlp.experts.gate_up_proj" in tensors
    save_file(tensors, tmp_path / safetensors_io.WEIGHTS)
    same(load(tmp_path), twin(model))


def test_weights_are_cast_to_the_dtype_asked_for(folder):
    decoder = hf.load(folder, device="cpu", dtype=torch.bfloat16)
    wanted = twin(hf_model("qwen3 moe")).embedding.weight
    assert torch.equal(decoder.embedding.weight, wanted.to(torch.bfloat16))


def test_a_copy_of_a_tied_head_and_rotary_buffers_are_ignored(tmp_path):
    decoder = twin(hf_model("qwen2 tied"))
    hf.export(decoder, tmp_path)
    spare = {"lm_head.weight": torch.ones(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    change(tmp_path, lambda tensors: tensors.update(spare))
    same(load(tmp_path), decoder)


def test_a_missing_tensor_is_named(folder):
    change(folder, lambda tensors: tensors.pop("model.layers.1.mlp.experts.3.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight is missing"):
        load(folder)


def test_an_unknown_tensor_is_named(folder):
    change(folder, lambda tensors: tensors.update({"model.layers.0.mlp.shared_expert.weight": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"shared_expert\.weight in .*model\.safetensors belongs to no part"):
        load(folder)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(folder):
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight in .* has shape \(31,\), but .* \(32,\)"):
        load(folder)


def test_a_tensor_in_a_format_we_do_not_read_is_named(folder):
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight in .* is stored as I8"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
def test_a_truncated_file_is_refused_wherever_it_was_cut(folder, keep):
    path = folder / safetensors_io.WEIGHTS
    size = path.stat().st_size
    os.truncate(path, int(size * keep) if isinstance(keep, float) else keep % size)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load(folder)


def test_a_file_that_is_not_safetensors_is_refused(folder):
    (folder / safetensors_io.WEIGHTS).write_bytes((4).to_bytes(8, "little") + b"soup and more")
    with pytest.raises(CheckpointError, match="no safetensors header"):
        load(folder)


def test_a_missing_shard_is_named_with_what_it_should_hold(tmp_path):
    hf.export(twin(hf_model("llama")), tmp_path, max_shard_bytes=20_000)
    next(iter(sorted(tmp_path.glob("model-*.safetensors")))).unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-\d+\.safetensors is missing: .*embed_tokens"):
        load(tmp_path)


def test_an_index_that_lies_is_refused(tmp_path):
    hf.export(twin(hf_model("llama")), tmp_path, max_shard_bytes=20_000)
    index = json.loads((tmp_path / safetensors_io.INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    (tmp_path / safetensors_io.INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"does not hold model\.norm\.weight"):
        load(tmp_path)


def test_a_folder_without_weights_or_config_says_what_is_missing(tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load(tmp_path)
    hf.export(twin(hf_model("llama")), tmp_path)
    (tmp_path / safetensors_io.WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json holds a list"):
        load(tmp_path)


def test_end_tokens_of_the_generation_config_count(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert load(folder).spec.eos_token_ids == (7, 8)
    (folder / "generation_config.json").write_text("{}")
    assert load(folder).spec.eos_token_ids == ()


def test_dtype_auto_is_float32_on_a_cpu_and_the_configs_own_elsewhere():
    for config in ({"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}):
        assert hf.choose_dtype("auto", config, "cpu") == torch.float32
        assert hf.choose_dtype("auto", config, "meta") == torch.bfloat16
    assert hf.choose_dtype("auto", {}, "meta") == torch.float32
    assert hf.choose_dtype("bfloat16", {}, "cpu") == torch.bfloat16
    with pytest.raises(UsageError, match="int8"):
        hf.choose_dtype("auto", {"dtype": "int8"}, "meta")


# -- out --------------------------------------------------------------------------------------


def on_disk(folder):
    """Every tensor of a checkpoint, by its name."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def equal(some, others):
    assert some.keys() == others.keys()
    assert all(some[name].dtype == others[name].dtype and torch.equal(some[name], others[name]) for name in some)


@each_kind
def test_what_transformers_saved_comes_back_to_the_bit(kind, tmp_path):
    """Saved by transformers, loaded here, exported here, loaded by transformers."""
    model = hf_model(kind)
    model.save_pretrained(tmp_path / "theirs")
    decoder = load(tmp_path / "theirs")
    same(decoder, twin(model))
    hf.export(decoder, tmp_path / "ours", like=tmp_path / "theirs")
    equal(published(decoder.spec, on_disk(tmp_path / "theirs")), on_disk(tmp_path / "ours"))
    again, report = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    equal(model.state_dict(), again.state_dict())


@pytest.mark.parametrize("kind", ["qwen3", "qwen2 tied", "llama 3.1", "qwen3 moe in some layers"])
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 30_000])
def test_what_we_export_from_nothing_transformers_loads_to_the_bit(kind, max_shard_bytes, tmp_path):
    model = hf_model(kind)
    hf.export(twin(model), tmp_path, max_shard_bytes=max_shard_bytes)
    assert (tmp_path / safetensors_io.INDEX).exists() == (max_shard_bytes == 30_000)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager", experts_implementation="eager"
    )
    assert not any(report.values())
    equal(model.state_dict(), theirs.state_dict())
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, theirs(tokens).logits)
    same(load(tmp_path), twin(model))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_keep_the_dtype_that_is_theirs(kind, tmp_path):
    """A bias that steers a router stays float32 in a bfloat16 model, in memory and on disk."""
    hf_model(kind).save_pretrained(tmp_path / "theirs")
    decoder = hf.load(tmp_path / "theirs", device="cpu", dtype=torch.bfloat16)
    hf.export(decoder, tmp_path / "ours", like=tmp_path / "theirs")
    equal(dict(hf.iter_hf_tensors(decoder)), used(decoder.spec, on_disk(tmp_path / "ours")))
    again = hf.load(tmp_path / "ours", device="cpu", dtype=torch.bfloat16)
    same(decoder, again)
    assert {t.dtype for t in decoder.parameters()} <= {torch.bfloat16, torch.float32, torch.int64}
    trained = {name: p.requires_grad for name, p in decoder.named_parameters()}
    assert trained == {name: p.requires_grad for name, p in Decoder(decoder.spec, **META).named_parameters()}


def test_a_tensor_that_lies_otherwise_on_disk_is_copied_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "_COPY_BYTES", 5000)
    hf_model("llama 4").save_pretrained(tmp_path / "theirs")
    hf.export(load(tmp_path / "theirs"), tmp_path / "ours", like=tmp_path / "theirs")
    equal(on_disk(tmp_path / "theirs"), on_disk(tmp_path / "ours"))


def test_bfloat16_weights_stay_bfloat16_on_disk(tmp_path):
    hf.export(twin(hf_model("qwen3"), torch.bfloat16), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    same(hf.load(tmp_path, device="cpu", dtype=torch.bfloat16), twin(hf_model("qwen3"), torch.bfloat16))


def test_no_shard_is_larger_than_asked_unless_one_tensor_is(tmp_path):
    hf.export(twin(hf_model("qwen3 moe")), tmp_path, max_shard_bytes=9_000)
    for path in tmp_path.glob("*.safetensors"):
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 9_000


def test_an_export_takes_over_config_and_tokenizer_of_the_model_it_came_from(tmp_path):
    model = hf_model("qwen3")
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text('{"a": 1}')
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((tmp_path / "base" / "config.json").read_text()) | {"torch_dtype": "float16", "author": "we"}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    hf.export(twin(model), tmp_path / "out", like=tmp_path / "base")
    reported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert reported["author"] == "we"
    assert reported["dtype"] == "float32"
    assert "torch_dtype" not in reported
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "base" / name).read_bytes()


def test_a_config_of_another_model_is_refused(tmp_path):
    hf.export(twin(hf_model("qwen2")), tmp_path / "base")
    with pytest.raises(CheckpointError, match="another model"):
        hf.export(twin(hf_model("qwen2 tied")), tmp_path / "out", config=hf.read_config(tmp_path / "base"))


def test_exporting_over_an_older_export_leaves_none_of_its_weights(tmp_path):
    old, new = twin(hf_model("qwen3", seed=1)), twin(hf_model("qwen3", seed=2))
    hf.export(old, tmp_path, max_shard_bytes=10_000)
    hf.export(new, tmp_path)
    assert [p.name for p in tmp_path.glob("model*")] == [safetensors_io.WEIGHTS]
    same(load(tmp_path), new)
    hf.export(old, tmp_path, max_shard_bytes=10_000)
    same(load(tmp_path), old)


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"old")

    def fail(file):
        file.write(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        safetensors_io.write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    safetensors_io.write_atomically(path, lambda file: file.write(b"new"))
    assert [p.name for p in tmp_path.iterdir()] == ["weights"]
    assert path.read_bytes() == b"new"
