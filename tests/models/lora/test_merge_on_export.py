"""Adapters merged into a checkpoint when it is converted: PEFT as a witness, and the bits that a run has saved."""

import pytest
import torch
from tests.models.lora.test_adapters import filled, lora_for, merged_into, written
from tests.models.oracle import hf_model, our_logits, relative, tokens_of, twin

from miles.core.errors import UsageError
from miles.launch.main import main
from miles.models.checkpoint import hf
from miles.models.checkpoint.convert import convert_checkpoint, plan_conversion


def convert(source, target, adapters, dtype=torch.float32):
    convert_checkpoint(plan_conversion(source, format=None, dtype=dtype, adapters=adapters), target)
    return hf.load(target, device="cpu", dtype=dtype)


@pytest.mark.parametrize(("kind", "wanted"), [("qwen3", None), ("qwen3 moe", "attn,experts"), ("gpt-oss", "*")])
def test_two_adapters_are_merged_as_peft_merges_them(tmp_path, kind, wanted):
    library = pytest.importorskip("peft")
    model = hf_model(kind)
    decoder = twin(model)
    model.save_pretrained(tmp_path / "base")
    lora = lora_for(decoder.spec, wanted=wanted)
    folders = [written(tmp_path / name, filled(lora, seed), decoder.spec) for name, seed in (("one", 1), ("two", 2))]
    merged = convert(tmp_path / "base", tmp_path / "merged", folders)
    (tokens,) = tokens_of([9])
    with torch.no_grad():
        for folder in folders:
            model = library.PeftModel.from_pretrained(model, folder).merge_and_unload()
        assert relative(our_logits(merged, [tokens]), model(tokens[None]).logits[0]) < 1e-5


def test_one_adapter_gives_the_bits_that_engine_and_trainer_compute_with(tmp_path, monkeypatch):
    monkeypatch.setattr("miles.models.checkpoint.convert._CHUNK_BYTES", 999)  # some rows at a time
    decoder = twin(hf_model("qwen3")).to(torch.bfloat16)
    hf.export(decoder, tmp_path / "base")
    adapters = filled(lora_for(decoder.spec, wanted="q_proj,v_proj,mlp"))
    folder = written(tmp_path / "adapter", adapters, decoder.spec)
    merged = dict(convert(tmp_path / "base", tmp_path / "merged", [folder], torch.bfloat16).named_parameters())
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    merged_into(decoder, adapters)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, merged[name]), name
    assert not torch.equal(before["layers.0.attention.qkv.weight"], merged["layers.0.attention.qkv.weight"])


def test_an_adapter_of_another_model_is_refused(tmp_path):
    decoder = twin(hf_model("qwen3"))
    hf.export(decoder, tmp_path / "base")
    other = twin(hf_model("deepseek v3")).spec
    folder = written(tmp_path / "adapter", filled(lora_for(other)), other)
    with pytest.raises(UsageError, match="is not a LoRA target of this model"):
        convert(tmp_path / "base", tmp_path / "merged", [folder])
    assert not (tmp_path / "merged").exists()


def test_the_command_merges_and_refuses_to_merge_into_quantized_weights(tmp_path, capsys):
    decoder = twin(hf_model("qwen3"))
    hf.export(decoder, tmp_path / "base")
    folder = written(tmp_path / "adapter", filled(lora_for(decoder.spec)), decoder.spec)
    line = ["convert", str(tmp_path / "base"), str(tmp_path / "merged"), "--adapter", str(folder), "--format"]
    assert main([*line, "int4"]) != 0
    assert "--adapter merges into weights that are not quantized" in capsys.readouterr().err
    assert main([*line, "float32"]) == 0
    assert "merged: an adapter of rank 4" in capsys.readouterr().out
