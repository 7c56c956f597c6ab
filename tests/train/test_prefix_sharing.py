"""What samples share is read once, and nothing that is learnt changes."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.oracle import KINDS
from tests.models.small_families.small import SMALL
from tests.train.shared_prefix_samples import group, sample
from tests.train.small_trainer import DENSE, MOE, model, step, worker
from tests.train.test_critic import ppo

from miles.algo.loss_aggregation import mean_per_token
from miles.backends.fsdp.local_model import LocalModel
from miles.core.errors import UsageError
from miles.kernels.numerics import FAST
from miles.models.accounting.prefix_sharing import PrefixCost, count_sequences
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config
from miles.train.batch_tensors import (
    MicroBatch,
    build_token_paths,
    flatten_batch,
    group_by_trajectory,
    pack_micro_batch,
    select_samples,
)
from miles.train.config import TrainConfig
from miles.train.grad_accumulation import build_micro_batches
from miles.train.prefix_sharing import (
    TokenPath,
    TreeNode,
    build_prefix_tree,
    bundle_by_prefix,
    compute_runs,
    count_tree_tokens,
    join_trees,
)

CPU = torch.device("cpu")

# Few tokens, so that many begin alike.
texts_of = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=9)), max_size=7)


def paths(found, routed=None):
    return [TokenPath(prompt=p, tokens=np.array(t, np.int32), routed=routed) for p, t in found]


def read(tree, joined):
    """Every sample's tokens, off the tree."""
    return joined[tree.kept_T][tree.slot_P] if len(joined) else joined


@given(texts_of, st.integers(1, 5))
def test_every_sample_can_be_read_off_the_tree(found, least):
    made = paths(found)
    tree = build_prefix_tree(made, min_shared=least)
    joined = np.concatenate([np.empty(0, np.int32), *(p.tokens for p in made)])
    assert np.array_equal(read(tree, joined), joined)
    runs = compute_runs(tree.nodes)
    assert [sum(n for _, n in runs[end]) for end in tree.ends] == [len(p) for p in made]
    assert sum(s.length for s in tree.nodes) == len(tree.kept_T) == count_tree_tokens(made, min_shared=least)
    inner = {s.parent for s in tree.nodes}
    assert all(s.length >= least for i, s in enumerate(tree.nodes) if i in inner)


@given(texts_of)
def test_every_beginning_is_read_once(found):
    assert count_tree_tokens(paths(found), min_shared=1) == len(
        {(p, *t[: i + 1]) for p, t in found for i in range(len(t))}
    )


def test_a_branch_goes_on_where_its_trajectory_forked():
    turn = np.arange(30)
    found = [(0, turn), (0, [*turn[:20], 7, 7, 7]), (0, [*turn[:10], 5]), (0, turn[:20])]
    tree = build_prefix_tree(paths(found), min_shared=8)
    assert tree.nodes == (TreeNode(10), TreeNode(10, 0), TreeNode(10, 1), TreeNode(3, 1), TreeNode(1, 0))
    assert tree.ends == (2, 3, 4, 1)


def test_other_prompts_and_other_experts_share_nothing():
    tokens, experts = np.arange(20, dtype=np.int32), np.zeros((20, 2, 1), np.uint8)
    other = experts.copy()
    other[12:] = 1
    alone = TokenPath(prompt=1, tokens=tokens)
    reported = TokenPath(prompt=0, tokens=tokens, routed=experts)
    assert count_tree_tokens([alone, replace(alone, prompt=0)]) == 40
    assert count_tree_tokens([replace(alone, prompt=0), reported]) == 40
    assert count_tree_tokens([reported, replace(reported, routed=other)]) == 12 + 8 + 8


@given(texts_of, st.integers(1, 30), st.integers(1, 2))
def test_bundles_hold_every_sample_once_and_no_more_than_fits(found, limit, together):
    made = paths(found)
    packed = bundle_by_prefix(made, limit=limit, unit_size=together, min_shared=2)
    assert sorted(i for b in packed for i in b.members) == list(range(len(made)))
    for b in packed:
        assert len({made[i].prompt for i in b.members}) == 1
        assert b.tokens == count_tree_tokens([made[i] for i in b.members], min_shared=2)
        assert b.tokens <= limit or len(b.members) <= together


@given(texts_of.filter(any))
def test_the_trees_of_bundles_are_together_the_tree_of_all(found):
    made = sorted(paths(found), key=lambda path: path.prompt)
    whole = build_prefix_tree(made, min_shared=2)
    joined = join_trees([bundle.tree for bundle in bundle_by_prefix(made, limit=1000, min_shared=2)])
    assert (joined.nodes, joined.ends) == (whole.nodes, whole.ends)
    assert np.array_equal(joined.kept_T, whole.kept_T) and np.array_equal(joined.slot_P, whole.slot_P)


