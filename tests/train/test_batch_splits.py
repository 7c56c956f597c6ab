"""However a batch is cut, ordered, padded or shared out, loss and gradient are the same, for every objective.

A token's id is its place in a table of log-probs, so that the gradient can be read off the table.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.algo.config import AlgoConfig
from miles.algo.policy_loss import LossInputs
from miles.algo.registry import ALGORITHMS, build_loss, build_reducer, select_metric_reducer
from miles.core.types import Sample
from miles.train.batch_tensors import FlatBatch, flatten_batch, pack_micro_batch

CPU = torch.device("cpu")
EXTRA = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "entropy_coef": 0.1}
ALGOS = [
    *({"advantage_estimator": name} for name in ALGORITHMS),
    EXTRA | {"advantage_estimator": "gspo", "calculate_per_token_loss": True, "use_unbiased_kl": True},
    EXTRA | {"advantage_estimator": "cispo", "constant_loss_length": 7, "use_opsm": True, "opsm_delta": 0.1},
    EXTRA | {"eps_clip_c": 1.5, "use_tis": True, "tis_level": "sequence", "use_opsm": True},
    {"use_tis": True, "tis_mode": "mask", "tis_level": "geometric", "use_rs": True, "rs_veto_threshold": 0.3},
    {"loss_type": "sft_loss"},
]


@st.composite
def worlds(draw):
    """Trajectories of one to three branches with trained tokens anywhere, some with none at all."""
    chance = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    out: list[list[Sample]] = []
    size = 0
    for number in range(draw(st.integers(1, 5))):
        whole: list[Sample] = []
        share = draw(st.integers(1, 3))
        for _ in range(share):
            n = draw(st.integers(1, 7))
            mask = np.concatenate([[False], chance.random(n) < 0.6])
            whole.append(row(mask, size, chance, number, share))
            size += n + 1
        out.append(whole)
    return out, size


def row(mask, first, chance, number, share):
    n = len(mask)
    return Sample(
        prompt_id=0,
        trajectory=number,
        samples_per_trajectory=share,
        tokens=np.arange(first, first + n, dtype=np.int32),
        mask=mask,
        logprobs=np.where(mask, -chance.random(n), 0).astype(np.float32),
        advantages=np.where(mask, chance.normal(), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )


class Judge:
    """An objective over a table of log-probs."""

    def __init__(self, algo, size, seed=0):
        self.config = AlgoConfig(**algo)
        self.objective = build_loss(self.config)
        chance = torch.Generator().manual_seed(seed)
        self.now, self.old, self.ref, self.entropy = (
            -torch.rand(size, generator=chance, dtype=torch.float64) for _ in range(4)
        )

    def flat(self, trajectories) -> FlatBatch:
        return flatten_batch(trajectories, build_reducer(self.config), select_metric_reducer(self.config))

    def __call__(self, flat: FlatBatch, cuts):
        """Loss, gradient and metrics of a global batch, added up over micro-batches."""
        logp, entropy = self.now.clone().requires_grad_(), self.entropy.clone().requires_grad_()
        loss, metrics = torch.zeros((), dtype=torch.float64), {}
        for chosen in cuts:
            rows = pack_micro_batch(flat, chosen, device=CPU, replay=False)
            seen = LossInputs(
                logp_R=logp[rows.target_R],
                old_logp_R=self.old[rows.target_R],
                engine_logp_R=rows.engine_logp_R.double(),
                advantage_R=rows.advantage_R.double(),
                entropy_R=entropy[rows.target_R],
                sample_R=rows.sample_R,
                samples=len(rows.lengths),
                ref_logp_R=self.ref[rows.target_R],
            )
            terms = self.objective(seen, rows.aggregator())
            loss = loss + terms.loss
            for name, part in terms.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + part.item()
        grads = torch.autograd.grad(loss, (logp, entropy), allow_unused=True) if cuts else ()
        return metrics, [torch.zeros_like(logp) if g is None else g for g in grads]


def same(a, b):
    assert a[0].keys() == b[0].keys()
    for name, value in a[0].items():
        assert value == pytest.approx(b[0][name], rel=1e-6, abs=1e-9), name
    for mine, theirs in zip(a[1], b[1], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-9)


def kept(flat: FlatBatch) -> list[int]:
    return np.flatnonzero(flat.length_S).tolist()


@given(worlds(), st.sampled_from(ALGOS), st.data())
def test_a_batch_may_be_cut_into_micro_batches_and_shared_out_anyhow(world, algo, data):
    trajectories, size = world
    judge = Judge(algo, size)
    flat = judge.flat(trajectories)
    left = data.draw(st.permutations(kept(flat)))
    cuts = []
    while left:
        count = data.draw(st.integers(1, len(left)))
        cuts.append(left[:count])
        left = left[count:]
    same(judge(flat, cuts), judge(flat, [kept(flat)] if kept(flat) else []))


@given(worlds(), st.sampled_from(ALGOS), st.randoms())
def test_the_order_of_trajectories_and_of_their_branches_does_not_matter(world, algo, chance):
    trajectories, size = world
    judge = Judge(algo, size)
    mixed = [chance.sample(whole, len(whole)) for whole in chance.sample(trajectories, len(trajectories))]
    one, other = judge.flat(trajectories), judge.flat(mixed)
    same(judge(one, [kept(one)] if kept(one) else []), judge(other, [kept(other)] if kept(other) else []))


@given(worlds(), st.sampled_from(ALGOS), st.integers(1, 5))
def test_tokens_that_are_not_trained_on_change_nothing(world, algo, more):
    trajectories, size = world
    judge = Judge(algo, size)

    def padded(s: Sample) -> Sample:
        tail = np.zeros(more)
        return Sample(
            prompt_id=s.prompt_id,
            trajectory=s.trajectory,
            samples_per_trajectory=s.samples_per_trajectory,
            tokens=np.concatenate([s.tokens, np.zeros(more, np.int32)]),
            mask=np.concatenate([s.mask, tail.astype(bool)]),
            logprobs=np.concatenate([s.logprobs, tail.astype(np.float32)]),
            advantages=np.concatenate([s.advantages, tail.astype(np.float32)]),
            versions=np.concatenate([s.versions, np.full(more, -1, np.int32)]),
        )

    one, other = judge.flat(trajectories), judge.flat([[padded(s) for s in whole] for whole in trajectories])
    same(judge(one, [kept(one)] if kept(one) else []), judge(other, [kept(other)] if kept(other) else []))


def test_several_samples_of_a_trajectory_share_one_denominator():
    chance = np.random.default_rng(0)
    branches = [
        row(np.array([False, True]), 0, chance, 0, 2),
        row(np.array([False, True, True, True]), 2, chance, 0, 2),
    ]
    other = [row(np.array([False, True, True]), 6, chance, 1, 1)]
    expected = {
        "plain": [1 / 8, 1 / 8, 1 / 4],  # four tokens between the two branches, two in the other trajectory
        "token": [1 / 6, 1 / 6, 1 / 6],
        "constant": [1 / 20, 1 / 20, 1 / 20],  # two trajectories, ten tokens each whatever they have
    }
    knobs = {"plain": {}, "token": {"calculate_per_token_loss": True}, "constant": {"constant_loss_length": 10}}
    for name, weights in expected.items():
        assert Judge(knobs[name], 9).flat([branches, other]).weight_S.tolist() == pytest.approx(weights)
