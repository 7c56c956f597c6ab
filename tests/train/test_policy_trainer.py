"""The trainer against plain transformers training, and against itself however a batch is cut."""

import asyncio

import numpy as np
import pytest
import torch
from tests.train.small_trainer import EPS, MOE, distance, model, named, ragged, sample, step, twin, weights, worker

from miles.algo.config import AlgoConfig
from miles.core.errors import MilesError, ParityError, UsageError
from miles.core.types import Batch, Sample


def oracle_logprobs(reference, s: Sample, temperature=1.0):
    """Log-probs and entropies of a sample's trained tokens, one sequence at a time."""
    tokens = torch.from_numpy(s.tokens.astype(np.int64))
    logp = torch.log_softmax(reference(tokens[None]).logits[0].float() / temperature, -1)
    at = torch.from_numpy(np.flatnonzero(s.mask))
    rows = logp[at - 1]
    return rows.gather(1, tokens[at][:, None])[:, 0], -(rows.exp() * rows).sum(-1)


def oracle_step(reference, loss, *, lr=1e-2):
    matrices = [p for p in reference.parameters() if p.ndim >= 2]
    vectors = [p for p in reference.parameters() if p.ndim < 2]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}], lr=lr, eps=EPS
    )
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    adam.step()
    return float(norm)


