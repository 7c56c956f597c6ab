"""The verbs of a policy: sample, score, forward_backward, optim_step, publish, save_state and load_state."""

import _thread
import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.api.conftest import ROWS, SMALL, WORDS, shared_letters

import miles
from miles.core.types import Author
from miles.launch.commands import demo_task

OPTIONS = {name: value for name, value in SMALL.items() if name not in ("rollout_batch_size", "n_samples_per_prompt")}


@pytest.fixture
def policy(model: str) -> Iterator[miles.Policy]:
    with miles.open(model, **OPTIONS) as policy:
        yield policy


def texts(samples: list[miles.PolicySample]) -> list[str]:
    return [sample.text for sample in samples]


def take_step(policy: miles.Policy, **how: object) -> list[miles.PolicySample]:
    samples = policy.score(policy.sample(policy.read_prompts(ROWS[:4]), n=4), shared_letters)
    policy.forward_backward(samples, **how)
    policy.optim_step()
    policy.publish()
    return samples


# -- sampling and scoring ---------------------------------------------------------------------


def test_samples_have_tokens_logprobs_text_and_version(policy: miles.Policy):
    samples = policy.sample(policy.read_prompts(ROWS[:2]), n=3)
    assert [s.prompt.id for s in samples] == [0, 0, 0, 1, 1, 1] and [s.record for s in samples[::3]] == ROWS[:2]
    trained = policy.log_probs(samples)
    for sample, logprobs in zip(samples, trained, strict=True):
        assert sample.version == 0 and sample.reward is None and sample.status in ("completed", "truncated")
        assert len(sample.tokens) == 4 + len(sample.response_tokens)  # three letters and the question mark
        np.testing.assert_allclose(sample.logprobs, logprobs, atol=1e-5)


def test_a_prompt_is_a_text_messages_a_row_or_a_prompt(policy: miles.Policy):
    message = {"role": "user", "content": "abc"}
    same = [policy.sample(prompt, n=1, seed=3) for prompt in ("abc", ["abc"], [message], [[message]])]
    assert len({tuple(texts(samples)) for samples in same}) == 1
    row = policy.sample({"input": "abc", "label": "cba"})[0]
    assert row.prompt.label == "cba" and row.record == {"input": "abc", "label": "cba"}


def test_sampling_again_gives_others_and_a_seed_the_same(policy: miles.Policy):
    first, second = (texts(policy.sample(WORDS[:4], n=2)) for _ in range(2))
    assert first != second
    assert texts(policy.sample(WORDS[:4], n=2, seed=7)) == texts(policy.sample(WORDS[:4], n=2, seed=7))
    greedy = policy.sample("abc", n=2, temperature=0.0, max_new_tokens=2, ignore_eos=True)
    assert len(set(texts(greedy))) == 1 and len(greedy[0].response_tokens) == 2


def test_scores_come_from_functions_names_numbers_and_options(model: str, policy: miles.Policy):
    samples = policy.sample(policy.read_prompts(ROWS[:2]), n=2)
    letters = policy.score(samples, shared_letters)
    assert [s.reward for s in letters] == [shared_letters(s.text, str(s.prompt.label)) for s in samples]

    async def number(record, response):
        return record["number"] + 0.5

    assert [s.reward for s in policy.score(letters, number)] == [0.5, 0.5, 1.5, 1.5]
    assert [s.reward for s in policy.score(samples, [4, 3, 2, 1])] == [4.0, 3.0, 2.0, 1.0]
    assert {s.reward for s in policy.score(samples, "exact")} <= {0.0, 1.0}
    with pytest.raises(miles.UsageError, match=r"score\(\) has no reward; give a function or a name"):
        policy.score(samples)
    with pytest.raises(miles.UsageError, match="has 1 rewards for 4 samples"):
        policy.score(samples, [1.0])


def test_a_reward_that_raises_leaves_its_sample_out_of_training(policy: miles.Policy):
    def reward(response, record):
        if record["number"] == 0:
            raise ValueError("no answer")
        return len(response)

    samples = policy.score(policy.sample(policy.read_prompts(ROWS[:2]), n=4), reward)
    assert [s.trajectory.metadata.get("unscored") for s in samples] == ["ValueError: no answer"] * 4 + [None] * 4
    metrics = policy.forward_backward(samples)
    assert metrics["trained_tokens"] == sum(len(s.response_tokens) for s in samples[4:])
    again = policy.score(samples, shared_letters)
    assert not any("unscored" in s.trajectory.metadata for s in again)


# -- training ---------------------------------------------------------------------------------


