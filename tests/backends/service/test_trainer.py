"""The trainer of several adapters: each gets what PEFT and torch compute for it alone, whatever else is in the pass."""

import asyncio
import copy
import functools
import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from tests.backends.native.conftest import Tiny
from tests.models.oracle import hf_model, twin

from miles.backends.native.engine.lora import LoraShape
from miles.backends.native.engine.request import GenerateRequest
from miles.backends.service.adapter import AdamParams, AdapterShape, write_peft
from miles.backends.service.losses import LOSSES
from miles.backends.service.messages import Datum, TrainRequest
from miles.backends.service.trainer import MultiLoraTrainer, PassItem, check_data, split_data
from miles.core.protocols import SamplingParams
from miles.kernels.numerics import BATCH_INVARIANT
from miles.models.decoder import Decoder
from miles.models.lora.factors import read_factors
from miles.models.lora.targets import list_targets
from miles.rollout.serving.errors import RequestError

SHAPES = [
    AdapterShape(rank=4, alpha=32, seed=1, train_unembed=True),
    AdapterShape(rank=2, alpha=8, seed=2, train_mlp=False),
    AdapterShape(rank=7, alpha=32, seed=3, train_attn=False),
]
HEAD = AdapterShape(rank=3, alpha=8, seed=4, train_attn=False, train_mlp=False, train_unembed=True)


@functools.cache
def base(kind="qwen3"):
    return hf_model(kind)


def build_trainer(kind="qwen3", **options):
    decoder = twin(base(kind))
    modules = [target.module for target in list_targets(decoder.spec) if not target.num_experts]
    return MultiLoraTrainer(decoder, modules, device=torch.device("cpu"), **options)


def create(trainer, shape):
    """An adapter whose B is not zero, so that A has gradients too."""
    adapter = trainer.create(shape)
    random = torch.Generator().manual_seed(shape.seed + 100)
    state = {
        name: 0.15 * torch.randn(tensor.shape, generator=random) for name, tensor in adapter.collect_state().items()
    }
    adapter.load_state(state)
    return adapter


def random_data(seed, lengths, vocab=None):
    rng = np.random.default_rng(seed)
    vocab = vocab or base().config.vocab_size
    data = []
    for length in lengths:
        tokens = rng.integers(0, vocab, length + 1)
        floats = {
            "weights": rng.random(length),
            "logprobs": -3 * rng.random(length),
            "advantages": rng.standard_normal(length),
            "sequence_ratio_mask": (rng.random(length) < 0.7).astype(np.float32),
        }
        inputs = {"target_tokens": tokens[1:]} | {name: value.astype(np.float32) for name, value in floats.items()}
        data.append(Datum(tokens_N=tokens[:-1], inputs=inputs))
    return data


def make_item(adapter, data, loss_fn="cross_entropy", backward=True, config=None):
    return PassItem(adapter=adapter, data=data, loss_fn=loss_fn, loss_config=config or {}, backward=backward)


def gradients(adapter):
    return {name: tensor for name, tensor in adapter.collect_state().items() if name.endswith(":grad")}


def peft_model(trainer, adapter, tmp_path, kind="qwen3"):
    write_peft(tmp_path, adapter, trainer.decoder.spec, "base")
    return PeftModel.from_pretrained(copy.deepcopy(base(kind)), tmp_path, is_trainable=True)


def reference_loss(loss_fn, logp, inputs, low=0.8, high=1.2, beta=0.05):
    """The losses of the API as its documentation writes them."""
    sampled, advantages = inputs["logprobs"], inputs["advantages"]
    ratio = torch.exp(logp - sampled)
    if loss_fn == "cross_entropy":
        return -(inputs["weights"] * logp).sum()
    if loss_fn == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss_fn == "cispo":
        return -(ratio.detach().clamp(low, high) * logp * advantages).sum()
    if loss_fn == "dro":
        return -(logp * advantages - 0.5 * beta * (logp - sampled) ** 2).sum()
    if loss_fn == "gspo":
        marked = inputs["sequence_ratio_mask"] != 0
        mean = (logp.detach() - sampled)[marked].mean()
        ratio = torch.exp(mean + logp - logp.detach())
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