def close(trainer, reference, folder):
    return distance(weights(trainer), named(reference, folder))


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("budget", [16384, 16])
def test_a_supervised_step_is_a_plain_transformers_step(tmp_path, per_token, budget):
    actor = model()
    reference = twin(actor, tmp_path)
    samples = [sample(np.random.default_rng(i), prompt=2 + i, reply=3 + i, trajectory=i, version=-1) for i in range(4)]
    trainer = worker(
        actor,
        temperature=0.7,  # of the engine, which wrote none of this
        algo={"loss_type": "sft_loss", "calculate_per_token_loss": per_token},
        train={"max_tokens_per_gpu": budget},
    )
    report = step(trainer, samples)
    losses = [-oracle_logprobs(reference, s)[0] for s in samples]
    loss = torch.cat(losses).mean() if per_token else torch.stack([x.mean() for x in losses]).mean()
    norm = oracle_step(reference, loss)
    assert report.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert report.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert close(trainer, reference, tmp_path) < 1e-5
    assert report.version.number == 1 and "parity_mean_abs" not in report.metrics


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_an_on_policy_step_is_the_plain_policy_gradient_in_transformers(tmp_path, temperature):
    actor = model()
    reference = twin(actor, tmp_path)
    samples = ragged(6)
    trainer = worker(actor, temperature=temperature, train={"max_tokens_per_gpu": 24})
    report = step(trainer, samples)
    pairs = [oracle_logprobs(reference, s, temperature) for s in samples]
    parts = [
        -(((logp - logp.detach()).exp()) * float(s.advantages[s.mask][0])).mean()
        for (logp, _), s in zip(pairs, samples, strict=True)
    ]
    loss = torch.stack(parts).mean()
    entropy = torch.stack([e.mean() for _, e in pairs]).mean()
    gaps = torch.cat(
        [torch.from_numpy(s.logprobs[s.mask]) - p.detach() for (p, _), s in zip(pairs, samples, strict=True)]
    )
    norm = oracle_step(reference, loss)
    found = report.metrics
    assert found["loss"] == found["pg_loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert found["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert found["entropy"] == pytest.approx(entropy.item(), rel=1e-5)
    assert found["parity_mean_abs"] == pytest.approx(gaps.abs().mean().item(), rel=1e-4)
    assert found["parity_max_abs"] == pytest.approx(gaps.abs().max().item(), rel=1e-4)
    assert found["parity_k1"] == pytest.approx(gaps.mean().item(), abs=1e-5)
    assert found["pg_clipfrac"] == 0 and found["ratio"] == pytest.approx(1.0)
    assert close(trainer, reference, tmp_path) < 1e-5


def test_a_full_objective_with_reference_kl_and_entropy_equals_its_transformers_twin(tmp_path):
    actor, frozen = model(), model(seed=5, frozen=True)
    theirs, base = twin(actor, tmp_path / "a"), twin(frozen, tmp_path / "b")
    samples = ragged(5)
    knobs = {
        "use_rollout_logprobs": True,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "k3",
        "entropy_coef": 0.01,
        "eps_clip": 0.05,
        "eps_clip_high": 0.1,
    }
    trainer = worker(actor, algo=knobs, reference=frozen, train={"max_tokens_per_gpu": 20})
    report = step(trainer, samples)
    total, kls = torch.zeros(()), []
    for s in samples:
        logp, entropy = oracle_logprobs(theirs, s)
        with torch.no_grad():
            ref, _ = oracle_logprobs(base, s)
        ratio = (logp - torch.from_numpy(s.logprobs[s.mask])).exp()
        worth = float(s.advantages[s.mask][0])
        surrogate = -torch.min(ratio * worth, ratio.clamp(0.95, 1.1) * worth)
        kl = (ref - logp).exp() - (ref - logp) - 1
        kls.append(kl.mean().item())
        total = total + (surrogate + 0.1 * kl - 0.01 * entropy).mean() / len(samples)
    oracle_step(theirs, total)
    assert report.metrics["loss"] == pytest.approx(total.item(), abs=1e-6)
    assert report.metrics["kl"] == pytest.approx(np.mean(kls), abs=1e-7)
    assert close(trainer, theirs, tmp_path / "a") < 1e-5
    assert all(p.grad is None for p in frozen.parameters().values())


def trained(samples, *, train=None, algo=None, **more):
    trainer = worker(model(), train={"clip_grad": 0.0} | (train or {}), algo=algo, **more)
    return step(trainer, samples).metrics, weights(trainer)


@pytest.mark.parametrize(
    "cut", [{"max_tokens_per_gpu": 16}, {"max_tokens_per_gpu": 33}, {"micro_batch_size": 1}, {"micro_batch_size": 3}]
)
@pytest.mark.parametrize("per_token", [False, True])
def test_a_batch_may_be_cut_anyhow(cut, per_token):
    samples = ragged(10)
    algo = {"calculate_per_token_loss": per_token, "entropy_coef": 0.1}
    whole, expected = trained(samples, algo=algo)
    parts, found = trained(samples, train=cut, algo=algo)
    assert parts["micro_batches"] > whole["micro_batches"] == 1
    for name in ("loss", "entropy", "grad_norm", "parity_mean_abs", "parity_max_abs"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6)
    assert distance(expected, found) < 1e-6


def test_the_order_of_samples_does_not_matter():
    samples = ragged(10)
    a, before = trained(samples)
    b, after = trained(samples[::-1])
    assert a["loss"] == pytest.approx(b["loss"], abs=1e-6) and distance(before, after) < 1e-6


def test_chunked_logits_and_recomputed_layers_change_nothing():
    samples = ragged(6)
    _, plain = trained(samples)
    _, chunked = trained(samples, train={"log_probs_chunk_size": 4})
    assert distance(plain, chunked) < 1e-6
    again = worker(model(gradient_checkpointing=True), train={"clip_grad": 0.0})
    step(again, samples)
    assert distance(plain, weights(again)) < 1e-6


def test_several_optimizer_steps_of_one_batch_take_the_ratio_against_the_weights_before_the_first(tmp_path):
    actor = model()
    reference = twin(actor, tmp_path)
    samples = ragged(6)
    trainer = worker(actor, steps=2, train={"clip_grad": 0.0, "weight_decay": 0.0})
    report = step(trainer, samples)
    with torch.no_grad():
        olds = [oracle_logprobs(reference, s)[0] for s in samples]
    adam = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=EPS, weight_decay=0.0)
    clipped = []
    for half in (slice(0, 3), slice(3, 6)):
        adam.zero_grad()
        parts = []
        for s, old in zip(samples[half], olds[half], strict=True):
            ratio = (oracle_logprobs(reference, s)[0] - old).exp()
            worth = float(s.advantages[s.mask][0])
            held = ratio.clamp(0.8, 1.2) * worth
            parts.append(-torch.min(ratio * worth, held).mean())
            clipped.append((held < ratio * worth).float().mean().item())
        torch.stack(parts).mean().backward()
        adam.step()
    assert close(trainer, reference, tmp_path) < 1e-5
    assert report.metrics["pg_clipfrac"] == pytest.approx(np.mean(clipped), abs=1e-6)
    assert report.version.number == 1


