"""CUDA graphs without a GPU: replays repeat what was captured, and the engine samples what an eager one samples.

Kernels run in Triton's interpreter; CUDA graphs, events and pinned memory are stubs that call what was captured.
"""

import asyncio
import io
import os
import sys
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.native.conftest import Tiny
from tests.backends.native.image_requests import (
    ask,
    build_engine,
    generate,
    images,
    logprobs_of,
    our_logprobs,
    pair,
    response_of,
)
from tests.backends.native.lora_adapters import random_expert_factors, random_factors
from tests.kernels import interpreter  # noqa: F401
from tests.kernels.device import CARD, needs_triton
from tests.models.oracle import KINDS, hf_model, twin
from tests.models.vision.small_vision import place
from tests.parity.planes import decoder_of, spec_of_kind

import miles
from miles.backends.native.engine.lora import LoraShape
from miles.backends.native.engine.request import GenerateRequest
from miles.backends.native.engine.scheduler import PrefillDelay
from miles.backends.native.runner import cuda_graph as module
from miles.backends.native.runner import draft_head_graph, model_runner, step_inputs
from miles.backends.native.runner.gpu_runner import supports_gpu_kernels
from miles.backends.native.runner.lora import list_served_modules
from miles.cluster.executor import InlineExecutor
from miles.core.protocols import SamplingParams
from miles.core.types import Version
from miles.kernels.linear_attention import decode_step
from miles.kernels.lora import grouped
from miles.kernels.moe import fused_moe
from miles.kernels.numerics import FAST, numerics_from_parity
from miles.kernels.runtime import triton_compat
from miles.launch.commands import serve
from miles.launch.commands.serve import warm_up
from miles.models.decoder import Decoder
from miles.models.draft.checkpoint import init_eagle
from miles.models.draft.eagle import EagleDraft
from miles.models.draft.mtp import MtpDraft
from miles.models.draft.spec import build_eagle_spec, build_mtp_spec
from miles.models.families.registry import find_family
from miles.observe.factory import build_view
from miles.sync.publish import Publication

pytestmark = [needs_triton, pytest.mark.skipif(CARD, reason="a GPU is available: see test_cuda_graph.py")]

# One layer each: interpreted kernels take their time.
DENSE, EXPERTS = (replace(spec, layers=spec.layers[:1]) for spec in (Tiny.spec, Tiny.moe_spec))
LONG = SamplingParams(max_new_tokens=5, ignore_eos=True)


def wanted(requests, spec):
    """What an engine without CUDA graphs samples."""
    tiny = Tiny()
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(model_runner, "supports_gpu_kernels", lambda spec, model, device: False)
        return tiny.generate_all(tiny.engine(tiny.decoder(spec=spec), page_size=4), requests)


@pytest.mark.parametrize(
    ("spec", "count", "depth"),
    [(DENSE, 1, 1), (DENSE, 3, 1), (EXPERTS, 1, 1), (EXPERTS, 3, 0)],
    ids=["alone", "several", "alone with experts", "several with experts"],
)
def test_what_is_replayed_is_what_would_have_been_drawn(recording, spec, count, depth):
    tiny = Tiny(depth)
    requests = [(p, replace(LONG, seed=i, max_new_tokens=5 + i)) for i, p in enumerate(tiny.prompts(count))]
    engine = tiny.engine(tiny.decoder(spec=spec), page_size=4, max_running=4)
    answers = tiny.generate_all(engine, requests)
    for one, other in zip(answers, wanted(requests, spec), strict=True):
        assert tiny.tokens(one) == tiny.tokens(other)
        np.testing.assert_allclose(tiny.logprobs(one), tiny.logprobs(other), atol=1e-4)
        for a, b in zip(one.spans, other.spans, strict=True):
            assert {name: value.tolist() for name, value in a.extras.items()} == {
                name: value.tolist() for name, value in b.extras.items()
            }
    assert (
        {key.batch_size for key in recording} == {1}
        if count == 1
        else {1, 2, 4} >= {key.batch_size for key in recording}
    )
    made = engine._runner._graphs._graphs
    assert all(each.reads_plans == (key.batch_size > 1) for key, each in made.items())


