"""Draft training beside a policy: against a draft that is run token by token, and against the policy without it."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.backends.fsdp.test_lora_model import adapted
from tests.backends.fsdp.test_packed_lora_model import packed_actor
from tests.models.draft.mtp_checkpoints import make_reference, save_reference
from tests.models.vision.small_vision import vision_model, vision_twin
from tests.train.small_trainer import DENSE, ragged, sample, step, weights, worker
from tests.train.vision_samples import mixed
from torch import Tensor

from miles.backends.fsdp.local_model import LocalModel
from miles.core.errors import CheckpointError, UsageError
from miles.kernels.attention.params import AttentionInputs
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.numerics import BATCH_INVARIANT
from miles.models.checkpoint import hf
from miles.models.decoder import Decoder
from miles.models.draft.base import Draft, PolicyWeights
from miles.models.draft.checkpoint import init_eagle, load_eagle, load_mtp
from miles.models.draft.eagle import EagleDraft
from miles.models.draft.param_map import build_draft_map
from miles.models.draft.spec import build_eagle_spec
from miles.models.families import spec_from_config
from miles.train.config import TrainConfig
from miles.train.draft_trainer import DraftTrainer

TRAIN = {"draft_lr": 1e-2, "mtp_loss_scaling_factor": 1.0, "max_tokens_per_gpu": 24, "clip_grad": 0.0}


def dense() -> tuple[LocalModel, Decoder]:
    decoder = hf.init_random(spec_from_config(DENSE), seed=0, device="cpu", dtype=torch.float32)
    return LocalModel(decoder, config=DENSE), decoder


def eagle_worker(*, train=None, temperature=1.0, seed=3, **more):
    """A trainer with an EAGLE-3 head, the head, and the policy's decoder."""
    actor, decoder = dense()
    draft = init_eagle(build_eagle_spec(decoder.spec), seed=seed, device="cpu", dtype=torch.float32)
    options = TRAIN | (train or {})
    draft_trainer = DraftTrainer(draft, train=TrainConfig(**options), temperature=temperature)
    return worker(actor, train=options, temperature=temperature, draft=draft_trainer, **more), draft, decoder


def mtp_worker(folder: Path, *, name="deepseek v3", **train):
    decoder = hf.load(folder, device="cpu", dtype=torch.float32)
    actor = LocalModel(decoder, config=hf.read_config(folder), like=folder)
    draft = load_mtp(folder, decoder.spec, device="cpu", dtype=torch.float32)
    options = TRAIN | train
    trainer = DraftTrainer(draft, train=TrainConfig(**options), temperature=1.0)
    return worker(actor, train=options, draft=trainer), draft, decoder


# -- the oracle -----------------------------------------------------------------------------


class GrowingCache:
    """Attention of one sequence over the keys so far: all at once at first, then one token at a time."""

    latent = False

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, inputs: AttentionInputs, /) -> Tensor:
        first = not self.keys
        self.keys.append(inputs.k_TGd)
        self.values.append(inputs.v_TGe)
        q, k, v = inputs.q_THd, torch.cat(self.keys), torch.cat(self.values)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * inputs.params.scale
        if first:
            scores = scores + torch.full(scores.shape[1:], float("-inf")).triu(1)
        return torch.einsum("hqk,khe->qhe", scores.softmax(-1), v)

    def recurrent_state(self, layer: int):
        raise AssertionError


