"""Speculative decoding: what is drafted, what verification accepts, and when drafts pay."""

from itertools import product, takewhile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.backends.native.simulated_device import World, sample_after

from miles.backends.native.engine.draft_tree import (
    DraftBranch,
    DraftTree,
    build_tree_rows,
    find_accepted_drafts,
)
from miles.backends.native.engine.ngram_draft import (
    NOT_INDEXED,
    DraftedTokens,
    NgramDrafter,
    PromptHistory,
    find_branches,
)
from miles.backends.native.engine.speculation import MAX_REPLAY_STEPS, PROBE_STEPS, Speculation
from miles.backends.native.engine.step_cost import StepCost, estimate_step_cost
from miles.cluster.platform import Platform
from miles.models.accounting.known_models import find_known_config
from miles.models.families.registry import spec_from_config


def run(world, *, prompts, new=40):
    reqs = [world.submit(prompt, new) for prompt in prompts]
    world.drain()
    return reqs


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("size", [1, 4])
def test_drafts_change_the_number_of_steps_and_no_token(depth, size):
    prompts = [[0, 1, 0, 1], [0, 1, 0, 1], [1, 1, 0]]
    plain, drafted = (World(pages=400 // size, size=size, num_slots=30, depth=depth, draft_tokens=n) for n in (0, 5))
    expected, found = run(plain, prompts=prompts), run(drafted, prompts=prompts)
    assert [req.tokens for req in found] == [req.tokens for req in expected]
    assert [len(req.logprobs) for req in found] == [len(req.logprobs) for req in expected]
    assert drafted.scheduler.counters.generated_tokens == plain.scheduler.counters.generated_tokens == 120
    assert drafted.scheduler.counters.steps < 0.6 * plain.scheduler.counters.steps
    counters = drafted.speculation.counters
    assert 0 < counters.accepted < counters.drafted
    assert sum(counters.accepted_by_position) == counters.accepted
    assert counters.verified_by_position[0] == counters.chains


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_branches_change_no_token_and_leak_no_page(depth, size):
    """What the device reads is checked for each row: a branch reads its own drafts, and the tokens before its fork."""
    prompts = [[0, 1, 0, 1], [0, 1, 0, 1], [1, 1, 0], [0] * 19]
    sizes = {"pages": 600 // size, "size": size, "num_slots": 40, "depth": depth}
    plain, drafted = World(**sizes), World(**sizes, draft_tokens=6, num_branches=3, adaptive=False)
    for _ in range(2):
        expected, found = run(plain, prompts=prompts), run(drafted, prompts=prompts)
        assert [req.tokens for req in found] == [req.tokens for req in expected]
    counters = drafted.speculation.counters
    assert counters.branches > counters.accepted_branches > 0
    assert drafted.scheduler.counters.steps < 0.6 * plain.scheduler.counters.steps


def verify(tree, sampled, computed, size):
    """The accepted tokens and branch when the token after each prefix is a function of it."""
    rows = build_tree_rows([tree], [computed], size)
    traces = [rows.trace(row) for row in range(len(rows.tokens))]
    tokens = [sampled(trace) for trace in traces]
    accepted = find_accepted_drafts(rows, np.array(tokens)).nonzero()[0].tolist()
    return [tokens[row] for row in accepted], int(rows.branches[accepted[-1]]), rows


@given(st.data())
def test_of_a_tree_the_path_that_is_sampled_is_accepted(data):
    chains = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=5))
    computed, size = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 2, 4, 16]))
    answer = data.draw(st.lists(st.integers(0, 2), min_size=6, max_size=6))
    tree = DraftTree(chains[0], find_branches(chains[0], chains[1:], 4))
    found, _, rows = verify(
        tree, lambda trace: answer[len(trace)] if trace == answer[: len(trace)] else 7, computed, size
    )
    paths = [list(tree.tokens), *([*tree.tokens[: each.fork], *each.tokens] for each in tree.branches)]
    common = [takewhile(lambda pair: pair[0] == pair[1], zip(path, answer, strict=False)) for path in paths]
    longest = max(len(list(pairs)) for pairs in common)
    assert found == answer[: longest + 1]
    # A branch writes to no page of the chain: its rows begin on the page of its fork, or with the request's last token.
    for number, branch in enumerate(tree.branches, 1):
        own = np.sort(rows.offsets[rows.branches == number])
        assert own[-1] == branch.fork + len(branch.tokens)
        assert np.array_equal(own, np.arange(own[0], own[-1] + 1))
        assert own[0] == 0 or (computed + own[0]) % size == 0
        assert (computed + own[0]) // size == (computed + branch.fork + 1) // size or own[0] == 0


