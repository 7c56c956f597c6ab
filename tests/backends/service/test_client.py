"""The official client, unmodified, against the service: every verb of it does what its documentation says."""

import urllib.request

import numpy as np
import pytest
import torch
from safetensors.torch import load
from tests.backends.service.live import ALICE

tinker = pytest.importorskip("tinker", reason="pip install 'miles-rl[service]'")
types = tinker.types

PROMPT = [5, 17, 300, 44, 8, 99, 120]
ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def client(live):
    with tinker.ServiceClient(base_url=live.url, api_key=ALICE) as client:
        yield client


@pytest.fixture(scope="module")
def training(client, model):
    return client.create_lora_training_client(base_model=str(model), rank=8, seed=3)


def datum(tokens, weights=None, **inputs):
    """A sequence: with ``weights``, 1 by default, or with other inputs."""
    inputs = inputs or {"weights": [1.0] * (len(tokens) - 1) if weights is None else weights}
    arrays = {name: np.array(values, np.float32) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:])} | arrays,
    )


DATA = [datum(PROMPT), datum([9, 8, 7, 6])]


def test_capabilities_name_the_base_model(client, model):
    (found,) = client.get_server_capabilities().supported_models
    assert (found.model_name, found.max_context_length, found.trainable) == (str(model), 512, True)


def test_info_and_tokenizer(training, model):
    info = training.get_info()
    assert info.model_data.model_name == str(model) and info.lora_rank == 8 and info.is_lora
    assert training.get_tokenizer().decode([5]) != ""


def test_training_lowers_the_loss(training):
    losses = []
    for _ in range(6):
        result = training.forward_backward(DATA, "cross_entropy")
        step = training.optim_step(ADAM)
        losses.append(result.result().metrics["loss:sum"])
        assert step.result().metrics["grad_norm"] > 0
    assert losses[-1] < 0.7 * losses[0]
    outputs = result.result().loss_fn_outputs
    assert [len(each["logprobs"].data) for each in outputs] == [6, 3]
    assert losses[-1] == pytest.approx(-sum(each["logprobs"].to_numpy().sum() for each in outputs), rel=1e-4)


