import asyncio
import json

import pytest
import torch
from tests.train.small_trainer import DENSE, MOE, distance, model, ragged, step, weights, worker
from transformers import AutoModelForCausalLM

from miles.core.errors import CheckpointError

KNOBS = {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "adam_eps": 1e-8}


def build(config, dtype, seed=0):
    return worker(model(config, dtype=dtype, seed=seed), train=KNOBS, steps=2, updates=12)


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(tmp_path, config, dtype):
    straight = build(config, dtype)
    for n in range(3):
        step(straight, ragged(4, seed=n, version=n), n)
    asyncio.run(straight.save(tmp_path))
    resumed = build(config, dtype, seed=99)
    asyncio.run(resumed.load(tmp_path))
    assert resumed.version == straight.version and distance(weights(straight), weights(resumed)) == 0
    for n in range(3, 6):
        a = step(straight, ragged(4, seed=n, version=n), n)
        b = step(resumed, ragged(4, seed=n, version=n), n)
        assert a.metrics == b.metrics and a.version == b.version
    assert all(torch.equal(weights(straight)[n], w) for n, w in weights(resumed).items())


def test_a_checkpoint_before_the_first_step_resumes_too(tmp_path):
    straight, resumed = build(DENSE, torch.float32), build(DENSE, torch.float32, seed=99)
    asyncio.run(straight.save(tmp_path))
    asyncio.run(resumed.load(tmp_path))
    reports = [step(trainer, ragged(4)).metrics for trainer in (straight, resumed)]
    assert reports[0] == reports[1] and distance(weights(straight), weights(resumed)) == 0


def test_loading_keeps_the_live_tensors_and_forgets_what_was_trained_since(tmp_path):
    trainer = build(DENSE, torch.float32)
    live = trainer.weights()
    asyncio.run(trainer.save(tmp_path))
    saved = weights(trainer)
    first = step(trainer, ragged(4)).metrics
    asyncio.run(trainer.load(tmp_path))
    assert distance(live, saved) == 0 and trainer.version.number == 0
    assert step(trainer, ragged(4)).metrics == first


def test_the_folder_is_a_model_that_transformers_loads(tmp_path):
    trainer = build(DENSE, torch.float32)
    step(trainer, ragged(4))
    asyncio.run(trainer.save(tmp_path))
    found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(found.get_input_embeddings().weight, trainer.weights()["embedding.weight"])
    assert sorted(p.name for p in tmp_path.glob("[!.]*")) == [
        "config.json",
        "model.safetensors",
        "optimizer.safetensors",
        "trainer.json",
    ]


def test_incomplete_foreign_and_damaged_checkpoints_are_refused(tmp_path):
    trainer = build(DENSE, torch.float32)
    step(trainer, ragged(4))
    asyncio.run(trainer.save(tmp_path))
    with pytest.raises(CheckpointError, match="does not match the model in training"):
        asyncio.run(worker(model(DENSE | {"intermediate_size": 48})).load(tmp_path))
    numbers = json.loads((tmp_path / "trainer.json").read_text())
    (tmp_path / "trainer.json").write_text(json.dumps(numbers | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        asyncio.run(trainer.load(tmp_path))
    (tmp_path / "trainer.json").write_text(json.dumps(numbers)[:-3])
    with pytest.raises(CheckpointError, match=r"trainer\.json cannot be read"):
        asyncio.run(trainer.load(tmp_path))
    (tmp_path / "trainer.json").write_text(json.dumps(numbers))
    whole = (tmp_path / "optimizer.safetensors").read_bytes()
    (tmp_path / "optimizer.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors cannot be read"):
        asyncio.run(trainer.load(tmp_path))
    (tmp_path / "trainer.json").unlink()
    with pytest.raises(CheckpointError, match="--hf-checkpoint"):
        asyncio.run(trainer.load(tmp_path))
