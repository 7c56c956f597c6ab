"""EAGLE-3 heads: against plain torch, the features they read, and the folders they are saved in."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.models.oracle import KINDS, hf_model, positions_of, tokens_of, twin
from tests.models.small_families.small import SMALL
from torch import Tensor
from torch.nn import functional as F

from miles.core.errors import CheckpointError
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.models.checkpoint.param_slices import param_shape
from miles.models.draft.base import PolicyWeights
from miles.models.draft.checkpoint import init_eagle, load_eagle
from miles.models.draft.eagle import EagleDraft
from miles.models.draft.param_map import build_draft_map, build_eagle_config, read_eagle_spec
from miles.models.draft.spec import build_eagle_spec
from miles.models.families import spec_from_config
from miles.models.hidden_capture import HiddenCapture

LENGTHS = (9, 1, 14)


def named_tensors(draft: EagleDraft) -> dict[str, Tensor]:
    """The head's tensors by the names of its checkpoint."""
    own = dict(draft.named_parameters())
    pieces = ((piece, own[name]) for name, pieces in build_draft_map(draft.spec).items() for piece in pieces)
    return {piece.hf_name: piece.view(tensor.detach()).clone() for piece, tensor in pieces}


def randomise(draft: EagleDraft) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.25 * noise)


def plain_step(weights: dict[str, Tensor], draft: EagleDraft, hidden: Tensor, embedding: Tensor) -> Tensor:
    """The layer of EAGLE-3 for one sequence from position 0 on, as its paper draws it."""
    mixer = draft.spec.decoder.layers[0].mixer
    eps, theta = draft.spec.decoder.norm_eps, mixer.rope.theta
    heads, kv_heads, size = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weights[f"midlayer.{name}.weight"], eps)

    def rotate(x: Tensor) -> Tensor:
        angle = torch.arange(len(x))[:, None] / theta ** (torch.arange(0, size, 2) / size)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    mixed = torch.cat((norm(embedding, "input_layernorm"), norm(hidden, "hidden_norm")), -1)
    q, k, v = (F.linear(mixed, weights[f"midlayer.self_attn.{x}_proj.weight"]) for x in "qkv")
    q, k = rotate(q.unflatten(1, (heads, size))), rotate(k.unflatten(1, (kv_heads, size)))
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v.unflatten(1, (kv_heads, size))))
    out = F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True)
    hidden = hidden + F.linear(out.transpose(0, 1).flatten(1), weights["midlayer.self_attn.o_proj.weight"])
    x = norm(hidden, "post_attention_layernorm")
    gate, up = (F.linear(x, weights[f"midlayer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return hidden + F.linear(F.silu(gate) * up, weights["midlayer.mlp.down_proj.weight"])


@torch.no_grad()
def test_a_head_computes_what_plain_torch_does():
    decoder = twin(hf_model("qwen3"))
    spec = build_eagle_spec(decoder.spec)
    draft = init_eagle(spec, seed=0, device="cpu", dtype=torch.float32)
    randomise(draft)
    draft.share(PolicyWeights(decoder.embedding, decoder.head))
    sequences, after = tokens_of(LENGTHS), tokens_of(LENGTHS, seed=1)
    capture = draft.new_capture()
    hidden = decoder(
        torch.cat(sequences), positions_of(LENGTHS), VarlenAttentionBackend(LENGTHS, "cpu"), capture=capture
    )
    features = draft.features(hidden, capture)
    own = draft(features, torch.cat(after), positions_of(LENGTHS), VarlenAttentionBackend(LENGTHS, "cpu"))

    weights = named_tensors(draft)
    projected = F.linear(features, weights["fc.weight"]).split(LENGTHS)
    expected = torch.cat(
        [plain_step(weights, draft, h, decoder.embedding(n)) for h, n in zip(projected, after, strict=True)]
    )
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
    normed = F.rms_norm(expected, (expected.shape[-1],), weights["norm.weight"], spec.decoder.norm_eps)
    torch.testing.assert_close(draft.logits(own), F.linear(normed, decoder.head()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "deepseek v3", "hybrid qwen3 next", "glm-4.5"])
def test_a_captured_layer_is_what_transformers_returns_and_changes_nothing(kind: str):
    model = hf_model(kind)
    decoder = twin(model)
    [tokens] = tokens_of((13,))
    capture = HiddenCapture((1, 0))
    plain = decoder(tokens, torch.arange(13), VarlenAttentionBackend([13], "cpu"))
    captured = decoder(tokens, torch.arange(13), VarlenAttentionBackend([13], "cpu"), capture=capture)
    assert torch.equal(plain, captured)
    # transformers normalizes the last of its hidden states.
    theirs = model(tokens[None], output_hidden_states=True).hidden_states
    first = capture.concatenate()[:, decoder.spec.hidden_size :]
    torch.testing.assert_close(first, theirs[1][0].detach(), rtol=1e-3, atol=1e-4)
    assert not capture.concatenate().requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_has_a_head(kind: str):
    wanted = KINDS[kind]
    policy = spec_from_config(
        wanted.config(**(SMALL | wanted.own)).to_dict() | {"architectures": [wanted.model.__name__]}
    )
    spec = build_eagle_spec(policy)
    assert len(spec.capture_layers) == 3 and all(0 <= layer < policy.num_layers for layer in spec.capture_layers)
    made = EagleDraft(spec, device="meta", dtype=torch.float32)
    assert {name: tuple(p.shape) for name, p in made.named_parameters()} == {
        name: param_shape(pieces) for name, pieces in build_draft_map(spec).items()
    }
    assert read_eagle_spec(build_eagle_config(spec, "float32"), policy, "head") == spec


# -- folders --------------------------------------------------------------------------------


def write_head(draft: EagleDraft, folder: Path, **changes) -> None:
    folder.mkdir(exist_ok=True)
    tensors = named_tensors(draft)
    if draft.token_offsets_v is not None:
        tensors["d2t"] = draft.token_offsets_v
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(build_eagle_config(draft.spec, "float32") | changes))


@torch.no_grad()
def test_a_head_of_a_reduced_vocabulary_maps_its_tokens(tmp_path: Path):
    decoder = twin(hf_model("qwen3"))
    spec = replace(build_eagle_spec(decoder.spec), draft_vocab_size=3)
    made = EagleDraft(spec, device="cpu", dtype=torch.float32)
    randomise(made)
    made.token_offsets_v.copy_(torch.tensor([4, 10, 40]) - torch.arange(3))
    write_head(made, tmp_path)
    draft = load_eagle(tmp_path, decoder.spec, device="cpu", dtype=torch.float32)
    draft.share(PolicyWeights(decoder.embedding, decoder.head))
    assert draft.spec == spec
    assert draft.token_ids(torch.tensor([2, 0, 1])).tolist() == [40, 4, 10]
    hidden = torch.randn(5, decoder.spec.hidden_size)
    assert draft.logits(hidden).shape == (5, 3)
    assert draft.head() is draft.lm_head.weight


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is not an EAGLE-3 head"),
        ({"vocab_size": 54}, "vocab_size of .* is 54, but a draft of this policy needs 53"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, "the policy has 2 layers"),
        ({"draft_vocab_size": 7}, "lm_head.weight is missing"),
        ({"intermediate_size": 48}, "has shape"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(changes: dict, sentence: str, tmp_path: Path):
    decoder = twin(hf_model("qwen3"))
    draft = init_eagle(build_eagle_spec(decoder.spec), seed=0, device="cpu", dtype=torch.float32)
    write_head(draft, tmp_path, **changes)
    with pytest.raises(CheckpointError, match=sentence):
        load_eagle(tmp_path, decoder.spec, device="cpu", dtype=torch.float32)
