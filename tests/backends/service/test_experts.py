"""Adapters of routed experts in the training service: gradients of each tenant, files, and the official client."""

import numpy as np
import pytest
import torch
from peft import PeftModel
from tests.backends.service.live import ALICE, serving
from tests.backends.service.test_trainer import create, gradients, make_item, random_data
from tests.models.lora.test_adapters import merged_into
from tests.models.oracle import hf_model, our_logits, relative, twin

from miles.backends.service.adapter import AdapterShape, write_peft
from miles.backends.service.trainer import MultiLoraTrainer
from miles.launch.commands import demo_task
from miles.models.checkpoint import peft
from miles.models.lora import adapters as adapted
from miles.models.lora.adapters import LoraAdapters
from miles.models.lora.targets import list_targets

KINDS = ["qwen3 moe", "gpt-oss", "deepseek v3"]
SHAPES = [
    AdapterShape(rank=4, alpha=32, seed=1),
    AdapterShape(rank=2, alpha=8, seed=2, train_mlp=False),
    AdapterShape(rank=7, alpha=32, seed=3, train_attn=False),
]
LENGTHS = ((5, 9), (12,), (3, 7, 4))


def build_trainer(kind, **options):
    decoder = twin(hf_model(kind))
    modules = [target.module for target in list_targets(decoder.spec)]
    return MultiLoraTrainer(decoder, modules, device=torch.device("cpu"), **options)


def load_alone(kind, folder):
    """A decoder with the adapter of a PEFT folder merged into it, as a run trains one."""
    decoder = twin(hf_model(kind)).requires_grad_(False)
    lora = peft.find_adapter(folder, decoder.spec).lora
    adapters = LoraAdapters(lora, device=torch.device("cpu"), seed=0)
    adapters.load(adapted.read_adapter(folder, lora))
    merged_into(decoder, adapters)
    return decoder, adapters


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_in_one_pass_get_what_each_gets_alone_merged_into_its_experts(tmp_path, kind, checkpointing):
    trainer = build_trainer(kind, gradient_checkpointing=checkpointing)
    adapters = [create(trainer, shape) for shape in SHAPES]
    vocab = trainer.decoder.spec.vocab_size
    data = [random_data(i, lengths, vocab) for i, lengths in enumerate(LENGTHS)]
    outputs = trainer.run([make_item(*each) for each in zip(adapters, data, strict=True)])
    checked = 0
    for number, (adapter, own, output) in enumerate(zip(adapters, data, outputs, strict=True)):
        write_peft(tmp_path / str(number), adapter, trainer.decoder.spec, "base")
        alone, factors = load_alone(kind, tmp_path / str(number))
        total = torch.zeros(())
        for datum, got in zip(own, output.outputs, strict=True):
            logp = our_logits(alone, [torch.from_numpy(datum.tokens_N)]).log_softmax(-1)
            targets = torch.from_numpy(datum.inputs["target_tokens"])
            logp = logp.gather(1, targets[:, None]).squeeze(1)
            np.testing.assert_allclose(got["logprobs"], logp.detach().numpy(), atol=2e-4, rtol=1e-4)
            total = total - (torch.from_numpy(datum.inputs["weights"]) * logp).sum()
        total.backward()
        found = {name.removesuffix(":grad"): tensor for name, tensor in gradients(adapter).items()}
        assert found.keys() == factors.parameters.keys()
        for name, grad in found.items():
            assert relative(grad, factors.parameters[name].grad) < 2e-3, name
            checked += ".experts" in name
    assert checked


def test_a_forward_alone_has_the_adapters_of_experts_and_leaves_none_behind():
    trainer = build_trainer("qwen3 moe")
    data = random_data(1, (6, 9), trainer.decoder.spec.vocab_size)
    adapter, empty = create(trainer, SHAPES[0]), trainer.create(SHAPES[0])
    forward, both = (trainer.run([make_item(adapter, data, backward=b)])[0] for b in (False, True))
    (base,) = trainer.run([make_item(empty, data, backward=False)])
    for one, two, three in zip(forward.outputs, both.outputs, base.outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"], two["logprobs"], atol=1e-5)
        assert np.abs(one["logprobs"] - three["logprobs"]).max() > 1e-2
    with torch.no_grad():
        tokens = torch.from_numpy(data[0].tokens_N)
        bare = our_logits(trainer.decoder, [tokens]).log_softmax(-1)
    targets = torch.from_numpy(data[0].inputs["target_tokens"])
    np.testing.assert_allclose(
        bare.gather(1, targets[:, None]).squeeze(1).numpy(), base.outputs[0]["logprobs"], atol=1e-5
    )


def test_peft_computes_the_log_probs_of_an_adapter_of_experts(tmp_path):
    trainer = build_trainer("qwen3 moe")
    adapter = create(trainer, AdapterShape(rank=4, alpha=8, seed=5))
    (datum,) = random_data(2, (9,), trainer.decoder.spec.vocab_size)
    (output,) = trainer.run([make_item(adapter, [datum], backward=False)])
    write_peft(tmp_path / "adapter", adapter, trainer.decoder.spec, "base")
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(hf_model("qwen3 moe"), tmp_path / "adapter")
        logp = theirs(torch.from_numpy(datum.tokens_N)[None]).logits[0].log_softmax(-1)
    wanted = logp.gather(1, torch.from_numpy(datum.inputs["target_tokens"])[:, None]).squeeze(1)
    np.testing.assert_allclose(output.outputs[0]["logprobs"], wanted.numpy(), atol=2e-4, rtol=1e-4)


def test_the_official_client_trains_experts_and_samples_from_them(tmp_path):
    tinker = pytest.importorskip("tinker", reason="pip install 'miles-rl[service]'")
    types = tinker.types
    model = tmp_path / "model"
    model.mkdir()
    demo_task.write_checkpoint(model, moe=True, seed=1)
    prompt = [5, 17, 20, 24, 8, 9, 12]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(prompt[:-1]),
        loss_fn_inputs={"target_tokens": np.array(prompt[1:]), "weights": np.ones(6, np.float32)},
    )
    with (
        serving(model, tmp_path / "service", "--service-max-rank", "8") as live,
        tinker.ServiceClient(base_url=live.url, api_key=ALICE) as client,
    ):
        training = client.create_lora_training_client(
            base_model=str(model), rank=4, seed=3, train_attn=False, train_unembed=False
        )
        losses = []
        for _ in range(5):
            result = training.forward_backward([datum], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            losses.append(result.result().metrics["loss:sum"])
        assert losses[-1] < 0.8 * losses[0]
        forward = training.forward([datum], "cross_entropy").result()
        sampler = training.save_weights_and_get_sampling_client()
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(prompt)).result()
        np.testing.assert_allclose(forward.loss_fn_outputs[0]["logprobs"].to_numpy(), scored[1:], atol=1e-4)