def test_forward_is_what_the_sampler_scores(training):
    forward = training.forward(DATA[:1], "cross_entropy").result()
    sampler = training.save_weights_and_get_sampling_client()
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result()
    assert scored[0] is None
    np.testing.assert_allclose(forward.loss_fn_outputs[0]["logprobs"].to_numpy(), scored[1:], atol=1e-4)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_policy_losses(training, loss_fn):
    forward = training.forward(DATA[:1], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    inputs = {"logprobs": forward, "advantages": [0.0, 1.0, -1.0, 0.5, 0.0, 2.0]}
    inputs |= {"sequence_ratio_mask": [1.0] * 6} if loss_fn == "gspo" else {}
    result = training.forward_backward([datum(PROMPT, **inputs)], loss_fn).result()
    # On the policy that sampled, ratios are 1 and the gap is 0.
    advantages = np.array(inputs["advantages"])
    weight = forward if loss_fn in ("cispo", "dro") else 1.0
    assert result.metrics["loss:sum"] == pytest.approx(-(advantages * weight).sum(), rel=1e-3, abs=1e-4)
    training.optim_step(types.AdamParams(learning_rate=0.0)).result()


def test_clip_thresholds_of_a_request_apply(training):
    forward = training.forward(DATA[:1], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    inputs = {"logprobs": forward - 1.0, "advantages": [1.0] * 6}
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
    result = training.forward([datum(PROMPT, **inputs)], "ppo", config).result()
    assert result.metrics["loss:sum"] == pytest.approx(-6 * 1.5, rel=1e-5)


def test_custom_losses_have_the_gradient_of_the_function(client, model):
    def loss(data, logprobs):
        return sum((lp.exp() * torch.arange(len(lp))).sum() for lp in logprobs), {"mine": 3.0}

    one, two = (client.create_lora_training_client(base_model=str(model), rank=4, seed=9) for _ in range(2))
    result = one.forward_backward_custom(DATA, loss).result()
    assert result.metrics["mine"] == 3.0
    forward = two.forward(DATA, "cross_entropy").result()
    probabilities = [np.exp(each["logprobs"].to_numpy()) for each in forward.loss_fn_outputs]
    weighted = [
        datum(
            [*each.model_input.to_ints(), int(each.loss_fn_inputs["target_tokens"].data[-1])],
            (-p * np.arange(len(p))).tolist(),
        )
        for each, p in zip(DATA, probabilities, strict=True)
    ]
    two.forward_backward(weighted, "cross_entropy").result()
    norms = [each.optim_step(ADAM).result().metrics["grad_norm"] for each in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_an_adapter_of_the_output_layer_alone_is_trained_and_sampled_from(client, model):
    flags = {"train_attn": False, "train_mlp": False}
    run = client.create_lora_training_client(base_model=str(model), rank=4, seed=1, **flags)
    losses = []
    for _ in range(4):
        losses.append(run.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"])
        run.optim_step(ADAM).result()
    assert losses[-1] < losses[0]
    forward = run.forward(DATA[:1], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    scored = run.save_weights_and_get_sampling_client().compute_logprobs(types.ModelInput.from_ints(PROMPT)).result()
    np.testing.assert_allclose(forward, scored[1:], atol=1e-4)
    resumed = client.create_training_client_from_state_with_optimizer(run.save_state("head").result().path)
    again = []
    for each in (run, resumed):
        each.forward_backward(DATA, "cross_entropy").result()
        each.optim_step(ADAM).result()
        again.append(each.forward(DATA, "cross_entropy").result().metrics["loss:sum"])
    assert again[0] == again[1] < losses[-1]


def test_states_are_saved_and_loaded(client, model):
    run = client.create_lora_training_client(base_model=str(model), rank=4, seed=1)
    run.forward_backward(DATA, "cross_entropy")
    run.optim_step(ADAM).result()
    path = run.save_state("first").result().path
    assert path == f"tinker://{run.model_id}/weights/first"
    with_moments = client.create_training_client_from_state_with_optimizer(path)
    without = client.create_training_client_from_state(path)

    def go_on(each):
        each.forward_backward(DATA, "cross_entropy").result()
        each.optim_step(ADAM).result()
        return each.forward(DATA, "cross_entropy").result().metrics["loss:sum"]

    wanted = go_on(run)
    assert go_on(with_moments) == wanted
    assert go_on(without) != wanted


def test_samples_come_from_the_saved_version(client, model):
    run = client.create_lora_training_client(base_model=str(model), rank=8, seed=2)
    before = run.save_weights_for_sampler("before").result().path
    for _ in range(8):
        run.forward_backward(DATA[:1], "cross_entropy")
        run.optim_step(ADAM).result()
    after = run.save_weights_and_get_sampling_client()
    greedy = types.SamplingParams(max_tokens=4, temperature=0.0)
    prompt = types.ModelInput.from_ints(PROMPT[:3])
    assert after.sample(prompt, 1, greedy).result().sequences[0].tokens == PROMPT[3:]
    old = client.create_sampling_client(model_path=before)
    base = client.create_sampling_client(base_model=str(model))
    assert old.sample(prompt, 1, greedy).result().sequences[0].tokens != PROMPT[3:]
    # A new adapter changes nothing.
    scores = [each.compute_logprobs(prompt).result()[1:] for each in (old, base)]
    np.testing.assert_allclose(*scores, atol=1e-5)
    assert base.get_base_model() == str(model)


def test_sampling_options(client, model):
    base = client.create_sampling_client(base_model=str(model))
    prompt = types.ModelInput.from_ints(PROMPT)
    params = types.SamplingParams(max_tokens=5, seed=7, top_k=50, top_p=0.9, temperature=0.8, stop=[])
    result = base.sample(
        prompt, 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=3
    ).result()
    again = base.sample(prompt, 3, params).result()
    assert [each.tokens for each in result.sequences] == [each.tokens for each in again.sequences]
    assert len({tuple(each.tokens) for each in result.sequences}) > 1
    assert all(
        len(each.tokens) == len(each.logprobs) == 5 and each.stop_reason == "length" for each in result.sequences
    )
    assert len(result.prompt_logprobs) == 7 and result.prompt_logprobs[0] is None
    assert result.topk_prompt_logprobs[0] is None and all(len(row) == 2 for row in result.topk_prompt_logprobs[1:])
    assert all(len(row) == 3 for row in result.sequences[0].topk_logprobs)
    last = base.sample(prompt, 1, params, include_prompt_logprobs=True, prompt_logprobs_last_n=2).result()
    assert last.prompt_logprobs[:5] == [None] * 5
    assert last.prompt_logprobs[5:] == pytest.approx(result.prompt_logprobs[5:], abs=1e-5)


def test_named_tokens_are_scored(client, model):
    base = client.create_sampling_client(base_model=str(model))
    ids = torch.full((6, 1), -1, dtype=torch.int64)
    ids[4, 0] = PROMPT[5]
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=1)
    target = types.TensorData.from_torch_sparse(ids, pad_value=-1)
    result = base.sample(prompt, 1, params, include_prompt_logprobs=True, target_prompt_logprobs=target).result()
    found = result.target_prompt_logprobs.to_numpy()
    assert found.shape == (6, 1) and found[4, 0] == pytest.approx(result.prompt_logprobs[5], abs=1e-5)
    assert not found[:4].any()


def test_sampling_stops_at_tokens_and_texts(client, model, training):
    base = client.create_sampling_client(base_model=str(model))
    prompt = types.ModelInput.from_ints(PROMPT)
    free = base.sample(prompt, 1, types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])).result().sequences[0]
    stop = free.tokens[3]
    ended = base.sample(prompt, 1, types.SamplingParams(max_tokens=8, temperature=0.0, stop=[stop])).result()
    first = free.tokens.index(stop)
    assert ended.sequences[0].tokens == free.tokens[: first + 1] and ended.sequences[0].stop_reason == "stop"
    text = training.get_tokenizer().decode(free.tokens[2:4])
    ended = base.sample(prompt, 1, types.SamplingParams(max_tokens=8, temperature=0.0, stop=text)).result()
    assert ended.sequences[0].stop_reason == "stop" and len(ended.sequences[0].tokens) <= 4


def test_checkpoints_are_listed_downloaded_and_deleted(client, model):
    run = client.create_lora_training_client(base_model=str(model), rank=4, user_metadata={"name": "mine"})
    saved = run.save_state("one", ttl_seconds=7200).result().path
    sampler = run.save_weights_for_sampler("two").result().path
    external = run.save_weights_external("three").result().path
    rest = client.create_rest_client()
    listed = rest.list_checkpoints(run.model_id).result().checkpoints
    assert {each.tinker_path for each in listed} == {saved, sampler, external}
    assert {each.checkpoint_type for each in listed} == {"training", "sampler", "external"}
    assert next(each for each in listed if each.tinker_path == saved).expires_at is not None
    found = rest.get_training_run(run.model_id).result()
    assert (found.lora_rank, found.user_metadata) == (4, {"name": "mine"})
    assert found.last_checkpoint.tinker_path == saved and found.last_sampler_checkpoint.tinker_path == sampler
    assert run.model_id in {each.training_run_id for each in rest.list_training_runs().result().training_runs}
    info = rest.get_weights_info_by_tinker_path(saved).result()
    assert (info.lora_rank, info.train_attn, info.train_mlp, info.train_unembed) == (4, True, True, True)
    urls = rest.get_external_weights_urls(external).result().urls
    assert set(urls) == {"adapter_config.json", "adapter_model.safetensors"}
    with urllib.request.urlopen(urls["adapter_model.safetensors"]) as response:
        names = set(load(response.read()))
    assert all("lora_" in name for name in names)
    assert {name for name in names if "lm_head" in name} == {
        f"base_model.model.lm_head.lora_{factor}.weight" for factor in "AB"
    }
    rest.set_checkpoint_ttl_from_tinker_path(saved, None).result()
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    left = rest.list_checkpoints(run.model_id).result().checkpoints
    assert {each.tinker_path for each in left} == {saved, external}
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        client.create_sampling_client(model_path=sampler)


def test_bad_requests_fail_in_one_sentence_and_the_run_goes_on(training):
    with pytest.raises(tinker.RequestFailedError, match="outside the vocabulary"):
        training.forward_backward([datum([1, 2, 10**6])], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="has no advantages") as caught:
        training.forward_backward(DATA, "ppo").result()
    assert caught.value.category == types.RequestErrorCategory.User
    with pytest.raises(tinker.RequestFailedError, match="no name of a checkpoint"):
        training.save_state("../../etc").result()
    with pytest.raises(tinker.RequestFailedError, match="beta1 is 2"):
        training.optim_step(types.AdamParams(beta1=2.0)).result()
    assert training.forward(DATA, "cross_entropy").result().metrics["loss:sum"] > 0


def test_unknown_base_models_are_refused(client):
    with pytest.raises(tinker.UnprocessableEntityError, match="is not served"):
        client.create_lora_training_client(base_model="other/model")
    with pytest.raises(tinker.UnprocessableEntityError, match="is not served"):
        client.create_sampling_client(base_model="other/model")


def test_a_wrong_key_is_refused(live):
    with pytest.raises(tinker.AuthenticationError, match="API key"):
        tinker.ServiceClient(base_url=live.url, api_key="tml-wrong").get_server_capabilities()
