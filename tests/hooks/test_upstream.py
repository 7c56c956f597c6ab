"""Functions of upstream's signatures behind our doors: they read what happened, and are held to it when they write."""

import asyncio
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.algo.advantages import build_samples
from miles.core.errors import HookError, MilesError
from miles.core.protocols import Completion, FilterResult, SamplingParams
from miles.core.types import Author, Batch, Group, Prompt, Reward, Span, Status, Trajectory, Version
from miles.hooks import registry
from miles.hooks.compat.adapters import mark_evaluation
from miles.hooks.compat.convert import is_removed, sample_from_trajectory, trajectory_from_samples
from miles.hooks.compat.engine import TrajectoryRequests
from miles.hooks.compat.types import (
    UpstreamArgs,
    UpstreamContext,
    UpstreamSample,
    UpstreamServices,
    UpstreamStatus,
)

PROMPT = Prompt(id=4, messages=[{"role": "user", "content": "hello"}], label="olleh", metadata={"level": 2})


class Words:
    """A tokenizer whose tokens are numbers."""

    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(str(i) for i in ids if i or not skip_special_tokens)


class Counting:
    """An engine that writes 10, 11, 12 ... under two versions, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def generate(self, tokens, sampling: SamplingParams, images=()) -> Completion:
        self.asked.append((tokens.tolist(), sampling))
        first, second = (wrote(at, 2, version) for at, version in ((10, 0), (12, 1)))
        return Completion(spans=(first, second), status=Status.COMPLETED, finish_reason="stop")


def wrote(start: int, count: int, version: int = 0) -> Span:
    return Span(
        author=Author.POLICY,
        tokens=np.arange(start, start + count, dtype=np.int32),
        logprobs=-np.arange(1, count + 1, dtype=np.float32) / 8,
        version=Version(number=version),
    )


def the_run(**args) -> UpstreamContext:
    known = {"n_samples_per_prompt": 2, "reward_key": None, "rollout_batch_size": 3, "lr": 0.5} | args
    return UpstreamContext(
        args=UpstreamArgs(**known),
        tokenizer=Words,
        render=lambda prompt: np.array([1, 2, 3], np.int32),
        prompt_text=lambda prompt: prompt.messages[0]["content"],
        fill_extras=lambda spans, given: list(spans),
        build_samples=build_samples,
    )


def trajectory(index: int = 0, value: float = 1.0) -> Trajectory:
    asked = Span(author=Author.PROMPT, tokens=np.array([1, 2, 3], np.int32))
    env_span = Span(author=Author.ENV, tokens=np.array([5], np.int32))
    return Trajectory(
        branches=((asked, wrote(10, 2), env_span, wrote(20, 2, 1)),),
        status=Status.TRUNCATED,
        reward=Reward(value=value),
        index=index,
        metadata={"text": "well", "turns": 2},
    )


GROUP = Group(prompt=PROMPT, trajectories=(trajectory(0, 1.0), trajectory(1, 3.0)))


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def theirs(point, name: str, **args):
    return point.load(f"upstream_functions:{name}", the_run(**args))


def answered(name: str, engine: Counting | None = None) -> Trajectory:
    function = theirs(registry.GENERATE, name)
    return asyncio.run(function(PROMPT, engine or Counting(), SamplingParams(seed=5, max_new_tokens=9)))


# -- what they are given --------------------------------------------------------------------


def test_args_are_the_flags_and_what_a_function_adds():
    args = UpstreamArgs(lr=1.0)
    assert args.lr == 1.0 and vars(args) == {"lr": 1.0} and "lr" in args
    with pytest.raises(AttributeError, match="args has no router_url: this run has no such flag"):
        _ = args.router_url
    assert getattr(args, "router_url", 7) == 7
    args.mine = 3
    assert deepcopy(args).mine == 3 and args.replace(lr=2.0).lr == 2.0 and args.lr == 1.0


def test_a_sample_says_what_the_attempt_was():
    sample = sample_from_trajectory(the_run(), PROMPT, trajectory(1))
    assert sample.tokens == [1, 2, 3, 10, 11, 5, 20, 21] and sample.response_length == 5
    assert sample.loss_mask == [1, 1, 0, 1, 1] and sample.rollout_log_probs == [-0.125, -0.25, 0.0, -0.125, -0.25]
    assert (sample.index, sample.group_index, sample.label, sample.response) == (9, 4, "olleh", "well")
    assert sample.status is UpstreamSample.Status.TRUNCATED and sample.weight_versions == ["0", "1"]
    assert sample.metadata == {"level": 2, "turns": 2} and sample.effective_response_length == 4
    assert sample.prompt == "hello" and sample.get_reward_value(the_run().args) == 1.0


# -- generate -------------------------------------------------------------------------------


def test_what_the_engine_wrote_keeps_its_stamps():
    engine = Counting()
    made = answered("generate", engine)
    ((asked, *spans),) = made.branches
    assert asked.tokens.tolist() == [1, 2, 3] and asked.author is Author.PROMPT
    assert [span.version.number for span in spans if span.version] == [0, 1]
    assert np.concatenate([s.logprobs for s in spans if s.logprobs is not None]).tolist() == [-0.125, -0.25] * 2
    assert made.metadata["text"] == "10 11 12 13" and made.status is Status.COMPLETED
    (tokens, sampling) = engine.asked[0]
    assert tokens == [1, 2, 3] and sampling == SamplingParams(seed=5, max_new_tokens=9)


def test_a_request_of_text_is_one_of_its_tokens_and_a_cut_reply_keeps_its_stamps():
    engine = Counting()
    made = answered("generate_by_text", engine)
    assert engine.asked == [([1, 2, 3], SamplingParams(seed=5, max_new_tokens=2, stop=("x",)))]
    assert [span.tokens.tolist() for span in made.branches[0]] == [[1, 2, 3], [10, 11], [12]]


def test_several_samples_are_branches_and_each_request_has_luck_of_its_own():
    engine = Counting()
    made = answered("two_branches", engine)
    assert [branch[0].tokens.tolist() for branch in made.branches] == [[7, 7], [1, 2, 3]]
    assert [sampling.seed for _, sampling in engine.asked] == [5, 6]


@pytest.mark.parametrize("held_out", [True, False])
def test_a_function_is_told_whether_it_is_evaluated(held_out: bool):
    function = theirs(registry.GENERATE, "generate_told")
    asked = mark_evaluation(function) if held_out else function
    made = asyncio.run(asked(PROMPT, Counting(), SamplingParams()))
    assert made.metadata["evaluation"] is held_out


def test_an_attempt_that_was_given_up_is_its_prompt():
    made = answered("given_up")
    assert made.status is Status.ABORTED and [len(branch) for branch in made.branches] == [1]


def test_what_a_function_leaves_on_its_sample_is_there_for_the_next():
    made = answered("marked")
    sample = sample_from_trajectory(the_run(), PROMPT, made)
    assert (sample.prompt, sample.turns, sample.remove_sample) == ("rewritten", [1, 2], True) and is_removed(made)
    assert "sample_fields" not in sample.metadata and not is_removed(answered("generate"))
    again = UpstreamSample.from_dict(sample.to_dict())
    assert again == sample and again.turns == [1, 2]


def test_a_generate_function_of_one_argument_is_told_everything():
    assert _flat(answered("generate_input").branches[0]) == _flat(answered("generate").branches[0])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "short_log_probs",
            "--custom-generate-function-path upstream_functions:short_log_probs: the sample of prompt 4 has a "
            "response_length of 4 and 1 rollout_log_probs",
        ),
        ("short_mask", "has 7 tokens, a response_length of 4 and a loss_mask of 1"),
        ("pending", "is still pending"),
        ("elsewhere", "post to http://engine.invalid/flush_cache does not reach the engine"),
        ("odd_sampling", "has repetition_penalty, which this engine does not know"),
    ],
)
def test_a_function_that_does_not_keep_to_the_interface_is_refused(name: str, says: str):
    with pytest.raises(HookError) as raised:
        answered(name)
    assert says in str(raised.value)


@pytest.mark.parametrize(("name", "token"), [("tokenised_anew", 3), ("shifted", 4), ("unmasked", 7)])
def test_a_trajectory_with_other_tokens_than_were_sampled_fails_alone(name: str, token: int):
    made = answered(name)
    assert made.status is Status.FAILED and made.response_length == 0
    says = f"Token {token} of a sample of prompt 4 is to be trained on, and no request"
    assert made.metadata["failure"].startswith(says)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=6), st.data())
def test_any_conversation_comes_back_as_it_was(turns: list[tuple[bool, int]], data: st.DataObject):
    """Spans to a sample and back: the same tokens, authors, log-probs and versions; one token changed is refused."""
    run, branch = the_run(), [Span(author=Author.PROMPT, tokens=np.array([1, 2], np.int32))]
    attempt = TrajectoryRequests(run=run, engine=Counting(), sampling=SamplingParams())
    for number, (policy, size) in enumerate(turns):
        so_far = np.concatenate([span.tokens for span in branch])
        if policy:
            span = wrote(100 * number + 100, size, number)
            attempt.asked.append((so_far, Completion(spans=(span,), status=Status.COMPLETED, finish_reason="stop")))
        else:
            span = Span(author=Author.ENV, tokens=np.full(size, 7, np.int32))
        branch.append(span)
    whole = Trajectory(branches=(tuple(branch),), status=Status.COMPLETED)
    sample = sample_from_trajectory(run, PROMPT, whole)
    (back,) = trajectory_from_samples(run, PROMPT, attempt, sample).branches
    assert _flat(back) == _flat(branch)
    mine = [at for at, author in enumerate(_flat(branch)[1]) if author is Author.POLICY]
    if mine:
        sample.tokens[data.draw(st.sampled_from(mine))] += 1000
        with pytest.raises(HookError, match="is to be trained on"):
            trajectory_from_samples(run, PROMPT, attempt, sample)


def _flat(branch) -> tuple[list, list, list, list]:
    each = [(span, at) for span in branch for at in range(len(span))]
    return (
        [int(span.tokens[at]) for span, at in each],
        [span.author for span, _ in each],
        [None if span.logprobs is None else float(span.logprobs[at]) for span, at in each],
        [span.version for span, _ in each],
    )


# -- rewards, filters, credit ---------------------------------------------------------------


def test_rewards_are_numbers_or_parts_of_which_one_is_named():
    score = theirs(registry.REWARD, "score")
    assert asyncio.run(score(PROMPT, trajectory())) == Reward(value=5.0)
    parts = theirs(registry.REWARD, "score_parts", reward_key="length")
    assert asyncio.run(parts(PROMPT, trajectory())) == Reward(value=5.0, parts={"length": 5.0, "ok": 1.0})
    with pytest.raises(HookError, match="--reward-key is None; name one of them"):
        asyncio.run(theirs(registry.REWARD, "score_parts")(PROMPT, trajectory()))
    with pytest.raises(HookError, match="The reward is a str"):
        asyncio.run(theirs(registry.REWARD, "score_text")(PROMPT, trajectory()))
    whole = theirs(registry.GROUP_REWARD, "score_all")
    assert [r.value for r in asyncio.run(whole(PROMPT, GROUP.trajectories))] == [8.0, 9.0]


def test_filters_and_worths_are_asked_group_by_group():
    assert theirs(registry.FILTER, "keep")(GROUP) == FilterResult(keep=True)
    assert theirs(registry.FILTER, "keep_told")(GROUP) == FilterResult(keep=False, reason="dull")
    assert theirs(registry.REWARD_POST_PROCESS, "centred")(GROUP) == [-1.0, 1.0]
    assert theirs(registry.SAMPLE_FILTER, "drop_first")(GROUP) == [False, True]
    still = theirs(registry.BUFFER_FILTER, "newest")
    assert still(GROUP, Version(number=1)).keep and not still(GROUP, Version(number=3)).keep


def test_converted_rows_are_the_sampled_tokens_with_fewer_of_them_trained():
    rows = theirs(registry.CONVERT_SAMPLES, "convert")(GROUP)
    assert [row.tokens.tolist() for row in rows] == [[1, 2, 3, 10, 11, 5, 20, 21]] * 2
    assert rows[0].mask.tolist() == [False] * 4 + [True, False, True, True]
    assert set(rows[1].advantages[rows[1].mask].tolist()) == {6.0}
    assert rows[0].versions.tolist() == [-1, -1, -1, 0, 0, -1, 1, 1]
    with pytest.raises(HookError, match="are not those that were"):
        theirs(registry.CONVERT_SAMPLES, "convert_wrongly")(GROUP)
    with pytest.raises(HookError, match="may only exclude tokens"):
        theirs(registry.CONVERT_SAMPLES, "convert_too_much")(GROUP)
    branched = replace(trajectory(), branches=trajectory().branches * 2)
    with pytest.raises(HookError, match="has 2 branches"):
        theirs(registry.CONVERT_SAMPLES, "convert")(Group(prompt=PROMPT, trajectories=(branched, trajectory())))


# -- a whole step ---------------------------------------------------------------------------


def test_all_groups_are_looked_at_and_masks_taken_back():
    import upstream_functions

    theirs(registry.ALL_SAMPLES, "look")(1, [GROUP], [GROUP])
    assert [len(group) for group in upstream_functions.LOOKED.pop()] == [2, 2]
    rows = tuple(
        row for t in GROUP.trajectories for row in build_samples(4, t, advantage=1.0, trained_author=Author.POLICY)
    )
    made = theirs(registry.POST_PROCESS, "hide_last")(Batch(step=1, samples=rows, num_groups=1))
    assert [row.mask.tolist() for row in made.samples] == [[False] * 3 + [True, True, False, True, False]] * 2
    theirs(registry.TRAINER_INIT, "init")(None)
    assert upstream_functions.LOOKED.pop() == 0.5


def test_log_functions_add_to_the_metrics_or_keep_them_from_being_logged():
    log = theirs(registry.ROLLOUT_LOG, "log_rollout")
    assert log(1, [GROUP], {"reward": 2.0}) == {"reward": 2.0, "seen": 2.0}
    assert log(8, [GROUP], {"reward": 2.0}) == {}
    assert theirs(registry.EVAL_LOG, "log_eval")(0, {"held": [GROUP]}, {}) == {"best": 3.0}


def test_a_data_source_deals_out_prompts_and_goes_on_where_it_was():
    make = theirs(registry.DATA_SOURCE, "Deck")
    source = make([])
    first, second = source.next(), source.next()
    assert (first.id, second.id) == (0, 1) and second.messages[0]["content"] == "question 2" and second.label == "2"
    other = make([])
    other.load(source.state())
    assert other.next() == source.next()


# -- whole rollouts -------------------------------------------------------------------------


def prompts(count: int) -> list[Prompt]:
    return [replace(PROMPT, id=number) for number in range(count)]


def produced(name: str, wanted: list[Prompt]) -> list[Group]:
    spare = iter(prompts(99)[50:])
    services = UpstreamServices(next_prompt=lambda: next(spare))
    run = replace(the_run(rollout_batch_size=2), services=services)
    make = registry.ROLLOUT.load_guarded(f"upstream_functions:{name}", run)

    async def produce() -> list[Group]:
        calls = [make(prompt, Counting(), SamplingParams(seed=prompt.id), 2, None) for prompt in wanted]
        return await asyncio.gather(*calls)

    return asyncio.run(produce())


def test_a_rollout_function_is_called_for_all_prompts_in_flight():
    import upstream_functions

    upstream_functions.LOOKED.clear()
    groups = produced("rollout", prompts(3))
    assert upstream_functions.LOOKED == [(0, 2), (1, 1)]  # two calls, the second for what was left
    # The first call read prompts 0, 1 and a further one, and returned the group of 0, which the second put back again.
    assert [group.prompt.id for group in groups] == [50, 1, 2]
    assert all([t.index for t in group.trajectories] == [0, 1] for group in groups)
    assert all(t.response_length == 4 and t.reward is not None for group in groups for t in group.trajectories)
    assert [group.prompt.id for group in produced("RolloutClass", prompts(2))] == [0, 1]


def test_an_evaluation_function_scores_every_prompt_of_a_set():
    evaluate = theirs(registry.EVALUATE, "rollout")
    groups = asyncio.run(evaluate("held", prompts(2), Counting(), SamplingParams(), None))
    assert [group.rewards for group in groups] == [[1.0], [0.0]]
    assert groups[1].trajectories[0].status is Status.TRUNCATED
    with pytest.raises(HookError, match="returned no rewards of other"):
        asyncio.run(evaluate("other", prompts(2), Counting(), SamplingParams(), None))
    with pytest.raises(HookError, match="returned 2 rewards for the 3 prompts of held"):
        asyncio.run(evaluate("held", prompts(3), Counting(), SamplingParams(), None))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("rollout_of_one", "returned 1 groups, and args.rollout_batch_size is 2; return as many."),
        ("rollout_of_nothing", "returns a list of groups, each a list of samples."),
        ("rollout_that_fails", "raised OSError: no network"),
    ],
)
def test_a_rollout_function_that_fails_ends_the_run_in_a_sentence(name: str, says: str):
    with pytest.raises(MilesError) as told:
        produced(name, prompts(2))
    assert str(told.value).startswith(f"--rollout-function-path upstream_functions:{name}") and says in str(told.value)


def test_a_buffer_and_a_picker_choose_among_what_they_are_given():
    choose = theirs(registry.DATA_BUFFER, "LastIn")
    waiting = [replace(GROUP), replace(GROUP), replace(GROUP)]
    assert choose(waiting, Version(number=1)) == 2
    assert choose(waiting[:2], Version(number=1)) == 1
    short, long = (SimpleNamespace(spans=trajectory().branches[0][:count]) for count in (2, 4))
    assert theirs(registry.SAMPLE_PICKER, "pick_longest")([short, long]) == [long]


def test_a_postprocessor_excludes_tokens_and_sets_the_reward():
    made = theirs(registry.SAMPLE_POSTPROCESSOR, "only_the_end")(trajectory())
    (branch,) = made.branches
    authors = [span.author for span in branch for _ in span.tokens]
    assert authors == [Author.PROMPT] * 3 + [Author.ENV] * 3 + [Author.POLICY, Author.ENV]
    before = trajectory().branches[0]
    assert [t for span in branch for t in span.tokens] == [t for span in before for t in span.tokens]
    assert made.reward == Reward(value=7.0) and branch[-2].version == Version(number=1)
    with pytest.raises(HookError, match="may only exclude tokens"):
        theirs(registry.SAMPLE_POSTPROCESSOR, "invented")(trajectory())


# -- what is theirs, and what is not --------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "name", "wants"),
    [
        (registry.ROLLOUT, "keep", "RolloutFn wants async def (prompt: Prompt, engine: Engine"),
        (registry.EVALUATE, "newest", "EvalFn wants async def (name: str, prompts: Sequence[Prompt]"),
        (registry.OBJECTIVE, "keep", "LossFn wants def (inputs: LossInputs, aggregator: LossAggregator) -> LossOutput"),
        (registry.FILTER, "newest", "Filter wants def (group: Group) -> FilterResult"),
        (registry.REWARD, "score_group", "it is called with one sample; add --group-rm"),
        (registry.GROUP_REWARD, "score", "--group-rm calls it with a list of them; remove --group-rm"),
        (registry.ROLLOUT, "rollout_without_a_source", "or upstream's (args, rollout_id, data_source, evaluation=...)"),
        (registry.REWARD, "generate", "RewardFn wants async def (prompt: Prompt, trajectory: Trajectory) -> Reward"),
    ],
)
def test_what_cannot_be_fitted_is_refused_with_the_signature_to_write(point, name: str, wants: str):
    with pytest.raises(HookError) as raised:
        theirs(point, name)
    assert str(raised.value).startswith(f"{point.flag} upstream_functions:{name} ") and wants in str(raised.value)


def test_where_upstream_had_what_is_built_in_leads_to_it():
    hub = "miles.rollout.generate_hub"
    assert registry.GENERATE.resolve_name(f"{hub}.multi_turn.generate") == "multi_turn"
    assert registry.GENERATE.resolve_name(f"{hub}.single_turn.generate") == "single_turn"
    assert registry.GENERATE.resolve_name(f"{hub}.agentic_tool_call.generate") == "agent"
    former = "miles.rollout.sglang_rollout.generate_rollout"
    assert registry.ROLLOUT.load(former) is registry.ROLLOUT.load("standard")
    assert registry.ROLLOUT.is_builtin("slime.rollout.sglang_rollout:generate_rollout")
    assert registry.EVALUATE.load(former) is registry.EVALUATE.load("standard")
    assert registry.DATA_SOURCE.load("miles.rollout.data_source.RolloutDataSource") is registry.DATA_SOURCE.load(
        "in_order"
    )


def test_modules_have_their_names_in_slime_too():
    theirs(registry.FILTER, "keep")
    assert import_module("slime.utils.types") is import_module("miles.utils.types")
    assert import_module("miles").__spec__.name == "miles"
    assert import_module("slime.rollout.rm_hub").async_rm is import_module("miles.rollout.sglang_rollout").async_rm


def test_our_own_functions_are_left_as_they_are(tmp_path: Path):
    (tmp_path / "ours.py").write_text("async def score(prompt, trajectory):\n    return 1\n")
    path = f"{tmp_path / 'ours.py'}:score"
    assert registry.REWARD.load(path, the_run()) is registry.REWARD.load(path)


def test_status_names_are_the_same_on_both_sides():
    assert {status.value for status in UpstreamStatus} - {"pending"} == {status.value for status in Status}
