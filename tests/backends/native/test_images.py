"""Requests with images: log-probs as transformers', whatever the schedule; features encoded once and kept in bounds."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.native.conftest import EXPERTS, Tiny
from tests.backends.native.image_requests import (
    ask,
    build_engine,
    extend,
    generate,
    hf_logprobs,
    images,
    logprobs_of,
    our_logprobs,
    pair,
    requests,
    response_of,
)
from tests.models.vision.small_vision import (
    IMAGE,
    VISION_KINDS,
    Prompt,
    hf_vision_logits,
    packed_arguments,
    place,
    prompts_of,
    random_patches,
)
from torch import nn

from miles.backends.native.engine.forward_batch import ForwardBatch
from miles.backends.native.engine.request import GenerateRequest
from miles.backends.native.tp.runner import CODEC
from miles.core.errors import EngineError
from miles.core.media import make_image_input
from miles.core.protocols import SamplingParams
from miles.core.types import Status, Version
from miles.kernels.numerics import FAST, numerics_from_parity
from miles.models.checkpoint import hf
from miles.models.decoder import Routing
from miles.models.draft.checkpoint import init_eagle
from miles.models.draft.spec import build_eagle_spec

EXACT = numerics_from_parity("exact")
KIND = "qwen3_vl"
KINDS = ["qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4"]
SMALL_STEPS = {"page_size": 4, "prefill_chunk": 5, "max_running": 3, "kv_tokens": 400}


@pytest.fixture(params=[0, 1], ids=["at once", "overlapped"])
def depth(request: pytest.FixtureRequest) -> int:
    return request.param


def close_to_transformers(kind, asked, answers) -> None:
    for (prompt, _), answer in zip(asked, answers, strict=True):
        response, logprobs = response_of(answer), logprobs_of(answer)
        expected = hf_logprobs(kind, prompt, response)
        np.testing.assert_allclose(logprobs[: len(expected)], expected, atol=1e-4)
        np.testing.assert_allclose(logprobs, our_logprobs(pair(kind)[1], prompt, response), atol=1e-4)


def same(answers, others) -> None:
    for one, other in zip(answers, others, strict=True):
        np.testing.assert_array_equal(response_of(one), response_of(other))
        np.testing.assert_allclose(logprobs_of(one), logprobs_of(other), atol=5e-5)


# -- log-probs ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "gemma4_moe", "gemma4_per_layer"])
@pytest.mark.parametrize("options", [{}, SMALL_STEPS], ids=["whole prompts", "chunks across images"])
def test_logprobs_are_those_of_transformers(kind, options, depth):
    asked = requests(kind)
    close_to_transformers(kind, asked, generate(build_engine(pair(kind)[1], depth=depth, **options), asked))


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_logprobs_are_those_of_transformers(kind):
    prompt = requests(kind)[0][0]
    engine = build_engine(pair(kind)[1], **SMALL_STEPS)

    async def score(start: int):
        how = SamplingParams(max_new_tokens=0)
        output = engine.submit(
            GenerateRequest(tokens=prompt.tokens, sampling=how, images=prompt.images, logprob_start_len=start)
        )
        await output.completion()
        return output.prompt_logprobs.logprobs

    with torch.no_grad():
        logits = hf_vision_logits(pair(kind)[0], [prompt])[:-1]
    expected = logits.log_softmax(-1).gather(1, torch.from_numpy(prompt.tokens)[1:, None])[:, 0].numpy()
    first, *rest = asyncio.run(score(0))
    assert first is None
    np.testing.assert_allclose(rest, expected, atol=1e-4)
    np.testing.assert_allclose(asyncio.run(score(12)), expected[11:], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_cached_prefixes_and_batch_mates_change_no_bit(kind):
    decoder, (several, shared, *_) = pair(kind)[1], requests(kind)
    asked = [
        ask(several[0], 0, new=4),
        ask(shared[0], 1, new=4),
        ask(shared[0], 2, new=4),
        ask(place([6], 3), 3, new=4),
    ]
    engine = build_engine(decoder, numerics=EXACT, page_size=4)
    together, again = generate(engine, asked), generate(engine, asked)
    assert again[0].cached_tokens == len(asked[0][0].tokens) - 1
    chunked = generate(build_engine(decoder, numerics=EXACT, **SMALL_STEPS), asked)
    alone = [generate(build_engine(decoder, numerics=EXACT, prefix_cache=False), [each])[0] for each in asked]
    for others in (again, chunked, alone):
        for one, other in zip(together, others, strict=True):
            np.testing.assert_array_equal(response_of(one), response_of(other))
            np.testing.assert_array_equal(logprobs_of(one), logprobs_of(other))


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_after_images_change_no_bit(kind):
    """Drafted tokens have the positions that follow the images, and images are no context of a draft."""
    decoder, (several, shared, *_) = pair(kind)[1], requests(kind)
    asked = [ask(prompt, seed, new=12) for seed, prompt in enumerate((several[0], shared[0], shared[0], place([6], 3)))]
    plain = generate(build_engine(decoder, numerics=EXACT, page_size=4), asked)
    engine = build_engine(decoder, numerics=EXACT, page_size=4, speculative_algorithm="ngram")
    for answers in (generate(engine, asked), generate(engine, asked)):
        for one, other in zip(plain, answers, strict=True):
            np.testing.assert_array_equal(response_of(one), response_of(other))
            np.testing.assert_array_equal(logprobs_of(one), logprobs_of(other))
    assert engine.stats()["accepted_draft_tokens"] > 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_drafts_after_images_and_changes_no_bit(kind):
    """It is trained on the positions that it has here: those of tokens in the sequence."""
    decoder, (several, shared, *_) = pair(kind)[1], requests(kind)
    asked = [ask(prompt, seed, new=12) for seed, prompt in enumerate((several[0], shared[0], place([6], 3)))]
    plain = generate(build_engine(decoder, numerics=EXACT, page_size=4), asked)
    head = init_eagle(build_eagle_spec(decoder.spec), seed=0, device="cpu", dtype=torch.float32, numerics=EXACT)
    engine = build_engine(
        decoder,
        numerics=EXACT,
        page_size=4,
        head=head,
        speculative_algorithm="eagle3",
        speculative_adaptive=False,
        speculative_num_draft_tokens=2,
    )
    for one, other in zip(plain, generate(engine, asked), strict=True):
        np.testing.assert_array_equal(response_of(one), response_of(other))
        np.testing.assert_array_equal(logprobs_of(one), logprobs_of(other))
    assert engine.stats()["drafted_tokens"] > 20


# -- images that attend in both directions ----------------------------------------------------


def record_steps(engine) -> list[ForwardBatch]:
    """The steps that an engine computes from now on."""
    batches, runner = [], engine._runner
    build = runner._build_attention
    runner._build_attention = lambda batch, *rest: (batches.append(batch), build(batch, *rest))[1]
    return batches


@pytest.mark.parametrize("chunk", [1, 5, 9, 30])
def test_no_prefill_chunk_ends_within_an_image_that_attends_in_both_directions(chunk):
    decoder, (a, b, c) = pair("gemma3")[1], images("gemma3")
    asked = [ask(place([3, a, 2, b, 1, c, 4], 1)), ask(place([a, 1, b], 2), 1), ask(place([6], 3), 2)]
    engine = build_engine(decoder, page_size=4, prefill_chunk=chunk, max_running=3)
    steps = record_steps(engine)
    close_to_transformers("gemma3", asked, generate(engine, asked))
    with_images = [batch for batch in steps if batch.vision is not None]
    assert len(with_images) > 1
    for batch in with_images:
        assert batch.vision.count_J.tolist() == [9] * len(batch.vision.count_J)
        last_T = np.cumsum(batch.counts_B) - 1
        np.testing.assert_array_equal(batch.visible_ends_T[last_T], batch.starts_B + batch.counts_B)
        assert codec_copy(batch).visible_ends_T.tolist() == batch.visible_ends_T.tolist()


def test_images_without_a_token_between_are_refused_where_they_would_attend_to_each_other():
    a, b, _ = images("gemma3")
    message = "image 1 begins right behind the one before it, but a gemma3 model needs a token between"
    refuse(build_engine(pair("gemma3")[1]), place([2, a, b, 3], 1), message)


def codec_copy(batch: ForwardBatch) -> ForwardBatch:
    """As the other ranks of a tensor-parallel engine receive it."""
    return CODEC.unpack(CODEC.pack("step", batch))[1]


@pytest.mark.parametrize("numerics", [FAST, EXACT], ids=["fast", "exact"])
def test_a_cached_prefix_may_end_within_an_image_that_attends_in_both_directions(numerics):
    decoder, a = pair("gemma3")[1], images("gemma3")[0]
    engine = build_engine(decoder, numerics=numerics, page_size=4)
    prompt, other = place([2, a, 5], 1), place([2, a, 6], 1)
    other.tokens[11:] = (other.tokens[11:] + 7) % 50
    (first,) = generate(engine, [ask(prompt)])
    (second,) = generate(engine, [ask(other)])
    assert first.cached_tokens == 0 and second.cached_tokens == 8  # of an image from token 2 to 11
    close_to_transformers("gemma3", [ask(prompt), ask(other)], [first, second])
    (alone,) = generate(build_engine(decoder, numerics=numerics, page_size=4), [ask(other)])
    if numerics is EXACT:
        np.testing.assert_array_equal(logprobs_of(second), logprobs_of(alone))


def test_a_sampled_placeholder_is_an_ordinary_token():
    decoder, (prompt, _) = pair(KIND)[1], requests(KIND)[1]
    engine = build_engine(decoder)

    async def forced():
        how = SamplingParams(max_new_tokens=5, seed=1, ignore_eos=True)
        request = GenerateRequest(
            tokens=prompt.tokens, sampling=how, images=prompt.images, logit_bias={IMAGE: 40.0}, top_logprobs_num=1
        )
        return await engine.submit(request).completion()

    response = response_of(asyncio.run(forced()))
    assert IMAGE in response
    longer = extend(prompt, response)
    (answer,) = generate(engine, [ask(longer, new=6)])
    np.testing.assert_allclose(logprobs_of(answer), our_logprobs(decoder, longer, response_of(answer)), atol=1e-4)


# -- the prefix cache -----------------------------------------------------------------------


def test_a_prefix_matches_with_the_same_image_and_never_with_another(depth):
    decoder, a = pair(KIND)[1], images(KIND)[0]
    other = make_image_input({**a.arrays, "pixel_values": -a.arrays["pixel_values"]}, a.num_features)
    prompt = place([9, a, 11], 3)
    changed = Prompt(prompt.tokens, (replace(prompt.images[0], image=other),))
    engine = build_engine(decoder, depth=depth, page_size=4)
    (first,) = generate(engine, [ask(prompt)])
    answers = generate(engine, [ask(changed, 1), ask(prompt, 2), ask(place([9], 3), 3)])
    # Full pages before the image; all but the last token.
    assert [answer.cached_tokens for answer in answers[:2]] == [8, len(prompt.tokens) - 1]
    close_to_transformers(KIND, [ask(prompt), ask(changed), ask(prompt)], [first, *answers[:2]])
    assert engine.stats()["encoded_images"] == 2


def test_the_next_turn_finds_its_images_computed():
    decoder, (a, b, _) = pair(KIND)[1], images(KIND)
    engine = build_engine(decoder, page_size=4)
    prompt = place([3, a, 2], 1)
    (first,) = generate(engine, [ask(prompt)])
    turn = extend(prompt, response_of(first))
    more = place([2, b, 3], 2)
    placed = tuple(each.shift(len(turn.tokens)) for each in more.images)
    longer = Prompt(np.concatenate((turn.tokens, more.tokens)), turn.images + placed)
    (second,) = generate(engine, [ask(longer)])
    assert second.cached_tokens >= len(prompt.tokens)
    close_to_transformers(KIND, [ask(longer)], [second])
    assert engine.stats()["encoded_images"] == 2


# -- encoding -------------------------------------------------------------------------------


class CountedTower:
    """Counts calls of an engine's vision tower."""

    def __init__(self, engine) -> None:
        self.calls: list[set[str]] = []
        encoder = engine._runner.images
        self._tower, self.check = encoder._tower, encoder._tower.check
        encoder._tower = self

    def __call__(self, images):
        self.calls.append({image.digest for image in images})
        return self._tower(images)


