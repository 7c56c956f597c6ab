import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.train.small_trainer import sample

from miles.algo.loss_aggregation import mean_per_token, mean_per_trajectory
from miles.core.types import Sample
from miles.train.batch_tensors import flatten_batch, group_by_trajectory, pack_micro_batch

CPU = torch.device("cpu")


@st.composite
def batches(draw):
    """Trajectories of one or two branches with any mask that leaves the first token alone."""
    out: list[Sample] = []
    for number in range(draw(st.integers(1, 6))):
        share = draw(st.integers(1, 2))
        for _ in range(share):
            mask = [False, *draw(st.lists(st.booleans(), min_size=0, max_size=8))]
            n = len(mask)
            draws = [draw(st.integers(0, 30)) for _ in range(n)]
            out.append(
                Sample(
                    prompt_id=0,
                    trajectory=number,
                    samples_per_trajectory=share,
                    tokens=np.array(draws, np.int32),
                    mask=np.array(mask),
                    logprobs=-np.arange(n, dtype=np.float32),
                    advantages=np.arange(n, dtype=np.float32) / 8,
                    versions=np.arange(n, dtype=np.int32),
                )
            )
    return out


@given(batches(), st.sampled_from([mean_per_token, mean_per_trajectory]))
def test_every_trained_token_is_predicted_once_by_the_token_before_it(samples, reducer):
    flat = flatten_batch(group_by_trajectory(samples), reducer)
    chosen = [i for i, n in enumerate(flat.length_S.tolist()) if n]
    if not chosen:
        assert not any(s.mask.any() for s in samples)
        return
    rows = pack_micro_batch(flat, chosen[::-1], device=CPU, replay=False)
    assert sum(rows.lengths) == len(rows.tokens_T) == len(rows.positions_T)
    expected = [
        (s.tokens[j - 1], j - 1, s.tokens[j], s.logprobs[j], s.advantages[j], s.oldest_version)
        for i in chosen[::-1]
        for s in [samples[i]]
        for j in np.flatnonzero(s.mask)
    ]
    found = zip(
        rows.tokens_T[rows.before_R].tolist(),
        rows.positions_T[rows.before_R].tolist(),
        rows.target_R.tolist(),
        rows.engine_logp_R.tolist(),
        rows.advantage_R.tolist(),
        rows.oldest_R.tolist(),
        strict=True,
    )
    assert list(found) == expected
    filled = sum(any(s.mask.any() for s in whole) for whole in group_by_trajectory(samples))
    whole = len(group_by_trajectory(samples)) if reducer is mean_per_trajectory else filled
    assert float(rows.weight_R.sum()) == pytest.approx(filled / whole, rel=1e-5)


def test_a_trajectory_torn_apart_is_our_own_mistake():
    rng = np.random.default_rng(0)
    with pytest.raises(AssertionError, match="not contiguous"):
        group_by_trajectory([sample(rng, share=2), sample(rng, trajectory=1)])


def test_two_visits_to_one_prompt_in_a_batch_stay_two_trajectories():
    rng = np.random.default_rng(0)
    assert len(group_by_trajectory([sample(rng), sample(rng)])) == 2


def test_the_engines_none_is_left_to_the_router_and_so_is_a_sample_without_a_record():
    rng = np.random.default_rng(0)
    known = np.full((7, 1, 2), 255, np.uint8)
    known[3:6] = [4, 2]
    samples = [sample(rng, routed_experts=known), sample(rng, prompt=1, reply=2, trajectory=1)]
    flat = flatten_batch(group_by_trajectory(samples), mean_per_trajectory)
    replay = pack_micro_batch(flat, [0, 1], device=CPU, replay=True).replay_TLk
    assert replay is not None
    assert replay[:, 0].tolist() == [[-1, -1]] * 3 + [[4, 2]] * 3 + [[-1, -1]] * 2
    assert pack_micro_batch(flat, [1], device=CPU, replay=True).replay_TLk is None
    assert pack_micro_batch(flat, [0, 1], device=CPU, replay=False).replay_TLk is None