@pytest.mark.parametrize(
    ("loss_fn", "kind"),
    [*((loss_fn, "qwen3") for loss_fn in LOSSES), ("cross_entropy", "qwen2 tied"), ("cross_entropy", "gemma2")],
)
def test_gradients_of_adapters_in_one_pass_are_those_of_peft(loss_fn, kind, tmp_path):
    trainer = build_trainer(kind)
    adapters = [create(trainer, shape) for shape in (*SHAPES, HEAD)]
    lengths = ((5, 9), (12,), (3, 7, 4), (6,))
    data = [random_data(i, own, base(kind).config.vocab_size) for i, own in enumerate(lengths)]
    outputs = trainer.run([make_item(*each, loss_fn) for each in zip(adapters, data, strict=True)])
    for number, (adapter, own, output) in enumerate(zip(adapters, data, outputs, strict=True)):
        oracle = peft_model(trainer, adapter, tmp_path / str(number), kind)
        total = 0.0
        for datum, got in zip(own, output.outputs, strict=True):
            logits = oracle(torch.from_numpy(datum.tokens_N)[None]).logits[0]
            targets = torch.from_numpy(datum.inputs["target_tokens"])
            logp = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
            np.testing.assert_allclose(got["logprobs"], logp.detach().numpy(), atol=2e-4, rtol=1e-4)
            inputs = {name: torch.from_numpy(array) for name, array in datum.inputs.items() if name != "target_tokens"}
            total = total + reference_loss(loss_fn, logp, inputs)
        total.backward()
        assert output.loss == pytest.approx(total.item(), rel=1e-4)
        wanted = {
            name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad
            for name, parameter in oracle.named_parameters()
            if parameter.grad is not None
        }
        found = {name.removesuffix(":grad"): tensor for name, tensor in gradients(adapter).items()}
        assert found.keys() == wanted.keys() and len(found) == 2 * len(adapter.targets)
        for name, grad in found.items():
            scale = wanted[name].abs().max().item()
            torch.testing.assert_close(grad, wanted[name], atol=2e-4 * scale + 1e-6, rtol=2e-3)