def test_branches_share_one_denominator():
    rng = np.random.default_rng(0)
    long, short = sample(rng, reply=6, share=2), sample(rng, reply=2, share=2)
    single = sample(rng, reply=5, trajectory=1)
    metrics, _ = trained([long, short, single], algo={"loss_type": "sft_loss"})
    actor = model()

    def nll(s):
        return step(worker(actor, algo={"loss_type": "sft_loss"}, train={"lr": 0.0}), [s]).metrics["loss"]

    rng = np.random.default_rng(0)
    long, short, single = sample(rng, reply=6), sample(rng, reply=2), sample(rng, reply=5)
    expected = ((6 * nll(long) + 2 * nll(short)) / 8 + nll(single)) / 2
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_sample_without_trained_tokens_adds_nothing_but_counts():
    samples = ragged(3)
    rng = np.random.default_rng(1)
    silent = sample(rng, prompt=4, reply=0, trajectory=9)
    without, _ = trained(samples, algo={"loss_type": "sft_loss"})
    with_it, _ = trained([*samples, silent], algo={"loss_type": "sft_loss"})
    assert with_it["loss"] == pytest.approx(without["loss"] * 3 / 4, rel=1e-5)
    alone, after = trained([silent])
    assert alone["grad_norm"] == 0 and distance(after, weights(worker(model()))) == 0


def test_tokens_of_older_weights_take_the_engines_logprobs_unless_told_otherwise():
    fresh, stale = ragged(4, version=0), ragged(4, version=-1)
    on, _ = trained(fresh)
    off, _ = trained(stale)
    assert on["ratio"] == pytest.approx(1.0) and off["ratio"] != pytest.approx(1.0, abs=1e-3)
    assert "parity_mean_abs" in on and "parity_mean_abs" not in off
    forced, _ = trained(stale, algo={"use_rollout_logprobs": False})
    assert forced["ratio"] == pytest.approx(1.0)
    assert trained(fresh, algo={"use_rollout_logprobs": True})[0]["ratio"] == pytest.approx(off["ratio"])


def test_a_report_counts_tokens_and_times_its_parts():
    rng = np.random.default_rng(0)
    samples = [sample(rng, prompt=3, reply=4), sample(rng, prompt=5, reply=0, trajectory=1)]
    ticks = iter(range(10))
    report = step(worker(model(), clock=lambda: float(next(ticks))), samples)
    counts = {name: report.metrics[name] for name in ("tokens", "train_tokens", "trained_tokens", "samples")}
    assert counts == {"tokens": 12, "train_tokens": 6, "trained_tokens": 4, "samples": 2}
    assert report.seconds == {"pack": 1.0, "old_logprobs": 1.0, "optimize": 1.0}


def test_a_report_has_the_logprob_and_entropy_of_each_trained_token(tmp_path):
    samples = [*ragged(5), sample(np.random.default_rng(1), prompt=4, reply=0, trajectory=9)]
    actor = model()
    reference = twin(actor, tmp_path)
    report = step(worker(actor, steps=2, record_tokens=True, train={"max_tokens_per_gpu": 16, "lr": 0.0}), samples)
    assert report.token_stats is not None
    found = report.token_stats.split()
    assert sorted(found) == [0, 1, 2, 3, 4]  # nothing of the last one is trained
    for number, (logprobs, entropies) in found.items():
        tokens = torch.tensor(samples[number].tokens, dtype=torch.int64)
        wanted = torch.distributions.Categorical(logits=reference(tokens[None]).logits[0, :-1])
        mask = samples[number].mask[1:]
        np.testing.assert_allclose(logprobs, wanted.log_prob(tokens[1:]).detach().numpy()[mask], atol=1e-5)
        np.testing.assert_allclose(entropies, wanted.entropy().detach().numpy()[mask], atol=1e-5)
    assert step(worker(model()), samples).token_stats is None


def test_the_spans_of_a_report_follow_each_other():
    ticks = iter(range(100, 200))
    report = step(worker(model(), clock=lambda: float(next(ticks))), ragged(3))
    assert [(span.name, span.start, span.seconds) for span in report.spans] == [
        ("pack", 100.0, 1.0),
        ("old_logprobs", 101.0, 1.0),
        ("optimize", 102.0, 1.0),
    ]


def test_two_runs_are_equal_to_the_bit():
    (a, first), (b, second) = (trained(ragged(10), train={"max_tokens_per_gpu": 40}) for _ in range(2))
    assert a == b and distance(first, second) == 0


@pytest.mark.parametrize("config_dtype", [torch.float32, torch.bfloat16])
def test_training_on_one_answer_makes_it_likely(config_dtype):
    rng = np.random.default_rng(0)
    samples = [sample(rng, reply=3)]
    trainer = worker(model(dtype=config_dtype), algo={"loss_type": "sft_loss"}, updates=40, train={"adam_eps": 1e-8})
    losses = [step(trainer, samples, n).metrics["loss"] for n in range(40)]
    assert losses[0] > 3 and losses[-1] < 0.1


