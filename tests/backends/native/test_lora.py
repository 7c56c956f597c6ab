"""Adapters beside the weights: each request gets what transformers computes with its own adapter alone.

Every engine has small pages and short prefill chunks, and more requests and adapters than slots.
"""

import asyncio
import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.native.conftest import Tiny
from tests.backends.native.lora_adapters import merged_model, random_factors, save_adapter
from tests.backends.native.tp.test_packed import ADAPTERS, DENSE, SPARSE, packed_weights, publish, quantize
from tests.models.oracle import SMALL, hf_model, twin

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.adapter_versions import select_factors
from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.engine.lora import LoraShape
from miles.backends.native.engine.request import GenerateRequest
from miles.backends.native.runner.lora import list_served_modules
from miles.cluster.executor import InlineExecutor
from miles.core.errors import EngineError, UsageError
from miles.core.protocols import SamplingParams
from miles.core.types import Version
from miles.kernels.numerics import FAST, numerics_from_parity

RNG = np.random.default_rng(0)
SHORT, MIDDLE, LONG = (RNG.integers(0, SMALL["vocab_size"], n).astype(np.int32) for n in (1, 21, 62))
NAMES = ("first", "second", None, "third")
KNOBS = {"page_size": 4, "prefill_chunk": 13, "max_running": 4, "kv_tokens": 800}
NEW = SamplingParams(max_new_tokens=6, ignore_eos=True)


@functools.cache
def pair(kind):
    model = hf_model(kind)
    return model, twin(model)


@functools.cache
def adapters(kind):
    """Three adapters of other ranks, scales and targets."""
    spec = pair(kind)[1].spec
    served = list_served_modules(spec, (), FAST)
    names = {module.rpartition(".")[2] for module in served}
    return {
        "first": random_factors(spec, 1, only=names),
        "second": random_factors(spec, 2, rank=2, alpha=1.0, only=sorted(names)[::2]),
        "third": random_factors(spec, 3, rank=7, alpha=3.0, only=names, use_rslora=True),
    }


@functools.cache
def oracle(kind, name, seed=None):
    factors = None if name is None else adapters(kind)[name] if seed is None else random_factors_like(kind, name, seed)
    return merged_model(pair(kind)[0], factors)


def random_factors_like(kind, name, seed):
    own = adapters(kind)[name]
    names = {module.rpartition(".")[2] for module in own.modules}
    return random_factors(pair(kind)[1].spec, seed, rank=own.rank, only=names)


def build_engine(
    kind="qwen3", *, depth=0, slots=2, max_rank=8, max_loaded=None, names=("first", "second", "third"), **knobs
):
    _, decoder = pair(kind)
    shape = LoraShape(
        num_slots=slots,
        max_rank=max_rank,
        modules=list_served_modules(decoder.spec, (), decoder.numerics),
        max_loaded=max_loaded,
    )
    engine = Tiny(depth).engine(decoder, lora=shape, **(KNOBS | knobs))
    for name in names:
        engine.load_lora(name, adapters(kind)[name])
    return engine


async def ask(engine: NativeEngine, *asked):
    """Outputs of (prompt, adapter, sampling) at once."""
    outputs = [
        engine.submit(GenerateRequest(tokens=prompt, sampling=how, lora=name, logprob_start_len=0))
        for prompt, name, how in asked
    ]
    for output in outputs:
        await output.completion()
    engine.check()
    return outputs


def expect(kind, name, output, seed=None):
    """Log-probs of prompt and response are those of transformers with the adapter in its weights."""
    tokens = torch.tensor([[*output.request.tokens.tolist(), *output.tokens]])
    with torch.no_grad():
        logprobs = oracle(kind, name, seed)(tokens).logits[0].double().log_softmax(-1)
    wanted = logprobs[:-1].gather(1, tokens[0, 1:, None]).squeeze(1)
    got = [*output.prompt_logprobs.logprobs[1:], *output.logprobs]
    np.testing.assert_allclose(got, wanted.numpy(), atol=2e-4, rtol=1e-3)


MIXED = [
    *((LONG, name, replace(NEW, seed=i)) for i, name in enumerate(("first", "second", None, "third"))),
    *((MIDDLE, name, replace(NEW, seed=i)) for i, name in enumerate((None, "third", "third", "first"))),
    *((SHORT, name, NEW) for name in ("second", None)),
]