def test_what_else_is_in_a_pass_changes_a_tenants_results_by_rounding_only():
    trainer = build_trainer()
    data = [random_data(i, lengths) for i, lengths in enumerate(((5, 9), (12,), (3, 7, 4)))]
    together = [create(trainer, shape) for shape in SHAPES]
    outputs = trainer.run([make_item(*each) for each in zip(together, data, strict=True)])
    for shape, own, adapter, output in zip(SHAPES, data, together, outputs, strict=True):
        alone = create(trainer, shape)
        (expected,) = trainer.run([make_item(alone, own)])
        assert output.loss == pytest.approx(expected.loss, rel=1e-6)
        for name, grad in gradients(adapter).items():
            wanted = gradients(alone)[name]
            assert (grad - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_with_batch_invariant_numerics_log_probs_do_not_depend_on_the_pass_at_all():
    decoder = twin(base())
    exact = Decoder(decoder.spec, device="cpu", dtype=torch.float32, numerics=BATCH_INVARIANT)
    exact.load_state_dict(decoder.state_dict())
    trainer = MultiLoraTrainer(exact, [t.module for t in list_targets(decoder.spec)], device=torch.device("cpu"))
    data = [random_data(i, lengths) for i, lengths in enumerate(((5, 9), (12,), (3, 7, 4)))]
    adapters = [create(trainer, shape) for shape in SHAPES]
    outputs = trainer.run([make_item(*each, backward=False) for each in zip(adapters, data, strict=True)])
    for adapter, own, output in zip(adapters, data, outputs, strict=True):
        (alone,) = trainer.run([make_item(adapter, own, backward=False)])
        for one, two in zip(output.outputs, alone.outputs, strict=True):
            np.testing.assert_array_equal(one["logprobs"], two["logprobs"])


@pytest.mark.parametrize("kind", ["qwen3", "qwen2 tied"])
def test_with_exact_parity_the_engine_scores_with_the_bits_of_the_trainer(kind, tmp_path):
    decoder = twin(base(kind))
    exact = Decoder(decoder.spec, device="cpu", dtype=torch.bfloat16, numerics=BATCH_INVARIANT)
    exact.load_state_dict(decoder.state_dict())
    modules = tuple(target.module for target in list_targets(decoder.spec))
    trainer = MultiLoraTrainer(exact, modules, device=torch.device("cpu"))
    engine = Tiny().engine(exact, lora=LoraShape(num_slots=2, max_rank=8, modules=modules), page_size=4)
    adapters = {str(number): create(trainer, shape) for number, shape in enumerate((SHAPES[0], HEAD))}
    for name, adapter in adapters.items():
        write_peft(tmp_path / name, adapter, decoder.spec, "base")
        engine.load_lora(name, read_factors(tmp_path / name, decoder.spec))
    data = random_data(1, (9, 13), base(kind).config.vocab_size)
    items = [make_item(adapters[name], [datum], backward=False) for name, datum in zip("01", data, strict=True)]
    trained = trainer.run(items)

    async def score():
        asked = [
            engine.submit(
                GenerateRequest(
                    tokens=np.append(datum.tokens_N, datum.inputs["target_tokens"][-1]).astype(np.int32),
                    sampling=SamplingParams(max_new_tokens=0),
                    lora=name,
                    logprob_start_len=0,
                )
            )
            for name, datum in zip("01", data, strict=True)
        ]
        for output in asked:
            await output.completion()
        return [np.array(output.prompt_logprobs.logprobs[1:], np.float32) for output in asked]

    for output, scores in zip(trained, asyncio.run(score()), strict=True):
        np.testing.assert_array_equal(output.outputs[0]["logprobs"], scores)


def test_gradients_add_up_and_a_forward_alone_adds_none():
    trainer = build_trainer()
    one, two = random_data(1, (6,)), random_data(2, (8, 2))
    summed, both = create(trainer, SHAPES[0]), create(trainer, SHAPES[0])
    trainer.run([make_item(summed, one)])
    trainer.run([make_item(summed, two, backward=False), make_item(create(trainer, SHAPES[1]), one)])
    trainer.run([make_item(summed, two)])
    trainer.run([make_item(both, one), make_item(both, two)])
    for name, grad in gradients(both).items():
        torch.testing.assert_close(gradients(summed)[name], grad, atol=1e-4, rtol=1e-4)


def test_gradient_checkpointing_computes_the_same():
    data = random_data(1, (6, 9))
    plain, saving = build_trainer(), build_trainer(gradient_checkpointing=True)
    one, two = create(plain, SHAPES[0]), create(saving, SHAPES[0])
    plain.run([make_item(one, data)])
    saving.run([make_item(two, data)])
    for name, grad in gradients(one).items():
        torch.testing.assert_close(gradients(two)[name], grad, atol=1e-5, rtol=1e-5)


def test_steps_are_those_of_adamw():
    trainer = build_trainer()
    adapter = create(trainer, SHAPES[0])
    params = {name: tensor.clone().requires_grad_() for name, tensor in adapter.collect_state().items()}
    optimizer = torch.optim.AdamW(params.values(), lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for number in range(3):
        trainer.run([make_item(adapter, random_data(number, (7,)))])
        for name, parameter in params.items():
            parameter.grad = gradients(adapter)[f"{name}:grad"].clone()
        norm = torch.nn.utils.clip_grad_norm_(params.values(), 0.5)
        optimizer.step()
        how = AdamParams(learning_rate=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)
        assert adapter.step(how)["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        for name, parameter in params.items():
            torch.testing.assert_close(adapter.collect_state()[name], parameter.detach(), atol=1e-6, rtol=1e-5)
    assert not gradients(adapter)


def test_a_saved_state_continues_to_the_bit(tmp_path):
    trainer = build_trainer()
    adapter, other = create(trainer, SHAPES[0]), trainer.create(SHAPES[0])
    for number in range(2):
        trainer.run([make_item(adapter, random_data(number, (7,)))])
        adapter.step(AdamParams(learning_rate=0.01))
    trainer.run([make_item(adapter, random_data(5, (7,)))])
    adapter.save(tmp_path / "state.safetensors")
    other.load(tmp_path / "state.safetensors")
    for each in (adapter, other):
        each.step(AdamParams(learning_rate=0.01))
        trainer.run([make_item(each, random_data(6, (4,)))])
        each.step(AdamParams(learning_rate=0.01))
    for name, tensor in adapter.collect_state().items():
        assert torch.equal(tensor, other.collect_state()[name]), name
    fresh = trainer.create(SHAPES[0])
    fresh.load(tmp_path / "state.safetensors", optimizer=False)
    assert len(fresh.collect_state()) == 2 * len(fresh.targets)


def test_several_targets_of_a_token_are_scored():
    trainer = build_trainer()
    adapter = create(trainer, SHAPES[0])
    datum = random_data(1, (5,))[0]
    targets = np.stack([datum.inputs["target_tokens"], (datum.inputs["target_tokens"] + 1) % 7], 1)
    weights = np.random.default_rng(0).random((5, 2)).astype(np.float32)
    wide = Datum(tokens_N=datum.tokens_N, inputs={"target_tokens": targets, "weights": weights})
    first = Datum(tokens_N=datum.tokens_N, inputs={"target_tokens": targets[:, 0]})
    got = trainer.run([make_item(adapter, [wide])])[0]
    one = trainer.run([make_item(adapter, [first])])[0].outputs[0]["logprobs"]
    logprobs = got.outputs[0]["logprobs"]
    assert logprobs.shape == (5, 2)
    np.testing.assert_allclose(logprobs[:, 0], one, atol=1e-6)
    assert got.loss == pytest.approx(-(logprobs * weights).sum(), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": ()}, "no data"),
        ({"loss_fn": "stable_reinforce"}, "there is no loss"),
        ({"loss_fn": "ppo", "drop": "advantages"}, "no advantages"),
        ({"tokens": np.array([1, 10**6])}, "outside the vocabulary"),
        ({"tokens": np.array([1])}, "there is one for each"),
        ({"weights": np.array([1.0], np.float32)}, "but target_tokens have"),
        ({"weights": np.array([1.0, np.nan], np.float32)}, "no finite numbers"),
        ({"tokens": np.zeros(10**4, np.int64)}, "more than the model's"),
    ],
)
def test_bad_data_is_refused_in_one_sentence(change, words):
    inputs = {name: array[:2] for name, array in random_data(0, (4,))[0].inputs.items() if name != change.get("drop")}
    inputs |= {"weights": change["weights"]} if "weights" in change else {}
    datum = Datum(tokens_N=change.get("tokens", np.array([1, 2])), inputs=inputs)
    data = change.get("data", (datum,))
    loss_fn = change.get("loss_fn", "cross_entropy")
    request = TrainRequest(model_id="m", seq_id=1, data=data, loss_fn=loss_fn)
    with pytest.raises(RequestError, match=words) as caught:
        check_data(request, vocab_size=100, max_positions=512)
    assert caught.value.status == 422 and str(caught.value).count("\n") == 0


def test_requests_are_split_by_tokens():
    data = random_data(0, (5, 5, 20, 1, 1))
    assert split_data(data, 10) == [range(0, 2), range(2, 3), range(3, 5)]
    assert split_data(data, 100) == [range(0, 5)]


def test_adapters_are_written_as_peft_reads_them(tmp_path):
    trainer = build_trainer()
    adapter = create(trainer, SHAPES[1])
    write_peft(tmp_path, adapter, trainer.decoder.spec, "base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 8)
    assert set(config["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}
