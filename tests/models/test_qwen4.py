"""Qwen4-Exp: n-gram embeddings, gated hyper-connections and sparse attention by pools, and how its config is read."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.models.oracle import hf_model, our_logits, relative, tokens_of, twin
from tests.models.small_families.qwen4 import QWEN4, text_config, wrapped_config
from tests.models.small_families.small import SMALL
from tests.tiers import examples
from transformers import Qwen4ExpForCausalLM
from transformers.models.qwen4_exp import modeling_qwen4_exp as reference

from miles.backends.megatron.supported_models import check_megatron_support
from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import UsageError
from miles.models.accounting import params
from miles.models.accounting.known_models import load_known_models
from miles.models.accounting.kv_cache import list_states, ngram_state_key
from miles.models.capabilities import check_prefix_sharing
from miles.models.checkpoint import hf
from miles.models.draft.spec import find_mtp_layout
from miles.models.families import spec_from_config
from miles.models.families.qwen4_exp import list_multipliers, list_primes
from miles.models.layers.ngram_embedding import shift_tokens
from miles.models.lora.targets import list_targets
from miles.models.parallel.tp_sharding import shard_spec
from miles.models.residual_spec import GatedResidualSpec
from miles.models.spec import AttentionSpec, GatedDeltaNetSpec, PoolIndexerSpec

KIND = "hybrid qwen4"
END = QWEN4["eos_token_id"]
PUBLISHED = load_known_models()["Qwen3.8-Flash-Next"]


def small_config(**changes):
    return text_config(**(SMALL | QWEN4)).to_dict() | {"architectures": ["Qwen4ExpForCausalLM"]} | changes


# -- the config -------------------------------------------------------------------------------


def test_the_published_config_has_the_published_sizes():
    spec = spec_from_config(PUBLISHED)
    assert round(params.parameter_count(spec) / 1e9) == 177  # the text model of the 176B with its vocabulary
    assert round(params.ngram_table_size(spec) / 1e9, 1) == 51.2
    vocabulary = 2 * spec.vocab_size * spec.hidden_size
    assert round((params.active_parameter_count(spec) - vocabulary) / 1e9) == 6
    assert spec.hyper == GatedResidualSpec(streams=4, rank=320) and not spec.has_final_norm
    kinds = [isinstance(layer.mixer, AttentionSpec) for layer in spec.layers]
    assert kinds == 12 * [False, False, False, True]
    delta, attention = spec.layers[0].mixer, spec.layers[3].mixer
    assert isinstance(delta, GatedDeltaNetSpec) and delta.output_gate == "sigmoid"
    assert attention.indexer == PoolIndexerSpec(num_heads=4, head_dim=128, top=2048, pool=4)
    assert attention.rope.dim == 64 and [i for i, layer in enumerate(spec.layers) if layer.ngram] == [1]
    ngram = spec.layers[1].ngram
    assert (ngram.dim, ngram.order, ngram.rows, ngram.shards) == (2560, 3, 320_001_536, 128)
    assert ngram.end_token_id == 248044 and spec.vocab_size < 1 << 24  # ids are kept in float32


def test_a_sequence_keeps_the_last_tokens_and_the_inputs_of_the_convolution_beside_its_states():
    spec = spec_from_config(PUBLISHED)
    states = list_states(spec, hf.FAST)
    assert len(states) == 36 + 1
    assert states[ngram_state_key(spec, 1)].shapes == ((4 * 2560, 9), (2,))
    assert states[ngram_state_key(spec, 1)].wide == (False, True)


def test_what_a_long_context_costs_is_bounded_but_for_the_scores_of_pools():
    spec = spec_from_config(PUBLISHED)
    flops = [params.forward_flops_per_token(spec, context) for context in (100_000, 100_004)]
    assert flops[1] - flops[0] == pytest.approx(12 * 2 * 4 * 128, rel=1e-6)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("output_gate_type", "tanh"),
        ("attn_output_gate", False),
        ("layer_types", ["sliding_attention"] * 3),
        ("hc_count", 1),
        ("hc_lowrank", 0),
        ("indexer_n_heads", None),
        ("indexer_kv_heads", 2),
        ("indexer_budget", 13),
        ("indexer_head_dim", 2),
        ("ple_layer_ids", [0]),
        ("ple_layer_ids", [2]),
        ("ple_embed_dim", 25),
        ("ngram_size", 1),
        ("eos_token_id", None),
        ("linear_num_key_heads", 3),
        ("num_experts_per_tok", 9),
    ],
)
def test_what_is_not_implemented_is_refused_by_its_key(key, value):
    with pytest.raises(UsageError, match=rf"^{key} of config\.json "):
        spec_from_config(small_config(**{key: value}))


def test_what_the_family_does_not_support_is_refused_in_a_sentence():
    spec = spec_from_config(small_config())
    assert "recurrent layers carry a state" in str(check_prefix_sharing(spec))
    assert ParallelDims(world=2, tensor=2, sequence=True).find_model_problem(spec) is None
    assert check_megatron_support(spec, ParallelDims(world=2, tensor=2, sequence=True)) is None
    assert "--sequence-parallel" in str(check_megatron_support(spec, ParallelDims(world=2, tensor=2)))
    assert find_mtp_layout(spec) is None


def test_adapters_are_of_attention_and_experts_alone():
    names = {target.param_name for target in list_targets(spec_from_config(small_config()))}
    assert {"layers.1.attention.qkv.weight", "layers.0.delta.qkvz.weight", "layers.0.moe.gate_up"} <= names
    assert not [name for name in names if "ngram" in name or "hyper" in name or "indexer" in name]


def test_a_tower_is_read_past_and_the_text_model_is_the_same():
    text = {key: value for key, value in QWEN4.items() if key != "mrope"}
    wrapped = wrapped_config(**(SMALL | text)).to_dict() | {"architectures": ["Qwen4ExpForConditionalGeneration"]}
    spec = spec_from_config(wrapped)
    assert spec.vision is None and spec.layers == spec_from_config(small_config()).layers


# -- n-grams ----------------------------------------------------------------------------------


def test_the_constants_of_the_hash_are_those_of_transformers():
    # Those of published sizes are found by the same search.
    assert list_primes(20_000_000, 3) == tuple(reference._find_nth_prime_after(20_000_000 - 1, i + 1) for i in range(3))
    for layer in (0, 3):
        theirs = reference._build_layer_multipliers(248320, 4, layer, 1234).tolist()
        assert list_multipliers(248320, 4, 1234 + 10007 * layer) == tuple(theirs)
    model, spec = hf_model(KIND), spec_from_config(small_config())
    for number in (0, 2):
        embedding, ngram = model.model.layers[number].ple.ple_embedding, spec.layers[number].ngram
        assert tuple(embedding.layer_multipliers.tolist()) == ngram.multipliers
        assert tuple(embedding.ngram_heads_vocab_sizes.tolist()) == ngram.head_sizes
        assert embedding.ngram_embedding.num_embeddings == ngram.rows
        constants = twin(model).layers[number].ngram.constants()
        assert torch.equal(constants["offsets"], embedding.ngram_heads_offsets)


def shifted_by_hand(tokens, count):
    """Each token and those before it; from an end on backwards there are only ends."""
    rows = []
    for i in range(len(tokens)):
        row = [tokens[i]]
        for distance in range(1, count + 1):
            before = tokens[i - distance] if i >= distance else END
            row.append(END if END in row[1:] else before)
        rows.append(row)
    return rows


@settings(max_examples=examples(60), deadline=None)
@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=24),
    other=st.lists(st.integers(0, 9), max_size=5),
    cuts=st.lists(st.integers(0, 24), max_size=4),
    count=st.integers(1, 4),
)
def test_shifted_tokens_stay_inside_a_sequence_however_it_is_cut(tokens, other, cuts, count):
    wanted = shifted_by_hand(tokens, count)
    packed = torch.tensor([*other, *tokens, *other])
    rows, last = shift_tokens(packed, [len(other), len(tokens), len(other)], None, count=count, end=END)
    assert last is None
    assert torch.stack(rows, 1)[len(other) : len(other) + len(tokens)].tolist() == wanted
    earlier, found = torch.zeros(2, count), []
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for first, stop in pairwise(edges):
        part = torch.tensor([*tokens[first:stop], *other], dtype=torch.int64)
        rows, after = shift_tokens(part, [stop - first, len(other)], earlier, count=count, end=END)
        found += torch.stack(rows, 1)[: stop - first].tolist()
        earlier = torch.cat((after[:1], torch.zeros(1, count)))
    assert found == wanted


def test_packed_samples_do_not_look_at_each_other_and_sequences_look_at_their_last_tokens():
    decoder = twin(hf_model(KIND))
    first, second = tokens_of([9, 20])
    with torch.no_grad():
        alone = our_logits(decoder, [second])
        assert relative(our_logits(decoder, [first, second])[9:], alone) < 1e-5
        other = second.clone()
        other[0] = (other[0] + 1) % 5
        hashed = [decoder.layers[0].ngram._hash(tokens, [20], None)[0] for tokens in (second, other)]
        # The first head of each order: pairs of two tokens, and triples of three.
        changed = (hashed[0] != hashed[1]).any(0), (hashed[0] != hashed[1])[3:].any()
        assert changed[0].all() and not changed[1]
        for layer in (0, 2):
            decoder.layers[layer].ngram.table.weight.zero_()
        assert relative(our_logits(decoder, [second]), alone) > 1e-2


# -- checkpoints ------------------------------------------------------------------------------


def test_shards_of_the_table_and_constants_are_written_by_their_published_names(tmp_path):
    model = hf_model(KIND)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"mtp.fc_hidden.weight": torch.ones(4, 4), "model.visual.patch_embed.proj.bias": torch.ones(3)}
    save_file(tensors | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    decoder = hf.load(tmp_path, device="cpu", dtype=torch.float32)
    hf.export(decoder, tmp_path / "ours", like=tmp_path)
    after = load_file(tmp_path / "ours" / "model.safetensors")
    assert after.keys() == tensors.keys() | extra.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in (tensors | extra).items())
    ple = "model.layers.0.ple.ple_embedding"
    assert {f"{ple}.ngram_embedding.shard_{i}.weight" for i in range(4)} <= after.keys()
    assert after[f"{ple}.layer_multipliers"].dtype == torch.int64
    again = Qwen4ExpForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


def test_a_new_model_has_the_constants_that_its_config_says():
    spec = spec_from_config(small_config())
    decoder = hf.init_random(spec, seed=0, device="cpu", dtype=torch.bfloat16)
    ngram = decoder.layers[2].ngram
    assert ngram.multipliers.dtype == torch.int64
    assert tuple(ngram.multipliers.tolist()) == spec.layers[2].ngram.multipliers
    assert ngram.sizes.tolist() == list(spec.layers[2].ngram.head_sizes)


def test_ranks_share_the_rows_of_the_table():
    ngram = shard_spec(spec_from_config(PUBLISHED), 8).layers[1].ngram
    assert ngram.rows == 320_001_536 // 8 and ngram.head_sizes == spec_from_config(PUBLISHED).layers[1].ngram.head_sizes


# -- numbers ----------------------------------------------------------------------------------


@pytest.mark.extended
def test_half_precision_is_as_near_as_that_of_transformers():
    """Experts that differ move some tokens far, so the error is that of the mean."""
    model = hf_model(KIND, indexer_budget=96)
    sequences = tokens_of([60])
    with torch.no_grad():
        wide = our_logits(twin(model), sequences)
        ours = our_logits(twin(model, torch.bfloat16).to(torch.bfloat16), sequences).float()
        theirs = model.to(torch.bfloat16)(sequences[0][None]).logits[0].float()
    errors = [(each - wide).abs().mean() / wide.abs().mean() for each in (ours, theirs)]
    assert errors[0] < 1.3 * errors[1] < 0.2


def test_only_sequences_with_more_pools_than_are_selected_depend_on_the_selection():
    some, every = twin(hf_model(KIND)), twin(hf_model(KIND, indexer_budget=96))
    short, long = tokens_of([12, 60])
    with torch.no_grad():
        assert torch.equal(our_logits(every, [short]), our_logits(some, [short]))
        assert relative(our_logits(every, [long]), our_logits(some, [long])) > 1e-3