def build_head(spec, kind):
    """A head that has no weights yet, and one with random weights."""
    if kind == "eagle3":
        made = init_eagle(build_eagle_spec(spec), seed=5, device="cpu", dtype=torch.float32)
        empty = EagleDraft(made.spec, device="meta", dtype=torch.float32)
    else:
        made, empty = (
            MtpDraft(build_mtp_spec(spec, find_family("mimo").mtp, 2), device=device, dtype=torch.float32)
            for device in ("cpu", "meta")
        )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) if parameter.dim() > 1 else 1.0)
    return empty, made


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_replayed_steps_of_a_head_draft_what_eager_ones_do(recording, kind):
    """The same requests, drafts and accepted tokens with the head's steps as graphs and on the torch path."""
    tiny = Tiny(1)
    spec = replace(DENSE, vocab_size=4, eos_token_ids=())
    options = {
        "page_size": 4,
        "max_running": 12,
        "speculative_algorithm": kind,
        "speculative_num_draft_tokens": 3,
        "speculative_num_branches": 2,
        "speculative_adaptive": False,
    }
    requests = [
        (prompt % 4, replace(LONG, seed=i, max_new_tokens=9, top_k=(-1, 2)[i]))
        for i, prompt in enumerate(tiny.prompts(2))
    ]

    def generate():
        empty, head = build_head(spec, kind)
        engine = tiny.engine(tiny.decoder(spec=spec, scale=6.0), draft=empty, head=head, **options)
        answers = tiny.generate_all(engine, requests)
        stats = engine.stats()
        return answers, [stats[name] for name in ("drafted_tokens", "accepted_draft_tokens", "accepted_draft_branches")]

    answers, counted = generate()
    keys = [key for key in recording if isinstance(key, draft_head_graph.HeadGraphKey)]
    # The first step of several layers runs all of them, on rows of their own.
    assert {key.step for key in keys} == ({0, 1} if kind == "eagle3" else {1})
    assert any(key.has_filter for key in keys)
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(model_runner, "supports_gpu_kernels", lambda spec, model, device: False)
        expected, eager_counted = generate()
    for one, other in zip(answers, expected, strict=True):
        assert tiny.tokens(one) == tiny.tokens(other)
    assert counted == eager_counted
    assert counted[1] > 0


def test_a_single_row_after_others_and_before_them_is_cut_anew(recording):
    tiny = Tiny()
    engine = tiny.engine(tiny.decoder(spec=DENSE), page_size=4, max_running=4)
    first, second, third = ((p, replace(LONG, seed=i)) for i, p in enumerate(tiny.prompts(3)))
    got = [
        *tiny.generate_all(engine, [first]),
        *tiny.generate_all(engine, [second, third]),
        *tiny.generate_all(engine, [first]),
    ]
    for one, other in zip(got, wanted([first, second, third, first], DENSE), strict=True):
        assert tiny.tokens(one) == tiny.tokens(other)


def test_more_new_pages_than_a_sheet_holds_are_sent_as_a_table(recording, monkeypatch):
    monkeypatch.setattr(step_inputs, "_TABLE_COLUMNS", {"table_index": 3, "table_pages": 3})
    tiny = Tiny()
    requests = [(p, replace(LONG, seed=i)) for i, p in enumerate(tiny.prompts(4, low=20))]
    answers = tiny.generate_all(tiny.engine(tiny.decoder(spec=DENSE), page_size=4, max_running=4), requests)
    for one, other in zip(answers, wanted(requests, DENSE), strict=True):
        assert tiny.tokens(one) == tiny.tokens(other)


def test_filters_and_greedy_rows_are_replayed_side_by_side(recording):
    tiny = Tiny()
    manners = [{"top_k": 5}, {"temperature": 0.0}, {"top_p": 0.8, "temperature": 1.3}]
    requests = [
        (p, replace(LONG, seed=i, **how)) for i, (p, how) in enumerate(zip(tiny.prompts(3), manners, strict=True))
    ]
    answers = tiny.generate_all(tiny.engine(tiny.decoder(spec=DENSE), page_size=4, max_running=4), requests)
    for one, other in zip(answers, wanted(requests, DENSE), strict=True):
        assert tiny.tokens(one) == tiny.tokens(other)
    assert {key.has_filter for key in recording} == {True}


