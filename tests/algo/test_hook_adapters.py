"""Upstream's losses, corrections and reducers give what ours give."""

import pytest
import torch
from tests.hooks.test_upstream import the_run
from tests.hooks.upstream_style import losses

from miles.algo.hook_adapters import adapt_correction, adapt_loss, adapt_reducer
from miles.algo.loss_aggregation import ConstantLengthReducer, WeightedAggregator, mean_per_trajectory
from miles.algo.policy_loss import ClipRange, LossInputs, PolicyLoss, k3
from miles.core.errors import HookError

RUN = the_run(eps_clip=0.2, eps_clip_high=0.3, tis_clip=1.2, tis_clip_low=0.5)


def inputs() -> LossInputs:
    generator = torch.Generator().manual_seed(3)
    logp, old, engine, advantage, entropy = torch.randn((5, 7), generator=generator).unbind()
    return LossInputs(
        logp_R=logp.clone().requires_grad_(),
        old_logp_R=old,
        engine_logp_R=engine,
        advantage_R=advantage,
        entropy_R=entropy.abs(),
        sample_R=torch.tensor([0, 0, 0, 1, 2, 2, 2]),
        samples=3,
    )


def aggregator() -> WeightedAggregator:
    counts = torch.tensor([3, 1, 3])
    weight = torch.tensor([1 / 9] * 3 + [1 / 3] + [1 / 9] * 3)
    return WeightedAggregator(weight_R=weight, sample_R=inputs().sample_R, trained_S=counts)


def test_a_clipped_loss_of_upstreams_is_ours_with_its_gradient():
    theirs, ours = adapt_loss(losses.clipped_loss, RUN), PolicyLoss(clip=ClipRange(low=0.2, high=0.3), kl_estimator=k3)
    results = []
    for loss_fn in (theirs, ours):
        given = inputs()
        output = loss_fn(given, aggregator())
        output.loss.backward()
        results.append((output, given.logp_R.grad))
    (one, one_grad), (other, other_grad) = results
    torch.testing.assert_close(one.loss, other.loss)
    torch.testing.assert_close(one_grad, other_grad)
    torch.testing.assert_close(one.metrics["mine_clipfrac"], other.metrics["pg_clipfrac"])


def test_a_correction_of_upstreams_weights_each_token():
    given = inputs()
    weights = adapt_correction(losses.truncated, RUN)(given, aggregator())
    ratio = (given.old_logp_R - given.engine_logp_R).exp()
    torch.testing.assert_close(weights.weight_R, ratio.clamp(0.5, 1.2))
    torch.testing.assert_close(weights.metrics["mine_tis"], aggregator().mean(ratio))


def test_masked_tokens_have_no_weight():
    def first_only(args, *, pg_loss, loss_masks):
        return pg_loss, [mask * (number == 0) for number, mask in enumerate(loss_masks)], {"kept": 0.5}

    weights = adapt_correction(first_only, RUN)(inputs(), aggregator())
    assert weights.weight_R.tolist() == [1.0] * 3 + [0.0] * 4 and float(weights.metrics["kept"]) == pytest.approx(0.5)


def test_a_reducer_of_upstreams_gives_the_weight_of_each_token():
    constant = adapt_reducer(losses.get_pg_loss_reducer, RUN)
    assert constant([1, 4, 0]).tolist() == pytest.approx([*ConstantLengthReducer(length=10)([1, 4]) * 2 / 3, 0.0])

    def mean(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
        return lambda x: sum(
            (p * m).sum() / m.sum() for p, m in zip(x.split(response_lengths), loss_masks, strict=True)
        )

    assert adapt_reducer(mean, RUN)([1, 4]).tolist() == pytest.approx(mean_per_trajectory([1, 4]).tolist())

    def last_only(total_lengths, response_lengths, loss_masks):
        return lambda x: x[-1]

    with pytest.raises(HookError, match="weights the tokens of one sample differently"):
        adapt_reducer(last_only, RUN)([1, 4])


def test_what_a_loss_cannot_read_is_named():
    def of_logits(args, batch, logits, sum_of_sample_mean):
        return logits.softmax(-1), {}

    def of_values(args, batch, logits, sum_of_sample_mean):
        return batch["values"], {}

    with pytest.raises(HookError, match=r"logits\.softmax, and logits are not kept as one tensor"):
        adapt_loss(of_logits, RUN)(inputs(), aggregator())
    with pytest.raises(HookError, match=r"'values'.*there are advantages, log_probs"):
        adapt_loss(of_values, RUN)(inputs(), aggregator())
    with pytest.raises(HookError, match="--context-parallel-size splits them"):
        adapt_loss(of_logits, the_run(context_parallel_size=2))