def test_a_group_of_eight_encodes_its_image_once(depth):
    a, b, _ = images(KIND)
    engine = build_engine(pair(KIND)[1], depth=depth, page_size=4)
    tower = CountedTower(engine)
    asked = [ask(place([3, image, 5], 1), seed) for image in (a, b) for seed in range(8)]
    close_to_transformers(KIND, asked, generate(engine, asked))
    assert tower.calls == [{a.digest, b.digest}]


def test_images_of_several_requests_are_encoded_together_and_once():
    a, b, c = images(KIND)
    engine = build_engine(pair(KIND)[1])
    tower = CountedTower(engine)
    asked = [ask(place([n, one, 1, two, 2], n), n) for n, (one, two) in enumerate(((a, b), (b, c), (c, a)), 1)]
    close_to_transformers(KIND, asked, generate(engine, asked))
    assert tower.calls == [{a.digest, b.digest, c.digest}]


def test_the_tower_gets_no_more_patches_at_once_than_it_may():
    a, b, c = images(KIND)
    engine = build_engine(pair(KIND)[1])
    tower = CountedTower(engine)
    engine._runner.images._max_features = a.num_features + b.num_features
    asked = [ask(place([2, a, 1, b, 1, c, 2]))]
    close_to_transformers(KIND, asked, generate(engine, asked))
    assert tower.calls == [{a.digest, b.digest}, {c.digest}]


