"""Inkling: its config, what is refused, weighed shared experts, and the names of its published checkpoints."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.oracle import SMALL, hf_model, our_logits, relative, tokens_of, twin
from tests.models.small_families.relative import FULL, INKLING, SLIDING, text_config

from miles.backends.megatron.supported_models import check_megatron_support
from miles.backends.native.runner.gpu_runner import supports_gpu_kernels
from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import UsageError
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.numerics import FAST
from miles.models.accounting import params
from miles.models.accounting.known_models import load_known_models
from miles.models.accounting.kv_cache import PerTokenCache, cache_layout, list_states
from miles.models.capabilities import check_prefix_sharing
from miles.models.checkpoint import hf
from miles.models.decoder import Routing
from miles.models.draft.spec import find_mtp_layout
from miles.models.families import spec_from_config
from miles.models.lora.targets import list_targets
from miles.models.spec import MlpSpec, MoeSpec, RelativeAttentionSpec, output_conv_state

LARGE = load_known_models()["Inkling"]


def small_config(**changes):
    return text_config(**(SMALL | INKLING)).to_dict() | {"architectures": ["InklingForCausalLM"]} | changes


def test_the_layers_of_inkling_are_those_of_its_config():
    spec = spec_from_config(LARGE)
    heads = {"num_heads": 64, "head_dim": 128, "rank": 16, "kernel": 4}
    full = RelativeAttentionSpec(**heads, num_kv_heads=8, extent=1024, temperature=(128_000.0, 0.1))
    sliding = RelativeAttentionSpec(**heads, num_kv_heads=16, extent=512, window=512)
    assert [layer.mixer for layer in spec.layers] == 11 * [*(5 * [sliding]), full]
    dense = MlpSpec(size=24_576, interleaved=True, learned_scale=True)
    assert [layer.ffn for layer in spec.layers[:2]] == [dense, dense]
    moe = spec.layers[2].ffn
    assert isinstance(moe, MoeSpec) and (moe.num_experts, moe.experts_per_token, moe.size) == (256, 6, 3072)
    assert (moe.weighed_shared, moe.scale, moe.score, moe.interleaved) == (2, 8.0, "sigmoid", True)
    assert (spec.vocab_size, spec.vocab_padding, spec.output_divisor) == (200_058, 966, 24.0)
    assert spec.embedding_norm and not spec.tie_embeddings and {layer.output_kernel for layer in spec.layers} == {4}
    assert round(params.active_parameter_count(spec) / 1e9, 1) == 41.1


def test_a_config_without_lists_has_a_full_layer_after_five_others_and_experts_everywhere():
    config = {"architectures": ["InklingForCausalLM"], "hidden_size": 64, "num_hidden_layers": 7, "vocab_size": 50}
    spec = spec_from_config(config)
    assert [layer.mixer.window for layer in spec.layers] == [*(5 * [512]), None, 512]
    assert spec.moe_layers == tuple(range(7)) and spec.eos_token_ids == (2,)
    # The expert's size is that of its own key here, and of intermediate_size in a published config.
    sizes = {key: spec_from_config(config | {"intermediate_size": 96} | own).moe.size for key, own in OWN.items()}
    assert sizes == {"text": 24, "published": 96}


OWN = {"text": {"moe_intermediate_size": 24}, "published": {"dense_intermediate_size": 128}}


def test_a_layer_has_a_key_value_cache_and_three_states():
    spec = spec_from_config(small_config())
    sliding, states = spec.layers[0].mixer, list_states(spec, FAST)
    assert cache_layout(sliding, FAST) == PerTokenCache(heads=4, key_dim=6, value_dim=6)
    shapes = [states[number].shapes for number in (0, *(output_conv_state(spec, 0, part) for part in ("mixer", "ffn")))]
    assert shapes == [((2 * 4 * 6, 3),), ((32, 3),), ((32, 3),)] and len(states) == 3 * spec.num_layers
    channels = 2 * (2 * 4 * 6) + 2 * 2 * 8 + 6 * 32
    assert params.state_bytes_per_sequence(spec, "float32") == 4 * 3 * channels


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("shared_expert_sink", False),
        ("use_sconv", False),
        ("gate_activation", "softmax"),
        ("q_bias", True),
        ("final_logit_softcapping", 30.0),
        ("conv_kernel_size", 1),
        ("num_key_value_heads", 3),
        ("n_shared_experts", 0),
        ("layer_types", ["full_attention"] * 3),
        ("mlp_layer_types", ["moe"] * 3),
        ("log_scaling_n_floor", -1),
    ],
)
def test_what_is_not_implemented_is_refused_by_its_key(key, value):
    with pytest.raises(UsageError, match=rf"^{key} of config\.json "):
        spec_from_config(small_config(**{key: value}))


def test_what_relative_attention_does_not_support_is_refused_in_a_sentence():
    spec = spec_from_config(small_config())
    assert "carry a state" in str(check_prefix_sharing(spec))
    assert ParallelDims(world=2, tensor=2, sequence=True).find_model_problem(spec) is None
    assert "only with --sequence-parallel" in str(check_megatron_support(spec, ParallelDims(world=2, tensor=2)))
    assert find_mtp_layout(spec) is None
    assert not supports_gpu_kernels(spec, twin(hf_model("inkling")), torch.device("cuda"))


def test_adapters_are_for_projections_and_routed_experts():
    names = {target.param_name.split(".", 2)[2] for target in list_targets(spec_from_config(small_config()))[:-1]}
    assert names == {
        "relative.qkv.weight",
        "relative.relative.weight",
        "relative.output.weight",
        "mlp.gate_up.weight",
        "mlp.down.weight",
        "moe.gate_up",
        "moe.down",
    }


def test_routed_and_shared_experts_share_one_sum_of_weights_and_selections_can_be_replayed():
    decoder = twin(hf_model("inkling"))
    moe = decoder.layers[1].moe
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    weights, experts, shared = moe._route_with_shared(x, None)
    total = moe.spec.scale * moe.shared_experts.factor
    torch.testing.assert_close(weights.sum(-1) + shared.sum(-1), total.expand(5))
    scores = (x @ moe.router.weight.T).sigmoid()
    torch.testing.assert_close(weights[:, :1] / shared[:, :1], scores.gather(1, experts[:, :1]) / scores[:, 8:9])
    sequences, routing = tokens_of([9, 4]), Routing(record=True)
    with torch.no_grad():
        free = our_logits(decoder, sequences, routing)
        recorded = torch.stack(routing.recorded, 1)
        assert recorded.shape == (13, 2, 3) and recorded.max() < 8
        assert torch.equal(free, our_logits(decoder, sequences, Routing(replay_TLk=recorded)))
        assert relative(our_logits(decoder, sequences, Routing(replay_TLk=recorded.roll(1, 0))), free) > 1e-3


def test_published_tensors_are_read_and_written_and_towers_and_mtp_layers_are_kept(tmp_path):
    model = hf_model("inkling whole")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"model.mtp.chain_norm.weight": torch.ones(32)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert {name.split(".")[1] for name in tensors} == {"llm", "audio", "visual", "mtp"}
    decoder = hf.load(tmp_path, device="cpu")
    hf.export(decoder, tmp_path / "ours", like=tmp_path)
    after = load_file(tmp_path / "ours" / "model.safetensors")
    assert tensors.keys() == after.keys() and all(torch.equal(tensor, after[name]) for name, tensor in tensors.items())
    # Rows alternate on disk: a gate, then an up.
    stored = after["model.llm.layers.1.mlp.w13_dn.weight"]
    assert torch.equal(stored[0::2], model.model.language_model.layers[1].mlp.gate_proj.weight)
    assert torch.equal(stored[1::2], model.model.language_model.layers[1].mlp.up_proj.weight)


def test_rows_of_padding_are_kept_but_have_no_logits(tmp_path):
    model = hf_model("inkling whole")
    decoder = twin(model)
    assert decoder.lm_head.weight.shape == (60, 32) and decoder.head().shape == (53, 32)
    backend = VarlenAttentionBackend([3], "cpu")
    hidden = decoder(torch.tensor([1, 2, 3]), torch.arange(3), backend)
    (hidden @ decoder.head().T).logsumexp(-1).sum().backward()
    grad = decoder.lm_head.weight.grad
    assert grad is not None and grad[:53].abs().sum() > 0 and not grad[53:].any()


def test_the_kinds_have_every_mechanism_and_sequences_that_reach_it():
    specs = [twin(hf_model(kind)).spec for kind in ("inkling", "inkling whole")]
    mixers = [layer.mixer for spec in specs for layer in spec.layers]
    assert (
        {mixer.window is None for mixer in mixers} == {mixer.temperature is None for mixer in mixers} == {True, False}
    )
    assert max(mixer.extent for mixer in mixers) < 90 and {mixer.kernel for mixer in mixers} == {3, 4}
    assert {spec.moe.weighed_shared for spec in specs} == {1, 2} and {spec.moe.interleaved for spec in specs} == {
        True,
        False,
    }
    assert {SLIDING, FULL} == set(INKLING["layer_types"])


def test_a_saved_config_names_the_model(tmp_path):
    hf_model("inkling").save_pretrained(tmp_path)
    hf.export(hf.load(tmp_path, device="cpu"), tmp_path / "ours", like=tmp_path)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "inkling_text"
