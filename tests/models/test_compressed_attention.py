"""DeepSeek-V4: its config, what is refused, hash routing, and the names of its published checkpoints."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.oracle import KINDS, SMALL, hf_model, our_logits, relative, tokens_of, twin
from tests.models.small_families.compressed import CSA, DEEPSEEK_V4, HCA, SLIDING, YARN, deepseek_v4_config
from transformers import DeepseekV4ForCausalLM

from miles.backends.megatron.supported_models import check_megatron_support
from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import CheckpointError, UsageError
from miles.kernels.numerics import FAST
from miles.models.accounting import params
from miles.models.accounting.known_models import load_known_models
from miles.models.accounting.kv_cache import PerTokenCache, cache_layout
from miles.models.capabilities import check_batch_invariance, check_prefix_sharing
from miles.models.checkpoint import hf
from miles.models.decoder import Routing
from miles.models.draft.spec import find_mtp_layout
from miles.models.families import spec_from_config
from miles.models.parallel.tp_sharding import check_tp_size
from miles.models.spec import CompressedAttentionSpec, CompressorSpec, MoeSpec, RopeSpec, WindowIndexerSpec

FLASH = load_known_models()["DeepSeek-V4-Flash"]
# As published configs name the layers, the last of which is an MTP layer, and the RoPE of compressed layers.
RATIOS = [0, 0, *(21 * [4, 128])][:43]
PUBLISHED = {key: value for key, value in FLASH.items() if key != "compress_rates"} | {
    "compress_ratios": [*RATIOS, 0],
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
}
INDEXER = WindowIndexerSpec(num_heads=64, head_dim=128, top=512)


def small_config(**changes):
    config = deepseek_v4_config(**(SMALL | DEEPSEEK_V4)).to_dict() | {"architectures": ["DeepseekV4ForCausalLM"]}
    return config | changes


def test_the_layers_of_v4_flash_are_those_of_its_config():
    spec = spec_from_config(FLASH)
    csa, hca = CompressorSpec(rate=4, overlap=True, indexer=INDEXER), CompressorSpec(rate=128, overlap=False)
    assert [layer.mixer.compressor for layer in spec.layers] == [hca, hca, *(21 * [hca, csa])[:41]]
    tables = [layer.ffn.hash_vocab for layer in spec.layers if isinstance(layer.ffn, MoeSpec)]
    assert tables == 3 * [129280] + 40 * [0]
    assert [layer.ffn.correction for layer in spec.layers] == 3 * [False] + 40 * [True]
    assert spec.hyper is not None and spec.hyper.learned_join and spec.streams == 4
    assert round(params.parameter_count(spec) / 1e9, 1) == 284.3
    assert round(params.active_parameter_count(spec) / 1e9, 1) == 13.8


def test_published_configs_name_layers_by_their_ratios_and_scale_the_rope_of_compressed_ones():
    spec = spec_from_config(PUBLISHED)
    rates = [0 if layer.mixer.compressor is None else layer.mixer.compressor.rate for layer in spec.layers]
    assert rates == RATIOS
    assert spec.layers[0].mixer.rope == RopeSpec(theta=10000.0, dim=64, interleaved=True)
    scaled = spec.layers[2].mixer.rope
    assert (scaled.kind, scaled.theta, scaled.factor, scaled.scale) == ("yarn", 160000.0, 16.0, 1.0)
    assert scaled.original_max_positions == 65536 and scaled.dim == 64


def test_the_cache_has_a_key_and_what_a_token_adds_to_windows():
    sliding, csa, hca = (spec_from_config(PUBLISHED).layers[i].mixer for i in (0, 2, 3))
    layouts = [cache_layout(mixer, FAST) for mixer in (sliding, csa, hca)]
    common = {"heads": 1, "key_dim": 512, "value_dim": 0, "rope_dim": 64}
    # Values and gates, twice with an overlap; of the indexer's compressor too.
    assert layouts == [PerTokenCache(**common, index_dim=n) for n in (0, 4 * (512 + 128), 2 * 512)]


def test_a_long_context_costs_its_windows_and_the_scores_of_those():
    spec = spec_from_config(PUBLISHED)
    flops = [params.forward_flops_per_token(spec, context) for context in (100_000, 100_128)]
    # 32 more windows of 4 tokens are scored in 21 layers, and one more of 128 attended to in 20.
    each = 21 * 32 * 2 * 64 * 128 + 20 * 4 * 64 * 512
    assert flops[1] - flops[0] == pytest.approx(each, rel=1e-6)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("num_key_value_heads", 2),
        ("n_shared_experts", 2),
        ("norm_topk_prob", False),
        ("scoring_func", "sigmoid"),
        ("expert_dtype", "fp4"),
        ("swiglu_limit", None),
        ("o_groups", 3),
        ("layer_types", ["full_attention"] * 4),
        ("mlp_layer_types", ["dense"] * 4),
        ("mlp_layer_types", ["moe"]),
        ("compress_rates", {CSA: 0, HCA: 5}),
        ("partial_rotary_factor", 1.0),
        ("index_head_dim", 2),
    ],
)
def test_what_is_not_implemented_is_refused_by_its_key(key, value):
    changes = {key: value}
    if key == "partial_rotary_factor":  # which transformers writes into each group too
        changes["rope_parameters"] = None
    with pytest.raises(UsageError, match=rf"^{key} of config\.json "):
        spec_from_config(small_config(**changes))


def test_what_compressed_attention_does_not_support_is_refused_in_a_sentence():
    spec = spec_from_config(small_config())
    assert "divides each whole sequence into windows" in str(check_prefix_sharing(spec))
    assert check_batch_invariance(spec) is None
    assert ParallelDims(world=2, context=2).find_model_problem(spec) is None
    assert check_megatron_support(spec, ParallelDims()) is None
    assert "2 output groups of attention heads" in str(check_tp_size(spec, 4)) and check_tp_size(spec, 2) is None
    assert find_mtp_layout(spec) is None


def test_experts_of_hash_layers_are_those_of_the_table_and_can_be_replayed():
    decoder = twin(hf_model("deepseek v4"))
    sequences = tokens_of([9, 4])
    tokens = torch.cat(sequences)
    routing = Routing(record=True)
    with torch.no_grad():
        free = our_logits(decoder, sequences, routing)
        for layer in (0, 1):
            assert torch.equal(routing.recorded[layer], decoder.layers[layer].moe.expert_table[tokens])
        replayed = our_logits(decoder, sequences, Routing(replay_TLk=torch.stack(routing.recorded, 1)))
        other = torch.stack([each.roll(1, 0) for each in routing.recorded], 1)
        assert torch.equal(free, replayed)
        assert relative(our_logits(decoder, sequences, Routing(replay_TLk=other)), free) > 1e-3


def test_a_new_model_deals_different_experts_to_each_token():
    decoder = hf.init_random(spec_from_config(small_config()), seed=0, device="cpu", dtype=torch.bfloat16)
    table = decoder.layers[0].moe.expert_table
    assert table.dtype == torch.int64 and table.shape == (53, 3)
    assert all(len(set(row)) == 3 and set(row) <= set(range(8)) for row in table.tolist())


def rewrite(folder, change):
    """Change the tensors of a saved model."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def published_names(tensors):
    """Without the prefix that transformers adds when it saves, and with the published name of a norm."""
    out = {}
    for name, tensor in tensors.items():
        name = name.replace(".attn.norm.", ".attn.kv_norm.").removeprefix("model.")
        name = name.replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        out[name] = tensor
    return out