@pytest.mark.parametrize("room", [0, 1, 2])
def test_features_beyond_the_budget_are_evicted_but_none_that_a_step_needs(room, depth):
    """The cache has room for no image, for the largest, or for two."""
    kind_images = images(KIND)
    engine = build_engine(pair(KIND)[1], depth=depth, **SMALL_STEPS | {"prefix_cache": False})
    cache = engine._runner.images.cache
    row = 32 * 3 * 4
    sizes = sorted((image.num_features * row for image in kind_images), reverse=True)
    cache.max_bytes = sum(sizes[:room])
    asked = requests(KIND)
    close_to_transformers(KIND, asked, generate(engine, asked))
    assert cache.num_bytes <= cache.max_bytes
    assert engine.stats()["encoded_images"] > 3


def test_the_least_recently_used_image_is_evicted_first():
    a, b, c = images(KIND)
    engine = build_engine(pair(KIND)[1], prefix_cache=False)
    cache = engine._runner.images.cache
    row = 32 * 3 * 4
    cache.max_bytes = (a.num_features + b.num_features + c.num_features - 1) * row
    for image in (a, b, a, c):
        generate(engine, [ask(place([2, image, 2]))])
    assert [image.digest in cache for image in (a, b, c)] == [True, False, True]
    assert cache.num_bytes == (a.num_features + c.num_features) * row