def test_the_other_continuation_of_a_repeated_context_is_accepted():
    """After 3 4 once came 5, and lastly 6; a request that samples 5 there takes the branch."""
    history = PromptHistory()
    history.add(0, [3, 4, 5, 7, 3, 4, 6, 8], 0)
    own = [1, 3, 4]
    history.add(1, own, 0)
    draft = history.find(1, 2, 2)
    assert draft.tokens == [6, 8]
    assert draft.branches == [DraftBranch(0, [5, 7])]
    answer = [5, 7, 3]
    tokens, branch, _ = verify(
        DraftTree(draft.tokens, draft.branches),
        lambda trace: answer[len(trace)] if trace == answer[: len(trace)] else 9,
        2,
        16,
    )
    assert (tokens, branch) == ([5, 7, 3], 1)


def test_branches_are_verified_while_they_pay():
    """By measured acceptance: the chain is right every other time, and the branch otherwise, or never."""
    cost = StepCost(fixed_seconds=1, row_seconds=0.02, expert_seconds=0, expert_share=0)
    for right in (False, True):
        speculation = Speculation(FixedDrafter(), max_draft_tokens=4, cost=cost, page_size=4)
        req = SimpleNamespace(slot=0, tokens=[0] * 6, finish_kind="", record_verification=lambda *_, drafted_end: None)
        had = []
        for i in range(200):
            req.draft = speculation.propose([req], [4], num_rows=1, max_rows=30)[0]
            had.append(len(req.draft.branches))
            branch = int(right and i % 2 == 0 and had[-1] > 0)
            speculation.record(req, max(branch, min(i % 2, len(req.draft.tokens))), branch)
        assert had[0] == 1
        assert sum(had[100:]) == (100 if right else 0)


class FixedDrafter(NgramDrafter):
    """One chain and one branch."""

    def __init__(self):
        super().__init__(10)

    def draft(self, reqs, lengths):
        return [DraftedTokens([1, 1], 2, [DraftBranch(0, [2])]) for _ in reqs]


def test_a_second_epoch_of_a_prompt_is_drafted_from_the_first():
    world = World(pages=200, num_slots=30, draft_tokens=8)
    prompt = [0, 1, 1, 0, 1]
    first = run(world, prompts=[prompt])[0]
    before = world.scheduler.counters.steps
    second = run(world, prompts=[prompt])[0]
    assert second.tokens == first.tokens
    # One step computes the prompt, and none has drafts before two tokens match.
    assert world.scheduler.counters.steps - before <= 40 // 4


def test_no_step_has_more_rows_than_request_slots():
    world = World(pages=200, num_slots=4, draft_tokens=5)
    reqs = [world.submit([0, 0, 0, 0], 30) for _ in range(3)]
    while any(not req.finish_kind for req in reqs):
        step = world.step()
        assert step is None or len(step.batch.rows_D) <= 4


def test_drafts_never_take_the_last_pages_from_running_requests():
    world = World(pages=12, size=1, num_slots=30, draft_tokens=5)
    reqs = run(world, prompts=[[0, 0, 0]] * 2, new=3)
    assert [len(req.tokens) for req in reqs] == [6, 6]