@pytest.mark.parametrize("depth", [0, 1])
def test_adapters_in_one_batch_give_what_each_gives_alone(depth):
    engine = build_engine(depth=depth)
    for output, (_, name, _) in zip(asyncio.run(ask(engine, *MIXED)), MIXED, strict=True):
        expect("qwen3", name, output)


@pytest.mark.extended
@pytest.mark.parametrize(
    "kind",
    ["qwen2 moe", "deepseek v3", "hybrid qwen3 next", "hybrid kimi linear", "hybrid qwen4", "lfm2", "gemma2", "phi3"],
)
def test_adapters_of_other_kinds_of_models_too(kind):
    engine = build_engine(kind)
    for output, (_, name, _) in zip(asyncio.run(ask(engine, *MIXED)), MIXED, strict=True):
        expect(kind, name, output)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2 tied", pytest.param("gemma2", marks=pytest.mark.extended)])
def test_adapters_of_the_output_layer_are_batched_with_others(kind):
    """Of a model with tied embeddings they change the logits, and not the embedding."""
    model, decoder = pair(kind)
    spec = decoder.spec
    modules = list_served_modules(spec, ("all", "lm_head"), decoder.numerics)
    assert "lm_head" in modules and "lm_head" not in list_served_modules(spec, (), decoder.numerics)
    names = sorted({module.rpartition(".")[2] for module in modules} - {"lm_head"})
    own = {
        "head": random_factors(spec, 1, rank=3, only=["lm_head"]),
        "plain": random_factors(spec, 2, rank=2, only=names),
        "both": random_factors(spec, 3, rank=7, alpha=3.0, only=["lm_head", *names]),
    }
    engine = Tiny().engine(decoder, lora=LoraShape(num_slots=2, max_rank=8, modules=modules), **KNOBS)
    for name, factors in own.items():
        engine.load_lora(name, factors)
    asked = [
        (prompt, name, replace(NEW, seed=i))
        for i, (prompt, name) in enumerate([(p, n) for n in ("head", None, "both", "plain") for p in (LONG, SHORT)])
    ]
    models = {name: merged_model(model, own.get(name)) for name in ("head", None, "both", "plain")}
    for output, (_, name, _) in zip(asyncio.run(ask(engine, *asked)), asked, strict=True):
        tokens = torch.tensor([[*output.request.tokens.tolist(), *output.tokens]])
        with torch.no_grad():
            logprobs = models[name](tokens).logits[0].double().log_softmax(-1)
        wanted = logprobs[:-1].gather(1, tokens[0, 1:, None]).squeeze(1)
        got = [*output.prompt_logprobs.logprobs[1:], *output.logprobs]
        np.testing.assert_allclose(got, wanted.numpy(), atol=2e-4, rtol=1e-3)
    with pytest.raises(UsageError, match="an adapter of lm_head, which is not among the modules"):
        build_engine(kind, names=()).load_lora("head", own["head"])


def test_requests_that_lose_their_pages_go_on_with_their_adapter():
    engine = build_engine(slots=3, kv_tokens=104, max_running=6)
    asked = [(p, name, replace(NEW, max_new_tokens=18)) for p, name, _ in MIXED[4:]]
    outputs = asyncio.run(ask(engine, *asked))
    assert engine.stats()["preemptions"] > 0
    for output, (_, name, _) in zip(outputs, asked, strict=True):
        expect("qwen3", name, output)


def test_a_prefix_is_found_by_its_own_adapter_and_version_only():
    engine = build_engine()

    async def cached(name):
        (output,) = [engine.submit(GenerateRequest(tokens=LONG, sampling=NEW, lora=name))]
        await output.completion()
        return output.cached_tokens

    async def story():
        assert [await cached(name) for name in (None, "first", "second")] == [0, 0, 0]
        assert [await cached(name) for name in (None, "first", "second")] == [61, 61, 61]
        engine.update_lora("first", random_factors_like("qwen3", "first", 9))
        assert [await cached(name) for name in ("first", "first", "second", None)] == [0, 61, 61, 61]
        engine.unload_lora("second")
        engine.load_lora("second", adapters("qwen3")["second"])
        assert await cached("second") == 0

    asyncio.run(story())