def test_published_names_are_read_and_written_and_mtp_layers_are_kept(tmp_path):
    model = hf_model("deepseek v4")
    model.save_pretrained(tmp_path)
    ours = twin(model)
    extra = {"mtp.0.attn.wkv.weight": torch.ones(4, 4)}
    rewrite(tmp_path, lambda tensors: published_names(tensors) | extra)
    decoder = hf.load(tmp_path, device="cpu")
    assert all(torch.equal(p, ours.get_parameter(name)) for name, p in decoder.named_parameters())
    hf.export(decoder, tmp_path / "ours", like=tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "ours"))
    assert before.keys() == after.keys() and {"embed.weight", "head.weight", "hc_head_fn"} <= after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert after["layers.0.ffn.gate.tid2eid"].dtype == torch.int64
    again = DeepseekV4ForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("dtype", "is_read"), [(torch.int32, True), (torch.float32, False)])
def test_a_table_of_experts_is_read_from_integers_only(dtype, is_read, tmp_path):
    hf_model("deepseek v4").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {n: t.to(dtype) if "tid2eid" in n else t for n, t in tensors.items()})
    if is_read:
        table = hf.load(tmp_path, device="cpu").layers[0].moe.expert_table
        assert torch.equal(table, twin(hf_model("deepseek v4")).layers[0].moe.expert_table)
    else:
        with pytest.raises(CheckpointError, match=r"tid2eid .* is stored as F32, not I64 or I32"):
            hf.load(tmp_path, device="cpu")


def test_scales_of_fp8_weights_are_read_by_their_published_name(tmp_path):
    """Block-wise FP8, whose scales the published checkpoint calls ``scale``."""
    model = hf_model("deepseek v4", hidden_size=128, moe_intermediate_size=128)
    model.save_pretrained(tmp_path)
    name = "model.layers.0.attn.wq_a"

    def quantize(tensors):
        weight = tensors[f"{name}.weight"]
        scale = weight.abs().max() / 448
        tensors[f"{name}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        return tensors | {f"{name}.scale": scale.view(1, 1)}

    rewrite(tmp_path, quantize)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = hf.load(tmp_path, device="cpu").layers[0].compressed.q_a.weight
    wanted = model.model.layers[0].self_attn.q_a_proj.weight
    assert 0 < (found - wanted).abs().max() < 0.04 * wanted.abs().max()


def test_the_kinds_have_every_mechanism_and_sequences_that_reach_it():
    specs = [twin(hf_model(kind)).spec for kind in KINDS if kind.startswith("deepseek v4")]
    mixers = [layer.mixer for spec in specs for layer in spec.layers]
    assert all(isinstance(mixer, CompressedAttentionSpec) for mixer in mixers)
    assert {mixer.rope.kind for mixer in mixers} == {"default", YARN["rope_type"]}
    assert {None if m.compressor is None else m.compressor.overlap for m in mixers} == {None, True, False}
    assert SLIDING in DEEPSEEK_V4["layer_types"] and {spec.tie_embeddings for spec in specs} == {True, False}


def test_only_sequences_with_more_windows_than_are_selected_depend_on_the_selection():
    some, every = twin(hf_model("deepseek v4")), twin(hf_model("deepseek v4", index_topk=100))
    short, long = tokens_of([9, 60])
    with torch.no_grad():
        assert torch.equal(our_logits(every, [short]), our_logits(some, [short]))
        assert relative(our_logits(every, [long]), our_logits(some, [long])) > 1e-3
