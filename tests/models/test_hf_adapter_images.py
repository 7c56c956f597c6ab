"""The transformers adapter with images: packed, paged and trained as transformers' own forward computes them."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.models.oracle import relative
from tests.models.small_aya_vision import write_aya_checkpoint
from tests.models.small_vision import draw_png, write_vision_checkpoint
from tests.models.test_hf_adapter import engine_of
from transformers import AyaVisionForConditionalGeneration

from miles.core.errors import UsageError
from miles.core.media import make_image_input
from miles.core.media_store import MediaStore
from miles.core.protocols import SamplingParams
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.fused.lm_head import compute_logits
from miles.models.hf_adapter import checkpoint
from miles.models.processor import load_processor
from miles.models.resolve import resolve_spec
from miles.models.vision.inputs import build_vision_inputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_aya_checkpoint(tmp_path_factory.mktemp("aya") / "model")


@pytest.fixture(scope="module")
def prompts(folder):
    """Two images, one that is shared and of other sizes, and text alone."""
    processor = load_processor(folder, media=MediaStore())
    first, second = (processor.media.put(draw_png(seed, 40, 24 + 8 * seed)) for seed in (0, 1))
    texts = [("the<image>in<image> a", [first, second]), ("<image>b", [first]), ("none", [])]
    encoded = [processor.encode_with_images(text, images) for text, images in texts]
    return [(np.array(tokens), images) for tokens, images in encoded]


def their_logits(model, prompts):
    logits = []
    for tokens, images in prompts:
        pixels = [torch.from_numpy(placed.image.arrays["pixel_values"].copy()) for placed in images]
        given = {"pixel_values": torch.cat(pixels)} if pixels else {}
        logits.append(model(input_ids=torch.from_numpy(tokens)[None], **given).logits[0])
    return torch.cat(logits)


def our_logits(decoder, prompts):
    lengths = [len(tokens) for tokens, _ in prompts]
    offsets = np.cumsum([0, *lengths[:-1]])
    sequences = [(int(at), *prompt) for at, prompt in zip(offsets, prompts, strict=True)]
    positions = torch.cat([torch.arange(n) for n in lengths])
    tokens = torch.from_numpy(np.concatenate([tokens for tokens, _ in prompts]))
    hidden = decoder(
        tokens,
        positions,
        VarlenAttentionBackend(lengths, "cpu"),
        vision=build_vision_inputs(decoder.spec, sequences, "cpu"),
    )
    return compute_logits(hidden, decoder.head(), decoder.spec.logit_softcap, numerics=decoder.numerics)


def load_theirs(folder):
    return AyaVisionForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize("recompute", [False, True])
def test_logits_and_gradients_of_packed_prompts_are_those_of_the_module(folder, prompts, recompute):
    decoder, model = checkpoint.load(folder, device="cpu", dtype=torch.float32), load_theirs(folder)
    decoder.checkpoint_layers = recompute
    mine, wanted = our_logits(decoder, prompts), their_logits(model, prompts)
    assert relative(mine, wanted) < 1e-5
    # Another image gives other logits.
    changed = [prompts[0], change_pixels(prompts[1]), prompts[2]]
    assert relative(our_logits(decoder, changed), wanted) > 1e-3
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    (mine * weights).sum().backward()
    (wanted * weights).sum().backward()
    found = dict(decoder.named_parameters())
    moved = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert any("vision_tower" in name for name in moved) and any("projector" in name for name in moved)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.norm() > 1e-3:
            assert relative(found[name].grad, parameter.grad) < 1e-3, name


def change_pixels(prompt):
    """A prompt of one image, with other pixels in it."""
    tokens, (placed,) = prompt
    arrays = {n: a + 1 if a.dtype == np.float32 else a for n, a in placed.image.arrays.items()}
    return tokens, (replace(placed, image=make_image_input(arrays, placed.image.num_features)),)


@pytest.mark.parametrize("chunk", [None, 5])
def test_an_engine_samples_with_the_log_probs_of_the_module(folder, prompts, chunk):
    model = load_theirs(folder)
    decoder = checkpoint.load(folder, device="cpu", dtype=torch.float32)
    engine = engine_of(decoder, page_size=4, kv_tokens=1024, prefill_chunk=chunk)
    how = SamplingParams(max_new_tokens=7, ignore_eos=True, seed=3)

    async def sample():
        return await asyncio.gather(
            *(engine.generate(tokens.astype(np.int32), how, images) for tokens, images in (*prompts, prompts[1]))
        )

    answers = asyncio.run(sample())
    assert engine.stats()["encoded_images"] == 2
    for (tokens, images), answer in zip((*prompts, prompts[1]), answers, strict=True):
        span = answer.spans[0]
        with torch.no_grad():
            logits = their_logits(model, [(np.concatenate((tokens, span.tokens)), images)])
        wanted = logits[len(tokens) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(span.tokens.tolist())[:, None])
        assert np.abs(span.logprobs - wanted[:, 0].numpy()).max() < 1e-4


def test_a_module_that_treats_images_in_its_own_way_is_refused_when_it_is_loaded(folder, tmp_path, monkeypatch):
    forward = AyaVisionForConditionalGeneration.forward

    def shifted(self, input_ids=None, pixel_values=None, **more):
        if pixel_values is not None:
            more["position_ids"] = 3 + torch.arange(input_ids.shape[1])[None] // 2
        return forward(self, input_ids=input_ids, pixel_values=pixel_values, **more)

    monkeypatch.setattr(AyaVisionForConditionalGeneration, "forward", shifted)
    with pytest.raises(UsageError, match="prompts with images get other logits than from the module itself"):
        checkpoint.load(folder, device="cpu", dtype=torch.float32)


def test_models_with_multimodal_rope_run_on_text_alone(tmp_path):
    write_vision_checkpoint(tmp_path, "qwen2_5_vl")
    assert resolve_spec(tmp_path, "transformers").vision is None