@pytest.mark.parametrize("depth", [0, 1])
def test_an_update_in_place_reaches_running_and_new_requests(depth):
    engine = build_engine(depth=depth)
    changed = random_factors_like("qwen3", "first", 9)

    async def story():
        running = engine.submit(GenerateRequest(tokens=MIDDLE, sampling=replace(NEW, max_new_tokens=20), lora="first"))
        other = engine.submit(GenerateRequest(tokens=MIDDLE, sampling=NEW, lora="second", logprob_start_len=0))
        async for chunk in running:
            if chunk.first + len(chunk.tokens) >= 3:
                break
        engine.update_lora("first", changed)
        later = await ask(engine, (MIDDLE, "first", NEW), (MIDDLE, None, NEW))
        await running.completion()
        return running, other, later

    running, other, (new, base) = asyncio.run(story())
    expect("qwen3", "first", new, seed=9)
    expect("qwen3", None, base)
    expect("qwen3", "second", other)
    (first, zero), (start, one) = running.lora_versions
    assert (first, zero, one) == (0, 0, 1) and 3 <= start < 20
    assert new.lora_versions == [(0, 1)]
    # The tokens before the update are the old adapter's.
    tokens = torch.tensor([[*MIDDLE.tolist(), *running.tokens]])
    logprobs = oracle("qwen3", "first")(tokens).logits[0].log_softmax(-1).detach()
    wanted = logprobs[len(MIDDLE) - 1 : -1].gather(1, tokens[0, len(MIDDLE) :, None]).squeeze(1).numpy()
    np.testing.assert_allclose(running.logprobs[:start], wanted[:start], atol=2e-4)
    assert np.abs(np.array(running.logprobs) - wanted).max() > 1e-3


def test_many_adapters_share_few_slots_and_none_starves():
    engine = build_engine(slots=2, names=(), max_running=3)
    spec = pair("qwen3")[1].spec
    for number in range(12):
        engine.load_lora(f"a{number}", random_factors(spec, number, rank=1 + number % 8))
    asked = [(MIDDLE, f"a{i % 12}", replace(NEW, seed=i)) for i in range(30)]
    outputs = asyncio.run(ask(engine, *asked))
    for i in (0, 5, 11, 12, 29):
        one = merged_model(pair("qwen3")[0], random_factors(spec, i % 12, rank=1 + i % 12 % 8))
        tokens = torch.tensor([[*MIDDLE.tolist(), *outputs[i].tokens]])
        wanted = one(tokens).logits[0].log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None]).squeeze(1).detach()
        np.testing.assert_allclose(outputs[i].logprobs, wanted[len(MIDDLE) - 1 :].numpy(), atol=2e-4)


def test_one_that_waits_for_a_slot_is_overtaken_so_often_and_no_more(monkeypatch):
    from miles.backends.native.engine import scheduler

    monkeypatch.setattr(scheduler, "MAX_OVERTAKEN", 3)
    engine = build_engine(slots=1, max_running=2)
    ended = []

    async def one(index, name):
        output = engine.submit(
            GenerateRequest(tokens=SHORT, sampling=replace(NEW, max_new_tokens=4 + index % 3), lora=name)
        )
        await output.completion()
        ended.append(index)

    async def story():
        await asyncio.gather(*(one(i, "second" if i == 2 else "first") for i in range(14)))

    asyncio.run(story())
    assert ended.index(2) <= 8, ended


def test_an_unloaded_adapter_is_unknown_at_once_and_its_requests_end_with_it():
    engine = build_engine()

    async def story():
        output = engine.submit(GenerateRequest(tokens=MIDDLE, sampling=NEW, lora="first", logprob_start_len=0))
        async for _ in output:
            break
        engine.unload_lora("first")
        with pytest.raises(EngineError, match=r"no LoRA adapter 'first'; loaded: second, third"):
            engine.submit(GenerateRequest(tokens=MIDDLE, sampling=NEW, lora="first"))
        assert len(engine._runner.lora._host) == 3
        await output.completion()
        return output

    expect("qwen3", "first", asyncio.run(story()))
    assert len(engine._runner.lora._host) == 2


