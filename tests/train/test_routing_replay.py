"""A batch's experts, as the engine or the trainer's own first look at it chose them, in every forward that follows."""

import numpy as np
import torch
from tests.train.small_trainer import MOE, distance, model, ragged, step, weights, worker

from miles.backends.fsdp.local_model import LocalModel
from miles.models.layers.moe import MoeMlp
from miles.train.batch_tensors import MicroBatch


class Listening(LocalModel):
    """Tells the experts of every forward of every micro-batch."""

    def __init__(self, inner: LocalModel) -> None:
        super().__init__(inner._decoder)
        self.heard: dict[bytes, list[list[list[int]]]] = {}

    def _output(self, rows: MicroBatch):
        kept: list[list[int]] = []
        layers = [m for m in self._decoder.modules() if isinstance(m, MoeMlp)]

        def listen(route):
            def routed(*given):
                weights_Tk, experts_Tk = route(*given)
                kept.append(experts_Tk.tolist())
                return weights_Tk, experts_Tk

            return routed

        for layer in layers:
            layer.route = listen(layer.route)
        try:
            return super()._output(rows)
        finally:
            for layer in layers:
                del layer.route
            self.heard.setdefault(rows.tokens_T.numpy().tobytes(), []).append(kept)


def routed(samples, seed=5):
    rng = np.random.default_rng(seed)
    for s in samples:
        experts = np.array([[rng.permutation(6)[:2] for _ in range(2)] for _ in range(len(s))], np.uint8)
        s.extras["routed_experts"] = experts
    return samples


def heard(algo, *, steps=2, train=None, samples=None):
    actor = Listening(model(MOE))
    trainer = worker(actor, algo=algo, train={"lr": 0.3, **(train or {})}, steps=steps)
    metrics = step(trainer, samples or ragged(8)).metrics
    return actor.heard, metrics, trainer


def test_all_steps_of_a_batch_use_the_experts_of_the_first_look_at_it():
    free, plain, _ = heard({})
    held, metrics, _ = heard({"use_routing_replay": True})
    assert all(len(forwards) == 2 for forwards in (*free.values(), *held.values()))
    assert any(first != second for first, second in free.values()), "weights move, and routers with them"
    assert all(first == second for first, second in held.values())
    assert {name: first for name, (first, _) in held.items()} == {name: first for name, (first, _) in free.items()}
    assert metrics["routing_mismatch_ratio"] > 0 and "routing_mismatch_ratio" not in plain


def test_the_engines_experts_come_first_and_the_trainers_own_fill_in():
    samples = routed(ragged(8))
    for s in samples:
        s.extras["routed_experts"][::2] = 255
    both, _, _ = heard({"use_routing_replay": True, "use_rollout_routing_replay": True}, samples=samples)
    free, _, _ = heard({}, samples=samples)
    assert all(first == second for first, second in both.values())
    assert any(both[name][0] != free[name][0] for name in both), "the engine's experts are others"


def test_a_first_look_is_made_for_the_experts_where_log_probs_are_the_engines():
    held, metrics, _ = heard({"use_routing_replay": True, "use_rollout_logprobs": True})
    assert all(len(forwards) == 2 and forwards[0] == forwards[1] for forwards in held.values())
    assert metrics["ratio"] != 1


def test_layers_that_run_again_in_backward_use_the_same_experts():
    results = []
    for again in (False, True):
        inner = model(MOE, gradient_checkpointing=again)
        trainer = worker(inner, algo={"use_routing_replay": True}, train={"lr": 0.3}, steps=2)
        results.append((step(trainer, ragged(8)).metrics, weights(trainer)))
    assert distance(results[0][1], results[1][1]) < 1e-6
    assert results[0][0]["expert_imbalance"] == results[1][0]["expert_imbalance"]


def test_what_samples_share_is_read_once_and_replayed_too():
    samples = ragged(8)
    for s in samples:
        s.tokens[:] = samples[0].tokens[0]
    found = []
    for share in (False, True):
        trainer = worker(
            model(MOE), algo={"use_routing_replay": True}, train={"lr": 0.1, "share_prefix": share}, steps=2
        )
        step(trainer, samples)
        found.append(weights(trainer))
    assert distance(*found) < 1e-4


def test_the_reference_chooses_its_own_experts():
    samples = routed(ragged(4))
    algo = {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_rollout_routing_replay": True, "use_routing_replay": True}
    reference = Listening(model(MOE, seed=1, frozen=True))
    step(worker(model(MOE), algo=algo, reference=reference, steps=1), samples)
    alone = Listening(model(MOE, seed=1, frozen=True))
    step(worker(model(MOE), algo={"use_kl_loss": True, "kl_loss_coef": 0.1}, reference=alone, steps=1), ragged(4))
    assert reference.heard == alone.heard


def test_the_gap_without_replay_is_measured_now_and_then_and_changes_nothing():
    algo, found = {"use_rollout_routing_replay": True}, []
    for every in (0, 2):
        trainer = worker(model(MOE), algo=algo, parity_no_replay_interval=every)
        reported = [
            "parity_mean_abs_no_replay" in step(trainer, routed(ragged(4, version=n))).metrics for n in range(4)
        ]
        found.append((reported, weights(trainer)))
    assert [reported for reported, _ in found] == [[False] * 4, [True, False, True, False]]
    assert distance(found[0][1], found[1][1]) == 0
    metrics = step(worker(model(MOE), algo=algo, parity_no_replay_interval=1), routed(ragged(4))).metrics
    plain = step(worker(model(MOE)), ragged(4)).metrics
    assert metrics["parity_mean_abs_no_replay"] != metrics["parity_mean_abs"]
    assert abs(metrics["parity_mean_abs_no_replay"] - plain["parity_mean_abs"]) < 1e-6


def test_the_load_of_experts_is_that_of_their_choices():
    samples = ragged(4)
    for s in samples:
        s.extras["routed_experts"] = np.tile(np.array([[0, 1], [2, 3]], np.uint8), (len(s), 1, 1))
    metrics = step(worker(model(MOE), algo={"use_rollout_routing_replay": True}), samples).metrics
    assert metrics["expert_imbalance"] == 3, "two of six experts have all tokens, each half of the choices"
    assert torch.isfinite(torch.tensor(metrics["loss"]))