def losses_token_by_token(draft: Draft, decoder: Decoder, samples, *, steps: int, kind: str, temperature: float = 1.0):
    """The loss of every (trained token, step), and whether the draft's best token is the policy's, as a draft runs."""
    found: list[list[tuple[Tensor, bool]]] = [[] for _ in range(steps)]
    draft.share(PolicyWeights(decoder.embedding, decoder.head))
    for each in samples:
        tokens = torch.from_numpy(each.tokens.astype(np.int64))
        with torch.no_grad():
            capture = draft.new_capture()
            positions = torch.arange(len(tokens))
            hidden = decoder(tokens, positions, VarlenAttentionBackend([len(tokens)], "cpu"), capture=capture)
            features = draft.features(hidden, capture)
            policy = (hidden @ decoder.head().T / temperature).log_softmax(-1)
        for root in range(len(tokens) - 1):
            cache, own = GrowingCache(), features[: root + 1]
            for number in range(min(steps, len(tokens) - 2 - root)):
                after = tokens[1 : root + 2] if number == 0 else tokens[root + number + 1][None]
                at = torch.arange(root + 1) if number == 0 else torch.tensor([root + number])
                own = draft(own, after, at, cache, step=number)[-1:] if number else draft(own, after, at, cache)[-1:]
                target = root + number + 2
                if not each.mask[target]:
                    continue
                logq = (draft.logits(own, step=number)[0] / temperature).log_softmax(-1)
                soft = -(policy[target - 1].exp() * logq).sum()
                loss = soft if kind == "soft" else -logq[tokens[target]]
                found[number].append((loss, bool(logq.argmax() == policy[target - 1].argmax())))
    return found


# -- the loss and its gradient ----------------------------------------------------------------


@pytest.mark.parametrize(("kind", "temperature"), [("soft", 1.0), ("soft", 0.7), ("hard", 1.0)])
def test_the_loss_is_that_of_a_draft_run_token_by_token(kind: str, temperature: float):
    trainer, draft, decoder = eagle_worker(
        train={"draft_loss": kind, "draft_lr": 0.0, "lr": 0.0}, temperature=temperature
    )
    samples = ragged(6)
    found = losses_token_by_token(draft, decoder, samples, steps=3, kind=kind, temperature=temperature)
    pairs = [pair for step_pairs in found for pair in step_pairs]
    expected = torch.stack([loss for loss, _ in pairs]).mean()
    grads = torch.autograd.grad(expected, list(draft.parameters()))
    norm = torch.stack([grad.norm() for grad in grads]).norm()

    metrics = step(trainer, samples).metrics
    assert metrics["draft_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["draft_grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for number, step_pairs in enumerate(found, 1):
        agreed = sum(agrees for _, agrees in step_pairs) / len(step_pairs)
        assert metrics[f"draft_agreement_{number}"] == pytest.approx(agreed)


@pytest.mark.parametrize("name", ["deepseek v3", "qwen3-next", "mimo"])
def test_an_mtp_layer_has_the_loss_of_a_draft_run_token_by_token(name: str, tmp_path: Path):
    save_reference(make_reference(name), tmp_path)
    trainer, draft, decoder = mtp_worker(tmp_path, draft_lr=0.0, lr=0.0, draft_train_steps=2)
    samples = ragged(4)
    found = losses_token_by_token(draft, decoder, samples, steps=2, kind="soft")
    expected = torch.stack([loss for pairs in found for loss, _ in pairs]).mean()
    assert step(trainer, samples).metrics["draft_loss"] == pytest.approx(expected.item(), rel=2e-5)


def test_samples_that_share_a_prefix_have_the_same_loss():
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 31, 20).astype(np.int32)
    samples = []
    for number in range(4):
        each = sample(rng, prompt=20, reply=5, advantage=1.0 - number, trajectory=number)
        each.tokens[:20] = prompt
        samples.append(each)
    still = {"draft_lr": 0.0, "lr": 0.0, "max_tokens_per_gpu": 200}
    apart = step(eagle_worker(train=still)[0], samples).metrics
    shared = step(eagle_worker(train=still | {"share_prefix": True})[0], samples).metrics
    assert shared["tokens_shared"] > 0
    assert shared["draft_loss"] == pytest.approx(apart["draft_loss"], rel=1e-5)


def reduced_eagle(decoder: Decoder) -> EagleDraft:
    """A head of every other token, with a random head of its own."""
    spec = replace(build_eagle_spec(decoder.spec), draft_vocab_size=16)
    draft = EagleDraft(spec, device="cpu", dtype=torch.float32)
    draft.load_state_dict(
        {**hf.sample_params(draft, seed=3, device="cpu"), "token_offsets_v": torch.arange(16)}, assign=True
    )
    return draft