def test_the_schedule_moves_with_every_optimizer_step():
    trainer = worker(
        model(), steps=2, updates=8, train={"lr": 1.0e-3, "lr_decay_style": "linear", "lr_warmup_iters": 2}
    )
    rates = [step(trainer, ragged(4), n).metrics["lr"] for n in range(4)]
    assert rates == pytest.approx([1e-3, 1e-3 * 4 / 6, 1e-3 * 2 / 6, 0.0])


def test_the_live_weights_are_the_very_ones_that_train():
    trainer = worker(model())
    live = trainer.weights()
    before = {n: w.clone() for n, w in live.items()}
    step(trainer, ragged(4))
    assert distance(live, before) > 0 and distance(live, weights(trainer)) == 0
    assert not any(w.requires_grad for w in live.values())


@pytest.mark.parametrize("field", ["advantages", "logprobs"])
def test_a_sample_with_no_number_is_refused_by_name_before_any_update(field):
    good = ragged(2)
    values = getattr(good[1], field).copy()
    values[-1] = np.nan
    bad = {name: getattr(good[1], name) for name in ("tokens", "mask", "logprobs", "advantages", "versions")}
    trainer = worker(model())
    before = weights(trainer)
    with pytest.raises(MilesError, match="trajectory 1 of prompt 3"):
        step(trainer, [good[0], Sample(prompt_id=3, trajectory=1, **(bad | {field: values}))])
    assert distance(before, weights(trainer)) == 0 and trainer.version.number == 0


def test_settings_that_cannot_be_trained_on_are_refused():
    with pytest.raises(UsageError, match="--rollout-temperature"):
        worker(model(), temperature=0.0)
    with pytest.raises(UsageError, match="--ref-load"):
        worker(model(), algo={"use_kl_loss": True})
    with pytest.raises(UsageError, match="--max-tokens-per-gpu 4"):
        step(worker(model(), train={"max_tokens_per_gpu": 4}), ragged(4))


def test_sleeping_and_waking_on_a_cpu_change_nothing():
    trainer, other = worker(model()), worker(model())
    for n in range(2):
        step(trainer, ragged(4), n)
        step(other, ragged(4), n)
        asyncio.run(trainer.sleep())
        asyncio.run(trainer.wake())
    assert distance(weights(trainer), weights(other)) == 0


def routed(experts):
    def give(s):
        extras = {"routed_experts": np.full((len(s), 2, 2), 255, np.uint8)}
        extras["routed_experts"][3:-1] = experts
        kept = {name: getattr(s, name) for name in ("tokens", "mask", "logprobs", "advantages", "versions")}
        return Sample(prompt_id=0, trajectory=s.trajectory, extras=extras, **kept)

    return give


def test_replayed_experts_are_used_where_the_engine_said_and_flips_are_counted():
    samples = [sample(np.random.default_rng(i), prompt=3, reply=5, trajectory=i) for i in range(3)]
    reported = [routed([4, 1])(s) for s in samples]
    replay = {"use_rollout_routing_replay": True}

    def run(rows, algo):
        trainer = worker(model(MOE), algo=algo)
        return step(trainer, rows).metrics, weights(trainer)

    plain, free = run(samples, {})
    forced, held = run(reported, replay)
    assert 0 < forced["routing_mismatch_ratio"] <= 1 and "routing_mismatch_ratio" not in plain
    assert distance(free, held) > 0
    assert run(reported, {})[0]["entropy"] == plain["entropy"]
    assert run(samples, replay)[0] == plain


def test_replaying_the_trainers_own_choice_is_no_change():
    from miles.kernels.attention.varlen import VarlenAttentionBackend
    from miles.models.checkpoint import hf
    from miles.models.families import spec_from_config
    from miles.models.layers.moe import Routing

    decoder = hf.init_random(spec_from_config(MOE), seed=0, device="cpu", dtype=torch.float32)
    samples = []
    for i in range(3):
        s = sample(np.random.default_rng(i), prompt=3, reply=5, trajectory=i)
        routing = Routing(record=True)
        tokens = torch.from_numpy(s.tokens.astype(np.int64))
        decoder(tokens, torch.arange(len(s)), VarlenAttentionBackend([len(s)], "cpu"), routing)
        samples.append(routed(torch.stack(routing.recorded, 1).numpy()[3:-1])(s))
    results = []
    for replay in (False, True):
        trainer = worker(model(MOE), algo={"use_rollout_routing_replay": replay})
        metrics = step(trainer, samples).metrics
        results.append((metrics["loss"], weights(trainer)))
    assert metrics["routing_mismatch_ratio"] == 0
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6) and distance(results[0][1], results[1][1]) < 1e-6