def test_a_step_changes_what_is_sampled_and_its_version(policy: miles.Policy):
    before = policy.sample("abc", n=4, seed=0)
    samples = take_step(policy)
    after = policy.sample("abc", n=4, seed=0)
    assert policy.version == 1 and {s.version for s in samples} == {0} and {s.version for s in after} == {1}
    assert [s.logprobs.tolist() for s in before] != [s.logprobs.tolist() for s in after]
    np.testing.assert_allclose(after[0].logprobs, policy.log_probs(after[:1])[0], atol=1e-5)


def test_a_policy_learns_what_its_reward_asks_for(policy: miles.Policy):
    rewards = []
    for _ in range(12):
        samples = policy.score(policy.sample(WORDS, n=4), lambda response: response.count("a"))
        policy.forward_backward(samples)
        policy.optim_step(lr=3e-2)
        policy.publish()
        rewards.append(np.mean([sample.reward for sample in samples]))
    assert np.mean(rewards[-3:]) > 1.0 + np.mean(rewards[:3])


def test_weights_must_be_published_before_they_are_sampled_from(policy: miles.Policy):
    samples = policy.score(policy.sample("abc", n=4), lambda response: len(response))
    policy.forward_backward(samples)
    policy.optim_step()
    with pytest.raises(miles.UsageError, match=r"call publish\(\) before sample\(\)"):
        policy.sample("abc")
    assert policy.publish() == 1 and policy.sample("abc")[0].version == 1


def test_with_staleness_the_engine_keeps_the_published_weights(model: str):
    with miles.open(model, max_weight_staleness=1, **OPTIONS) as policy:
        before = policy.sample("abc", n=4, seed=0)
        policy.forward_backward(policy.score(before, [1.0, 0.0, 0.0, 0.0]))
        policy.optim_step()
        unpublished = policy.sample("abc", n=4, seed=0)
        assert texts(unpublished) == texts(before) and {s.version for s in unpublished} == {0}
        for new, old in zip(unpublished, before, strict=True):  # the cached prompt may change a last bit
            np.testing.assert_allclose(new.logprobs, old.logprobs, atol=1e-5)
        policy.publish()
        assert {s.version for s in policy.sample("abc", n=4, seed=0)} == {1}


def test_a_second_update_takes_the_ratio_against_the_sampled_log_probs(policy: miles.Policy):
    samples = policy.score(policy.sample("abc", n=8), lambda response: response.count("a") + len(response))
    first = policy.forward_backward(samples)
    policy.optim_step()
    second = policy.forward_backward(samples)
    assert first["ratio"] == pytest.approx(1.0, abs=1e-5) and abs(second["ratio"] - 1.0) > 1e-3


def test_a_loss_of_ones_own_is_the_built_in_one_where_it_says_the_same(model: str):
    def clipped(logprobs, old_logprobs, advantages):
        ratio = (logprobs - old_logprobs).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

    def scalar(logprobs, old_logprobs, advantages, mean):
        return mean(clipped(logprobs, old_logprobs, advantages))

    digests = []
    for loss in (None, "grpo", clipped, scalar):
        with miles.open(model, **OPTIONS) as policy:
            take_step(policy, loss=loss)
            digests.append(read_weights(policy.save_state("state-" + str(len(digests)))))
    assert digests[0] == digests[1]
    for other in digests[2:]:
        for name, weight in digests[0].items():
            torch.testing.assert_close(other[name], weight, atol=2e-5, rtol=0)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found = load_file(folder / "model.safetensors")
    return Weights(found)


class Weights(dict):
    """Weights that are compared bit for bit."""

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, dict)
        return self.keys() == other.keys() and all(torch.equal(self[name], other[name]) for name in self)


def test_given_advantages_replace_those_of_rewards(policy: miles.Policy):
    samples = policy.sample(["abc", "bcd"], n=1)
    before = policy.log_probs(samples)
    policy.forward_backward(samples, advantages=[1.0, -1.0])
    policy.optim_step()
    after = policy.log_probs(samples)
    gains = [float(new.sum() - old.sum()) for new, old in zip(after, before, strict=True)]
    assert gains[0] > 0 > gains[1]


def test_demonstrations_are_trained_on_by_any_policy(policy: miles.Policy):
    samples = policy.read_demonstrations(ROWS)
    assert texts(samples) == [row["label"] for row in ROWS] and {s.version for s in samples} == {-1}
    losses = []
    for _ in range(4):
        losses.append(policy.forward_backward(samples, loss="sft")["loss"])
        policy.optim_step()
    assert losses == sorted(losses, reverse=True)
    expected = -np.mean([logprobs.mean() for logprobs in policy.log_probs(samples)])
    assert policy.forward_backward(samples, loss="sft")["loss"] == pytest.approx(float(expected), rel=1e-4)