def test_host_memory_is_bounded_and_what_has_a_folder_is_read_again(tmp_path):
    spec = pair("qwen3")[1].spec
    engine = build_engine(slots=1, max_loaded=2, names=("first",))
    for number in range(4):
        folder = save_adapter(tmp_path / str(number), spec, number)
        engine.load_lora(f"a{number}", random_factors(spec, number), folder=folder)
    assert len(engine._runner.lora._host) == 2 and set(engine.lora.adapters) == {"first", "a0", "a1", "a2", "a3"}
    outputs = asyncio.run(ask(engine, (MIDDLE, "first", NEW)))
    outputs += [asyncio.run(ask(engine, (MIDDLE, f"a{number}", NEW)))[0] for number in (0, 2, 3)]
    expect("qwen3", "first", outputs[0])
    for number, output in zip((0, 2, 3), outputs[1:], strict=True):
        one = merged_model(pair("qwen3")[0], random_factors(spec, number))
        tokens = torch.tensor([[*MIDDLE.tolist(), *output.tokens]])
        wanted = one(tokens).logits[0].log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None]).squeeze(1).detach()
        np.testing.assert_allclose(output.logprobs, wanted[len(MIDDLE) - 1 :].numpy(), atol=2e-4)
    engine.unload_lora("a1")
    with pytest.raises(UsageError, match="--max-loaded-loras"):
        engine.load_lora("b", random_factors(spec, 8))
        engine.load_lora("c", random_factors(spec, 8))
    assert len(engine._runner.lora._host) == 2


@pytest.mark.parametrize("count", [2, pytest.param(5, marks=pytest.mark.extended)])
def test_with_exact_parity_no_other_request_changes_a_bit(count):
    model, _ = pair("qwen3")
    numerics = numerics_from_parity("exact")
    decoder = twin(model)
    exact = type(decoder)(decoder.spec, device="cpu", dtype=torch.float32, numerics=numerics)
    exact.load_state_dict(decoder.state_dict())
    shape = LoraShape(num_slots=3, max_rank=8, modules=list_served_modules(decoder.spec, (), numerics))

    def run(*asked):
        engine = Tiny().engine(exact, lora=shape, **KNOBS)
        for name, factors in adapters("qwen3").items():
            engine.load_lora(name, factors)
        return asyncio.run(ask(engine, *asked))

    together = run(*MIXED[:count])
    for asked, output in zip(MIXED[:count], together, strict=True):
        (alone,) = run(asked)
        assert alone.tokens == output.tokens and alone.logprobs == output.logprobs
        assert alone.prompt_logprobs == output.prompt_logprobs
        expect("qwen3", asked[1], output)


def test_what_does_not_fit_is_refused_by_a_sentence():
    spec = pair("qwen3")[1].spec
    engine = build_engine(max_rank=4, names=())
    with pytest.raises(UsageError, match=r"rank is 7, but adapters have at most 4; raise --max-lora-rank"):
        engine.load_lora("third", adapters("qwen3")["third"])
    engine.load_lora("first", adapters("qwen3")["first"])
    with pytest.raises(UsageError, match="loaded already"):
        engine.load_lora("first", adapters("qwen3")["first"])
    with pytest.raises(UsageError, match="to update"):
        engine.update_lora("nobody", adapters("qwen3")["first"])
    with pytest.raises(UsageError, match="to unload"):
        engine.unload_lora("nobody")
    assert len(engine._runner.lora._host) == 1
    plain = Tiny().engine(pair("qwen3")[1], **KNOBS)
    with pytest.raises(EngineError, match="--enable-lora"):
        asyncio.run(ask(plain, (SHORT, "first", NEW)))
    with pytest.raises(UsageError, match="choose among"):
        list_served_modules(spec, ("w_proj",), FAST)


def test_drafted_tokens_are_verified_with_the_adapter_of_their_request():
    asked = [(MIDDLE, name, SamplingParams(max_new_tokens=12, seed=i, ignore_eos=True)) for i, name in enumerate(NAMES)]
    plain = asyncio.run(ask(build_engine(), *asked))
    engine = build_engine(speculative_algorithm="ngram", speculative_num_draft_tokens=4, speculative_adaptive=False)
    asyncio.run(ask(engine, *asked))  # what was sampled before is what is drafted
    for one, other in zip(asyncio.run(ask(engine, *asked)), plain, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-4)
        assert one.speculation is not None and one.speculation.accepted > 0


