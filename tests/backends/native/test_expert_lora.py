"""Adapters of routed experts beside the weights: each request gets what a model with its adapter merged gives."""

import asyncio
import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.native.conftest import Tiny
from tests.models.lora.test_adapters import filled, lora_for, written
from tests.models.oracle import SMALL, hf_model, twin

from miles.backends.native.engine.lora import LoraShape
from miles.backends.native.engine.request import GenerateRequest
from miles.backends.native.lora_config import LoraServingConfig
from miles.backends.native.runner.lora import count_slot_bytes, list_served_modules
from miles.core.errors import UsageError
from miles.core.protocols import SamplingParams
from miles.kernels.numerics import BATCH_INVARIANT, FAST
from miles.launch.build.engines import build_lora_serving
from miles.models.decoder import Decoder
from miles.models.lora.factors import parse_factors, read_factors

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, SMALL["vocab_size"], n).astype(np.int32) for n in (30, 7, 18, 11, 25)]
NAMES = ("first", None, "second", "first", "third")
NEW = SamplingParams(max_new_tokens=5, ignore_eos=True)
KNOBS = {"page_size": 4, "prefill_chunk": 13, "max_running": 4, "kv_tokens": 800}
FORMS = {
    "first": {"rank": 4, "wanted": "*"},
    "second": {"rank": 3, "wanted": "experts"},
    "third": {"rank": 2, "wanted": "*.down_proj"},
}


@functools.cache
def adapters(kind, name):
    form = dict(FORMS[name])
    lora = lora_for(twin(hf_model(kind)).spec, rank=form["rank"], wanted=form["wanted"])
    return filled(replace(lora, shared_outer=name == "second"), seed=len(name))


def merged(kind, name):
    """A decoder with the adapter merged into its weights."""
    decoder = twin(hf_model(kind)).requires_grad_(False)
    if name is not None:
        own, weights = adapters(kind, name), dict(decoder.named_parameters())
        with torch.no_grad():
            for param in own.targets_by_param:
                own.merge(param, weights[param], weights[param].clone())
    return decoder


def ask(engine, names):
    async def story():
        outputs = [
            engine.submit(GenerateRequest(tokens=p, sampling=replace(NEW, seed=i), lora=name, logprob_start_len=0))
            for i, (p, name) in enumerate(zip(PROMPTS, names, strict=True))
        ]
        for output in outputs:
            await output.completion()
        engine.check()
        return outputs

    return asyncio.run(story())


def build_engine(kind, folder, numerics=FAST, words=("all", "experts")):
    decoder = twin(hf_model(kind)).requires_grad_(False)
    if numerics is not FAST:
        exact = Decoder(decoder.spec, device="meta", dtype=torch.float32, numerics=numerics)
        exact.load_state_dict(decoder.state_dict(), assign=True)
        decoder = exact.requires_grad_(False)
    modules = list_served_modules(decoder.spec, words, numerics)
    engine = Tiny().engine(decoder, lora=LoraShape(num_slots=2, max_rank=5, modules=modules), **KNOBS)
    for name in FORMS:
        path = folder / name
        if not path.exists():
            written(path, adapters(kind, name), decoder.spec)
        engine.load_lora(name, read_factors(path, decoder.spec))
    return engine


@pytest.mark.parametrize("kind", ["qwen3 moe", "step 3.7", pytest.param("gpt-oss", marks=pytest.mark.extended)])
def test_requests_get_the_experts_of_their_own_adapter(tmp_path, kind):
    outputs = ask(build_engine(kind, tmp_path), NAMES)
    for index, (name, output) in enumerate(zip(NAMES, outputs, strict=True)):
        alone = ask(Tiny().engine(merged(kind, name), **KNOBS), [None] * len(PROMPTS))[index]
        assert output.tokens == alone.tokens
        got, wanted = ([*each.prompt_logprobs.logprobs[1:], *each.logprobs] for each in (output, alone))
        np.testing.assert_allclose(got, wanted, atol=2e-4, rtol=1e-3)


def test_with_exact_parity_no_other_request_changes_a_bit(tmp_path):
    engine = build_engine("qwen3 moe", tmp_path, BATCH_INVARIANT)
    together = ask(engine, NAMES)
    for index, name in ((0, "first"), (2, "second")):
        other = build_engine("qwen3 moe", tmp_path, BATCH_INVARIANT)
        alone = ask(other, [name if i == index else None for i in range(len(NAMES))])[index]
        assert alone.logprobs == together[index].logprobs


def test_slots_have_room_for_experts_only_if_they_are_served(tmp_path):
    spec = twin(hf_model("qwen3 moe")).spec
    plain, experts = (list_served_modules(spec, words, FAST) for words in ((), ("experts",)))
    assert not set(plain) & set(experts) and all("*" in module for module in experts)
    folder = written(tmp_path / "adapter", adapters("qwen3 moe", "second"), spec)
    serving = build_lora_serving(LoraServingConfig(lora_paths=(f"a={folder}",)), spec, FAST)
    assert serving is not None and set(serving.shape.modules) == {*plain, *experts}
    shape = LoraShape(num_slots=3, max_rank=5, modules=experts)
    moe = spec.moe
    each = 3 * (spec.hidden_size + moe.size) * moe.num_experts * len(spec.moe_layers)
    assert count_slot_bytes(spec, shape, 2) == 3 * 5 * 2 * each


def test_adapters_that_do_not_fit_the_experts_are_refused_by_a_sentence():
    spec = twin(hf_model("qwen3 moe")).spec
    own = adapters("qwen3 moe", "second")
    config = {"r": 3, "lora_alpha": 8, "peft_type": "LORA"}
    tensors = {f"base_model.model.{name}": tensor for name, tensor in own.export().items()}
    lost = {name: tensor for name, tensor in tensors.items() if ".experts.1.up_proj" not in name}
    with pytest.raises(
        UsageError, match=r"adapters of some experts only: model.layers.0.mlp.experts.1.up_proj has none"
    ):
        parse_factors(config, lost, spec, where="it")
    patterns = {"alpha_pattern": {r".*experts\.1\.up_proj": 3}}
    with pytest.raises(UsageError, match="have different ranks or alphas"):
        parse_factors(config | patterns, tensors, spec, where="it")