def test_state_continues_to_the_bit(model: str, tmp_path: Path):
    with miles.open(model, **OPTIONS) as policy:
        take_step(policy)
        state = policy.save_state(tmp_path / "state")
        whole = [take_step(policy) for _ in range(2)]
        wanted = read_weights(policy.save_state(tmp_path / "whole"))
    assert state == tmp_path / "state" / "step-000001"
    with miles.open(model, **OPTIONS) as policy:
        policy.load_state(tmp_path / "state")
        assert policy.version == 1
        assert [texts(take_step(policy)) for _ in range(2)] == [texts(samples) for samples in whole]
        assert read_weights(policy.save_state(tmp_path / "resumed")) == wanted
        with pytest.raises(miles.MilesError, match="nowhere has no state of a policy"):
            policy.load_state("nowhere")
        assert policy.version == 3
    with miles.Engine(str(state), **ENGINE) as engine:
        assert engine.sample("abc")[0].version == 0


@pytest.mark.parametrize(
    "options",
    [
        {"lora_rank": 8},
        {"algorithm": "ppo"},
        {"algorithm": "gspo", "use_tis": True, "use_kl_loss": True, "kl_loss_coef": 0.01},
        {"rollout_precision": "fp8"},
        {"lr_decay_style": "cosine", "num_rollout": 4},
    ],
    ids=lambda options: "-".join(options),
)
def test_any_way_to_train_learns_and_continues(model: str, options: dict[str, object]):
    with miles.open(model, **{**OPTIONS, **options}) as policy:
        for _ in range(3):
            samples = policy.score(policy.sample(WORDS[:3], n=4), lambda response: response.count("a"))
            metrics = policy.forward_backward(samples)
            assert metrics["parity_mean_abs"] < (0.05 if "rollout_precision" in options else 1e-5)
            policy.optim_step()
            policy.publish()
        state, wanted = policy.save_state("state"), policy.log_probs(samples)
        take_step(policy)
        policy.load_state(state)
        assert policy.version == 3 and policy.sample("abc")[0].version == 3
        assert all((one == two).all() for one, two in zip(policy.log_probs(samples), wanted, strict=True))


def test_experts_are_replayed(tmp_path: Path):
    demo_task.write_checkpoint(tmp_path / "moe", moe=True, seed=1)
    with miles.open(tmp_path / "moe", use_rollout_routing_replay=True, **OPTIONS) as policy:
        samples = policy.score(policy.sample(WORDS[:3], n=4), lambda response: response.count("a"))
        metrics = policy.forward_backward(samples)
        assert metrics["routing_replayed"] > 0 and metrics["parity_mean_abs"] < 1e-5


def test_an_interrupt_ends_a_verb_and_the_policy_goes_on(policy: miles.Policy):
    samples = policy.sample("abc")
    ended = threading.Event()

    def reward(response):
        _thread.interrupt_main()
        ended.wait(60)
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        policy.score(samples, reward)
    ended.set()
    assert policy.score(samples, lambda response: 2.0)[0].reward == 2.0
    assert len(policy.sample("abc", n=2)) == 2


# -- halves, and both forms ---------------------------------------------------------------------

ENGINE = {name: value for name, value in OPTIONS.items() if name not in ("lr", "label_key")}


def test_an_engine_alone_samples_what_a_policy_samples(model: str, policy: miles.Policy):
    with miles.Engine(model, **ENGINE) as engine:
        assert texts(engine.sample(WORDS, n=2)) == texts(policy.sample(WORDS, n=2))
        assert [s.reward for s in engine.score(engine.sample("abc", n=2), lambda response: 2)] == [2.0, 2.0]
        assert not hasattr(engine, "optim_step")


def test_a_trainer_alone_trains_on_samples_of_another_engine(model: str, policy: miles.Policy):
    samples = policy.score(policy.sample(WORDS[:4], n=4), shared_letters_of_abc)
    with miles.Trainer(model, **OPTIONS) as trainer:
        losses = [each.forward_backward(samples)["loss"] for each in (trainer, policy)]
        assert losses[0] == losses[1]
        trainer.optim_step()
        policy.optim_step()
        pairs = zip(trainer.log_probs(samples), policy.log_probs(samples), strict=True)
        assert all((one == two).all() for one, two in pairs)
        assert trainer.version == 1 and not hasattr(trainer, "sample")


def shared_letters_of_abc(response: str) -> int:
    return len(set(response) & set("abc"))