# -- leaving and coming back ------------------------------------------------------------------


def test_preempted_requests_compute_their_images_again_and_get_the_same_tokens(depth):
    decoder = pair(KIND)[1]
    asked = [ask(prompt, seed, new=20) for seed, (prompt, _) in enumerate(requests(KIND))]
    engine = build_engine(decoder, depth=depth, page_size=4, prefill_chunk=9, kv_tokens=96)
    same(generate(engine, asked), generate(build_engine(decoder), asked))
    assert engine.stats()["preemptions"] > 0


async def run_until(engine, steps: int) -> None:
    before = engine.stats()["steps"]
    while engine.stats()["steps"] < before + steps:
        await asyncio.sleep(0)


@pytest.mark.parametrize("steps", [2, 9], ids=["within the image", "within the response"])
def test_sleep_frees_features_and_a_woken_request_goes_on(steps, depth):
    decoder, (prompt, how) = pair(KIND)[1], ask(place([3, *images(KIND)[:1], 5], 1), new=12)
    engine = build_engine(decoder, depth=depth, page_size=4, prefill_chunk=3)

    async def slept():
        output = engine.submit(GenerateRequest(tokens=prompt.tokens, sampling=how, images=prompt.images))
        await run_until(engine, steps)
        assert len(engine._runner.images.cache) == 1
        await engine.sleep()
        assert len(engine._runner.images.cache) == 0 == engine._runner.images.cache.num_bytes
        await engine.wake()
        return await output.completion()

    close_to_transformers(KIND, [(prompt, how)], [asyncio.run(slept())])
    assert engine.stats()["encoded_images"] == 2


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_an_aborted_request_leaves_nothing_behind(steps, depth):
    prompt, how = ask(place([3, *images(KIND)[:1], 5], 1), new=12)
    engine = build_engine(pair(KIND)[1], depth=depth, page_size=4, prefill_chunk=3)

    async def aborted():
        output = engine.submit(GenerateRequest(tokens=prompt.tokens, sampling=how, images=prompt.images))
        await run_until(engine, steps)
        await engine.abort()
        return await output.completion()

    assert asyncio.run(aborted()).status is Status.ABORTED
    Tiny().check(engine)
    close_to_transformers(KIND, [(prompt, how)], generate(engine, [(prompt, how)]))


