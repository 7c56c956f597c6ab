"""MTP drafts against transformers' layers, put together as the DeepSeek-V3 report describes the module."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.draft.mtp_checkpoints import MTP_KINDS, make_reference, mtp_tensors, save_reference
from tests.models.oracle import positions_of, relative, tokens_of

from miles.core.errors import UsageError
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.models.checkpoint import hf
from miles.models.draft.base import PolicyWeights
from miles.models.draft.checkpoint import load_mtp, read_mtp_spec
from miles.models.draft.mtp import MtpDraft

LENGTHS = (17, 1, 9)
TOLERANCE = 2e-5


def load(folder: Path) -> tuple[hf.Decoder, MtpDraft]:
    decoder = hf.load(folder, device="cpu", dtype=torch.float32)
    draft = load_mtp(folder, decoder.spec, device="cpu", dtype=torch.float32)
    draft.share(PolicyWeights(decoder.embedding, decoder.head))
    return decoder, draft


@pytest.mark.parametrize("name", MTP_KINDS)
@torch.no_grad()
def test_an_mtp_layer_computes_what_transformers_does(name: str, tmp_path: Path):
    reference = make_reference(name)
    save_reference(reference, tmp_path)
    decoder, draft = load(tmp_path)
    sequences, after = tokens_of(LENGTHS), tokens_of(LENGTHS, seed=1)
    tokens, positions = torch.cat(sequences), positions_of(LENGTHS)

    hidden = decoder(tokens, positions, VarlenAttentionBackend(LENGTHS, "cpu"))
    features = draft.features(hidden, draft.new_capture())
    own = draft(features, torch.cat(after), positions, VarlenAttentionBackend(LENGTHS, "cpu"))

    steps = [reference.step(reference.hidden(t), n) for t, n in zip(sequences, after, strict=True)]
    normed = torch.cat(steps)
    assert relative(draft.head_input(own), normed) < TOLERANCE
    assert relative(draft.logits(own), reference.logits(normed)) < TOLERANCE


@pytest.mark.parametrize("name", ["deepseek v3", "qwen3-next", "mimo"])
@torch.no_grad()
def test_a_second_step_reads_the_hidden_state_of_the_first(name: str, tmp_path: Path):
    reference = make_reference(name)
    save_reference(reference, tmp_path)
    decoder, draft = load(tmp_path)
    [tokens], [after], [later] = tokens_of((9,)), tokens_of((9,), seed=1), tokens_of((9,), seed=2)

    hidden = decoder(tokens, torch.arange(9), VarlenAttentionBackend([9], "cpu"))
    first = draft(hidden, after, torch.arange(9), VarlenAttentionBackend([9], "cpu"))
    second = draft(first, later, torch.arange(1, 10), VarlenAttentionBackend([9], "cpu"), step=1)

    expected = reference.step(reference.step(reference.hidden(tokens), after), later, first=1)
    assert relative(draft.head_input(second, step=1), expected) < TOLERANCE


@pytest.mark.parametrize("name", MTP_KINDS)
def test_a_checkpoint_is_saved_with_its_mtp_tensors(name: str, tmp_path: Path):
    own = save_reference(make_reference(name), tmp_path / "old")
    decoder = hf.load(tmp_path / "old", device="cpu", dtype=torch.float32)
    hf.export(decoder, tmp_path / "new", like=tmp_path / "old")
    stored = load_file(tmp_path / "new" / "model.safetensors")
    assert own.keys() <= stored.keys()
    assert all(torch.equal(stored[tensor], own[tensor]) for tensor in own)


def test_the_policy_does_not_depend_on_its_mtp_layer(tmp_path: Path):
    reference = make_reference("deepseek v3")
    save_reference(reference, tmp_path)
    decoder, draft = load(tmp_path)
    owned = {parameter.data_ptr() for parameter in draft.parameters()}
    assert not owned & {parameter.data_ptr() for parameter in decoder.parameters()}


def test_a_checkpoint_without_mtp_layers_is_refused(tmp_path: Path):
    reference = make_reference("glm-4.5")
    save_reference(reference, tmp_path)
    spec = hf.spec_from_config(hf.read_config(tmp_path))
    assert read_mtp_spec(tmp_path, spec).num_layers == 1
    stored = load_file(tmp_path / "model.safetensors")
    hf_only = {name: tensor for name, tensor in stored.items() if not name.startswith("model.layers.2.")}
    save_file(hf_only, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="has no MTP layers"):
        read_mtp_spec(tmp_path, spec)


def test_quantized_mtp_weights_are_dequantized(tmp_path: Path):
    save_reference(make_reference("deepseek v3"), tmp_path)
    name = "model.layers.2.self_attn.o_proj.weight"
    stored = load_file(tmp_path / "model.safetensors")
    packed = stored[name].to(torch.float8_e4m3fn)
    save_file(stored | {name: packed, f"{name}_scale_inv": torch.full((1, 1), 0.5)}, tmp_path / "model.safetensors")
    config = hf.read_config(tmp_path)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, draft = load(tmp_path)
    assert torch.equal(dict(draft.named_parameters())["blocks.0.layer.mla.output.weight"], packed.float() * 0.5)


@torch.no_grad()
def test_several_mtp_layers_are_run_one_after_the_other(tmp_path: Path):
    first, second = make_reference("deepseek v3"), make_reference("deepseek v3")
    for parameter in second.layer.parameters():
        parameter.mul_(1.5)
    more = {name.replace("model.layers.2.", "model.layers.3."): value for name, value in mtp_tensors(second).items()}
    save_reference(first, tmp_path, **more)
    decoder, draft = load(tmp_path)
    assert draft.spec.num_layers == 2 and [draft.spec.layer_of_step(step) for step in range(4)] == [0, 1, 1, 1]
    [tokens], [after], [later] = tokens_of((9,)), tokens_of((9,), seed=1), tokens_of((9,), seed=2)
    hidden = decoder(tokens, torch.arange(9), VarlenAttentionBackend([9], "cpu"))
    own = draft(hidden, after, torch.arange(9), VarlenAttentionBackend([9], "cpu"))
    own = draft(own, later, torch.arange(1, 10), VarlenAttentionBackend([9], "cpu"), step=1)
    expected = second.step(first.step(first.hidden(tokens), after), later, first=1)
    assert relative(draft.head_input(own, step=1), expected) < TOLERANCE
