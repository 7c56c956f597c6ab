"""The same trainer on an accelerator, against itself on a CPU."""

import asyncio

import pytest
import torch
from tests.train.small_trainer import DENSE, MOE, distance, model, ragged, sample, step, weights, worker

from miles.train.logprobs import HeadOutput, compute_logprobs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here")

# Half-precision kernels want heads of at least 8 channels in multiples of 8, which the tiny configs have.
CONFIGS = pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])


def on_host(values):
    return {name: value.float().cpu() for name, value in values.items()}


def build(config, device, dtype, **how):
    """A worker whose weights bfloat16 can hold, the same in every type."""
    actor = model(config, device=device, dtype=dtype, **how)
    with torch.no_grad():
        for name, weight in model(config, seed=how.get("seed", 0), dtype=torch.bfloat16).parameters().items():
            actor.parameters()[name].copy_(weight)
    return worker(actor, train={"max_tokens_per_gpu": 40, "weight_decay": 0.0})


@CONFIGS
@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("again", [False, True])
def test_a_step_on_the_accelerator_is_the_step_on_the_cpu(config, dtype, slack, again):
    here = build(config, "cpu", torch.float32)
    there = build(config, "cuda", dtype, gradient_checkpointing=again)
    a, b = step(here, ragged(10)).metrics, step(there, ragged(10)).metrics
    for name in ("loss", "entropy", "grad_norm", "parity_mean_abs"):
        assert b[name] == pytest.approx(a[name], rel=slack, abs=slack)
    assert distance(weights(here), on_host(weights(there))) < slack


@CONFIGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sleeping_frees_the_optimizer_and_waking_goes_on(config, dtype):
    trainer, other = build(config, "cuda", dtype), build(config, "cuda", dtype)
    for n in range(2):
        step(trainer, ragged(6), n)
        step(other, ragged(6), n)
        live = {name: w.data_ptr() for name, w in trainer.weights().items()}
        asyncio.run(trainer.sleep())
        state = trainer._optimizer.state()
        assert all(v.device.type == "cpu" for name, v in state.items() if not name.startswith("step."))
        asyncio.run(trainer.wake())
        state = trainer._optimizer.state()
        assert all(v.is_cuda for name, v in state.items() if not name.startswith("step."))
        assert live == {name: w.data_ptr() for name, w in trainer.weights().items()}
    assert distance(on_host(weights(trainer)), on_host(weights(other))) < 1e-3


@CONFIGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_restores_every_bit(tmp_path, config, dtype):
    trainer, other = build(config, "cuda", dtype), build(config, "cuda", dtype, seed=9)
    step(trainer, ragged(6))
    asyncio.run(trainer.save(tmp_path))
    asyncio.run(other.load(tmp_path))
    assert all(torch.equal(w, other.weights()[name]) for name, w in trainer.weights().items())
    left, right = trainer._optimizer.state(), other._optimizer.state()
    assert left.keys() == right.keys() and all(torch.equal(v, right[n]) for n, v in left.items())
    step(other, ragged(6), 1)


def test_low_precision_logits_are_not_rounded_on_the_way():
    torch.manual_seed(0)
    hidden = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    head = torch.randn(1000, 128, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, 1000, (64,), device="cuda")
    found, _ = compute_logprobs(HeadOutput(hidden_RD=hidden, head_VD=head), target, chunk=10)
    exact = torch.log_softmax(hidden.double() @ head.double().T, -1).gather(1, target[:, None])[:, 0]
    assert float((found - exact).abs().max()) < 1e-3


def test_training_on_one_answer_makes_it_likely_in_low_precision():
    import numpy as np

    trainer = worker(
        model(MOE, device="cuda", dtype=torch.bfloat16),
        algo={"loss_type": "sft_loss"},
        updates=40,
        train={"adam_eps": 1e-8},
    )
    losses = [step(trainer, [sample(np.random.default_rng(0), reply=3)], n).metrics["loss"] for n in range(40)]
    assert losses[0] > 3 and losses[-1] < 0.2