def test_prompts_that_wait_for_recorded_steps_are_answered_as_ever(recording, monkeypatch):
    tiny, prefills, heard, came = Tiny(1), [], [], []
    launch = model_runner.ModelRunner.launch

    def counted(self, batch):
        if not batch.decode_only:
            prefills.append(len(recording))
        return launch(self, batch)

    monkeypatch.setattr(model_runner.ModelRunner, "launch", counted)
    engine = tiny.engine(tiny.decoder(spec=DENSE), page_size=4, max_running=8)
    assert engine._runner.uses_cuda_graphs
    engine._scheduler.prefill_delay = PrefillDelay(4, min_running=2)
    requests = [(p, replace(LONG, seed=i, max_new_tokens=16)) for i, p in enumerate(tiny.prompts(5))]

    async def story():
        begun = asyncio.Event()

        def hear(tokens):
            heard.extend(tokens)
            if len(heard) > 3:
                begun.set()

        asked = [asyncio.create_task(engine.generate_stream(*requests[0], hear))]
        asked += [asyncio.create_task(engine.generate(*request)) for request in requests[1:3]]
        await begun.wait()
        came.append(len(recording))
        asked += [asyncio.create_task(engine.generate(*request)) for request in requests[3:]]
        return await asyncio.gather(*asked)

    answers = asyncio.run(story())
    # The first at once; the others, which came together, when four recorded steps had gone before them.
    assert len(prefills) == 2 and prefills[0] == 0 and prefills[1] >= came[0] + 4
    for one, other in zip(answers, wanted(requests, DENSE), strict=True):
        assert tiny.tokens(one) == tiny.tokens(other)
    tiny.check(engine)


@pytest.mark.parametrize(
    ("spec", "parity"),
    [(DENSE, "fast"), (EXPERTS, "fast"), (DENSE, "exact"), (EXPERTS, "exact")],
    ids=["dense", "with experts", "dense, exact", "with experts, exact"],
)
def test_steps_with_prefill_replay_graphs_when_their_size_comes_again(recording, spec, parity):
    """Prompts that arrive while others decode, in chunks and behind cached prefixes: what eager steps sample.

    With batch-invariant kernels padding changes no bit.
    """
    tiny = Tiny(1)
    weights = dict(tiny.decoder(spec=spec).named_parameters())
    decoder = Decoder(spec, device="meta", dtype=torch.float32, numerics=numerics_from_parity(parity))
    decoder.load_state_dict(weights, assign=True)
    prompts = tiny.prompts(5, low=6, high=20)
    prompts[3] = np.concatenate((prompts[0], prompts[3]))  # begins with what is cached
    requests = [(p, replace(LONG, seed=i, max_new_tokens=3 + i % 2)) for i, p in enumerate(prompts)]
    requests.append(requests[4])  # samples of one prompt
    options = {"page_size": 4, "max_running": 5, "prefill_chunk": 16}
    answers = tiny.generate_staggered(tiny.engine(decoder, **options), requests)
    replayed = list(recording)
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(step_inputs.PrefillInputs, "choose_shape", lambda inputs, batch: None)
        expected = tiny.generate_staggered(tiny.engine(decoder, **options), requests)
    for one, other in zip(answers, expected, strict=True):
        assert tiny.tokens(one) == tiny.tokens(other)
        atol = 0 if parity == "exact" else 1e-4
        np.testing.assert_allclose(tiny.logprobs(one), tiny.logprobs(other), rtol=0, atol=atol)
        for a, b in zip(one.spans, other.spans, strict=True):
            assert {k: v.tolist() for k, v in a.extras.items()} == {k: v.tolist() for k, v in b.extras.items()}
    assert any(key.num_tokens for key in replayed) and any(not key.num_tokens for key in replayed)


