"""PPO and REINFORCE++ steps against plain transformers and torch.optim.AdamW, and against themselves."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.fsdp.test_local_critic import critic as value_model
from tests.train.small_trainer import DENSE, EPS, distance, model, named, ragged, sample, step, twin, weights, worker

from miles.algo.config import AlgoConfig
from miles.core.errors import CheckpointError, MilesError, ParityError, UsageError
from miles.train.config import TrainConfig
from miles.train.critic import Critic

PPO = {"advantage_estimator": "ppo", "gamma": 0.97, "lambd": 0.9}
TRAIN = {"lr": 1e-2, "adam_eps": EPS}


def ppo(actor, *, algo=None, train=None, updates=10, seed=7, dtype=torch.float32, head=True, device="cpu", **more):
    """A worker with a critic, and the critic's model."""
    algo, train = PPO | (algo or {}), TRAIN | {"critic_lr": 2e-2} | (train or {})
    value, _ = value_model(seed=seed, dtype=dtype, head=head, device=device)
    critic = Critic(value, algo=AlgoConfig(**algo), train=TrainConfig(**train), updates=updates)
    return worker(actor, algo=algo, train=train, updates=updates, critic=critic, **more), value


def talks(count=6, seed=0):
    """Trajectories in which the environment speaks in between; of one length, mask and worth each its own."""
    rng = np.random.default_rng(seed)
    out = []
    for number in range(count):
        s = sample(rng, prompt=int(rng.integers(1, 4)), reply=8, advantage=float(rng.integers(0, 3)), trajectory=number)
        env = rng.random(len(s)) < 0.3
        env[-1] = env[-1] and number % 2 == 0  # every other one ends with the environment's word
        mask = s.mask & ~env
        mask[s.mask.argmax()] = True
        parts = {"mask": mask, "advantages": s.advantages * mask, "logprobs": s.logprobs * mask}
        out.append(replace(s, **parts, versions=np.where(mask, 0, -1).astype(np.int32)))
    return tuple(out)


def gae(reward, value, gamma, lambd):
    """The plain loop, in float64."""
    out, carry, after = np.zeros(len(value)), 0.0, 0.0
    for t in reversed(range(len(value))):
        out[t] = carry = reward[t] + gamma * after - value[t] + gamma * lambd * carry
        after = value[t]
    return out


def theirs_logp(reference, s):
    tokens = torch.from_numpy(s.tokens.astype(np.int64))
    at = torch.from_numpy(np.flatnonzero(s.mask))
    return torch.log_softmax(reference(tokens[None]).logits[0], -1)[at - 1].gather(1, tokens[at][:, None])[:, 0]


def theirs_value(reference, head, s):
    tokens = torch.from_numpy(s.tokens.astype(np.int64))
    at = torch.from_numpy(np.flatnonzero(s.mask))
    return head(reference.model(tokens[None]).last_hidden_state[0])[at - 1, 0]


def head_of(value):
    live = value.parameters()
    head = torch.nn.Linear(16, 1)
    head.load_state_dict({n: live[f"value_head.{n}"].detach().clone() for n in ("weight", "bias")})
    return head