SPARSE_ADAPTERS = replace(
    ADAPTERS,
    modules=tuple(
        f"model.layers.{i}.{name}"
        for i in (0, 1)
        for name in ("self_attn.q_proj", *(f"mlp.experts.*.{each}_proj" for each in ("gate", "up", "down")))
    ),
)


@pytest.mark.parametrize("format", ["int4_g32", "fp8"])
@pytest.mark.parametrize(("base", "adapter"), [(DENSE, ADAPTERS), (SPARSE, SPARSE_ADAPTERS)], ids=["dense", "experts"])
def test_over_a_packed_base_an_adapter_gives_what_the_engines_own_gives(format, base, adapter):
    """The engine's own adapter is held against autograd and transformers elsewhere."""
    spec = quantize(base, format, 1)
    own_spec = replace(spec, adapters=adapter)
    tensors = packed_weights(own_spec, 0)
    served_factors = select_factors(own_spec, tensors)
    shape = LoraShape(num_slots=2, max_rank=8, modules=tuple(served_factors.modules))
    answers = []
    for each, lora in ((own_spec, None), (spec, shape)):
        engine = NativeEngine(
            each,
            device="cpu",
            dtype=torch.float32,
            config=NativeConfig(engine_kv_tokens=512, engine_page_size=8),
            run=InlineExecutor(),
            decode=None,
            lora=lora,
        )
        publish(engine, {name: t for name, t in tensors.items() if lora is None or "lora_" not in name}, 0)
        if lora is not None:
            engine.load_lora("first", served_factors)
        prompts = [prompt % 61 for prompt in (MIDDLE, SHORT, LONG)]
        name = None if lora is None else "first"
        answers.append(asyncio.run(ask(engine, *((prompt, name, NEW) for prompt in prompts))))
    for own, served in zip(*answers, strict=True):
        assert own.tokens == served.tokens
        np.testing.assert_allclose(own.logprobs, served.logprobs, atol=1e-4)


def test_requests_name_a_published_version_and_those_in_flight_end_with_theirs():
    engine = build_engine(names=(), slots=3)
    versions = {Version(number=number): name for number, name in enumerate(("first", "second", "third"))}

    async def story():
        engine.publish_lora(Version(), adapters("qwen3")["first"], keep=2)
        engine.publish_lora(Version(number=1), adapters("qwen3")["second"], keep=2)
        asked = replace(NEW, max_new_tokens=20)
        running = engine.submit(GenerateRequest(tokens=LONG, sampling=asked, logprob_start_len=0))
        while not running.logprobs:  # it samples under the second
            await asyncio.sleep(0)
        engine.publish_lora(Version(number=2), adapters("qwen3")["third"], keep=2)
        answered = await ask(engine, (LONG, None, NEW), (LONG, "actor-1", NEW), (LONG, "actor-2", NEW))
        await running.completion()
        with pytest.raises(EngineError, match="there is no LoRA adapter 'actor-0'; loaded: actor-1, actor-2"):
            engine.submit(GenerateRequest(tokens=LONG, sampling=NEW, lora="actor-0"))
        return [running, *answered]

    outputs = asyncio.run(story())
    stamped = [[version for version, _ in output.split_by_version(len(output.tokens))] for output in outputs]
    assert [[version.number for version in each] for each in stamped] == [[1], [2], [1], [2]]
    for output, (version,) in zip(outputs, stamped, strict=True):
        expect("qwen3", versions[version], output)
    assert engine.version == Version(number=2)


def test_publishing_a_version_keeps_the_prefixes_of_others():
    engine = build_engine(names=(), slots=3)

    def count_cached(name):
        before = engine.stats()["prefilled_tokens"]
        output = engine.submit(GenerateRequest(tokens=LONG, sampling=NEW, lora=name))
        return output, before

    async def story():
        counts = []
        for number, name in ((0, "first"), (1, "second")):
            engine.publish_lora(Version(number=number), adapters("qwen3")[name], keep=2)
            for asked in (None, "actor-0"):
                output, before = count_cached(asked)
                await output.completion()
                counts.append(engine.stats()["prefilled_tokens"] - before)
        return counts

    first, again, other, old = asyncio.run(story())
    assert first == other == len(LONG)  # no prefix of another version is found
    assert again == old < len(LONG) / 2  # that of its own is, also after the publication