def test_a_server_records_all_before_it_listens_and_tells_how_far_it_is(recording, monkeypatch):
    monkeypatch.setattr(serve, "_WARMUP_LENGTHS", (24, 7))  # interpreted kernels take their time
    tiny, out = Tiny(), io.StringIO()
    engine = tiny.engine(tiny.decoder(spec=DENSE), page_size=4, max_running=2, kv_tokens=64)
    asyncio.run(warm_up(engine, build_view("plain", stream=out)))
    sizes = 2 * len(module.capture_batch_sizes(2)) + len(step_inputs.capture_token_sizes(64))
    said = out.getvalue().splitlines()
    assert (said[0], said[-1]) == (f"Capturing CUDA graphs ... (0/{sizes})", "Prefilling prompts ... done"), said
    made = dict(engine._runner._graphs._graphs)
    assert len(made) == sizes and [key.num_tokens for key in recording] == [32, 32]
    engine.check()
    requests = [(p, replace(LONG, seed=i)) for i, p in enumerate(tiny.prompts(2))]
    for one, other in zip(tiny.generate_all(engine, requests), wanted(requests, DENSE), strict=True):
        assert tiny.tokens(one) == tiny.tokens(other)
    assert recording and made.items() <= engine._runner._graphs._graphs.items()


def test_where_nothing_is_recorded_nothing_is_said():
    tiny, out = Tiny(), io.StringIO()
    engine = tiny.engine(tiny.decoder(spec=DENSE), page_size=4)
    asyncio.run(warm_up(engine, build_view("plain", stream=out)))
    assert not out.getvalue() and not engine.stats()["steps"]


class Lent:
    """Memory that comes back where it was, and is spoilt in between."""

    def __init__(self):
        self.held, self.there = [], True

    def zeros(self, shape, dtype):
        self.held.append(torch.zeros(shape, dtype=dtype))
        return self.held[-1]

    def release(self):
        self.there = False
        for tensor in self.held:
            tensor.fill_(float("nan"))

    def restore(self):
        self.there = True
        for tensor in self.held:
            tensor.zero_()


def test_recordings_outlive_sleep_where_the_cache_comes_back_to_its_place(recording, monkeypatch):
    lent, tiny = Lent(), Tiny()
    monkeypatch.setattr(model_runner, "create_vmm_allocator", lambda device: lent)
    model, other = tiny.decoder(spec=DENSE), tiny.decoder(seed=1, spec=DENSE)
    engine = tiny.engine(model, page_size=4, max_running=2)
    requests = [(p, replace(LONG, seed=i)) for i, p in enumerate(tiny.prompts(2))]
    before = tiny.generate_all(engine, requests)
    made = dict(engine._runner._graphs._graphs)
    assert made and len(lent.held) == 2

    asyncio.run(engine.sleep())
    assert not lent.there
    asyncio.run(engine.warm_up())  # nothing is recorded over memory that is not there
    asyncio.run(engine.wake())
    assert lent.there
    for one, again in zip(before, tiny.generate_all(engine, requests), strict=True):
        assert tiny.tokens(one) == tiny.tokens(again)
    assert made.items() <= engine._runner._graphs._graphs.items() and len(lent.held) == 2

    asyncio.run(engine.sleep())
    tiny.publish(engine, other)  # other tensors, while it sleeps: what was recorded reads the old ones
    assert not engine._runner._graphs._graphs
    asyncio.run(engine.wake())
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(model_runner, "supports_gpu_kernels", lambda spec, model, device: False)
        fresh = tiny.generate_all(tiny.engine(other, page_size=4), requests)
    for one, again in zip(fresh, tiny.generate_all(engine, requests), strict=True):
        assert tiny.tokens(one) == tiny.tokens(again)


@pytest.mark.parametrize(
    ("kind", "parity"),
    [("hybrid qwen3.5", "fast"), ("hybrid nemotron 3", "fast"), ("hybrid kimi linear", "exact"), ("lfm2", "fast")],
)
def test_recurrent_states_are_updated_in_place_found_again_and_outlive_sleep(recording, kind, parity, monkeypatch):
    """A prompt of one token begins in a replayed step; later ones begin with the states of prefixes."""
    lent, tiny = Lent(), Tiny(1)
    monkeypatch.setattr(model_runner, "create_vmm_allocator", lambda device: lent)
    monkeypatch.setattr(decode_step, "use_triton_inference", lambda x: torch.is_inference_mode_enabled())
    model = decoder_of(spec_of_kind(kind), torch.float32, numerics=numerics_from_parity(parity))
    prompts = [prompt % model.spec.vocab_size for prompt in tiny.prompts(2, low=9, high=12)]
    requests = [(prompts[0], replace(LONG, max_new_tokens=3)), (prompts[1][:1], replace(LONG, seed=1))]
    options = {"page_size": 4, "max_running": 4}

    def generate(engine):
        answers = tiny.generate_all(engine, requests[:1]) + tiny.generate_all(engine, requests)
        asyncio.run(engine.sleep())
        asyncio.run(engine.wake())
        return [*answers, *tiny.generate_all(engine, requests)]

    engine = tiny.engine(model, **options)
    found = generate(engine)
    assert recording and engine.stats()["state_hits"] > 0
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(model_runner, "supports_gpu_kernels", lambda spec, model, device: False)
        expected = generate(tiny.engine(model, **options))
    for one, other in zip(found, expected, strict=True):
        assert tiny.tokens(one) == tiny.tokens(other)
        np.testing.assert_allclose(tiny.logprobs(one), tiny.logprobs(other), atol=1e-4)


