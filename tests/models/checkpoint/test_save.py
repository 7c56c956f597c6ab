"""What a folder is to hold is known before any tensor is: by names, shapes and dtypes, for every kind of model."""

import json

import pytest
import torch
from safetensors import safe_open
from tests.models.oracle import KINDS, hf_model, twin

from miles.core.errors import CheckpointError
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import encode_header, stored_tensors
from miles.models.checkpoint.save_plan import plan_decoder_save, plan_save
from miles.models.families import config_from_spec


@pytest.mark.parametrize("kind", KINDS)
def test_the_outline_of_a_spec_is_what_an_export_of_its_decoder_holds(kind, tmp_path):
    hf_model(kind).save_pretrained(tmp_path / "theirs")
    decoder = hf.load(tmp_path / "theirs", device="cpu", dtype=torch.bfloat16)
    hf.export(decoder, tmp_path / "ours", like=tmp_path / "theirs")
    reported = plan_save(decoder.spec, dtype=torch.bfloat16, like=tmp_path / "theirs")
    assert reported == plan_decoder_save(decoder, like=tmp_path / "theirs")
    said = {d.name: (d.dtype, d.shape, d.nbytes) for unit in reported.units for d in unit.headers()}
    said |= {name: (s.dtype, s.shape, s.stop - s.start) for name, s in reported.extra_tensors}
    found = stored_tensors(tmp_path / "ours")
    assert said == {name: (s.dtype, s.shape, s.stop - s.start) for name, s in found.items()}
    assert reported.config == json.loads((tmp_path / "ours" / "config.json").read_text())
    assert reported.full_shapes() == {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    assert reported.dtypes() == {name: p.dtype for name, p in decoder.named_parameters()}


@pytest.mark.parametrize("kind", ["qwen3 moe", "llama 4"])
def test_a_wide_tensor_is_narrowed_to_what_the_outline_says(kind, tmp_path):
    """As a float32 shard is, for a model that computes in bfloat16."""
    hf_model(kind).save_pretrained(tmp_path)
    wide, narrow = twin(hf_model(kind)), twin(hf_model(kind), torch.bfloat16)
    reported, live = plan_decoder_save(narrow, like=tmp_path), dict(wide.named_parameters())
    theirs = dict(hf.iter_hf_tensors(narrow))
    for unit in reported.units:
        for described, view in zip(unit.headers(), unit.views(live[unit.name]), strict=True):
            assert view.dtype == theirs[described.name].dtype
            assert torch.equal(view, theirs[described.name]), described.name


def test_a_header_is_one_that_safetensors_reads(tmp_path):
    reported = plan_decoder_save(twin(hf_model("qwen3")))
    tensors = [d for unit in reported.units for d in unit.headers()]
    (tmp_path / "file").write_bytes(encode_header(tensors) + bytes(sum(d.nbytes for d in tensors)))
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == {  # noqa: SIM118
            d.name: d.shape for d in tensors
        }


def test_a_config_of_another_model_is_refused():
    config = config_from_spec(twin(hf_model("qwen2")).spec)
    with pytest.raises(CheckpointError, match="another model"):
        plan_save(twin(hf_model("qwen2 tied")).spec, dtype=torch.float32, config=config)