@given(st.data())
def test_a_row_is_accepted_if_every_draft_up_to_it_was_sampled(data):
    chains = data.draw(st.lists(st.lists(st.integers(0, 1), max_size=4), min_size=1, max_size=4))
    rows = build_tree_rows([DraftTree(chain) for chain in chains], [5] * len(chains), 4)
    count = len(rows.tokens)
    sampled = data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    found = find_accepted_drafts(rows, np.array(sampled))
    expected, row = [], 0
    for chain in chains:
        accepted = True
        expected.append(True)
        for i, token in enumerate(chain):
            accepted = accepted and sampled[row + i] == token
            expected.append(accepted)
        row += len(chain) + 1
    assert found.tolist() == expected


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=4))
def test_a_draft_is_what_followed_the_longest_recent_match(sequences):
    history = PromptHistory()
    for number, tokens in enumerate(sequences):
        history.add(number, tokens, 0)
    own = sequences[-1]
    draft = history.find(len(sequences) - 1, 5) if len(own) > 1 else None
    if draft is None:
        return
    assert 1 <= len(draft.tokens) <= 5
    context = [*own[len(own) - draft.match :], *draft.tokens]
    places = [tokens[i : i + len(context)] for tokens in sequences for i in range(len(tokens) - len(context) + 1)]
    assert context in places


def test_drafts_are_tried_again_after_steps_without_any():
    """A row costs as much as a step, so drafts would not pay."""
    world = World(pages=400, num_slots=30, draft_tokens=2, row_seconds=100.0)
    world.speculation._drafter.can_replay = False
    world.submit([0] * 6, 3 * PROBE_STEPS + 10)
    world.drain()
    # The second probe comes after twice the steps.
    assert world.speculation.counters.steps == 2
    assert world.speculation.counters.drafted == 2


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_without_a_model_are_measured_without_verification(depth):
    world = World(pages=400, num_slots=30, draft_tokens=2, row_seconds=100.0, depth=depth)
    req = world.submit([0] * 6, 130)
    world.drain()
    assert world.speculation.counters.steps == 0
    counted = [(rate.accepted, rate.verified) for rate in world.speculation._rates]
    assert sum(verified for _, verified in counted) > 8.0 * len(counted) + 20
    assert len(req.tokens) == 136


def test_repetition_is_noticed_after_a_time_without_any():
    """Nothing repeats until the same prompts come again; then drafts are verified and accepted."""
    world = World(pages=800, num_slots=30, draft_tokens=4, row_seconds=0.01)
    speculation = world.speculation
    speculation._found, speculation._num_lookups = [0.0] * len(speculation._found), 128.0
    assert speculation.choose_length(2) == 0
    run(world, prompts=[[0, 1, 0], [1, 1, 0]], new=100)
    run(world, prompts=[[0, 1, 0], [1, 1, 0]], new=100)
    assert speculation.choose_length(2) > 0
    assert speculation.counters.accepted > 50


def test_rows_of_a_sparse_model_read_more_experts():
    platform = Platform(kind="cuda", device=torch.device("cpu"), name="", memory_bytes=0)
    dense, sparse = (
        estimate_step_cost(spec_from_config(find_known_config(name)), platform, "bfloat16")
        for name in ("Qwen3-8B", "Qwen3-30B-A3B")
    )
    assert dense(4) < 1.2 * dense(1)
    assert sparse(4) > 1.5 * sparse(1)
    assert sparse(512) < 1.2 * sparse(256)


# Throughput with 3 tokens a verification of 3 drafts over that without, on an H200 (docs/performance.md).
MEASURED_RATIOS = {
    "Qwen3-8B": {1: 2.08, 4: 2.33, 8: 2.42, 16: 2.08, 32: 1.83, 64: 1.42},
    "Qwen3-30B-A3B": {1: 1.41, 16: 2.24, 32: 2.34, 64: 2.02},
}


@pytest.mark.parametrize("name", MEASURED_RATIOS)
def test_the_estimated_gain_is_near_the_measured_one(name):
    platform = Platform(kind="cuda", device=torch.device("cpu"), name="", memory_bytes=0)
    cost = estimate_step_cost(spec_from_config(find_known_config(name)), platform, "bfloat16")
    for batch, measured in MEASURED_RATIOS[name].items():
        estimated = 3 * cost(batch) / (cost(4 * batch) + cost.turn_seconds)
        assert estimated == pytest.approx(measured, rel=0.3), batch