def changed(decoder, prefix: str):
    """A copy of a decoder in which one tensor of this prefix is another."""
    tensors = {name: parameter.clone() for name, parameter in decoder.named_parameters()}
    name = next(name for name, tensor in tensors.items() if name.startswith(prefix) and tensor.dim() > 1)
    tensors[name] = -tensors[name]
    copy = type(decoder)(decoder.spec, device="meta", dtype=torch.float32)
    copy.load_state_dict(tensors, strict=False, assign=True)
    return copy.requires_grad_(False)


@pytest.mark.parametrize(("prefix", "encoded"), [("layers.", 1), ("vision.", 2)])
def test_new_weights_encode_images_again_only_if_the_tower_changed(prefix, encoded, depth):
    decoder, asked = pair(KIND)[1], [ask(place([3, *images(KIND)[:1], 5], 1))]
    engine = build_engine(decoder, depth=depth)
    old = generate(engine, asked)
    new = changed(decoder, prefix)
    Tiny().publish(engine, new, number=1)
    answers = generate(engine, asked)
    assert engine.stats()["encoded_images"] == encoded
    assert not np.allclose(logprobs_of(old[0]), logprobs_of(answers[0]), atol=1e-3)
    same(answers, generate(build_engine(new), asked))


def test_weights_overwritten_in_place_encode_images_again():
    decoder, asked = pair(KIND)[1], [ask(place([3, *images(KIND)[:1], 5], 1))]
    engine = build_engine(changed(decoder, "layers."))
    generate(engine, asked)
    weights = engine.weights()

    def write() -> None:
        for name, parameter in changed(decoder, "vision.").named_parameters():
            weights[name].data.copy_(parameter)

    engine.write_weights_in_place(write)
    engine.commit_in_place(Version(number=1))
    same(generate(engine, asked), generate(build_engine(changed(decoder, "vision.")), asked))
    # The tower's digests are those of the last publication, but not its weights.
    Tiny().publish(engine, decoder, number=2)
    same(generate(engine, asked), generate(build_engine(decoder), asked))


def test_weights_that_come_within_an_image_start_the_prompt_again(depth):
    decoder, (prompt, how) = pair(KIND)[1], ask(place([3, *images(KIND)[:1], 5], 1))
    engine, new = build_engine(decoder, depth=depth, page_size=4, prefill_chunk=3), changed(decoder, "vision.")

    async def interrupted():
        output = engine.submit(GenerateRequest(tokens=prompt.tokens, sampling=how, images=prompt.images))
        await run_until(engine, 2)
        await engine.pause()
        Tiny().publish(engine, new, number=1)
        await engine.resume()
        return await output.completion()

    answer = asyncio.run(interrupted())
    assert [span.version.number for span in answer.spans] == [1]
    same([answer], generate(build_engine(new), [(prompt, how)]))


# -- experts --------------------------------------------------------------------------------


def test_routed_experts_are_those_of_a_full_forward(depth):
    spec = pair(KIND)[1].spec
    spec = replace(spec, layers=tuple(replace(layer, ffn=EXPERTS) for layer in spec.layers))
    decoder = hf.init_random(spec, seed=0, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.2)
    asked = requests(KIND)
    for (prompt, _), answer in zip(
        asked, generate(build_engine(decoder, depth=depth, **SMALL_STEPS), asked), strict=True
    ):
        routing = Routing(record=True)
        decoder(**packed_arguments(decoder, [extend(prompt, response_of(answer))]), routing=routing)
        expected = torch.stack(routing.recorded, 1).numpy()
        found = np.concatenate((answer.prompt_extras["routed_experts"], answer.spans[0].extras["routed_experts"]))
        np.testing.assert_array_equal(found[:-1], expected[:-1])


