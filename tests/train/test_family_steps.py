"""A whole training step of every mechanism, against transformers' own module and AdamW by hand."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.oracle import hf_model
from tests.models.small_families.compressed import CSA, HCA
from tests.train.small_trainer import EPS, distance, named, ragged, sample, step, weights, worker

from miles.backends.fsdp.local_model import LocalModel
from miles.models.checkpoint import hf

# Samples are up to fourteen tokens long, so what narrows the view is made shorter than that.
KINDS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4},
    "deepseek v3": {},
    "gpt-oss": {"sliding_window": 4},
    "step 3.7": {"sliding_window": 4},
    "llama 4": {"attention_chunk_size": 4, "floor_scale": 4, "rope_parameters": None},
    "hybrid qwen3.5": {},
    "hybrid nemotron 3": {},
    "lfm2": {},
    "hybrid kimi linear": {},
    "hybrid glm 5.3 flash": {"index_topk": 8},
    "hybrid qwen4": {"indexer_budget": 4, "indexer_compress_ratio": 2},
    "glm 5 shared choices": {"index_topk": 4},
    "minimax-m3": {"index_block_size": 2, "index_topk_blocks": 2},
    "gemma3n": {"sliding_window": 4},
    "inkling": {"sliding_window_size": 4, "rel_extent": 5, "log_scaling_n_floor": 3},
    "deepseek v4": {"sliding_window": 4, "index_topk": 2, "compress_rates": {CSA: 2, HCA: 3}},
}
SFT = {"loss_type": "sft_loss"}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}


def theirs(kind, seed=0):
    return hf_model(kind, seed, vocab_size=31, max_position_embeddings=64, **KINDS[kind])


def ours(reference, folder, dtype=torch.float32, **how):
    reference.save_pretrained(folder)
    return LocalModel(hf.load(folder, device="cpu", dtype=dtype), like=folder, **how)


def demonstrations(count):
    rngs = map(np.random.default_rng, range(count))
    return [sample(rng, prompt=2 + i, reply=3 + i, trajectory=i, version=-1) for i, rng in enumerate(rngs)]


def read(reference, s):
    """The log-probs of a sample's trained tokens, this sequence alone."""
    tokens = torch.from_numpy(s.tokens.astype(np.int64))
    at = torch.from_numpy(np.flatnonzero(s.mask))
    rows = torch.log_softmax(reference(tokens[None]).logits[0], -1)[at - 1]
    return rows.gather(1, tokens[at][:, None])[:, 0]


def supervised(reference, base, samples):
    return torch.stack([-read(reference, s).mean() for s in samples]).mean()


def on_policy(reference, base, samples):
    """The policy gradient where the ratio is 1, and the distance from ``base`` as k3 estimates it."""
    total = torch.zeros(())
    for s in samples:
        logp = read(reference, s)
        with torch.no_grad():
            past = read(base, s)
        gain = (logp - logp.detach()).exp() * float(s.advantages[s.mask][0])
        kl = (past - logp).exp() - (past - logp) - 1
        total = total + (0.1 * kl - gain).mean() / len(samples)
    return total


def by_hand(reference, loss):
    """One step of AdamW; only matrices are decayed, and a bias is none, though experts' biases lie stacked."""
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    groups: dict[float, list[torch.nn.Parameter]] = {0.01: [], 0.0: []}
    for name, parameter in reference.named_parameters():
        groups[0.01 if parameter.dim() >= 2 and not name.endswith("bias") else 0.0].append(parameter)
    made = [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()]
    torch.optim.AdamW(made, lr=1e-2, eps=EPS).step()
    return float(norm)


@pytest.mark.parametrize(("loss", "algo"), [(supervised, SFT), (on_policy, KL)], ids=["supervised", "on policy"])
@pytest.mark.parametrize(("kind", "chunk"), [*((kind, None) for kind in KINDS), ("gemma2", 3)])
def test_a_step_is_the_one_of_transformers(kind, chunk, loss, algo, tmp_path):
    reference, base = theirs(kind), theirs(kind, seed=1)
    actor, frozen = ours(reference, tmp_path / "a"), ours(base, tmp_path / "b", frozen=True)
    held = {name: p.detach().clone() for name, p in actor.parameters().items() if not p.requires_grad}
    samples = ragged(5) if algo is KL else demonstrations(5)
    trainer = worker(
        actor,
        algo=algo,
        train={"max_tokens_per_gpu": 24, "log_probs_chunk_size": chunk},
        reference=frozen if algo is KL else None,
    )
    report = step(trainer, samples)
    wanted = loss(reference, base, samples)
    norm = by_hand(reference, wanted)
    assert report.metrics["loss"] == pytest.approx(wanted.item(), rel=1e-5, abs=1e-6)
    assert report.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert distance(weights(trainer), named(reference, tmp_path / "c")) < 1e-5
    corrected = ("deepseek v3", "step 3.7", "hybrid nemotron 3", "hybrid kimi linear", "glm 5 shared choices")
    corrected += ("hybrid glm 5.3 flash", "minimax-m3", "inkling", "deepseek v4", "hybrid qwen4")
    assert bool(held) == (kind in corrected)
    assert all(torch.equal(trainer.weights()[name], tensor) for name, tensor in held.items())


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_run_again_in_backward_change_no_bit(kind, tmp_path):
    reference, after = theirs(kind), []
    for again in (False, True):
        trainer = worker(ours(reference, tmp_path, gradient_checkpointing=again), train={"max_tokens_per_gpu": 40})
        step(trainer, ragged(5))
        after.append(weights(trainer))
    assert distance(*after) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_half_precision_keeps_what_must_stay_wide_and_continues_to_the_bit(kind, tmp_path):
    reference, samples = theirs(kind), demonstrations(3)
    exact = step(worker(ours(reference, tmp_path), algo=SFT), samples).metrics
    trainer = worker(ours(reference, tmp_path, torch.bfloat16), algo=SFT)
    before = weights(trainer)
    found = step(trainer, samples).metrics
    after = weights(trainer)
    assert found["loss"] == pytest.approx(exact["loss"], rel=0.05)
    wide = {name for name, tensor in after.items() if tensor.dtype == torch.float32}
    assert wide == {name for name in after if name.endswith("correction")}
    assert all(torch.equal(after[name], before[name]) for name in wide)
    assert all(tensor.isfinite().all() for tensor in after.values()) and distance(before, after) > 0

    (tmp_path / "saved").mkdir()
    asyncio.run(trainer.save(tmp_path / "saved"))
    other = worker(ours(theirs(kind, seed=1), tmp_path, torch.bfloat16), algo=SFT)
    asyncio.run(other.load(tmp_path / "saved"))
    assert step(trainer, samples, 1).metrics == step(other, samples, 1).metrics
    assert distance(weights(trainer), weights(other)) == 0