def test_a_policy_that_drifted_from_its_engine_is_not_trained_on():
    samples = [sample(np.random.default_rng(0))]  # its log-probs are not this model's
    trainer = worker(model(), parity_stop=1e-3)
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    with pytest.raises(
        ParityError, match=r"after version 0 .* above --parity-stop 0.001; the weights were not changed"
    ):
        step(trainer, samples)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.weights().items())


def test_a_trajectory_that_older_weights_began_is_not_compared():
    fresh, begun = ragged(3), ragged(3, seed=1)
    for s in begun:
        s.versions[s.mask.argmax()] = -1  # the rest was sampled from what those weights remembered of it
    alone, both = (step(worker(model()), samples).metrics for samples in (fresh, [*fresh, *begun]))
    assert both["parity_tokens"] == alone["parity_tokens"] == sum(s.mask.sum() for s in fresh)
    assert both["parity_max_abs"] == pytest.approx(alone["parity_max_abs"], rel=1e-4)


def test_when_all_of_a_batch_is_older_waiting_samples_are_compared_and_not_trained_on():
    stale, waiting = ragged(4, version=-1), ragged(3, seed=1, version=0)
    alone, _ = trained(stale)
    trainer = worker(model())
    report = asyncio.run(trainer.step(Batch(step=1, samples=stale, num_groups=1, probe=waiting)))
    assert "parity_mean_abs" not in alone
    assert report.metrics["parity_tokens"] == sum(s.mask.sum() for s in waiting)
    plain = worker(model())
    step(plain, stale)
    assert distance(weights(trainer), weights(plain)) == 0


# -- forward_backward and optim_step ----------------------------------------------------------


def test_forward_backward_and_optim_step_are_a_step_to_the_bit():
    whole, halves = worker(model()), worker(model())
    samples = ragged()
    for _ in range(2):
        report = step(whole, samples)
        metrics = asyncio.run(halves.forward_backward(samples))
        update = asyncio.run(halves.optim_step())
        assert update.version == report.version == halves.version
        assert {**metrics, **update.metrics} == {name: report.metrics[name] for name in (*metrics, *update.metrics)}
        assert distance(weights(whole), weights(halves)) == 0.0


def test_gradients_of_several_calls_add_up():
    one, two = worker(model(), algo={"constant_loss_length": 8}), worker(model(), algo={"constant_loss_length": 8})
    samples = ragged()
    asyncio.run(one.forward_backward(samples))
    asyncio.run(two.forward_backward(samples))
    asyncio.run(two.forward_backward(samples))
    single, double = (asyncio.run(each.optim_step()).metrics["grad_norm"] for each in (one, two))
    assert double == pytest.approx(2 * single, rel=1e-5)


def test_another_objective_is_that_of_a_trainer_with_its_options():
    mixed, supervised = worker(model(), temperature=0.7), worker(model(), algo={"loss_type": "sft_loss"})
    samples = ragged(version=-1)
    objective = mixed.build_objective(AlgoConfig(loss_type="sft_loss"))
    loss = asyncio.run(mixed.forward_backward(samples, objective))["loss"]
    asyncio.run(mixed.optim_step())
    report = step(supervised, samples)
    assert loss == report.metrics["loss"] and distance(weights(mixed), weights(supervised)) == 0.0


def test_a_given_learning_rate_replaces_that_of_the_schedule():
    given, configured = worker(model()), worker(model(), train={"lr": 3e-3})
    for trainer, lr in ((given, 3e-3), (configured, None)):
        asyncio.run(trainer.forward_backward(ragged()))
        assert asyncio.run(trainer.optim_step(lr)).metrics["lr"] == 3e-3
    assert distance(weights(given), weights(configured)) == 0.0


@pytest.mark.parametrize("budget", [16, 4096])
def test_log_probs_are_those_of_transformers_in_the_order_of_the_samples(tmp_path, budget):
    actor = model()
    trainer = worker(actor, train={"max_tokens_per_gpu": budget})
    reference, samples = twin(actor, tmp_path), ragged()
    found = asyncio.run(trainer.log_probs(samples))
    for sample_, logprobs in zip(samples, found, strict=True):
        np.testing.assert_allclose(logprobs, oracle_logprobs(reference, sample_)[0].detach().numpy(), atol=1e-5)


def test_an_update_without_a_gradient_is_refused():
    trainer = worker(model())
    with pytest.raises(UsageError, match=r"optim_step\(\) has no gradient to apply; call forward_backward\(\) first"):
        asyncio.run(trainer.optim_step())
    assert trainer.version.number == 0
