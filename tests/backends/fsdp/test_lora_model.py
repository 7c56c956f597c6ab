"""A model whose adapters alone are trained: what changes, what is kept of it, and what an engine sees."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.backends.megatron import cases
from tests.backends.megatron.vision_cases import image_samples
from tests.models.vision.small_vision import vision_model
from tests.train.small_trainer import DENSE, MOE, distance, model, ragged, step, weights, worker

from miles.backends.fsdp.local_model import LocalModel
from miles.backends.fsdp.lora_model import LoraModel, LoraReference, UnmergedLoraModel
from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import InlineExecutor
from miles.core.errors import CheckpointError
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config
from miles.models.lora.targets import LoraSpec, select_targets
from miles.sync.publish import Publication
from miles.train.dp_group import SINGLE_RANK


def adapted(base, config=DENSE, *, seed=0, dtype=torch.float32, rank=2, start=None, wanted=None, lora=None, **how):
    """The model whose random weights come of ``seed``, under adapters."""
    base_model = model(config, seed=seed, dtype=dtype, frozen=True, **how)
    targets = select_targets(spec_from_config(config), wanted, None)
    lora = LoraSpec(rank=rank, alpha=4.0, targets=targets, **(lora or {}))
    return LoraModel(base_model, lora, base=base, seed=1, start=start)


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_moves_the_targets_by_the_product_and_nothing_else(tmp_path, config, dtype):
    actor = adapted(tmp_path, config, dtype=dtype)
    trainer = worker(actor)
    before = weights(trainer)
    step(trainer, ragged())
    after, adapters = weights(trainer), actor.adapters()
    for name, tensor in after.items():
        expected = before[name].clone()
        if name in adapters.targets_by_param:
            adapters.merge(name, expected, before[name])
            assert not torch.equal(expected, before[name]), name
        assert torch.equal(tensor, expected), name
    assert after.keys() == model(config).parameters().keys()


def test_the_optimizer_has_moments_of_adapters_alone(tmp_path):
    actor = adapted(tmp_path)
    trainer = worker(actor)
    step(trainer, ragged())
    assert trainer._optimizer.bytes == 8 * actor.adapters().lora.num_parameters
    assert {name.partition(".")[2] for name in trainer._optimizer.state()} <= {"", *actor.adapters().parameters}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_learn_what_they_are_rewarded_for(tmp_path, checkpointing):
    trainer = worker(adapted(tmp_path, gradient_checkpointing=checkpointing), train={"lr": 3e-2})
    rewarded = ragged(4)
    reported = [step(trainer, rewarded, number).metrics for number in range(6)]
    assert reported[-1]["loss"] < reported[0]["loss"]


UNTIED = DENSE | {"tie_word_embeddings": False}
FORMS = {
    "plain": {},
    "output layer": {"config": UNTIED, "wanted": "attn, lm_head"},
    "experts": {"config": MOE, "wanted": "*"},
    "shared experts": {"config": MOE, "wanted": "experts", "lora": {"shared_outer": True}},
    "dora": {"lora": {"use_dora": True, "use_rslora": True}},
    "dora of experts": {"config": MOE, "wanted": "*", "lora": {"use_dora": True}},
    "dora of shared experts": {"config": MOE, "wanted": "experts", "lora": {"use_dora": True, "shared_outer": True}},
    "dropout": {"lora": {"dropout": 0.2}},
    "dropout of experts": {"config": MOE, "wanted": "*", "lora": {"dropout": 0.2}, "gradient_checkpointing": True},
    "dropout, recomputed": {"lora": {"dropout": 0.2}, "gradient_checkpointing": True},
}


@pytest.mark.parametrize("wanted", ["lm_head", "all-linear, lm_head"])
def test_an_adapter_of_the_output_layer_trains_merged_as_beside_its_weight(tmp_path, wanted):
    trainers = []
    for kind in (LoraModel, UnmergedLoraModel):
        targets = select_targets(spec_from_config(UNTIED), wanted, None)
        lora = LoraSpec(rank=2, alpha=4.0, targets=targets)
        trainers.append(worker(kind(model(UNTIED, frozen=True), lora, base=tmp_path, seed=1)))
    before = weights(trainers[0])["lm_head.weight"]
    for number in range(3):
        merged, beside = (step(trainer, ragged(seed=number), number).metrics for trainer in trainers)
        for name in ("loss", "grad_norm"):
            assert merged[name] == pytest.approx(beside[name], rel=1e-4, abs=1e-6), (number, name)
    after, base = weights(trainers[0]), weights(trainers[1])
    assert torch.equal(base["lm_head.weight"], before) and not torch.equal(after["lm_head.weight"], before)
    product = 2.0 * (base["lm_head.lora_b"] @ base["lm_head.lora_a"])
    torch.testing.assert_close(after["lm_head.weight"], before + product, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_a_run_that_is_taken_up_again_goes_on_to_the_bit(tmp_path, form, optimizer):
    train = {"optimizer": optimizer}
    one, two = (worker(adapted(tmp_path, **FORMS[form]), train=train) for _ in range(2))
    for number in range(2):
        step(one, ragged(seed=number), number)
    (tmp_path / "kept").mkdir()
    asyncio.run(one.save(tmp_path / "kept"))
    asyncio.run(two.load(tmp_path / "kept"))
    assert two.version == one.version
    for number in (2, 3):
        assert step(one, ragged(seed=number), number).metrics == step(two, ragged(seed=number), number).metrics
    assert distance(weights(one), weights(two)) == 0.0
    mine, theirs = one.adapters(), two.adapters()
    assert mine is not None and theirs is not None
    for name, parameter in mine.parameters.items():
        assert torch.equal(parameter, theirs.parameters[name]), name


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_a_base_that_came_in_bfloat16_is_saved_in_it_and_taken_up_again_to_the_bit(tmp_path, config):
    """The weights of this base are not exact in bfloat16, so that nothing may be taken from the rounded files."""
    one, two = (worker(adapted(tmp_path, config, save_dtype=torch.bfloat16)) for _ in range(2))
    for number in range(2):
        step(one, ragged(seed=number), number)
    kept = tmp_path / "kept"
    kept.mkdir()
    asyncio.run(one.save(kept))
    stored = {tensor.dtype for tensor in load_file(kept / "model.safetensors").values()}
    assert torch.bfloat16 in stored
    assert json.loads((kept / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(kept / "adapter" / "adapter_model.safetensors").values()} == {torch.float32}
    asyncio.run(two.load(kept))
    assert distance(weights(one), weights(two)) == 0.0
    for number in (2, 3):
        assert step(one, ragged(seed=number), number).metrics == step(two, ragged(seed=number), number).metrics
    assert distance(weights(one), weights(two)) == 0.0
    with pytest.raises(CheckpointError, match="was trained over another base"):
        asyncio.run(worker(adapted(tmp_path, config, seed=5, save_dtype=torch.bfloat16)).load(kept))


def test_masks_are_others_in_every_update_and_the_same_when_layers_are_recomputed(tmp_path):
    plain, dropped, recomputed = (
        worker(adapted(tmp_path, lora=lora, gradient_checkpointing=recompute))
        for lora, recompute in ((None, False), ({"dropout": 0.4}, False), ({"dropout": 0.4}, True))
    )
    for number in range(3):
        found = [step(trainer, ragged(seed=1), number).metrics for trainer in (plain, dropped, recomputed)]
        assert found[1]["loss"] == found[2]["loss"] and found[1]["grad_norm"] == found[2]["grad_norm"]
        assert number == 0 or found[1]["loss"] != found[0]["loss"]
    assert distance(weights(dropped), weights(recomputed)) == 0.0 < distance(weights(dropped), weights(plain))


REFERENCE = {"algo": {"use_kl_loss": True, "kl_loss_coef": 0.5}}


@pytest.mark.parametrize("form", ["plain", "experts", "dora", "dropout"])
def test_the_reference_is_the_base_with_the_adapters_off_and_has_no_copy(tmp_path, form):
    given = FORMS[form]
    mine, theirs = (adapted(tmp_path, **given) for _ in range(2))
    one = worker(mine, reference=LoraReference(mine), **REFERENCE)
    two = worker(theirs, reference=model(given.get("config", DENSE), frozen=True), **REFERENCE)
    for number in range(3):
        found, wanted = (step(trainer, ragged(seed=number), number).metrics for trainer in (one, two))
        assert found == wanted
        assert (found["kl"] != 0) == (number > 0) or form == "dropout"
    assert distance(weights(one), weights(two)) == 0.0


@pytest.mark.parametrize("form", ["plain", "dora"])
def test_a_reference_that_is_updated_is_the_policy_of_then_also_in_a_resumed_run(tmp_path, form):
    train = {"ref_update_interval": 2}

    def build():
        actor = adapted(tmp_path, **FORMS[form])
        return worker(actor, reference=LoraReference(actor), train=train, **REFERENCE)

    one, kl = build(), []
    for number in range(3):
        kl.append(step(one, ragged(seed=3), number).metrics["kl"])
        folder = tmp_path / f"step-{number + 1:06d}"
        folder.mkdir()
        asyncio.run(one.save(folder))
    assert kl[0] == 0.0 and kl[1] != 0.0 and kl[2] == 0.0  # the third begins as what the reference has become
    for start in (2, 3):
        two = build()
        asyncio.run(two.load(tmp_path / f"step-{start:06d}"))
        again = [step(two, ragged(seed=3), number).metrics for number in range(start, 4)]
        if start == 2:
            assert again[0]["kl"] == kl[2]
            expected = again[1]
        else:
            assert again[0] == expected and expected["kl"] != 0.0


def test_muon_updates_factors_as_matrices(tmp_path):
    trainer = worker(adapted(tmp_path, MOE, wanted="*"), train={"optimizer": "muon", "lr": 1e-2, "weight_decay": 0.0})
    adapters = trainer.adapters()
    before = {name: p.detach().clone() for name, p in adapters.parameters.items()}
    step(trainer, ragged())
    name = next(n for n in before if n.endswith("experts.*.gate_proj.lora_B.weight"))
    change_EOr = adapters.parameters[name].detach() - before[name]
    for change_Or in change_EOr[change_EOr.flatten(1).abs().amax(1) > 0]:
        lengths = torch.linalg.svdvals(change_Or)
        assert float(lengths[-1] / lengths[0]) > 0.3  # near orthogonal: all singular values alike


def test_a_checkpoint_is_a_whole_model_and_an_adapter_beside_it(tmp_path):
    actor = adapted(tmp_path, dtype=torch.bfloat16)
    trainer = worker(actor)
    step(trainer, ragged())
    (tmp_path / "kept").mkdir()
    asyncio.run(trainer.save(tmp_path / "kept"))
    whole = dict(hf.load_slices(tmp_path / "kept", rank=0, world=1, device="cpu", dtype=torch.bfloat16))
    assert all(torch.equal(whole[name], tensor) for name, tensor in weights(trainer).items())
    found = load_file(tmp_path / "kept" / "adapter" / "adapter_model.safetensors")
    for name, parameter in actor.adapters().parameters.items():
        stored = found[f"base_model.model.{name}"]
        assert stored.dtype == torch.float32 and torch.equal(stored, parameter)
    (tmp_path / "alone").mkdir()
    actor.save(tmp_path / "alone")
    assert load_file(tmp_path / "alone" / "adapter" / "adapter_model.safetensors").keys() == found.keys()


def test_an_adapter_to_start_from_is_where_training_begins(tmp_path):
    trainer = worker(adapted(tmp_path))
    step(trainer, ragged())
    (tmp_path / "kept").mkdir()
    asyncio.run(trainer.save(tmp_path / "kept"))
    restarted = adapted(tmp_path, start=tmp_path / "kept" / "adapter")
    assert distance(weights(trainer), weights(worker(restarted))) == 0.0


def test_a_checkpoint_over_another_base_or_of_other_adapters_or_of_none_is_refused(tmp_path):
    trainer = worker(adapted(tmp_path))
    step(trainer, ragged())
    (tmp_path / "kept").mkdir()
    asyncio.run(trainer.save(tmp_path / "kept"))
    with pytest.raises(CheckpointError, match="was trained over another base"):
        asyncio.run(worker(adapted(tmp_path, seed=5)).load(tmp_path / "kept"))
    with pytest.raises(CheckpointError, match="holds other adapters than --lora-rank"):
        asyncio.run(worker(adapted(tmp_path, rank=3)).load(tmp_path / "kept"))
    plain = worker(model())
    (tmp_path / "plain").mkdir()
    asyncio.run(plain.save(tmp_path / "plain"))
    with pytest.raises(CheckpointError, match="has no adapter because its weights were trained"):
        asyncio.run(worker(adapted(tmp_path)).load(tmp_path / "plain"))


def test_an_engine_of_this_process_reads_the_merged_weights_where_they_are(tmp_path):
    trainer = worker(adapted(tmp_path))
    config = NativeConfig(engine_kv_tokens=256)
    engine = NativeEngine(
        spec_from_config(DENSE),
        device=torch.device("cpu"),
        dtype=torch.float32,
        config=config,
        run=InlineExecutor(),
        decode=None,
    )
    sync = Publication(weights=trainer.weights, engines=[engine], transport="shared", run=InlineExecutor())
    asyncio.run(sync.publish(trainer.version))
    places = {name: tensor.data_ptr() for name, tensor in engine.weights().items()}
    step(trainer, ragged())
    asyncio.run(sync.publish(trainer.version))
    assert {name: tensor.data_ptr() for name, tensor in engine.weights().items()} == places
    assert {name: tensor.data_ptr() for name, tensor in trainer.weights().items()} == places
    asyncio.run(engine.close())


def test_an_engine_that_samples_meanwhile_has_copies_of_what_changes_and_no_others(tmp_path):
    actor = adapted(tmp_path)
    trainer, places = worker(actor), actor.adapters().targets_by_param
    config = NativeConfig(engine_kv_tokens=256)
    how = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "config": config,
        "run": InlineExecutor(),
        "decode": None,
    }
    engine = NativeEngine(spec_from_config(DENSE), **how)
    sync = Publication(
        weights=trainer.weights, engines=[engine], transport="copy", run=InlineExecutor(), trained=places
    )
    asyncio.run(sync.publish(trainer.version))
    own = {name: tensor.data_ptr() for name, tensor in trainer.weights().items()}
    for name, tensor in engine.weights().items():
        assert (tensor.data_ptr() == own[name]) == (name not in places), name
    asyncio.run(engine.close())


def test_settling_gives_factors_that_were_not_reached_a_gradient_of_zero(tmp_path):
    actor = adapted(tmp_path)
    actor.finalize_grads()
    grads = {name: p.grad for name, p in actor.adapters().parameters.items() if p.grad is not None}
    assert grads.keys() == actor.adapters().parameters.keys() and not any(bool(grad.any()) for grad in grads.values())
    assert float(actor.norm(grads)) == 0.0


def test_adapters_of_a_tower_alone_pass_over_micro_batches_without_images(tmp_path: Path):
    vision_model("qwen2_5_vl").save_pretrained(folder := tmp_path / "model")

    def step(**train: Any) -> dict[str, Any]:
        decoder = hf.load(folder, device="cpu", dtype=torch.float32)
        lora = cases.lora_of(decoder.spec, "vision")
        model = cases.adapted(LocalModel(decoder, config=read_config(folder), frozen=True), folder, lora)
        return cases.stepped(model, image_samples("qwen2_5_vl", "turns"), SINGLE_RANK, {}, **train)

    whole, single = step(max_tokens_per_gpu=4096), step(micro_batch_size=1)
    assert whole["grads"].keys() == single["grads"].keys()
    assert any(grad.any() for grad in whole["grads"].values())
    for name, grad in whole["grads"].items():
        torch.testing.assert_close(single["grads"][name], grad, rtol=1e-4, atol=1e-5)