def test_async_forms_do_the_same_and_samples_may_overlap(model: str):
    async def loop():
        async with await miles.open_async(model, **OPTIONS) as policy:
            parts = await asyncio.gather(*(policy.sample_async(word, n=2) for word in WORDS[:4]))
            samples = await policy.score_async([s for part in parts for s in part], shared_letters_of_abc)
            metrics = await policy.forward_backward_async(samples)
            await policy.optim_step_async()
            late = asyncio.create_task(policy.sample_async("abc"))  # must wait, and then finds new weights
            with pytest.raises(miles.UsageError, match=r"publish\(\)"):
                await late
            assert await policy.publish_async() == 1
            logprobs = await policy.log_probs_async(samples)
            await policy.load_state_async(await policy.save_state_async("state"))
            return texts(samples), metrics["loss"], len(logprobs)

    async def with_plain_forms():
        with miles.open(model, **OPTIONS) as policy:  # a loop is running, as in a notebook
            samples = policy.score(policy.sample(WORDS[:4], n=2), shared_letters_of_abc)
            return texts(samples), policy.forward_backward(samples)["loss"], len(samples)

    assert asyncio.run(loop()) == asyncio.run(with_plain_forms())


# -- what is wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lrr": 1e-3}, "--lrr is not a flag; did you mean --lr?"),
        ({"algorithm": "grop"}, "algorithm 'grop' is not one of grpo"),
        ({"actor_num_gpus_per_node": 2}, "A policy is opened in one process on one device; remove"),
        ({"lr_decay_style": "cosine"}, "--lr-decay-style cosine needs the number of optimizer steps"),
        ({"hf_checkpoint": "other"}, "hf_checkpoint is the model, which is given already"),
    ],
)
def test_options_are_refused_with_the_sentences_of_the_command_line(model: str, options: dict, words: str):
    with pytest.raises(miles.UsageError) as caught:
        miles.open(model, **{**OPTIONS, **options})
    assert words in str(caught.value)


def test_verbs_are_refused_with_one_sentence(policy: miles.Policy):
    samples = policy.sample("abc", n=2)
    for call, words in (
        (lambda: policy.forward_backward([]), "has no samples"),
        (lambda: policy.forward_backward(samples), "sample 0 has no reward; call score() first"),
        (lambda: policy.forward_backward(samples, advantages=[1.0]), "1 advantages for 2 samples"),
        (
            lambda: policy.forward_backward(samples, loss="ppo", advantages=[1, 1]),
            "open the policy with algorithm='ppo'",
        ),
        (lambda: policy.forward_backward(samples, loss="dpo"), "--loss-type dpo_loss needs a reference model"),
        (lambda: policy.forward_backward(samples, loss="nll"), "algorithm 'nll' is not one of"),
        (lambda: policy.forward_backward(samples, lambda logits: 0, [1, 1]), "the loss takes logits; name its"),
        (lambda: policy.forward_backward(samples, lambda logprobs: 3, [1, 1]), "the loss returned int"),
        (lambda: policy.optim_step(), "has no gradient to apply"),
        (lambda: policy.sample("abc", temprature=1), "takes no temprature; its options are temperature"),
        (lambda: policy.sample([]), "has no prompts"),
        (lambda: policy.sample([3]), "was given a int as a prompt"),
        (lambda: policy.sample("abc", n=0), "takes n of at least 1"),
        (lambda: policy.sample("a" * 80), "leaves no room for a reply"),
        (lambda: policy.score(samples, "exat"), "exat"),
    ):
        with pytest.raises(miles.MilesError) as caught:
            call()
        assert words in str(caught.value)
    policy.close()
    policy.close()
    with pytest.raises(miles.UsageError, match="this policy is closed; open another one"):
        policy.sample("abc")


def test_preference_pairs_are_two_samples_each(model: str):
    rows = [{"input": word, "chosen": word[::-1], "rejected": word} for word in WORDS]
    options = {name: value for name, value in OPTIONS.items() if name not in ("label_key", "rollout_max_response_len")}
    with miles.open(model, algorithm="dpo", **options) as policy:
        pairs = policy.read_demonstrations(rows)
        assert texts(pairs)[:2] == ["cba", "abc"]
        losses = []
        for _ in range(3):
            losses.append(policy.forward_backward(pairs)["loss"])
            policy.optim_step()
        assert losses[0] == pytest.approx(np.log(2), rel=1e-4) and losses[-1] < losses[0]


def test_only_tokens_of_the_policy_are_trained_on(policy: miles.Policy):
    (sample,) = policy.sample("abc")
    authors = [span.author for span in sample.trajectory.branches[0]]
    assert authors == [Author.PROMPT, Author.POLICY]
    metrics = policy.forward_backward([sample], advantages=[1.0])
    assert metrics["trained_tokens"] == len(sample.response_tokens)


def test_rows_of_a_file_are_read_as_rows_in_memory(policy: miles.Policy, tmp_path: Path):
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert policy.read_prompts(path) == policy.read_prompts(ROWS)
