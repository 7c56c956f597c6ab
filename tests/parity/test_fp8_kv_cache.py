"""An FP8 KV cache: what the engine reads from it is what the trainer rounds its keys and values to."""

import numpy as np
import pytest
import torch
from tests.models.oracle import KINDS, hf_model, twin
from tests.parity.planes import (
    ask,
    decoder_of,
    engine_of,
    gap_of,
    plan_of,
    requests_of,
    samples_of,
    spec_of_kind,
    trained,
)

from miles.backends.fsdp.local_model import LocalModel
from miles.core.protocols import SamplingParams
from miles.kernels.numerics import Numerics
from miles.models.accounting.params import kv_bytes_per_token
from miles.models.decoder import Decoder
from miles.precision.kv_cache import round_kv

FP8 = Numerics(batch_invariant=False, kv_cache_dtype="fp8_e4m3")
EXACT_FP8 = Numerics(batch_invariant=True, kv_cache_dtype="fp8_e4m3")
WIDE = Numerics(batch_invariant=False)
TIGHT = {"page_size": 4, "prefill_chunk": 11, "kv_tokens": 72, "max_running": 4}
GREEDY = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}


def gap(kind: str, dtype: torch.dtype, numerics: Numerics, trainer: Numerics | None = None, **knobs: int) -> float:
    """The largest difference of log-probs of an engine and of a trainer, by default of its numerics."""
    spec = spec_of_kind(kind)
    asked = requests_of(spec.vocab_size, new=6)
    engine = engine_of(decoder_of(spec, dtype, numerics=numerics), **(TIGHT | knobs))
    plan = plan_of(samples_of(asked, ask(engine, asked)), max_tokens_per_gpu=60)
    return gap_of(plan, trained(LocalModel(decoder_of(spec, dtype, numerics=trainer or numerics)), plan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3 moe normalised", "gpt-oss", "deepseek v3"])
def test_engine_and_trainer_agree_to_the_last_bit_in_exact_mode(kind, dtype):
    assert gap(kind, dtype, EXACT_FP8) == 0.0


@pytest.mark.parametrize("kind", ["qwen3", "gemma3 with a cap on logits", "gpt-oss", "deepseek v3"])
def test_engine_and_trainer_agree_to_rounding_in_fast_mode(kind):
    assert gap(kind, torch.float32, FP8) < 2e-4
    assert gap(kind, torch.float32, FP8, WIDE) > 1e-3  # which a trainer that does not round is far from


def rounding_attention(module, query, key, value, attention_mask, scaling, **_):
    """Attention of transformers whose keys and values went through the cache."""
    key, value = round_kv(key), round_kv(value)
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.mT * scaling
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(1, 2), None


def test_the_engine_writes_what_transformers_writes_with_rounded_keys_and_values():
    from transformers import AttentionInterface

    model = hf_model("qwen3")
    plain = twin(model)
    decoder = Decoder(plain.spec, device="cpu", dtype=torch.float32, numerics=FP8)
    decoder.load_state_dict(plain.state_dict())
    requests = requests_of(plain.spec.vocab_size, new=6)
    answers = ask(engine_of(decoder, **TIGHT), [(tokens, SamplingParams(**GREEDY)) for tokens, _ in requests])
    AttentionInterface.register("fp8_kv", rounding_attention)
    before, model.config._attn_implementation = model.config._attn_implementation, "fp8_kv"
    try:
        for (prompt, _), answer in zip(requests, answers, strict=True):
            tokens = np.concatenate([prompt, *(span.tokens for span in answer.spans)]).astype(np.int64)
            with torch.no_grad():
                logp = model(torch.from_numpy(tokens)[None]).logits[0].log_softmax(-1)
            wanted = logp[len(prompt) - 1 : -1].gather(1, torch.from_numpy(tokens[len(prompt) :, None]))[:, 0]
            ours = np.concatenate([span.logprobs for span in answer.spans])
            assert np.abs(ours - wanted.numpy()).max() < 2e-5
    finally:
        model.config._attn_implementation = before


def test_a_prefix_from_the_cache_gives_the_bits_of_one_that_was_computed():
    spec = spec_of_kind("qwen3")
    engine = engine_of(decoder_of(spec, torch.bfloat16, numerics=EXACT_FP8), page_size=4)
    prompt = np.arange(2, 30, dtype=np.int32)
    answers = [ask(engine, [(prompt, SamplingParams(**GREEDY))])[0] for _ in range(2)]
    assert [answer.cached_tokens > 0 for answer in answers] == [False, True]
    first, again = ([span.logprobs.tobytes() for span in answer.spans] for answer in answers)
    assert first == again


@pytest.mark.parametrize("kind", ["glm 5", "deepseek v4", next(kind for kind in KINDS if kind.startswith("hybrid"))])
def test_models_with_an_indexer_a_compressor_or_recurrent_layers_keep_those_wide(kind):
    assert gap(kind, torch.float32, FP8) < 1e-3


def test_the_cache_takes_about_half_the_bytes_and_the_engine_holds_the_same_tokens():
    spec = spec_of_kind("qwen3", head_dim=128)
    wide, narrow = (kv_bytes_per_token(spec, "bfloat16", numerics) for numerics in (WIDE, FP8))
    assert narrow == wide // 2 * 132 // 128
    engine = engine_of(decoder_of(spec, torch.bfloat16, numerics=FP8), page_size=4, kv_tokens=400)
    cache = engine._runner._cache
    assert cache is not None
    assert sum(tensor.nbytes for tensor in cache._tensors) == 400 * narrow