@pytest.mark.parametrize(("num_running", "worthwhile"), [(1, True), (8, True), (10_000, False)])
def test_drafts_pay_while_rows_are_cheap(num_running, worthwhile):
    cost = StepCost(fixed_seconds=1, row_seconds=0.005, expert_seconds=0, expert_share=0, turn_seconds=0.1)
    length = Speculation(NgramDrafter(10), max_draft_tokens=4, cost=cost).choose_length(num_running)
    assert (length > 0) == worthwhile


def steps_of(world, prompts, new):
    """What each step computes, and which of them waited for the one in flight."""
    for prompt in prompts:
        world.submit(prompt, new)
    found = []
    while world.scheduler.running or world.scheduler.waiting or world.inflight:
        waits = bool(world.inflight) and world.scheduler.must_wait_for_inflight()
        if (step := world.step()) is not None:
            batch = step.batch
            arrays = (batch.tokens_T, batch.starts_B, batch.req_slots_B, batch.block_table_BM, batch.rows_D)
            found.append((waits, batch.decode_only, [array.tolist() for array in arrays]))
    return found


def test_a_step_without_drafts_is_the_step_of_an_engine_without_speculation():
    """The same batch, as a CUDA graph or not, launched before the last one's output; and nothing is indexed."""
    sizes = {"pages": 400, "num_slots": 30, "depth": 1}
    prompts = [[0, 1, 0, 1], [0, 1, 0, 1], [1, 1, 0], [0] * 9]
    plain, idle = World(**sizes), World(**sizes, draft_tokens=4, row_seconds=100.0)
    for _ in range(2):
        assert steps_of(idle, prompts, 60) == steps_of(plain, prompts, 60)
    assert idle.speculation.counters.steps == 0
    histories = idle.speculation._drafter._histories.values()
    assert histories
    assert not any(history._places for history in histories)


def test_replays_in_vain_become_rare():
    cost = StepCost(fixed_seconds=1, row_seconds=0.01, expert_seconds=0, expert_share=0)
    speculation, req = Speculation(NgramDrafter(10**6), max_draft_tokens=4, cost=cost), lone_req(range(100))
    speculation.observe(req)
    counted = count_calls(speculation._drafter, "replay")
    for token in range(100, 2100):
        req.tokens.append(token)
        speculation.measure([req])
    # After 4, 8, 16, 32, 64 and then every 128 steps.
    assert counted[0] == 6 + (2000 - 4 - 8 - 16 - 32 - 64 - 128) // MAX_REPLAY_STEPS
    for token in range(100, 240):
        req.tokens.append(token)
        speculation.measure([req])
    before = counted[0]
    for token in range(240, 340):
        req.tokens.append(token)
        speculation.measure([req])
    assert counted[0] - before > 90
    assert speculation.choose_length(1) > 0


def test_replays_take_a_small_share_of_the_steps():
    """A step that takes 100 us has no time for a search of 5 us or more but every few steps."""
    cost = StepCost(fixed_seconds=1e-4, row_seconds=1e-7, expert_seconds=0, expert_share=0)
    speculation, req = Speculation(NgramDrafter(10**6), max_draft_tokens=4, cost=cost), lone_req([1, 2] * 50)
    speculation.observe(req)
    counted = count_calls(speculation._drafter, "replay")
    for _ in range(1000):
        req.tokens += [1, 2]
        speculation.measure([req])
    assert 1000 / 64 < counted[0] <= 1000 * 0.01 * 1.01e-4 / 5e-6


def lone_req(tokens):
    return SimpleNamespace(
        number=0,
        slot=0,
        tokens=list(tokens),
        prompt_length=4,
        prompt_key=b"",
        images=None,
        finish_kind="",
        has_no_output=False,
    )


def count_calls(owner, name):
    counted, method = [0], getattr(owner, name)

    def call(*args):
        counted[0] += 1
        return method(*args)

    setattr(owner, name, call)
    return counted


