"""MiniMax-M3: its config, the vision tower beside it, and what its indexer selects."""

import pytest
import torch
from tests.models.oracle import KINDS, SMALL, hf_model, twin
from tests.models.small_families.block_sparse import SPARSE, WithTower
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

from miles.core.errors import UsageError
from miles.kernels.attention.block_selection import select_topk_blocks, unselected_tokens
from miles.kernels.numerics import FAST
from miles.models.accounting import params
from miles.models.accounting.known_models import load_known_models
from miles.models.accounting.kv_cache import PerTokenCache, cache_layout
from miles.models.capabilities import check_batch_invariance, check_prefix_sharing
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config
from miles.models.layers.rope import Positions
from miles.models.spec import AttentionSpec, BlockIndexerSpec, MlpSpec, MoeSpec

MINE = [kind for kind in KINDS if kind.startswith("minimax-m3")]
M3 = load_known_models()["MiniMax-M3"]


def test_minimax_m3_has_three_dense_layers_and_an_indexer_in_the_others():
    spec = spec_from_config(M3)
    indexers = [layer.mixer.indexer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    assert indexers == 3 * [None] + 57 * [BlockIndexerSpec(head_dim=128, block=128, top=16)]
    assert [type(layer.ffn) for layer in spec.layers] == 3 * [MlpSpec] + 57 * [MoeSpec]
    assert round(params.parameter_count(spec) / 1e9, 1) == 426.2
    assert round(params.active_parameter_count(spec) / 1e9, 1) == 26.0
    # Four key-value heads of 128 channels, and one key of the indexer.
    assert cache_layout(spec.layers[3].mixer, FAST) == PerTokenCache(heads=4, key_dim=128, value_dim=128, index_dim=128)


def test_a_long_context_costs_scores_of_the_indexer_and_the_selected_blocks():
    spec = spec_from_config(M3)
    # Queries and values of 64 heads in three layers; scores of four indexer heads in 57.
    each = 3 * 4 * 64 * 128 + 57 * 2 * 4 * 128
    flops = [params.forward_flops_per_token(spec, context) for context in (100_000, 100_001)]
    assert flops[1] - flops[0] == pytest.approx(each, rel=1e-3)


def test_the_lists_of_the_published_config_say_the_same_as_those_of_transformers():
    text = {key: value for key, value in M3["text_config"].items() if key != "moe_layer_freq"}
    group = {k: v for k, v in text.pop("sparse_attention_config").items() if k != "sparse_attention_freq"}
    text |= {"layer_types": 3 * ["full_attention"] + 57 * [SPARSE], "mlp_layer_types": 3 * ["dense"] + 57 * ["sparse"]}
    assert spec_from_config(M3 | {"text_config": text | {"sparse_attention_config": group}}) == spec_from_config(M3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("swiglu_limit", 5.0),
        ("swiglu_alpha", 1.0),
        ("qk_norm_type", "per_layer"),
        ("use_gemma_norm", False),
        ("attention_output_gate", True),
        ("n_shared_experts", 2),
        ("rotary_dim", 32),
        ("moe_layer_freq", [1, 0]),
        ("layer_types", 60 * ["mystery"]),
        ("scoring_func", "softmax"),
    ],
)
def test_what_is_not_implemented_is_refused_by_its_key(key, value):
    with pytest.raises(UsageError, match=rf"^{key} of config\.json "):
        spec_from_config(M3 | {"text_config": M3["text_config"] | {key: value}})


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("sparse_num_index_heads", 8, "index_n_heads"),
        ("sparse_index_dim", 32, "index_head_dim"),
        ("sparse_local_block", 17, "index_local_blocks"),
        ("sparse_init_block", 1, "sparse_attention_config.sparse_init_block"),
        ("sparse_score_type", "lse", "sparse_attention_config.sparse_score_type"),
        ("sparse_attention_freq", [1], "sparse_attention_config.sparse_attention_freq"),
        ("sparse_disable_index_value", 60 * [0], "sparse_attention_config.sparse_disable_index_value"),
    ],
)
def test_an_indexer_that_is_not_implemented_is_refused_by_its_key(key, value, named):
    text = M3["text_config"]
    group = text["sparse_attention_config"] | {key: value}
    with pytest.raises(UsageError, match=rf"^{named} of config\.json "):
        spec_from_config(M3 | {"text_config": text | {"sparse_attention_config": group}})


def test_prefixes_are_not_shared_and_numerics_can_be_exact():
    spec = spec_from_config(M3)
    assert check_batch_invariance(spec) is None
    assert "sparse attention selects" in str(check_prefix_sharing(spec))


@pytest.mark.parametrize("kind", MINE)
def test_the_blocks_are_those_that_transformers_selects(kind):
    model = hf_model(kind)
    decoder = twin(model)
    length = 60
    for number, layer in enumerate(decoder.layers):
        indexer = layer.attention.indexer
        if indexer is None:
            continue
        x_TD = torch.randn(length, SMALL["hidden_size"], generator=torch.Generator().manual_seed(number))
        index = indexer(x_TD, Positions(torch.arange(length), 256, torch.float32, numerics=FAST))
        ours = unselected_tokens(select_topk_blocks(index.q_TGd, index.k_Td, index), index.block, length)
        text = model.model.language_model
        theirs: MiniMaxM3VLIndexer = text.layers[number].self_attn.indexer
        ids = torch.arange(length)[None]
        blocks = theirs(x_TD[None], text.rotary_emb(x_TD[None], ids), None, ids)
        hidden_HST = theirs.build_block_mask(blocks, None, length, torch.float32, x_TD.device, ids)[0] < 0
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        assert torch.equal((ours | later).repeat_interleave(2, 0), hidden_HST)
        assert (ours & ~later).any(), "the selection must leave something out"


def test_the_vision_tower_is_not_read_and_is_kept_by_an_export(tmp_path):
    kind = KINDS["minimax-m3"]
    torch.manual_seed(0)
    WithTower(kind.config(**(SMALL | kind.own))).save_pretrained(tmp_path / "theirs")
    hf.export(hf.load(tmp_path / "theirs", device="cpu"), tmp_path / "ours", like=tmp_path / "theirs")
    states = [WithTower.from_pretrained(tmp_path / name).state_dict() for name in ("theirs", "ours")]
    assert any("vision_tower" in name for name in states[0])
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