@pytest.mark.parametrize(("prompts", "parts", "units"), [(1, 1, 1), (1, 4, 8), (2, 2, 4), (8, 2, 8)])
def test_few_prompts_are_parted_so_that_every_rank_has_some(prompts, parts, units):
    made = [
        TokenPath(prompt=p, tokens=np.concatenate([np.arange(20), np.full(90, i)]).astype(np.int32))
        for p in range(prompts)
        for i in range(16)
    ]
    packed = bundle_by_prefix(made, limit=10_000, dp_size=parts)
    assert sorted(i for b in packed for i in b.members) == list(range(len(made)))
    assert len(packed) >= units and (len(packed) == units or parts > 1)


# -- rows -----------------------------------------------------------------------------------


def same(a: MicroBatch, b: MicroBatch) -> bool:
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(MicroBatch)]
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


@settings(deadline=None)
@given(texts_of.filter(any), st.data())
def test_shared_rows_are_the_plain_ones_when_taken_apart(found, data):
    samples = [
        sample([*text, 0], data.draw(st.integers(1, len(text))), prompt_id=prompt, routed_experts=_experts([*text, 0]))
        for prompt, text in found
    ]
    flat = flatten_batch(group_by_trajectory(samples), mean_per_token)
    chosen = list(range(len(samples)))
    plain = pack_micro_batch(flat, chosen, device=CPU, replay=True)
    shared = pack_micro_batch(flat, chosen, device=CPU, replay=True, share=True, min_shared=2)
    assert shared.saved_tokens == sum(plain.lengths) - count_tree_tokens(
        build_token_paths(flat, chosen, replay=True), min_shared=2
    )
    assert same(shared.unshare(), plain)
    assert shared.tokens_T[shared.before_R].tolist() == plain.tokens_T[plain.before_R].tolist()
    some = sorted(data.draw(st.sets(st.sampled_from(chosen), min_size=1)))
    (ours, at_R), (wanted, wanted_R) = select_samples(shared, some), select_samples(plain, some)
    assert same(ours.unshare(), wanted) and at_R.tolist() == wanted_R.tolist()
    assert not ours.tree_nodes or len(ours.ends) == len(some)


def _experts(tokens):
    return np.array(tokens, np.uint8).reshape(-1, 1, 1)


def test_rows_that_share_nothing_are_plain():
    flat = flatten_batch(group_by_trajectory([sample(range(10), 4, prompt_id=i) for i in range(3)]), mean_per_token)
    rows = pack_micro_batch(flat, range(3), device=CPU, replay=False, share=True)
    assert (rows.tree_nodes, rows.ends, rows.saved_tokens) == ((), (), 0) and rows.unshare() is rows


# -- through the worker ---------------------------------------------------------------------


class Watched(LocalModel):
    """Keeps the gradient that the optimizer is about to see."""

    def finalize_grads(self):
        self.grads = {name: p.grad.clone() for name, p in self.parameters().items() if p.grad is not None}


def actor(config):
    return Watched(hf.init_random(spec_from_config(config), seed=0, device="cpu", dtype=torch.float32), config=config)


def talks(config):
    rng = np.random.default_rng(0)
    experts = (2, 6, 2) if config is MOE else None
    return [s for i in range(3) for s in group(rng, i, prompt=9 + 3 * i, replies=(6, 1, 11, 4), experts=experts)]


CASES = {
    "grpo": (DENSE, {}, {}),
    "grpo in several micro-batches": (DENSE, {}, {"max_tokens_per_gpu": 45}),
    "grpo, counted": (DENSE, {}, {"micro_batch_size": 4}),
    "a reference": (DENSE, {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}, {}),
    "gspo": (DENSE, {"advantage_estimator": "gspo"}, {}),
    "experts": (MOE, {}, {}),
    "replayed experts": (MOE, {"use_rollout_routing_replay": True}, {}),
}