def sent(engine, model, transport, number):
    """Publish a model's weights; the tensors that were to travel."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    job = Publication(weights=lambda: weights, engines=[engine], transport=transport, run=InlineExecutor())
    asyncio.run(job.publish(Version(number=number)))
    return weights


def test_recordings_stay_true_where_new_weights_are_written_over_the_engines_own(recording):
    tiny = Tiny()
    models = [tiny.decoder(seed=seed, spec=DENSE) for seed in range(3)]
    requests = [(np.array([3, 7, 5], np.int32), replace(LONG, max_new_tokens=3))]

    def drawn(seed):
        with pytest.MonkeyPatch.context() as plain:
            plain.setattr(model_runner, "supports_gpu_kernels", lambda spec, model, device: False)
            return [tiny.tokens(one) for one in tiny.generate_all(tiny.engine(models[seed], page_size=4), requests)]

    engine = tiny.engine(models[0], page_size=4, max_running=1)
    lent = dict(models[0].named_parameters())
    bits = {name: p.detach().clone() for name, p in lent.items()}
    tiny.generate_all(engine, requests)
    graphs = engine._runner._graphs

    # Its tensors are the model's: they are left alone, and what was recorded over them is forgotten.
    given = sent(engine, models[1], "made", 2)
    assert not graphs.has_graphs and all(torch.equal(bits[name], p) for name, p in lent.items())
    assert all(tensor.data_ptr() == given[name].data_ptr() for name, tensor in engine.weights().items())
    assert [tiny.tokens(one) for one in tiny.generate_all(engine, requests)] == drawn(1)
    made = dict(graphs._graphs)
    assert made

    # They are its own now: what comes is written there.
    for number, seed, transport in ((3, 2, "copy"), (4, 0, "made")):
        sent(engine, models[seed], transport, number)
        assert made.items() <= graphs._graphs.items()
        assert all(tensor.data_ptr() == given[name].data_ptr() for name, tensor in engine.weights().items())
        assert [tiny.tokens(one) for one in tiny.generate_all(engine, requests)] == drawn(seed)
    assert made.items() <= graphs._graphs.items()

    # And somebody else's again.
    given = sent(engine, models[1], "shared", 5)
    assert not graphs.has_graphs
    tiny.generate_all(engine, requests)
    bits = {name: tensor.clone() for name, tensor in given.items()}
    sent(engine, models[2], "made", 6)
    assert all(torch.equal(bits[name], tensor) for name, tensor in given.items())
    assert [tiny.tokens(one) for one in tiny.generate_all(engine, requests)] == drawn(2)


OURS = os.path.dirname(miles.__file__)
# What asks a device for numbers, which no recording can hold.
READS = ("tolist", "item", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")
# Experts whose input is weighed, and a scale that is rounded; the slow tests cover the others.
OFTEN = ("llama 4 with two experts a token", "gemma3")


@contextmanager
def unread():
    """Our own code may not read a tensor on the host; the interpreter has to."""

    def refused(name, read):
        def reads(tensor, *given, **more):
            asking = sys._getframe(1).f_code.co_filename
            assert not asking.startswith(OURS), f"{name} in {asking} while a step is recorded"
            return read(tensor, *given, **more)

        return reads

    with pytest.MonkeyPatch.context() as refusing:
        for name in READS:
            refusing.setattr(torch.Tensor, name, refused(name, getattr(torch.Tensor, name)))
        yield


@pytest.mark.parametrize(
    "kind", [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_no_kind_of_model_asks_the_device_for_numbers_while_it_is_recorded(recording, monkeypatch, kind):
    spec = twin(hf_model(kind)).spec
    model = Tiny().decoder(spec=replace(spec, layers=spec.layers[-1:]))
    if not supports_gpu_kernels(spec, model, torch.device("cuda")):
        pytest.skip("its steps are not captured")
    ready, graph = triton_compat.use_triton_inference, torch.cuda.graph
    for name, each in list(sys.modules.items()):
        if name.startswith("miles.") and vars(each).get("use_triton_inference") is ready:
            monkeypatch.setattr(each, "use_triton_inference", lambda x: torch.is_inference_mode_enabled())

    @contextmanager
    def strict(made, **how):
        with unread(), graph(made, **how):
            yield

    monkeypatch.setattr(torch.cuda, "graph", strict)
    graphs = Tiny().engine(model, page_size=4, max_running=3, kv_tokens=40)._runner._graphs
    keys = [module.GraphKey(rows, False, False) for rows in (1, 3)]
    if graphs.captures_prefill:
        keys.append(module.GraphKey(3, True, True, num_tokens=32))
    for key in keys:
        graphs._capture(key)
    assert list(graphs._graphs) == keys


@pytest.mark.parametrize(("parity", "depth"), [("fast", 1), ("fast", 0), ("exact", 1)])
def test_decoding_behind_images_replays_graphs_with_their_rope_positions(recording, parity, depth):
    decoder = one_layer(pair("qwen3_vl")[1])
    a, b, _ = images("qwen3_vl")
    asked = [ask(place([2, a, 2], 1), 0, new=4), ask(place([1, b, 1, a, 1], 2), 1, new=4), ask(place([5], 3), 2, new=4)]
    alone = [ask(place([1, b, 1, a, 1], 2), 3, new=3)]
    numerics = numerics_from_parity(parity)
    engine = build_engine(decoder, numerics=numerics, depth=depth, page_size=4, max_running=4, prefill_chunk=6)
    for some in (asked, alone):
        for (prompt, _), answer in zip(some, generate(engine, some), strict=True):
            response = response_of(answer)
            expected = our_logprobs(decoder, prompt, response)
            np.testing.assert_allclose(logprobs_of(answer), expected, atol=1e-4)
    assert {key.batch_size for key in recording} >= {1, 4}


@pytest.mark.parametrize("parity", ["fast", "exact"])
def test_images_that_attend_in_both_directions_are_prefilled_by_the_kernels(recording, parity):
    decoder = one_layer(pair("gemma3")[1], 2)
    a, b, _ = images("gemma3")
    asked = [ask(place([2, a, 1, b, 2], 1), 0, new=3), ask(place([2, a, 3], 1), 1, new=2)]
    asked[1][0].tokens[11:] = (asked[1][0].tokens[11:] + 7) % 50
    numerics = numerics_from_parity(parity)
    engine = build_engine(decoder, numerics=numerics, depth=1, page_size=4, max_running=2, prefill_chunk=6)
    for some in (asked[:1], asked[1:]):
        for (prompt, _), answer in zip(some, generate(engine, some), strict=True):
            expected = our_logprobs(decoder, prompt, response_of(answer))
            np.testing.assert_allclose(logprobs_of(answer), expected, atol=1e-4)
    # The second page ends within the image.
    assert answer.cached_tokens == 8


def one_layer(decoder, layers: int = 1):
    """A decoder with its first layers and two features in depth fewer."""
    spec = decoder.spec
    tower = replace(spec.vision.tower, deepstack_layers=spec.vision.tower.deepstack_layers[:1])
    spec = replace(spec, layers=spec.layers[:layers], vision=replace(spec.vision, tower=tower))
    short = type(decoder)(spec, device="meta", dtype=torch.float32)
    weights = dict(decoder.named_parameters())
    short.load_state_dict({name: weights[name] for name, _ in short.named_parameters()}, strict=False, assign=True)
    return short.requires_grad_(False)


def test_graphs_with_adapters_replay_for_other_adapters_and_none(recording, monkeypatch):
    """The rows of a replay have the adapters of its step, whatever they were when it was captured."""
    launched = []
    launch = grouped.launch_grouped_lora

    def counted(*args, **options):
        launched.append(len(args[0]))
        return launch(*args, **options)

    monkeypatch.setattr(grouped, "launch_grouped_lora", counted)
    spec = replace(DENSE, max_positions=64)
    modules = list_served_modules(spec, ("all", "lm_head"), FAST)
    shape = LoraShape(num_slots=2, max_rank=4, modules=modules)
    names = {module.rpartition(".")[2] for module in modules}
    factors = {f"a{i}": random_factors(spec, i, rank=1 + i, scale=0.5, only=names) for i in range(2)}
    factors["a2"] = random_factors(spec, 2, rank=3, scale=0.5)  # without one of the output layer
    tiny, prompts = Tiny(1), Tiny().prompts(3, high=8)
    rounds = [["a0", None, "a1"], [None, None, None], ["a2", "a2", "a0"], ["a1"]]

    def run(engine):
        for name, own in factors.items():
            engine.load_lora(name, own)

        async def story():
            found = []
            for names in rounds:
                asked = [
                    engine.submit(GenerateRequest(tokens=p, sampling=replace(LONG, seed=i), lora=name))
                    for i, (p, name) in enumerate(zip(prompts, names, strict=False))
                ]
                found += [(await output.completion(), output.tokens, output.logprobs) for output in asked]
            return found

        return asyncio.run(story())

    options = {"page_size": 4, "max_running": 4, "lora": shape}
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(model_runner, "supports_gpu_kernels", lambda spec, model, device: False)
        eager = run(Tiny().engine(tiny.decoder(spec=spec), **options))
    assert not launched
    monkeypatch.setattr(grouped, "use_triton_inference", lambda x: torch.is_inference_mode_enabled())
    replayed = run(tiny.engine(tiny.decoder(spec=spec), **options))
    for (_, tokens, logprobs), (_, wanted_tokens, wanted_logprobs) in zip(replayed, eager, strict=True):
        assert tokens == wanted_tokens
        np.testing.assert_allclose(logprobs, wanted_logprobs, atol=2e-4)
    assert launched and {key.has_lora for key in recording} == {False, True}
    assert any(key.has_lora and key.num_tokens for key in recording)


def test_graphs_with_adapters_of_experts_replay_for_other_adapters_and_none(recording, monkeypatch):
    """Tiles of adapter and expert are found within the graph: nothing of the routing is on the host."""
    launched = []
    launch = fused_moe.launch_with_lora

    def counted(*args, **options):
        launched.append(len(args[0]))
        return launch(*args, **options)

    monkeypatch.setattr(fused_moe, "launch_with_lora", counted)
    spec = replace(EXPERTS, max_positions=64)
    shape = LoraShape(num_slots=2, max_rank=4, modules=list_served_modules(spec, ("experts",), FAST))
    factors = {f"a{i}": random_expert_factors(spec, i) for i in range(3)}
    tiny, prompts = Tiny(1), Tiny().prompts(3, high=8)
    rounds = [["a0", None, "a1"], [None, None, None], ["a2", "a2", "a0"]]

    def run(engine):
        for name, own in factors.items():
            engine.load_lora(name, own)

        async def story():
            found = []
            for names in rounds:
                asked = [
                    engine.submit(GenerateRequest(tokens=p, sampling=replace(LONG, seed=i), lora=name))
                    for i, (p, name) in enumerate(zip(prompts, names, strict=True))
                ]
                found += [(await output.completion(), output.tokens, output.logprobs) for output in asked]
            return found

        return asyncio.run(story())

    options = {"page_size": 4, "max_running": 4, "lora": shape}
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(model_runner, "supports_gpu_kernels", lambda spec, model, device: False)
        eager = run(Tiny().engine(tiny.decoder(spec=spec), **options))
    assert not launched
    monkeypatch.setattr(fused_moe, "use_triton_inference", lambda x: torch.is_inference_mode_enabled())
    replayed = run(tiny.engine(tiny.decoder(spec=spec), **options))
    for (_, tokens, logprobs), (_, wanted_tokens, wanted_logprobs) in zip(replayed, eager, strict=True):
        assert tokens == wanted_tokens
        np.testing.assert_allclose(logprobs, wanted_logprobs, atol=2e-4)
    assert launched and {key.has_lora for key in recording} == {False, True}
    assert any(key.has_lora and key.num_tokens for key in recording)