def test_a_reduced_vocabulary_learns_the_policys_distribution_over_it(tmp_path: Path):
    def build(**changes):
        actor, decoder = dense()
        draft, options = reduced_eagle(decoder), TRAIN | {"draft_train_steps": 1} | changes
        own = DraftTrainer(draft, train=TrainConfig(**options), temperature=1.0)
        return worker(actor, train=options, draft=own), draft, decoder

    trainer, draft, decoder = build()
    samples, losses = ragged(6), []
    draft.share(PolicyWeights(decoder.embedding, decoder.head))
    for each in samples:
        tokens, count = torch.from_numpy(each.tokens.astype(np.int64)), len(each.tokens)
        capture, attention = draft.new_capture(), VarlenAttentionBackend([count], "cpu")
        hidden = decoder(tokens, torch.arange(count), attention, capture=capture)
        own = draft(draft.features(hidden, capture), tokens.roll(-1), torch.arange(count), attention)
        policy = (hidden @ decoder.head().T)[:, ::2].softmax(-1)
        logq = draft.logits(own).log_softmax(-1)
        losses += [-(policy[t - 1] * logq[t - 2]).sum() for t in range(2, count) if each.mask[t]]
    before = draft.head().detach().clone()
    assert step(trainer, samples).metrics["draft_loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert not torch.equal(draft.head(), before)

    train_and_save(trainer, tmp_path / "run", range(1, 2))
    resumed, fresh, _ = build()
    fresh.token_offsets_v.zero_()
    asyncio.run(resumed.load(tmp_path / "run"))
    assert torch.equal(fresh.token_offsets_v, torch.arange(16)) and torch.equal(fresh.head(), draft.head())
    with pytest.raises(UsageError, match="--draft-loss hard needs"):
        build(draft_loss="hard")


# -- the policy -----------------------------------------------------------------------------


def test_the_policy_is_the_same_to_the_bit_with_and_without_a_draft():
    with_draft, draft, _ = eagle_worker()
    before = {name: value.detach().clone() for name, value in draft.named_parameters()}
    without = worker(dense()[0], train=TRAIN)
    for number in range(3):
        samples = ragged(6, seed=number)
        metrics = step(with_draft, samples, number).metrics
        plain = step(without, samples, number).metrics
        assert {name: metrics[name] for name in plain} == plain
    theirs = weights(without)
    assert all(torch.equal(value, theirs[name]) for name, value in weights(with_draft).items())
    assert any(not torch.equal(value, before[name]) for name, value in draft.named_parameters())


def compare_with_and_without(make_actor, spec, batches):
    """Train two policies, one with an EAGLE-3 head; the metrics of that one's steps."""
    draft = init_eagle(build_eagle_spec(spec), seed=3, device="cpu", dtype=torch.float32)
    options = TRAIN | {"max_tokens_per_gpu": 64}
    own = DraftTrainer(draft, train=TrainConfig(**options), temperature=1.0)
    with_draft, without = worker(make_actor(), train=options, draft=own), worker(make_actor(), train=options)
    reported = []
    for number, samples in enumerate(batches):
        metrics, plain = (step(each, samples, number).metrics for each in (with_draft, without))
        assert {name: metrics[name] for name in plain} == plain
        reported.append(metrics)
    theirs = weights(without)
    assert all(torch.equal(value, theirs[name]) for name, value in weights(with_draft).items())
    return reported


@pytest.mark.parametrize("packed", [False, True], ids=["merged", "packed base"])
def test_a_policy_of_adapters_is_the_same_to_the_bit_and_its_draft_reads_the_adapted_model(tmp_path, packed: bool):
    def make_actor():
        return packed_actor(tmp_path) if packed else adapted(tmp_path)

    spec = make_actor()._base_model.spec
    batches = [ragged(6, seed=number) for number in range(3)]
    reported = compare_with_and_without(make_actor, spec, batches)
    assert reported[-1]["draft_loss"] < reported[0]["draft_loss"]

    actor, head = make_actor(), init_eagle(build_eagle_spec(spec), seed=3, device="cpu", dtype=torch.float32)
    still = TRAIN | {"draft_lr": 0.0, "lr": 0.0}
    trainer = worker(actor, train=still, draft=DraftTrainer(head, train=TrainConfig(**still), temperature=1.0))
    before = step(trainer, batches[0]).metrics["draft_loss"]
    with torch.no_grad():
        for factor in actor.adapters().parameters.values():
            factor.add_(0.3)
    actor.after_update()
    assert step(trainer, batches[0], 1).metrics["draft_loss"] != pytest.approx(before, rel=1e-4)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_a_policy_with_images_is_the_same_to_the_bit(kind: str):
    model = vision_model(kind)

    def make_actor():
        return LocalModel(vision_twin(model), config=model.config.to_dict())

    batches = [mixed(kind)] * 3
    reported = compare_with_and_without(make_actor, vision_twin(model).spec, batches)
    assert reported[-1]["draft_loss"] < reported[0]["draft_loss"]


def test_a_policy_with_recomputed_layers_gives_the_same_features():
    decoder = dense()[1]
    plain = step(eagle_worker(train={"draft_lr": 0.0})[0], ragged(5)).metrics
    recomputed = LocalModel(decoder, config=DENSE, gradient_checkpointing=True)
    draft = init_eagle(build_eagle_spec(decoder.spec), seed=3, device="cpu", dtype=torch.float32)
    options = TRAIN | {"draft_lr": 0.0}
    trainer = DraftTrainer(draft, train=TrainConfig(**options), temperature=1.0)
    metrics = step(worker(recomputed, train=options, draft=trainer), ragged(5)).metrics
    assert metrics["draft_loss"] == plain["draft_loss"]


# -- checkpoints ----------------------------------------------------------------------------


def train_and_save(trainer, folder: Path, numbers: range) -> None:
    for number in numbers:
        step(trainer, ragged(6, seed=number), number)
    folder.mkdir()
    asyncio.run(trainer.save(folder))


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(tmp_path: Path):
    whole, draft, _ = eagle_worker()
    train_and_save(whole, tmp_path / "half", range(2))
    train_and_save(whole, tmp_path / "whole", range(2, 4))

    resumed, fresh, _ = eagle_worker(seed=9)
    asyncio.run(resumed.load(tmp_path / "half"))
    train_and_save(resumed, tmp_path / "resumed", range(2, 4))
    theirs = dict(draft.named_parameters())
    assert all(torch.equal(value, theirs[name]) for name, value in fresh.named_parameters())
    for file in (
        "model.safetensors",
        "optimizer.safetensors",
        "draft/model.safetensors",
        "draft/optimizer.safetensors",
    ):
        assert (tmp_path / "resumed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file


def test_a_draft_that_is_saved_in_bfloat16_resumes_from_its_masters(tmp_path: Path):
    def build() -> tuple[DraftTrainer, Draft, object]:
        actor, decoder = dense()
        draft = init_eagle(build_eagle_spec(decoder.spec), seed=3, device="cpu", dtype=torch.float32)
        own = DraftTrainer(draft, train=TrainConfig(**TRAIN), temperature=1.0, save_dtype=torch.bfloat16)
        return own, draft, worker(actor, train=TRAIN, draft=own)

    _, draft, trainer = build()
    train_and_save(trainer, tmp_path / "run", range(2))
    stored = load_file(tmp_path / "run" / "draft" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    _, fresh, resumed = build()
    asyncio.run(resumed.load(tmp_path / "run"))
    theirs = dict(draft.named_parameters())
    assert all(torch.equal(value, theirs[name]) for name, value in fresh.named_parameters())


def test_a_saved_eagle_head_is_loaded_from_its_folder(tmp_path: Path):
    trainer, draft, decoder = eagle_worker()
    train_and_save(trainer, tmp_path / "run", range(1))
    loaded = load_eagle(tmp_path / "run" / "draft", decoder.spec, device="cpu", dtype=torch.float32)
    assert loaded.spec == draft.spec
    theirs = dict(draft.named_parameters())
    assert all(torch.equal(value, theirs[name]) for name, value in loaded.named_parameters())
    stored = load_file(tmp_path / "run" / "draft" / "model.safetensors")
    assert stored["fc.weight"].shape == (16, 48) and stored["midlayer.self_attn.k_proj.weight"].shape == (16, 32)


def test_a_checkpoint_contains_the_trained_mtp_layers(tmp_path: Path):
    own = save_reference(make_reference("glm-4.5"), tmp_path / "base")
    trainer, draft, decoder = mtp_worker(tmp_path / "base")
    train_and_save(trainer, tmp_path / "run", range(2))

    stored = load_file(tmp_path / "run" / "model.safetensors")
    trained = {piece.hf_name for pieces in build_draft_map(draft.spec).values() for piece in pieces}
    assert own.keys() == trained and own.keys() <= stored.keys()
    assert not torch.equal(stored["model.layers.2.eh_proj.weight"], own["model.layers.2.eh_proj.weight"])
    again = load_mtp(tmp_path / "run", decoder.spec, device="cpu", dtype=torch.float32)
    theirs = dict(draft.named_parameters())
    assert all(torch.equal(value, theirs[name]) for name, value in again.named_parameters())

    resumed, fresh, _ = mtp_worker(tmp_path / "base")
    asyncio.run(resumed.load(tmp_path / "run"))
    for each in (trainer, resumed):
        step(each, ragged(6, seed=2), 2)
    assert all(torch.equal(value, theirs[name]) for name, value in fresh.named_parameters())


def test_a_checkpoint_without_a_draft_is_not_resumed_with_one(tmp_path: Path):
    train_and_save(worker(dense()[0], train=TRAIN), tmp_path / "plain", range(1))
    with pytest.raises(CheckpointError, match="has no draft model"):
        asyncio.run(eagle_worker()[0].load(tmp_path / "plain"))


# -- learning -------------------------------------------------------------------------------


def test_a_trained_head_agrees_with_the_policy_more_often_than_a_new_one():
    trainer, draft, decoder = eagle_worker(
        train={"lr": 0.0, "adam_eps": 1e-8, "draft_train_steps": 2, "max_tokens_per_gpu": 512}
    )
    held_out = ragged(5, seed=1000)

    def agreement() -> list[float]:
        with torch.no_grad():
            found = losses_token_by_token(draft, decoder, held_out, steps=2, kind="soft")
        return [sum(agrees for _, agrees in pairs) / len(pairs) for pairs in found]

    fresh = agreement()
    for number in range(20):
        step(trainer, ragged(16, seed=number), number)
    trained = agreement()
    assert trained[0] > fresh[0] + 0.25 and trained[1] > fresh[1] + 0.1, (fresh, trained)


def test_a_draft_of_a_batch_invariant_policy_has_the_same_loss():
    fast = step(eagle_worker(train={"draft_lr": 0.0})[0], ragged(5, version=7)).metrics
    decoder = hf.init_random(
        spec_from_config(DENSE), seed=0, device="cpu", dtype=torch.float32, numerics=BATCH_INVARIANT
    )
    spec = build_eagle_spec(decoder.spec)
    draft = init_eagle(spec, seed=3, device="cpu", dtype=torch.float32, numerics=BATCH_INVARIANT)
    options = TRAIN | {"draft_lr": 0.0}
    own = DraftTrainer(draft, train=TrainConfig(**options), temperature=1.0)
    actor = LocalModel(decoder, config=DENSE)
    metrics = step(worker(actor, train=options, draft=own), ragged(5, version=7)).metrics
    assert metrics["draft_loss"] == pytest.approx(fast["draft_loss"], rel=1e-5)


def test_a_draft_in_bfloat16_has_the_mean_gradient_of_one_in_float32():
    """The gradients of low-precision parameters are accumulated in float32, apart from the parameters."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        decoder = hf.init_random(spec_from_config(DENSE), seed=0, device="cpu", dtype=dtype)
        draft = init_eagle(build_eagle_spec(decoder.spec), seed=3, device="cpu", dtype=dtype)
        own = DraftTrainer(draft, train=TrainConfig(**TRAIN), temperature=1.0)
        metrics = step(worker(LocalModel(decoder, config=DENSE), train=TRAIN, draft=own), ragged(6)).metrics
        found.append(metrics["draft_grad_norm"])
    assert found[1] == pytest.approx(found[0], rel=0.1)
