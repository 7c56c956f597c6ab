"""Gemma 3n: its config, its checkpoints with towers, tokens beyond the per-layer table, and sparse activations."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.oracle import KINDS, SMALL, hf_model, our_logits, relative, tokens_of, twin
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from miles.core.errors import UsageError
from miles.kernels.fused.activation import sparsify_gates, sparsify_sharded_gates
from miles.models.accounting.known_models import load_known_models
from miles.models.capabilities import check_batch_invariance
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config
from miles.models.residual_spec import AltUpSpec
from miles.models.spec import AttentionSpec, LayerSpec, MlpSpec

E4B = load_known_models()["Gemma-3n-E4B"]
WRAPPED = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}


def test_gemma_3n_e4b_has_four_streams_ten_sparse_layers_and_fifteen_that_share_keys():
    spec = spec_from_config(E4B)
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    assert spec.altup == AltUpSpec(streams=4) and {layer.laurel_rank for layer in spec.layers} == {64}
    assert [layer.ffn.sparsity for layer in spec.layers if isinstance(layer.ffn, MlpSpec)] == 10 * [0.95] + 25 * [0.0]
    assert [mixer.kv_source for mixer in mixers] == 20 * [None] + 3 * [18, 18, 18, 18, 19]
    assert [mixer.window for mixer in mixers[:5]] == 4 * [512] + [None]
    assert {mixer.rope.theta for mixer in mixers if mixer.window} == {10_000.0}
    assert spec.per_layer_input.beyond_token_id == 0  # the table has fewer tokens than the vocabulary
    assert check_batch_invariance(spec) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("altup_correct_scale", False),
        ("altup_active_idx", 4),
        ("activation_sparsity_pattern", [0.5]),
        ("activation_sparsity_pattern", 35 * [1.0]),
        ("intermediate_size", [16384]),
        ("hidden_activation", "silu"),
        ("num_kv_shared_layers", 35),
        ("layer_types", 35 * ["mystery"]),
    ],
)
def test_what_is_not_implemented_is_refused_by_its_key(key, value):
    with pytest.raises(UsageError, match=rf"^{key} of config\.json "):
        spec_from_config(E4B | {key: value})


def test_streams_without_a_learned_residual_are_no_layer():
    with pytest.raises(ValueError, match="go together"):
        LayerSpec(mixer=None, ffn=MlpSpec(size=8), altup=AltUpSpec(streams=2))


def test_the_language_model_of_a_checkpoint_with_towers_is_the_text_model(tmp_path):
    model = hf_model("gemma3n")
    model.save_pretrained(tmp_path / "text")
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    shared = "model.language_model.layers.3.self_attn.k_proj.weight"
    others = ("model.vision_tower.x", "model.audio_tower.x", "model.embed_vision.x", "model.embed_audio.x", shared)
    (tmp_path / "whole").mkdir()
    save_file(tensors | {name: torch.ones(2) for name in others}, tmp_path / "whole" / "model.safetensors")
    config = WRAPPED | {"text_config": model.config.to_dict()}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    text, whole = (hf.load(tmp_path / name, device="cpu") for name in ("text", "whole"))
    assert whole.spec.family == "gemma3n"
    assert all(torch.equal(p, q) for p, q in zip(text.parameters(), whole.parameters(), strict=True))
    hf.export(whole, tmp_path / "again", like=tmp_path / "whole")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys() | set(others)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_tokens_beyond_the_per_layer_table_have_its_first_row():
    kind = KINDS["gemma3n"]
    model = hf_model("gemma3n", vocab_size_per_layer_input=40)
    (tokens,) = tokens_of((30,))
    assert tokens.max() >= 40 and SMALL["vocab_size"] > 40 and kind.own["vocab_size_per_layer_input"] > 40
    text = model.model
    inputs = text.get_per_layer_inputs(torch.where(tokens < 40, tokens, 0)[None])
    hidden = text(inputs_embeds=text.embed_tokens(tokens[None]), per_layer_inputs=inputs).last_hidden_state
    logits = model.lm_head(hidden)[0] / 4.0  # the soft-cap of the kind
    assert relative(our_logits(twin(model), [tokens]), logits.tanh() * 4.0) < 1e-5


@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.95])
def test_gates_below_the_quantile_are_zero(sparsity):
    torch.manual_seed(0)
    gate_TI = 3 * torch.randn(7, 400) + 1
    ours = sparsify_gates(gate_TI, sparsity)
    theirs = Gemma3nTextMLP._gaussian_topk(SimpleNamespace(activation_sparsity=sparsity), gate_TI)
    assert relative(ours, theirs) < 1e-5
    assert (ours == 0).float().mean() == pytest.approx(sparsity, abs=0.05)


def test_ranks_find_the_cutoff_of_all_channels():
    torch.manual_seed(0)
    gate_TI = torch.randn(7, 40) + 2
    parts = [*gate_TI.split(20, 1)]
    sums = torch.stack([torch.stack((part.sum(-1), part.square().sum(-1)), -1) for part in parts]).sum(0)
    # A rank's padding counts for nothing.
    padded = [torch.nn.functional.pad(part, (0, 3)) for part in parts]
    ours = [sparsify_sharded_gates(part, 0.7, 40, lambda _: sums)[:, :20] for part in padded]
    assert relative(torch.cat(ours, 1), sparsify_gates(gate_TI, 0.7)) < 1e-5
