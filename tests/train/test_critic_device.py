"""A critic on a device of its own: batches go there, values come back, and it is never offloaded."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.fsdp.test_local_critic import critic as value_model
from tests.train.small_trainer import EPS, distance, model, ragged, step, weights, worker
from tests.train.test_critic import PPO, TRAIN, ppo, replace_version, talks

from miles.algo.config import AlgoConfig
from miles.algo.loss_aggregation import mean_per_trajectory
from miles.core.token_fields import TEACHER_LOGPROB
from miles.train.advantages import BatchWithAdvantages
from miles.train.batch_tensors import flatten_batch, pack_micro_batch
from miles.train.config import TrainConfig
from miles.train.critic import Critic
from miles.train.model_protocols import run_values
from miles.train.optim.optimizer import full_grad_norm

META = torch.device("meta")


def rows(**extras):
    samples = ragged(4, **extras)
    return pack_micro_batch(
        flatten_batch([[s] for s in samples], mean_per_trajectory),
        [0, 1, 2, 3],
        device=torch.device("cpu"),
        replay=False,
    )


class Elsewhere:
    """A value model that says it is on another device, and looks at where what it is given lies."""

    def __init__(self):
        self.device = META
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = []

    def parameters(self):
        return {"weight": self.weight}

    def in_use(self):
        return nullcontext()

    def finalize_grads(self):
        pass

    def after_update(self):
        pass

    def norm(self, grads):
        return full_grad_norm(grads)

    def forward_backward_values(self, micro_batches, callback):
        return run_values(self.values, micro_batches, callback)

    def values(self, tokens_T, positions_T, lengths, at_R, images=None):
        self.seen += [tokens_T.device, positions_T.device, at_R.device]
        return self.weight.expand(len(at_R)).clone()

    def move(self, device):
        raise AssertionError("it has a device of its own")


def critic(value, **how):
    return Critic(value, algo=AlgoConfig(**PPO), train=TrainConfig(lr=1e-2, adam_eps=EPS), updates=10, **how)


def test_rows_are_moved_whole_and_only_where_they_are_not_there_yet():
    packed = rows()
    assert packed.to(torch.device("cpu")) is packed
    moved = packed.to(META)
    for name in ("tokens_T", "positions_T", "before_R", "target_R", "advantage_R", "weight_R", "sample_R", "trained_B"):
        there, here = getattr(moved, name), getattr(packed, name)
        assert there.device == META and here.device.type == "cpu" and there.shape == here.shape
    assert moved.lengths == packed.lengths and moved.aggregator().weight_R.device == META
    reported = [replace_extras(s) for s in ragged(2)]
    carried = pack_micro_batch(
        flatten_batch([[s] for s in reported], mean_per_trajectory), [0, 1], device=torch.device("cpu"), replay=False
    )
    assert carried.teacher_logprobs is not None and carried.to(META).teacher_logprobs.logp_R.device == META


def replace_extras(sample):
    return replace(sample, extras={TEACHER_LOGPROB: np.zeros(len(sample), np.float32)})


def test_what_the_critic_reads_is_on_its_device_and_what_it_says_is_where_the_rows_are():
    value, packed = Elsewhere(), rows()
    (said,) = critic(value, dedicated_device=True).values([packed])
    assert set(value.seen) == {META} and said.device.type == "cpu" and len(said) == len(packed.target_R)


def test_an_update_takes_everything_to_the_critics_device():
    value, packed = Elsewhere(), rows()
    zeros = torch.zeros(len(packed.target_R))
    judged = BatchWithAdvantages(micro_batch=packed, value_R=zeros, return_R=zeros)
    with pytest.raises((RuntimeError, NotImplementedError)):  # numbers cannot be read off a device that holds none
        critic(value, dedicated_device=True).update([judged])
    assert set(value.seen) == {META}


def test_a_critic_that_shares_moves_with_the_policys_optimizer_and_one_apart_stays():
    for apart in (False, True):
        value, _ = value_model(seed=7)
        mine, moved = critic(value, dedicated_device=apart), []
        mine.move = moved.append
        trainer = worker(model(), algo=PPO, train=TRAIN, critic=mine)
        trainer._move(torch.device("cpu"))
        assert bool(moved) is not apart


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here")
def test_a_critic_on_the_host_beside_a_policy_on_the_accelerator_is_the_same_critic():
    def run(actor_on, critic_on):
        value, _ = value_model(seed=7, device=critic_on)
        own = Critic(
            value,
            algo=AlgoConfig(**PPO),
            train=TrainConfig(**TRAIN),
            updates=10,
            dedicated_device=actor_on != critic_on,
        )
        trainer = worker(model(device=actor_on), algo=PPO, train=TRAIN, critic=own)
        for n in range(3):
            step(trainer, [replace_version(s, n) for s in talks()], n)
            asyncio.run(trainer.sleep())
            assert value.device.type == (critic_on if own.apart else "cpu")
            asyncio.run(trainer.wake())
        return {n: w.cpu() for n, w in weights(trainer).items()}, {n: p.cpu() for n, p in value.parameters().items()}

    here, (mixed, values), there = run("cpu", "cpu"), run("cuda", "cpu"), run("cuda", "cuda")
    assert distance(here[0], mixed) < 1e-3 and distance(here[1], values) < 1e-3
    assert distance(there[0], mixed) < 1e-3 and distance(there[1], values) < 1e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two accelerators here")
def test_a_critic_on_another_accelerator_is_the_same_critic():
    (one, value), other = ppo(model(device="cuda:0"), device="cuda:0"), value_model(seed=7, device="cuda:1")[0]
    own = Critic(
        other,
        algo=AlgoConfig(**PPO),
        train=TrainConfig(**TRAIN | {"critic_lr": 2e-2}),
        updates=10,
        dedicated_device=True,
    )
    two = worker(model(device="cuda:0"), algo=PPO, train=TRAIN | {"critic_lr": 2e-2}, critic=own)
    for trainer in (one, two):
        step(trainer, talks())
    assert distance(weights(one), weights(two)) < 1e-5
    assert distance(value.parameters(), {n: p.to("cuda:0") for n, p in other.parameters().items()}) < 1e-5
