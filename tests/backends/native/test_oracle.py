"""What the engine writes is what transformers would write, token by token and to 1e-5 in log-prob."""

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from miles.core.protocols import Sampling
from miles.models import hub

SIZES = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "initializer_range": 0.3,
    "attn_implementation": "eager",
}


def reference(kind: str):
    torch.manual_seed(0)
    if kind == "dense":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval()
    moe = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **moe, decoder_sparse_step=1)).eval()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    made = {}
    for kind in ("dense", "moe"):
        model, folder = reference(kind), tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        made[kind] = model, hub.load(folder, device="cpu", dtype=torch.float32)
    return made


@pytest.fixture(params=["dense", "moe"])
def pair(request, pairs):
    return pairs[request.param]


def test_greedy_tokens_and_logprobs_are_those_of_transformers(tiny, pair):
    model, decoder = pair
    engine = tiny.engine(decoder, page_size=4, prefill_chunk=24)
    prompts = tiny.prompts(6)
    answers = tiny.ask(engine, [(p, Sampling(temperature=0.0, max_new_tokens=24)) for p in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor(prompt[None].astype(np.int64))
        with torch.no_grad():
            written = model.generate(ids, do_sample=False, max_new_tokens=24, pad_token_id=0)[0, len(prompt) :]
        assert tiny.tokens(answer) == written.tolist()
        compare(model, prompt, tiny.tokens(answer), tiny.logprobs(answer), temperature=1.0)


def test_sampled_logprobs_are_those_of_the_temperature_before_any_filter(tiny, pair):
    model, decoder = pair
    engine = tiny.engine(decoder, page_size=4)
    how = Sampling(temperature=0.7, top_k=9, top_p=0.9, max_new_tokens=20, seed=3)
    for prompt, answer in zip(
        prompts := tiny.prompts(4, seed=1), tiny.ask(engine, [(p, how) for p in prompts]), strict=True
    ):
        compare(model, prompt, tiny.tokens(answer), tiny.logprobs(answer), temperature=0.7)


def test_the_routing_of_every_computed_token_is_that_of_transformers(tiny, pairs):
    model, decoder = pairs["moe"]
    engine = tiny.engine(decoder, page_size=4, prefill_chunk=7)
    prompts = tiny.prompts(3, seed=2)
    answers = tiny.ask(engine, [(p, Sampling(max_new_tokens=12, ignore_eos=True, seed=5)) for p in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = torch.tensor([[*prompt.tolist(), *tiny.tokens(answer)]])
        with torch.no_grad():
            logits = model(whole, output_router_logits=True).router_logits
        routed = np.concatenate([span.extras["routed_experts"] for span in answer.spans])
        assert routed.dtype == np.uint8
        assert routed.shape == (12, 2, 2)
        assert (routed[-1] == 255).all()
        for layer, scores in enumerate(logits):
            expected = scores.reshape(-1, 6)[len(prompt) : -1].topk(2, dim=-1).indices
            assert routed[:-1, layer].tolist() == expected.tolist()


def compare(model, prompt, tokens, logprobs, *, temperature):
    whole = torch.tensor([[*prompt.tolist(), *tokens]])
    with torch.no_grad():
        logits = model(whole).logits[0, len(prompt) - 1 : -1].float() / temperature
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1).numpy()
    np.testing.assert_allclose(logprobs, expected, atol=1e-5, rtol=1e-5)
