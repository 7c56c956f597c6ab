"""A model whose adapters are trained beside a packed base: what changes, what is saved, and what engines are sent."""

import asyncio
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tests.train.small_trainer import DENSE, MOE, distance, ragged, step, worker

from miles.backends.fsdp.local_model import LocalModel
from miles.backends.fsdp.lora_model import UnmergedLoraModel
from miles.core.errors import CheckpointError
from miles.models.accounting.params import packed_weight_bytes, weight_bytes
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config
from miles.models.lora.targets import LoraSpec, select_targets
from miles.models.quantization import plan_quantization
from miles.precision.formats import FORMATS, QuantizationSpec
from miles.precision.quantize import dequantize, row_block
from miles.precision.quantized_tensor import QuantizedTensor

SIZES = {"hidden_size": 64, "intermediate_size": 96}


def packed_actor(
    folder, config=DENSE, *, name="int4_g32", dtype=torch.float32, seed=0, rank=2, wanted=None, device="cpu", **more
):
    """Adapters beside a packed model, whose random weights come of ``seed``."""
    config = config | SIZES | ({"moe_intermediate_size": 32} if config is MOE else {})
    spec = spec_from_config(config)
    base = folder / f"base-{seed}"
    if not base.exists():
        hf.export(hf.init_random(spec, seed=seed, device="cpu", dtype=dtype), base, config=config)
    lora = LoraSpec(rank=rank, alpha=4.0, targets=select_targets(spec, wanted, None))
    spec = replace(spec, quantization=QuantizationSpec(format=FORMATS[name], packed=True))
    decoder = hf.load_model(base, spec, device=device, dtype=dtype)
    return UnmergedLoraModel(LocalModel(decoder, config=config, frozen=True, **more), lora, base=base, seed=1)


def base_bytes(actor):
    names = actor._base_model.parameters()
    return {name: tensor.clone() for name, tensor in actor.engine_weights().items() if name in names}


def merged(actor):
    """The weights with dequantized base, in float32."""
    spec, params = actor._base_model.spec, dict(actor._base_model.parameters())
    found = {}
    for name, quantized in plan_quantization(spec).items():
        block = row_block(quantized.format, params[name].shape[-2], quantized.segments)
        found[name] = dequantize(QuantizedTensor.from_tensors(quantized.format, name, params, block), torch.float32)
    if not spec.tie_embeddings:  # which is not packed
        found["lm_head.weight"] = params["lm_head.weight"].detach().clone()
    for name, targets in actor.adapters().targets_by_param.items():
        for target in targets:
            a_rI, b_Or = (factor.detach() for factor in actor.adapters().factors(target))
            found[name][target.piece.start : target.piece.stop] += actor.adapters().lora.scale * (b_Or @ a_rI)
    return found


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_a_step_changes_the_factors_that_are_sent_and_no_byte_of_the_base(tmp_path, config):
    actor = packed_actor(tmp_path, config, dtype=torch.bfloat16, name="fp8")
    trainer, before, sent = worker(actor), base_bytes(actor), trained_factors(actor)
    step(trainer, ragged())
    after = base_bytes(actor)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in before if before[n].dim())
    again = trained_factors(actor)
    assert again.keys() == sent.keys() and all(tensor.dtype == torch.bfloat16 for tensor in again.values())
    assert all(not torch.equal(again[name], sent[name]) for name in again if name.endswith("lora_b"))


def trained_factors(actor):
    names = actor._base_model.parameters()
    return {name: tensor for name, tensor in actor.engine_weights().items() if name not in names}


@pytest.mark.parametrize("name", ["fp8", "int4_g32", "nvfp4"])
def test_the_trainer_holds_the_packed_bytes_that_the_plan_counts(tmp_path, name):
    actor = packed_actor(tmp_path, name=name, dtype=torch.bfloat16)
    spec = actor._base_model.spec
    held = sum(tensor.nbytes for tensor in actor._base_model.parameters().values())
    assert held == packed_weight_bytes(spec, "bfloat16") < 0.75 * weight_bytes(spec, "bfloat16")
    trainer = worker(actor)
    step(trainer, ragged())
    assert trainer._optimizer.bytes == 8 * actor.adapters().lora.num_parameters
    assert sum(t.nbytes for t in trained_factors(actor).values()) == 2 * actor.adapters().lora.num_parameters


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_learn_what_they_are_rewarded_for(tmp_path, checkpointing):
    trainer = worker(packed_actor(tmp_path, gradient_checkpointing=checkpointing), train={"lr": 3e-2})
    rewarded = ragged(4)
    reported = [step(trainer, rewarded, number).metrics for number in range(6)]
    assert reported[-1]["loss"] < reported[0]["loss"]


UNTIED = DENSE | {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("save_dtype", "more"),
    [(None, {}), (torch.bfloat16, {}), (None, {"config": UNTIED, "wanted": "all-linear, lm_head"})],
)
def test_a_checkpoint_is_the_merged_model_and_goes_on_to_the_bit(tmp_path, save_dtype, more):
    one, two = (worker(packed_actor(tmp_path, save_dtype=save_dtype, **more)) for _ in range(2))
    for number in range(2):
        step(one, ragged(seed=number), number)
    kept, alone = tmp_path / "kept", tmp_path / "alone"
    kept.mkdir()
    alone.mkdir()
    asyncio.run(one.save(kept))
    one._actor.save(alone)
    whole = dict(hf.load_slices(kept, rank=0, world=1, device="cpu", dtype=torch.float32))
    for name, tensor in merged(one._actor).items():
        assert torch.allclose(whole[name], tensor, rtol=1e-2 if save_dtype else 1e-5, atol=1e-6), name
    found = load_file(kept / "adapter" / "adapter_model.safetensors")
    assert found.keys() == load_file(alone / "adapter" / "adapter_model.safetensors").keys()
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    asyncio.run(two.load(kept))
    for number in (2, 3):
        assert step(one, ragged(seed=number), number).metrics == step(two, ragged(seed=number), number).metrics
    assert distance(trained_factors(one._actor), trained_factors(two._actor)) == 0.0


def test_a_checkpoint_over_another_base_is_refused(tmp_path):
    one = worker(packed_actor(tmp_path))
    step(one, ragged())
    (tmp_path / "kept").mkdir()
    asyncio.run(one.save(tmp_path / "kept"))
    with pytest.raises(CheckpointError, match="was trained over another base than"):
        asyncio.run(worker(packed_actor(tmp_path, seed=5)).load(tmp_path / "kept"))
    with pytest.raises(CheckpointError, match="was trained over another base than"):
        asyncio.run(worker(packed_actor(tmp_path, name="fp8")).load(tmp_path / "kept"))
    with pytest.raises(CheckpointError, match="holds other adapters"):
        asyncio.run(worker(packed_actor(tmp_path, rank=3)).load(tmp_path / "kept"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here")
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_a_model_on_the_host_has_the_merged_weights_of_the_accelerator(tmp_path, config):
    """A run that is stopped while the engine has the device is saved so, and compares the weights when it goes on."""
    actor = packed_actor(tmp_path, config, device="cuda")
    step(worker(actor), ragged())
    before = {unit.name: actor.save_plan().gather_unit(unit.name) for unit in actor.save_plan().units}
    actor.move(torch.device("cpu"))
    assert all(torch.equal(actor.save_plan().gather_unit(name), tensor) for name, tensor in before.items())