@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=30), min_size=1, max_size=4), st.integers(0, 4))
def test_a_replay_finds_a_match_as_long_as_the_one_of_an_index(sequences, count):
    """The index had the own sequence up to ``count`` tokens ago, and the whole others."""
    number = len(sequences) - 1
    own = sequences[number][: max(2, len(sequences[number]) - count)]
    indexed, searched = PromptHistory(), PromptHistory()
    for other, tokens in enumerate([*sequences[:-1], own]):
        indexed.add(other, tokens, 0)
    for other, tokens in enumerate(sequences):
        searched.add(other, tokens, 0)
    expected, found = indexed.find(number, 5), searched.search(number, len(own), 5)
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.match == expected.match
        assert 1 <= len(found.tokens) <= 5


def test_running_samples_stay_in_the_history_of_a_prompt_with_many():
    history = PromptHistory()
    for number in range(100):
        history.add(number, [1, 2, 3, number], 3, running=True)
    assert all(history.holds(number) for number in range(100))
    for number in range(100):
        history.add(number, [1, 2, 3, number], 3, running=False)
    assert sum(history.holds(number) for number in range(100)) == 64
    assert history.num_tokens == 4 * 64


class RightDrafter(NgramDrafter):
    """Drafts the next tokens, and one behind the first 1; with ``in_branch`` the first 1 is that of a branch."""

    def __init__(self, in_branch):
        super().__init__(500)
        self._in_branch = in_branch

    def draft(self, reqs, lengths):
        return [self._draft(tuple(req.tokens)) for req in reqs]

    def _draft(self, content):
        tokens = []
        while len(tokens) < 4 and 1 not in tokens:
            tokens.append(sample_after((*content, *tokens)))
        if 1 not in tokens:
            return DraftedTokens(tokens, 2)
        if self._in_branch:
            return DraftedTokens([*tokens[:-1], 0], 2, [DraftBranch(len(tokens) - 1, [1, 0])])
        return DraftedTokens([*tokens, 0], 2)


def count_to_end(prompt):
    """How many tokens are sampled up to the first 1."""
    zeros = next(count for count in range(100) if sample_after((*prompt, *[0] * count)))
    return zeros + 1


@pytest.mark.parametrize("in_branch", [False, True])
def test_a_drafted_end_of_a_response_counts_as_accepted(in_branch):
    world = World(pages=400, num_slots=30, draft_tokens=8, num_branches=2, adaptive=False)
    world.speculation._drafter = RightDrafter(in_branch)
    # The first token follows the prompt, a verification samples five, and the end is the third of the last one.
    prompt = next(prompt for prompt in product((0, 1), repeat=5) if count_to_end(prompt) in (9, 14, 19))
    req = world.submit(prompt, 40)
    req.accepted_drafts, req.stop_token_ids = [], frozenset([1])
    while not req.finish_kind:
        world.step()
    counts = req.build_speculation_counts()
    assert req.finish_kind == "stop" and req.tokens[-1] == 1
    assert counts.drafted_ends == 1
    # Each verification samples one token more than it accepts, but the last.
    assert counts.tokens == len(req.tokens) - len(prompt) - 1
    assert counts.accept_length == counts.tokens / counts.verifications
    # What is behind the end was not verified; of the chain beside the branch one token was rejected.
    rate = world.speculation._rates[0]
    assert rate.verified - rate.accepted == pytest.approx(8 - 0.6 * 8 + in_branch)
    assert rate.accepted == pytest.approx(0.6 * 8 + counts.accepted - in_branch)
    assert world.speculation.counters.accepted == counts.accepted


def test_a_long_history_is_indexed_over_several_steps():
    """A step indexes 4,096 tokens at most; until then a request has no draft, which is no failed lookup."""
    drafter = NgramDrafter(10**6)
    req = lone_req([*range(6000), *range(6000)])
    drafter.observe(req)
    found = [drafter.draft([req], [3])[0] for _ in range(3)]
    assert found[0] is found[1] is NOT_INDEXED
    assert found[2] == ([0, 1, 2], 24, [])