@pytest.mark.parametrize(("config", "algo", "train"), CASES.values(), ids=CASES.keys())
def test_the_gradient_is_that_of_samples_read_one_by_one(config, algo, train):
    found = []
    for share in (False, True):
        policy = actor(config)
        reference = model(config, seed=1, frozen=True) if "use_kl_loss" in algo else None
        trainer = worker(policy, algo=algo, train=train | {"share_prefix": share}, reference=reference)
        metrics = step(trainer, talks(config)).metrics
        found.append((metrics, policy.grads))
    (plain, wanted), (ours, grads) = found
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        assert (grad - wanted[name]).abs().max() <= 1e-5 * wanted[name].abs().max().clamp_min(1e-3), name
    # Experts of shared tokens are counted once.
    kept = plain.keys() - {"micro_batches", "routing_mismatch_ratio", "expert_imbalance"}
    assert {n: ours[n] for n in kept} == pytest.approx({n: plain[n] for n in kept}, rel=1e-5, abs=1e-6)
    assert 0 < ours["tokens_shared"] < plain["train_tokens"] and "tokens_shared" not in plain
    assert ours["micro_batches"] <= plain["micro_batches"]


@pytest.mark.parametrize("pays", [True, False])
def test_an_estimate_decides_where_the_option_leaves_it_open(pays, monkeypatch):
    """The step is then, to the bit, that of the option set by hand."""
    seen = []
    monkeypatch.setattr(PrefixCost, "pays", lambda self, plain, shared: seen.append((plain, shared)) or pays)
    cost = PrefixCost(spec_from_config(DENSE), "float32", FAST)
    found = []
    for train, more in (({"share_prefix": pays}, {}), ({}, {"prefix_cost": cost})):
        policy = actor(DENSE)
        found.append((step(worker(policy, train=train, **more), talks(DENSE)).metrics, policy.grads))
    (wanted, grads), (ours, same_grads) = found
    assert all(torch.equal(grad, same_grads[name]) for name, grad in grads.items())
    assert ours.pop("tokens_shared") == (wanted.pop("tokens_shared") if pays else 0) and ours == wanted
    [(plain, shared)] = seen
    # Prompts of 9, 12 and 15 tokens with four replies each, whose last token predicts nothing.
    assert plain.tokens - shared.tokens == 3 * (9 + 12 + 15)
    assert plain.varlen_pairs > shared.varlen_pairs and shared.gathered > shared.tokens


def test_the_estimate_is_for_each_text_of_a_pair(monkeypatch):
    """Attention of a pair is that of two texts, not of one as long as both."""
    seen = []
    monkeypatch.setattr(PrefixCost, "pays", lambda self, plain, shared: seen.append(plain) or False)
    flat = flatten_batch([[each] for each in talks(DENSE)], mean_per_token)
    cost, config = PrefixCost(spec_from_config(DENSE), "float32", FAST), TrainConfig(max_tokens_per_gpu=1000)
    build_micro_batches(flat, config, device=CPU, replay=False, paired=True, prefix_cost=cost)
    assert seen == [count_sequences(flat.length_S.tolist())]


def test_without_an_estimate_nothing_is_shared():
    assert "tokens_shared" not in step(worker(actor(DENSE)), talks(DENSE)).metrics


def test_prompts_are_read_once_for_all_their_trajectories():
    trainer = worker(actor(DENSE), train={"share_prefix": True})
    # The last prompt token of each predicts the first of a reply, and a reply's last predicts nothing.
    assert step(trainer, talks(DENSE)).metrics["tokens_shared"] == 3 * (9 + 12 + 15)


def test_a_critic_reads_what_it_would_have_read():
    ends = []
    for share in (False, True):
        trainer, value = ppo(model(), train={"share_prefix": share})
        step(trainer, talks(DENSE))
        ends.append({name: p.detach().clone() for name, p in value.parameters().items()})
    assert all(torch.allclose(ends[0][name], ends[1][name], atol=1e-6) for name in ends[0])


@pytest.mark.parametrize("kind", ["hybrid qwen3 next", "deepseek v3.2"])
def test_models_that_cannot_share_say_so(kind):
    wanted = KINDS[kind]
    config = wanted.config(**(SMALL | wanted.own)).to_dict() | {"architectures": [wanted.model.__name__]}
    trainer = worker(actor(config), train={"share_prefix": True})
    with pytest.raises(UsageError, match="--share-prefix does not support this model"):
        step(trainer, talks(DENSE))


def test_four_common_tokens_are_shared_near_the_start_and_eight_later():
    def fork_at(position, shared):
        """Tokens of samples of one prompt that share ``position`` tokens, and of two of them that share more."""
        common = list(range(position))
        tails = [[100] * 40, [200] * shared + [201], [200] * shared + [202]]
        return count_tree_tokens(paths([(0, common + tail) for tail in tails]))

    assert fork_at(10, 4) == 10 + 40 + 4 + 1 + 1
    assert fork_at(10, 3) == 10 + 40 + 2 * 4
    assert fork_at(64, 4) == 64 + 40 + 2 * 5
    assert fork_at(64, 8) == 64 + 40 + 8 + 1 + 1
