"""Training on images: gradients of transformers, packing, prefix sharing, freezing, exact resume."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models.oracle import gradients, relative
from tests.models.vision.small_vision import (
    VISION_KINDS,
    Prompt,
    assemble,
    hf_vision_logits,
    prompts_of,
    vision_model,
    vision_twin,
)
from tests.train.small_trainer import distance, step, weights, worker
from tests.train.vision_samples import A, B, C, group, mixed, pack, swap
from torch import Tensor
from transformers import PreTrainedModel

from miles.algo.config import AlgoConfig
from miles.backends.fsdp.local_critic import LocalCritic
from miles.backends.fsdp.local_model import LocalModel
from miles.core.errors import MilesError, UsageError
from miles.core.types import Sample
from miles.kernels.numerics import BATCH_INVARIANT
from miles.models.activation_checkpointing import set_recompute
from miles.models.optim_groups import FrozenVision, is_projector_param, is_vision_param
from miles.train.batch_tensors import MicroBatch, select_samples
from miles.train.config import TrainConfig
from miles.train.critic import Critic
from miles.train.logprobs import HeadOutput, compute_logprobs
from miles.train.model_protocols import KeptTensors, TrainModel

KINDS = ("qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4")
DISTILL = {"advantage_estimator": "on_policy_distillation"}


def run(model: TrainModel, plan: Sequence[MicroBatch]) -> list[Tensor]:
    """Gradients of a weighted sum of log-probs, and the log-probs."""

    def loss(number: int, output: HeadOutput) -> tuple[Tensor, KeptTensors]:
        rows = plan[number]
        logp_R, entropy_R = compute_logprobs(output, rows.target_R)
        value = (rows.weight_R * (rows.advantage_R * logp_R + 0.1 * entropy_R)).sum()
        return value, {"logp": logp_R.detach()}

    return [kept["logp"] for kept in model.forward_backward(plan, loss)]


def grads_of(model: TrainModel) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.parameters().items() if p.grad is not None}


def expected(model: PreTrainedModel, samples: Sequence[Sample]) -> tuple[dict[str, Tensor], Tensor]:
    """The same with transformers and autograd, one sample at a time; gradients under our names, and log-probs."""
    rows, logprobs = pack(samples), []
    weights, start = rows.weight_R, 0
    for each in samples:
        logits_TV = hf_vision_logits(model, [Prompt(each.tokens.astype(np.int64), each.images)])
        logp_TV = torch.log_softmax(logits_TV.float(), -1)
        trained = torch.from_numpy(np.flatnonzero(each.mask))
        logp_R = logp_TV[trained - 1, torch.from_numpy(each.tokens.astype(np.int64))[trained]]
        entropy_R = -(logp_TV.exp() * logp_TV).sum(-1)[trained - 1]
        weight_R = weights[start : start + len(trained)]
        start += len(trained)
        advantage_R = torch.from_numpy(each.advantages)[trained]
        (weight_R * (advantage_R * logp_R + 0.1 * entropy_R)).sum().backward()
        logprobs.append(logp_R.detach())
    return assemble(vision_twin(model).spec, gradients(model)), torch.cat(logprobs)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_packed_samples_with_images_are_those_of_transformers(kind: str) -> None:
    samples = mixed(kind)
    wanted, logprobs = expected(vision_model(kind), samples)
    order = range(len(samples))
    for plan in ([pack(samples)], [pack(samples, [i]) for i in order], [pack(samples, share=True)]):
        model = LocalModel(vision_twin(vision_model(kind)))
        found = torch.cat(run(model, plan))
        assert relative(found, logprobs) < 1e-5
        mine = grads_of(model)
        assert mine.keys() == {name for name in wanted if model.parameters()[name].requires_grad}
        for name, grad in mine.items():
            # Scores without a scale make a steep softmax (Gemma 4).
            assert relative(grad, wanted[name]) < (1e-4 if kind == "gemma4" else 2e-5), name


def answered(prompts: Sequence[Prompt]) -> list[Sample]:
    """A sample of every prompt, in which a reply is trained."""
    rng = np.random.default_rng(0)
    out: list[Sample] = []
    for number, prompt in enumerate(prompts):
        tokens = np.concatenate((prompt.tokens, rng.integers(0, 50, 4))).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(prompt.tokens)
        zeros = np.zeros(len(tokens), np.float32)
        out.append(
            Sample(
                prompt_id=number,
                trajectory=number,
                tokens=tokens,
                mask=mask,
                logprobs=zeros,
                advantages=np.where(mask, np.float32(number - 1.5), zeros),
                versions=np.where(mask, 0, -1).astype(np.int32),
                images=prompt.images,
            )
        )
    return out


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_every_family_is_trained_packed_as_transformers_does_one_by_one(kind: str) -> None:
    samples = answered(prompts_of(kind))
    model = LocalModel(vision_twin(vision_model(kind)))
    wanted, logprobs = expected(vision_model(kind), samples)
    assert relative(run(model, [pack(samples)])[0], logprobs) < 1e-4
    for name, grad in grads_of(model).items():
        assert relative(grad, wanted[name]) < 2e-4, name
    assert any(is_vision_param(name) for name in grads_of(model))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_blocks_of_the_tower_computed_again_change_no_bit(kind: str, mode) -> None:
    models = [LocalModel(vision_twin(vision_model(kind))) for _ in range(2)]
    set_recompute(models[1]._decoder, mode)
    first, again = (run(model, [pack(mixed(kind))])[0] for model in models)
    assert torch.equal(first, again)
    one, two = map(grads_of, models)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_each_different_image_of_a_micro_batch_is_encoded_once() -> None:
    model = LocalModel(vision_twin(vision_model("qwen3_vl")))
    encoded: list[list[str]] = []
    tower = model._decoder.get_submodule("vision")
    tower.register_forward_pre_hook(lambda module, args: encoded.append([i.digest for i in args[0]]))
    for share in (False, True):
        run(model, [pack(mixed(), share=share)])
    assert [sorted(each) for each in encoded] == [sorted((A.digest, B.digest, C.digest))] * 2


def test_prompts_that_differ_in_the_image_alone_share_the_tokens_before_it_and_no_others() -> None:
    samples = group(0, A, 2)
    rows = pack([*samples, *swap(samples, C)], share=True)
    tokens = [len(s.tokens) - 1 for s in samples]
    before, prefix = samples[0].images[0].start, samples[0].images[0].end + 4
    alone = sum(tokens) - prefix
    assert len(rows.tokens_T) == 2 * alone - before
    assert rows.saved_tokens == 2 * prefix + before
    assert all((a.tokens == b.tokens).all() for a, b in zip(samples, swap(samples, C), strict=True))


def test_log_probs_depend_on_the_image() -> None:
    model = LocalModel(vision_twin(vision_model("qwen2_5_vl")))
    samples = group(0, A, 2)
    first, other = (run(model, [pack(each)])[0] for each in (samples, swap(samples, C)))
    assert (first - other).abs().min() > 1e-3


def test_a_sample_is_cut_behind_whole_images_and_none_is_trained_on() -> None:
    (late,) = [s for s in mixed() if len(s.images) == 3]
    rows = pack([late])
    assert rows.images is not None
    assert [placed.image.digest for placed in rows.images.images[0]] == [B.digest, A.digest]
    assert int(rows.tokens_T.shape[0]) == int(np.flatnonzero(late.mask)[-1])
    mask = late.mask.copy()
    mask[late.images[1].start + 1] = True
    with pytest.raises(MilesError, match=r"trajectory 5 of prompt 1 trains on the tokens of an image, from token"):
        pack([replace(late, mask=mask)])


def test_selected_and_unshared_samples_keep_their_images_and_log_probs() -> None:
    model = LocalModel(vision_twin(vision_model("qwen3_vl")))
    rows = pack(mixed(), share=True)
    assert rows.tree_nodes
    whole = run(model, [rows])[0]
    assert relative(run(model, [rows.unshare()])[0], whole) < 1e-5
    part, index_R = select_samples(rows, [1, 3, 5])
    assert relative(run(model, [part])[0], whole[index_R]) < 1e-5


def test_a_batch_without_images_is_computed_as_before_and_gives_the_tower_no_gradient() -> None:
    model = LocalModel(vision_twin(vision_model("qwen2_5_vl")))
    rows = pack([s for s in mixed() if not s.images])
    assert rows.images is None
    run(model, [rows])
    assert not any(is_vision_param(name) for name in grads_of(model))


def test_a_model_without_a_tower_refuses_images() -> None:
    from tests.train.small_trainer import model

    with pytest.raises(UsageError, match="family qwen3 takes none; use a vision-language model"):
        run(model(), [pack(mixed())])


# -- the trainer ------------------------------------------------------------------------------


def local(kind: str = "qwen3_vl", **how) -> LocalModel:
    return LocalModel(vision_twin(vision_model(kind)), **how)


def test_the_gradient_norm_of_a_supervised_step_is_that_of_transformers() -> None:
    samples = [replace(s, advantages=s.mask.astype(np.float32)) for s in mixed()]
    trainer = worker(local(), algo={"loss_type": "sft_loss"})
    found = step(trainer, samples).metrics["grad_norm"]
    model = vision_model("qwen3_vl")
    losses = []
    for each in samples:
        logits_TV = hf_vision_logits(model, [Prompt(each.tokens.astype(np.int64), each.images)])
        trained = torch.from_numpy(np.flatnonzero(each.mask))
        logp_TV = torch.log_softmax(logits_TV, -1)
        losses.append(-logp_TV[trained - 1, torch.from_numpy(each.tokens.astype(np.int64))[trained]].mean())
    torch.stack(losses).mean().backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    assert found == pytest.approx(float(torch.stack(norms).norm()), rel=1e-4)


@pytest.mark.parametrize(
    ("tower", "projector"), [(True, False), (False, True), (True, True)], ids=["tower", "projector", "both"]
)
def test_frozen_parts_do_not_move_and_all_others_do(tower: bool, projector: bool) -> None:
    trainer = worker(local(frozen_vision=FrozenVision(tower=tower, projector=projector)))
    before = weights(trainer)
    step(trainer, mixed())
    for name, value in weights(trainer).items():
        frozen = is_vision_param(name) and (projector if is_projector_param(name) else tower)
        assert torch.equal(value, before[name]) == frozen, name


def test_the_tower_has_a_learning_rate_of_its_own() -> None:
    plain, slow, still = (worker(local(), train={"vision_lr": lr}) for lr in (None, 1e-3, 0.0))
    before = weights(plain)
    for trainer in (plain, slow, still):
        step(trainer, mixed())
    after = [weights(trainer) for trainer in (plain, slow, still)]
    moved = {name: [float((each[name] - old).abs().max()) for each in after] for name, old in before.items()}
    for name, (fast, tenth, none) in moved.items():
        if is_vision_param(name):
            assert none == 0 and tenth == pytest.approx(fast / 10, rel=0.05, abs=1e-6), name
        else:
            assert fast == tenth == none > 0, name


def test_a_run_is_taken_up_again_to_the_bit(tmp_path: Path) -> None:
    one, two = (worker(local(), train={"share_prefix": True, "vision_lr": 2e-3}) for _ in range(2))
    step(one, mixed(), 0)
    asyncio.run(one.save(tmp_path))
    asyncio.run(two.load(tmp_path))
    for number in (1, 2):
        assert step(one, mixed(), number).metrics == step(two, mixed(), number).metrics
    assert distance(weights(one), weights(two)) == 0.0


def test_reference_and_critic_see_the_images() -> None:
    model = LocalCritic(vision_twin(vision_model("qwen3_vl")))
    with torch.no_grad():
        model.parameters()["value_head.weight"].fill_(0.1)
    critic = Critic(model, algo=AlgoConfig(), train=TrainConfig(), updates=1)
    own, other = (critic.values([pack(group(0, each, 2), share=True)])[0] for each in (A, C))
    assert (own - other).abs().min() > 1e-4
    trainer = worker(local(), algo={"use_kl_loss": True, "kl_loss_coef": 0.1}, reference=local(frozen=True))
    metrics = step(trainer, mixed()).metrics
    # The reference is the policy: with the same images, both have the same log-probs.
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-9)


def test_log_probs_of_exact_numerics_do_not_depend_on_packing_sharing_or_batch_mates() -> None:
    model = LocalModel(vision_twin(vision_model("qwen3_vl"), numerics=BATCH_INVARIANT))
    samples = mixed()
    alone = torch.cat([run(model, [pack(samples, [i])])[0] for i in range(len(samples))])
    for rows in (pack(samples), pack(samples, share=True)):
        assert torch.equal(run(model, [rows])[0], alone)


@pytest.mark.parametrize("train", [{"optimizer": "muon"}, {"optimizer_state_dtype": "int8"}], ids=["muon", "int8"])
def test_other_optimizers_move_the_tower_too(train: dict[str, str]) -> None:
    trainer = worker(local(), train=train)
    before = weights(trainer)
    step(trainer, mixed())
    assert all(not torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_engines_get_the_tower_under_its_own_names() -> None:
    decoder = vision_twin(vision_model("qwen3_vl"))
    published = weights(worker(LocalModel(decoder)))
    assert published.keys() == dict(decoder.named_parameters()).keys()
    assert sum(map(is_vision_param, published)) == len(list(decoder.get_submodule("vision").parameters()))


def test_patches_of_a_micro_batch_are_limited() -> None:
    alone, together = (
        step(worker(local(), train={"max_patches_per_gpu": limit}, patches_per_feature=4), mixed()).metrics
        for limit in (32, None)
    )
    assert together["micro_batches"] == 1
    # A and C have 24 patches each, B has 8.
    assert alone["micro_batches"] == 2


@pytest.mark.parametrize("kind", ("qwen2_5_vl", "qwen3_vl"))
def test_a_teacher_in_the_trainer_sees_the_images(kind: str) -> None:
    teacher_hf = vision_model(kind)
    with torch.no_grad():
        for parameter in teacher_hf.parameters():
            parameter.mul_(1.1)
    teacher = LocalModel(vision_twin(teacher_hf), frozen=True)
    found = []
    for samples in (group(0, A, 1), swap(group(0, A, 1), C)):
        trainer = worker(LocalModel(vision_twin(vision_model(kind))), algo=DISTILL, teachers=[teacher])
        found.append(step(trainer, samples).metrics["teacher_logp"])
        _, logp_R = expected(teacher_hf, samples)
        assert found[-1] == pytest.approx(float(logp_R.mean()), abs=1e-4)
    assert found[0] != pytest.approx(found[1], abs=1e-3)