def adam(modules, lr):
    every = [p for m in modules for p in m.parameters()]
    groups = [{"params": [p for p in every if p.ndim >= 2], "weight_decay": 0.01}]
    groups += [{"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, eps=EPS), every


def descend(optimizer, every, loss):
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(every, 1.0)
    optimizer.step()
    return float(norm)


def earned(samples, kls, kl_coef):
    """What each token of each sample earns."""
    out = [-kl_coef * kl for kl in kls]
    for reward, s in zip(out, samples, strict=True):
        reward[-1] += s.advantages[s.mask][-1]
    return out


def white(worths):
    every = np.concatenate(worths)
    return [(w - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8) for w in worths]


def theirs_losses(policy, trunk, head, parts):
    """Both losses of one global batch of three samples, whose policy ratio and values started at what ``parts`` say."""
    policy_loss, value_loss = torch.zeros(()), torch.zeros(())
    for s, old, worth, before, came in parts:
        ratio, worth_R = (theirs_logp(policy, s) - old).exp(), torch.from_numpy(worth).float()
        policy_loss = policy_loss - torch.min(ratio * worth_R, ratio.clamp(0.8, 1.2) * worth_R).mean() / 3
        now = theirs_value(trunk, head, s)
        held = before + (now - before).clamp(-0.05, 0.05)
        value_loss = value_loss + torch.maximum((now - came) ** 2, (held - came) ** 2).mean() / 3
    return policy_loss, value_loss


@pytest.mark.parametrize("budget", [16384, 30])
@pytest.mark.parametrize("whitened", [False, True])
def test_a_whole_ppo_step_is_its_transformers_twin(tmp_path, budget, whitened):
    actor, frozen, samples = model(), model(seed=5, frozen=True), talks()
    knobs = {"kl_coef": 0.05, "kl_loss_type": "k3", "normalize_advantages": whitened, "value_clip": 0.05}
    trainer, value = ppo(actor, algo=knobs, train={"max_tokens_per_gpu": budget}, reference=frozen, steps=2)
    policy, base = twin(actor, tmp_path / "a"), twin(frozen, tmp_path / "b")
    trunk, head = twin(value, tmp_path / "c"), head_of(value)
    found = step(trainer, samples).metrics

    with torch.no_grad():
        olds = [theirs_logp(policy, s) for s in samples]
        refs = [theirs_logp(base, s) for s in samples]
        values = [theirs_value(trunk, head, s) for s in samples]
    kls = [((r - o).exp() - (r - o) - 1).double().numpy() for o, r in zip(olds, refs, strict=True)]
    rewards = earned(samples, kls, 0.05)
    worths = [gae(r, v.double().numpy(), 0.97, 0.9) for r, v in zip(rewards, values, strict=True)]
    comes = [torch.from_numpy(w).float() + v for w, v in zip(worths, values, strict=True)]
    worths = white(worths) if whitened else worths
    parts = list(zip(samples, olds, worths, values, comes, strict=True))
    policy_adam, critic_adam = adam([policy], 1e-2), adam([trunk.model, head], 2e-2)
    losses = []
    for half in (parts[:3], parts[3:]):
        pair = theirs_losses(policy, trunk, head, half)
        losses.append([x.item() for x in pair])
        descend(*policy_adam, pair[0])
        descend(*critic_adam, pair[1])
    came, reported = torch.cat(comes), torch.cat(values)
    assert [found["pg_loss"], found["value_loss"]] == pytest.approx(np.mean(losses, 0).tolist(), rel=1e-4)
    assert found["reward_kl"] == pytest.approx(np.concatenate(kls).mean(), rel=1e-4)
    assert [found["return_mean"], found["value_mean"]] == pytest.approx(
        [came.mean().item(), reported.mean().item()], rel=1e-4
    )
    assert found["return_std"] == pytest.approx(came.std(correction=0).item(), rel=1e-4)
    assert found["explained_variance"] == pytest.approx(1 - ((came - reported).var() / came.var()).item(), abs=1e-4)
    assert found["critic_lr"] == 2e-2 and found["lr"] == 1e-2
    assert found["advantage_mean"] == pytest.approx(np.concatenate(worths).mean(), abs=1e-5)
    assert distance(weights(trainer), named(policy, tmp_path / "a")) < 1e-5
    theirs = named(trunk, tmp_path / "c") | {f"value_head.{name}": p for name, p in head.named_parameters()}
    assert distance(value.parameters(), theirs) < 1e-5


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_reinforce_plus_plus_is_the_policy_gradient_of_whitened_returns(tmp_path, estimator):
    actor, frozen, samples = model(), model(seed=5, frozen=True), talks()
    policy, base = twin(actor, tmp_path / "a"), twin(frozen, tmp_path / "b")
    algo = {"advantage_estimator": estimator, "kl_coef": 0.1, "gamma": 0.9, "normalize_advantages": True}
    trainer = worker(actor, algo=algo, reference=frozen)
    report = step(trainer, samples)
    with torch.no_grad():
        olds = [theirs_logp(policy, s) for s in samples]
        kls = [(o - theirs_logp(base, s)).double().numpy() for o, s in zip(olds, samples, strict=True)]
    worths = [gae(r, 0 * r, 0.9, 1.0) for r in earned(samples, kls, 0.1)]
    loss = torch.zeros(())
    for s, old, worth in zip(samples, olds, white(worths), strict=True):
        ratio = (theirs_logp(policy, s) - old).exp()
        loss = loss - (ratio * torch.from_numpy(worth).float()).mean() / len(samples)
    norm = descend(*adam([policy], 1e-2), loss)
    assert report.metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert report.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert report.metrics["reward_kl"] == pytest.approx(np.concatenate(kls).mean(), abs=1e-6)
    assert report.metrics["return_mean"] == pytest.approx(np.concatenate(worths).mean(), abs=1e-5)
    assert report.metrics["advantage_mean"] == pytest.approx(0, abs=1e-6)
    assert distance(weights(trainer), named(policy, tmp_path / "a")) < 1e-5
    assert "kl" not in report.metrics and "value_loss" not in report.metrics


def test_a_charge_on_the_reward_and_a_term_in_the_loss_may_go_together():
    frozen = model(seed=5, frozen=True)
    algo = {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1, "normalize_advantages": True}
    algo |= {"use_kl_loss": True, "kl_loss_coef": 0.1, "calculate_per_token_loss": True}
    found = step(worker(model(), algo=algo, reference=frozen), talks()).metrics
    assert found["kl"] == pytest.approx(found["reward_kl"], rel=1e-4)
    assert found["loss"] == pytest.approx(found["pg_loss"] + 0.1 * found["kl"], rel=1e-5)


def test_any_estimator_may_be_whitened_over_the_batch():
    samples = ragged(6)
    plain, white = (step(worker(model(), algo={"normalize_advantages": on}), samples).metrics for on in (False, True))
    tokens = np.concatenate([s.advantages[s.mask] for s in samples])
    assert plain["advantage_mean"] == pytest.approx(tokens.mean()) and "return_mean" not in white
    assert white["advantage_mean"] == pytest.approx(0, abs=1e-6)
    assert white["advantage_std"] == pytest.approx(np.sqrt(1 - 1 / len(tokens)), rel=1e-5)


@pytest.mark.parametrize("cut", [{"max_tokens_per_gpu": 16}, {"micro_batch_size": 1}, {"micro_batch_size": 4}])
def test_a_batch_may_be_cut_anyhow(cut):
    """Also a trajectory that branched, and one of which nothing is trained."""
    rng = np.random.default_rng(3)
    branches = [sample(rng, reply=n, share=2, trajectory=90, advantage=2.0) for n in (3, 5)]
    samples = [*talks(8), *branches, sample(rng, reply=0, trajectory=91)]
    results = []
    for knobs in ({}, cut):
        algo = {"kl_coef": 0.05, "normalize_advantages": True}
        trainer, value = ppo(
            model(), algo=algo, train={"clip_grad": 0.0} | knobs, reference=model(seed=5, frozen=True), steps=2
        )
        found = step(trainer, samples).metrics
        results.append((found, weights(trainer), {n: p.detach().clone() for n, p in value.parameters().items()}))
    (whole, actor, critic), (parts, actor_parts, critic_parts) = results
    assert parts["micro_batches"] > whole["micro_batches"] == 2
    for name in whole.keys() - {"micro_batches"}:
        assert parts[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6), name
    assert distance(actor, actor_parts) < 1e-6 and distance(critic, critic_parts) < 1e-6


def test_at_first_only_the_critic_learns_and_then_both():
    trainer, value = ppo(
        model(), train={"num_critic_only_steps": 2, "lr_warmup_iters": 4, "critic_lr_warmup_iters": 2}, steps=2
    )
    before, first = weights(trainer), {n: p.detach().clone() for n, p in value.parameters().items()}
    seen = [step(trainer, [replace_version(s, n) for s in talks()], n + 1).metrics for n in range(2)]
    assert distance(before, weights(trainer)) == 0 and trainer.version.number == 2
    assert distance(first, value.parameters()) > 0
    assert all("loss" not in found and found["parity_tokens"] > 0 for found in seen)
    assert seen[1]["value_loss"] < seen[0]["value_loss"]
    third = step(trainer, [replace_version(s, 2) for s in talks()], 3).metrics
    assert distance(before, weights(trainer)) > 0 and {"loss", "lr", "grad_norm", "value_loss"} <= third.keys()
    assert third["lr"] == pytest.approx(1e-2 * 2 / 4), "the policy's schedule starts with the policy"


def replace_version(s, number):
    return replace(s, versions=np.where(s.mask, number, -1).astype(np.int32))


def test_while_the_policy_waits_a_drift_is_refused_all_the_same():
    trainer, value = ppo(model(), train={"num_critic_only_steps": 1}, parity_stop=1e-3)
    first = {n: p.detach().clone() for n, p in value.parameters().items()}
    with pytest.raises(ParityError):
        step(trainer, talks())
    assert distance(first, value.parameters()) == 0


def test_a_critic_learns_to_foresee_the_returns():
    trainer, _ = ppo(
        model(),
        head=False,
        updates=60,
        algo={"value_clip": 10.0, "gamma": 1.0, "lambd": 1.0},
        train={"num_critic_only_steps": 60, "adam_eps": 1e-8, "critic_lr": 3e-3},
    )
    samples = [replace_version(s, 0) for s in talks(8)]
    reported = [step(trainer, samples, n).metrics["explained_variance"] for n in range(60)]
    assert reported[0] == pytest.approx(0.0, abs=1e-6) and reported[-1] > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(tmp_path, dtype):
    def build(seed):
        train = {"lr_decay_style": "cosine", "critic_lr_warmup_iters": 3, "num_critic_only_steps": 1, "adam_eps": 1e-8}
        return ppo(model(dtype=dtype, seed=seed), seed=seed, dtype=dtype, train=train, steps=2, updates=12)

    (straight, one), (resumed, two) = build(0), build(99)
    for n in range(2):
        step(straight, [replace_version(s, n) for s in talks(seed=n)], n)
    asyncio.run(straight.save(tmp_path))
    asyncio.run(resumed.load(tmp_path))
    for n in range(2, 5):
        a, b = (step(trainer, [replace_version(s, n) for s in talks(seed=n)], n) for trainer in (straight, resumed))
        assert a.metrics == b.metrics and a.version == b.version
    assert all(torch.equal(weights(straight)[n], w) for n, w in weights(resumed).items())
    assert all(torch.equal(one.parameters()[n], p) for n, p in two.parameters().items())
    assert sorted(p.name for p in (tmp_path / "critic").glob("[!.]*")) == [
        "config.json",
        "model.safetensors",
        "optimizer.safetensors",
        "trainer.json",
        "value_head.safetensors",
    ]


def test_a_checkpoint_without_a_critic_is_refused_before_anything_changes(tmp_path):
    asyncio.run(worker(model()).save(tmp_path))
    trainer, _ = ppo(model(seed=3))
    before = weights(trainer)
    with pytest.raises(CheckpointError, match="has no critic"):
        asyncio.run(trainer.load(tmp_path))
    assert distance(before, weights(trainer)) == 0


def test_the_critic_is_never_published():
    trainer, _ = ppo(model())
    assert trainer.weights().keys() == model().parameters().keys()


@pytest.mark.parametrize("size", [float("inf"), 1e30])
def test_a_critic_that_explodes_says_which_rate_to_lower_before_anything_changes(size):
    trainer, value = ppo(model(), train={"num_critic_only_steps": 1})
    with torch.no_grad():
        value.parameters()["value_head.bias"].fill_(size)
    before, first = weights(trainer), {n: p.detach().clone() for n, p in value.parameters().items()}
    with pytest.raises(MilesError, match="--critic-lr"):
        step(trainer, talks())
    assert distance(before, weights(trainer)) == 0
    assert all(torch.equal(first[n], p) for n, p in value.parameters().items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sleeping_critic_leaves_the_accelerator_and_waking_goes_on(dtype):
    pairs = [ppo(model(dtype=dtype, device="cuda"), dtype=dtype, device="cuda") for _ in range(2)]
    (trainer, value), (other, same) = pairs
    for n in range(2):
        for one, _ in pairs:
            step(one, [replace_version(s, n) for s in talks()], n)
        asyncio.run(trainer.sleep())
        assert not any(p.is_cuda for p in value.parameters().values()) and value.device.type == "cpu"
        asyncio.run(trainer.wake())
        assert all(p.is_cuda for p in value.parameters().values())
    assert distance(weights(trainer), weights(other)) < 1e-3
    assert distance(value.parameters(), same.parameters()) < 1e-3


def test_a_charge_needs_a_reference():
    with pytest.raises(UsageError, match="--kl-coef needs a reference"):
        worker(model(), algo={"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1})


def test_the_parts_of_a_judged_step_are_timed():
    ticks = iter(range(10))
    trainer, _ = ppo(model(), clock=lambda: float(next(ticks)))
    assert step(trainer, talks()).seconds == {"pack": 1.0, "old_logprobs": 1.0, "returns": 1.0, "optimize": 1.0}
    assert DENSE["hidden_size"] == 16  # what head_of takes for granted
