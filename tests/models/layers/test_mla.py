"""Latent attention: the engine's way and the trainer's are one function, and both are that of transformers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.oracle import hf_logits, hf_model, relative, tokens_of, twin
from tests.models.small_families.mla import KINDS
from tests.tiers import examples
from torch import Tensor

from miles.kernels.attention.params import AttentionInputs, IndexerInputs
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.fused.lm_head import compute_logits
from miles.kernels.numerics import FAST
from miles.models.accounting.kv_cache import PerTokenCache, cache_layout
from miles.models.decoder import Decoder
from miles.models.layers.attention_backend import RecurrentState
from miles.models.layers.mla import MultiHeadLatentAttention
from miles.models.layers.rope import Positions
from miles.models.spec import DecoderSpec, LayerSpec, MlaSpec, RopeSpec

SPARSE = [kind for kind in KINDS if kind.startswith(("deepseek v3.2", "glm 5"))]


class Looking:
    """An ``Attend`` for one whole sequence, written out by hand."""

    def __init__(self, latent: bool) -> None:
        self.latent = latent
        self.chosen: dict[int, Tensor] = {}
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        q_THd, k_TGd, v_TGe, params, _, index = inputs
        self.asked.append((tuple(q_THd.shape), tuple(k_TGd.shape), tuple(v_TGe.shape)))
        seen_TS = torch.ones(len(q_THd), len(q_THd), dtype=torch.bool).tril()
        if isinstance(index, IndexerInputs):
            votes_TSH = torch.einsum("thd,sd->tsh", index.q_THd, index.k_Td).relu()
            score_TS = torch.einsum("tsh,th->ts", votes_TSH, index.weights_TH).masked_fill(~seen_TS, -torch.inf)
            best = score_TS.sort(descending=True, stable=True).indices[:, : index.topk]
            self.chosen[layer] = seen_TS & torch.zeros_like(seen_TS).scatter(1, best, True)
        if index is not None:
            seen_TS = self.chosen[layer if isinstance(index, IndexerInputs) else index]
        score_HTS = torch.einsum("thd,shd->hts", q_THd, k_TGd.expand(-1, q_THd.shape[1], -1)) * params.scale
        weight_HTS = score_HTS.masked_fill(~seen_TS, -torch.inf).softmax(-1)
        return torch.einsum("hts,she->the", weight_HTS, v_TGe.expand(-1, q_THd.shape[1], -1))

    def recurrent_state(self, layer: int) -> RecurrentState:
        raise AssertionError("latent attention carries nothing")


def logits(decoder: Decoder, tokens: Tensor, attend: Looking) -> Tensor:
    return compute_logits(
        decoder(tokens, torch.arange(len(tokens)), attend), decoder.head(), None, numerics=decoder.numerics
    )


@pytest.mark.parametrize("kind", KINDS)
def test_latents_and_expanded_keys_both_give_the_logits_of_transformers(kind):
    model = hf_model(kind)
    decoder, (tokens,) = twin(model), tokens_of([90])
    with torch.no_grad():
        theirs = hf_logits(model, [tokens])
        expanded, latent = (logits(decoder, tokens, Looking(way)) for way in (False, True))
    assert relative(expanded, theirs) <= 1e-5
    assert relative(latent, theirs) <= 1e-5
    assert relative(latent, expanded) <= 1e-5


@settings(max_examples=examples(25), deadline=None)
@given(
    heads=st.integers(1, 4),
    query_rank=st.none() | st.integers(1, 9),
    kv_rank=st.integers(1, 9),
    nope_dim=st.integers(1, 7),
    half_dim=st.integers(1, 4),
    value_dim=st.integers(1, 9),
    interleaved=st.booleans(),
    bias=st.booleans(),
    length=st.integers(1, 20),
    start=st.integers(0, 40),
)
def test_latents_and_expanded_keys_agree_whatever_the_sizes(
    heads, query_rank, kv_rank, nope_dim, half_dim, value_dim, interleaved, bias, length, start
):
    spec = MlaSpec(
        num_heads=heads,
        query_rank=query_rank,
        kv_rank=kv_rank,
        nope_dim=nope_dim,
        rope_dim=2 * half_dim,
        value_dim=value_dim,
        rope=RopeSpec(theta=100.0, interleaved=interleaved, scale=1.3),
        scale=0.4,
        bias=bias,
    )
    mla = MultiHeadLatentAttention(spec, model_of(spec), 0, device="cpu", dtype=torch.float64, numerics=FAST)
    generator = torch.Generator().manual_seed(length)
    x_TD = torch.randn(length, 11, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        for parameter in mla.parameters():
            parameter.normal_(generator=generator)
        at = Positions(torch.arange(start, start + length), 64, torch.float64, numerics=FAST)
        expanded, latent = (mla(x_TD, at, Looking(way)) for way in (False, True))
    assert torch.allclose(expanded, latent, rtol=1e-9, atol=1e-9)


def model_of(spec: MlaSpec) -> DecoderSpec:
    return DecoderSpec(
        family="deepseek_v3",
        vocab_size=3,
        hidden_size=11,
        norm_eps=1e-6,
        layers=(LayerSpec(mixer=spec, ffn=None),),
        tie_embeddings=False,
        max_positions=64,
        eos_token_ids=(),
    )


@pytest.mark.parametrize("kind", ["deepseek v2 lite", "deepseek v3", "glm 5"])
def test_an_engine_is_asked_to_remember_one_latent_a_token_and_a_trainer_nothing_short(kind):
    decoder, (tokens,) = twin(hf_model(kind)), tokens_of([12])
    latent, expanded = Looking(latent=True), Looking(latent=False)
    with torch.no_grad():
        logits(decoder, tokens, latent)
        logits(decoder, tokens, expanded)
    mixer = decoder.spec.layers[0].mixer
    assert isinstance(mixer, MlaSpec)
    kept = cache_layout(mixer, FAST)
    assert isinstance(kept, PerTokenCache)
    wide = (12, 4, mixer.kv_rank + mixer.rope_dim)
    assert latent.asked[0] == (wide, (12, kept.heads, kept.key_dim), (12, 1, mixer.kv_rank))
    assert expanded.asked[0] == ((12, 4, mixer.head_dim), (12, 4, mixer.head_dim), (12, 4, mixer.value_dim))


@pytest.mark.parametrize("kind", SPARSE)
def test_choosing_is_felt_takes_no_gradient_and_is_made_by_the_layers_that_have_a_scorer(kind):
    model = hf_model(kind)
    decoder, (tokens,) = twin(model), tokens_of([90])
    attend = Looking(latent=False)
    sparse = logits(decoder, tokens, attend)
    sparse.logsumexp(-1).sum().backward()
    scorers = {i for i, layer in enumerate(decoder.layers) if layer.get_submodule("mla").indexer is not None}
    assert set(attend.chosen) == scorers
    for chosen in attend.chosen.values():
        assert torch.equal(chosen.sum(1), torch.arange(1, 91).clamp(max=decoder.spec.layers[0].mixer.indexer.top))
    for name, parameter in decoder.named_parameters():
        frozen = ".indexer." in name or name.endswith(".correction")
        assert parameter.requires_grad is not frozen, name
        assert (parameter.grad is None) is frozen, name
    with torch.no_grad():
        full = logits(twin(hf_model(kind, index_topk=90)), tokens, Looking(latent=False))
    assert relative(full, sparse) > 1e-3


def test_layers_that_share_a_choice_name_the_last_layer_that_made_one():
    def sources(kind: str, **changes) -> list[int | None]:
        layers = twin(hf_model(kind, **changes)).spec.layers
        return [layer.mixer.indexer.source for layer in layers]

    assert sources("glm 5 shared choices") == [None, 0, 0, None]
    every = {"num_hidden_layers": 9, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    assert sources("glm 5", **every) == [None, None, None, 2, 2, 2, None, 6, 6]
    assert sources("glm 5", num_hidden_layers=4, index_topk_pattern="FSFS") == [None, 0, None, 2]


@pytest.mark.parametrize("kind", ["deepseek v3", "glm 5 shared choices"])
def test_recomputing_layers_in_backward_changes_no_gradient(kind):
    decoder, sequences = twin(hf_model(kind)), tokens_of([40, 5, 23])
    gradients = []
    for again in (False, True):
        decoder.checkpoint_layers = again
        decoder.zero_grad()
        lengths = [len(tokens) for tokens in sequences]
        positions = torch.cat([torch.arange(n) for n in lengths])
        decoder(torch.cat(sequences), positions, VarlenAttentionBackend(lengths, "cpu")).square().sum().backward()
        gradients.append({name: p.grad for name, p in decoder.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize("latent", [False, True])
def test_bfloat16_is_as_close_to_the_truth_as_transformers_is(latent):
    # Without experts and choices, which a rounded score may turn to another.
    model = hf_model("deepseek v3", first_k_dense_replace=2)
    (tokens,) = tokens_of([90])
    with torch.no_grad():
        truth = hf_logits(model, [tokens])
        ours = logits(twin(model, torch.bfloat16), tokens, Looking(latent)).float()
        theirs = hf_logits(model.to(torch.bfloat16), [tokens]).float()
    ours_off, theirs_off = (ours - truth).square().mean().sqrt(), (theirs - truth).square().mean().sqrt()
    assert ours_off <= 1.3 * theirs_off


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_a_scorer_hands_over_weights_in_float32_whatever_the_model_is_in():
    decoder = twin(hf_model("deepseek v3.2"), torch.bfloat16)
    mla = decoder.layers[0].get_submodule("mla")
    x_TD, query_TR = torch.randn(5, 32, dtype=torch.bfloat16), torch.randn(5, 14, dtype=torch.bfloat16)
    index = mla.indexer(x_TD, query_TR, Positions(torch.arange(5), 64, torch.bfloat16, numerics=FAST))
    assert index.weights_TH.dtype == torch.float32
    assert index.q_THd.dtype == index.k_Td.dtype == torch.bfloat16
