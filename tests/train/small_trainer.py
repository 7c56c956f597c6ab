"""Tiny models, samples and workers for the trainer's tests."""

import asyncio
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from miles.algo.config import AlgoConfig
from miles.backends.fsdp.local_model import LocalModel
from miles.cluster.executor import InlineExecutor
from miles.core.types import Batch, Sample
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config
from miles.train.config import TrainConfig
from miles.train.policy_trainer import PolicyTrainer

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
DENSE = Qwen3Config(**SIZES, architectures=["Qwen3ForCausalLM"]).to_dict()
MOE = Qwen3MoeConfig(
    **SIZES, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8, architectures=["Qwen3MoeForCausalLM"]
).to_dict()


def model(config=DENSE, *, seed=0, dtype=torch.float32, device="cpu", **how):
    return LocalModel(
        hf.init_random(spec_from_config(config), seed=seed, device="cpu", dtype=dtype).to(device), config=config, **how
    )


def twin(mine, folder, config=DENSE):
    """The same weights in transformers, whose log-probs are the oracle."""
    mine.save(folder)
    kind = Qwen3MoeForCausalLM if config is MOE else Qwen3ForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def named(reference, folder):
    """The oracle's weights under our names."""
    reference.save_pretrained(folder)
    return dict(hf.load(folder, device="cpu", dtype=torch.float32).named_parameters())


def sample(rng, *, prompt=3, reply=4, advantage=1.0, version=0, trajectory=0, share=1, prompt_id=0, **extras):
    n = prompt + reply
    mask = np.arange(n) >= prompt
    return Sample(
        prompt_id=prompt_id,
        trajectory=trajectory,
        tokens=rng.integers(0, 31, n).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, np.float32(-3.4), np.float32(0)),
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
        versions=np.where(mask, version, -1).astype(np.int32),
        samples_per_trajectory=share,
        extras=extras,
    )


def ragged(count=8, seed=0, **changes):
    """Samples of many lengths and advantages."""
    rng = np.random.default_rng(seed)
    return tuple(
        sample(
            rng,
            prompt=int(rng.integers(1, 6)),
            reply=int(rng.integers(1, 9)),
            advantage=float(rng.normal()),
            trajectory=i,
            **changes,
        )
        for i in range(count)
    )


# Adam's first update is the sign of a gradient, however small; a large epsilon makes it as smooth as the gradient.
EPS = 1e-2


def worker(actor, *, algo=None, train=None, steps=1, updates=10, temperature=1.0, **more):
    return PolicyTrainer(
        actor,
        algo=AlgoConfig(**(algo or {})),
        train=TrainConfig(**({"lr": 1e-2, "adam_eps": EPS} | (train or {}))),
        steps=steps,
        updates=updates,
        temperature=temperature,
        run=InlineExecutor(),
        **more,
    )


def step(trainer, samples, number=0):
    return asyncio.run(trainer.step(Batch(step=number, samples=tuple(samples), num_groups=1)))


def weights(trainer):
    return {name: value.clone() for name, value in trainer.weights().items()}


def distance(a, b):
    return max(float((a[n] - b[n]).detach().abs().max()) for n in a)