# -- what cannot be served ------------------------------------------------------------------


def refuse(engine, prompt: Prompt, message: str, new: int = 4) -> None:
    with pytest.raises(EngineError, match=message):
        generate(engine, [ask(prompt, new=new)])


def test_images_that_do_not_fit_their_tokens_are_refused():
    engine = build_engine(pair(KIND)[1])
    prompt = place([3, images(KIND)[0], 2], 1)
    shifted = Prompt(prompt.tokens, (prompt.images[0].shift(1),))
    refuse(engine, shifted, "engine 0 cannot serve the request: 5 placeholder tokens from token 4 on for an image of 6")
    refuse(engine, Prompt(prompt.tokens, (prompt.images[0].shift(9),)), "image 0 ends at token 18 of 11")
    refuse(engine, Prompt(prompt.tokens, 2 * prompt.images), "image 1 starts at token 3, before the end")
    text = np.full_like(prompt.tokens, 5)
    refuse(engine, Prompt(text, prompt.images), "0 placeholder tokens from token 3 on")
    assert engine.stats()["steps"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_grid_thw": None}, "engine 0 cannot serve the request: image 0: image_grid_thw is missing"),
        ({"pixel_values": None}, "pixel_values is missing"),
        ({"pixel_values": np.zeros((23, 96), np.float32)}, r"shape \(23, 96\), but 24 patches of 96 values"),
        ({"pixel_values": np.zeros((24, 96), np.uint8)}, "the pixels of an image are uint8, but must be floats"),
        ({"image_grid_thw": np.array([[1, 4, 4]])}, "4 features, not 6"),
    ],
)
def test_images_that_the_tower_cannot_read_are_refused_alone(change, message):
    a, b, _ = images(KIND)
    engine = build_engine(pair(KIND)[1])
    arrays = {name: array for name, array in {**a.arrays, **change}.items() if array is not None}
    bad = place([3, make_image_input(arrays, a.num_features), 2], 1)
    prompt, how = ask(place([3, b, 2], 1))

    async def both():
        running = asyncio.ensure_future(engine.generate(prompt.tokens, how, prompt.images))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match=message):
            await engine.generate(bad.tokens, how, bad.images)
        return await running

    close_to_transformers(KIND, [(prompt, how)], [asyncio.run(both())])


def test_an_image_larger_than_the_feature_cache_is_refused():
    limit = (1 << 20) // (32 * 3 * 4)
    grid = (1, 2, 2 * (limit + 1))
    image = random_patches(np.random.default_rng(0), grid, 3 * 2 * 4 * 4)
    decoder = replace_positions(pair(KIND)[1], 1 << 16)
    engine = build_engine(decoder, vision_cache_mib=1, kv_tokens=1 << 15, max_running=1)
    refuse(
        engine,
        place([image, 2]),
        f"image 0: it has {limit + 1} features, but --engine-vision-cache-mib has room for {limit}; raise it",
    )
    assert engine.stats()["encoded_images"] == 0


def replace_positions(decoder, positions: int):
    copy = type(decoder)(replace(decoder.spec, max_positions=positions), device="meta", dtype=torch.float32)
    copy.load_state_dict(dict(decoder.named_parameters()), strict=False, assign=True)
    return copy.requires_grad_(False)


def test_a_model_without_a_tower_takes_no_images():
    prompt = place([3, images(KIND)[0], 2], 1)
    tokens = np.minimum(prompt.tokens, 60)
    engine = Tiny().engine()
    refuse(engine, Prompt(tokens, prompt.images), "engine 0 cannot serve the request: its model takes no images")


# -- every family ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_logprobs_are_those_of_transformers_whatever_the_family(kind):
    asked = [ask(prompt, seed, new=5) for seed, prompt in enumerate(prompts_of(kind))]
    engine = build_engine(pair(kind)[1], page_size=4, prefill_chunk=7, max_running=3, kv_tokens=400)
    close_to_transformers(kind, asked, generate(engine, asked))
