"""Policies that meet: each owns its tokens, is stamped with its own version, and the attempt ends in a word."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tests.rollout.generate.scripted_engine import Scripted, chat_tokenizer

from miles.core.agents import ROLES, select_role_part
from miles.core.errors import HookError
from miles.core.protocols import Completion, SamplingParams
from miles.core.types import Author, Prompt, Reward, Span, Status, Tokens, Trajectory, Version
from miles.rollout.multi_agent.agents import AgentRole, Agents
from miles.rollout.multi_agent.generate import MultiAgentGenerate
from miles.rollout.multi_agent.self_play import self_play, solver_verifier
from miles.rollout.serving.errors import ContextLengthError
from miles.rollout.session.renderer_detect import build_renderer

ASKED = Prompt(id=3, messages=({"role": "user", "content": "2+2"},), label="4")


class Stamped(Scripted):
    """A scripted policy whose spans bear its name."""

    def __init__(self, tokenizer, script: Sequence[str] | Callable[[str], str], name: str, number: int) -> None:
        super().__init__(tokenizer, script)
        self._version = Version(name, number)

    async def generate(self, tokens: Tokens, sampling: SamplingParams, images=()) -> Completion:
        given = await super().generate(tokens, sampling)
        ids = np.concatenate([span.tokens for span in given.spans])
        span = Span(author=Author.POLICY, tokens=ids, logprobs=np.zeros(len(ids), np.float32), version=self._version)
        return Completion(spans=(span,), status=given.status, finish_reason=given.finish_reason)


class NoServer:
    def open(self, prompt, engine, sampling):
        raise AssertionError("nobody asked for an address")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def roles(tokenizer, *, limit: int | None = None, length: int = 64, **scripts: Sequence[str]) -> list[AgentRole]:
    return [
        AgentRole(
            name=name,
            policy=name,
            trained=True,
            engine=Stamped(tokenizer, script, name, number),
            renderer=build_renderer(tokenizer),
            sampling=SamplingParams(max_new_tokens=length),
            sessions=NoServer(),
            max_context_len=limit,
        )
        for number, (name, script) in enumerate(scripts.items())
    ]


def made(play, players: list[AgentRole], *, reward=None, seed: int = 1, wall_seconds: float = 60.0) -> Trajectory:
    generate = MultiAgentGenerate(play, players, reward=reward, scored=reward is not None, wall_seconds=wall_seconds)
    return asyncio.run(generate(ASKED, players[0].engine, SamplingParams(seed=seed)))


async def exact(prompt: Prompt, trajectory: Trajectory) -> Reward:
    return Reward(value=float(trajectory.metadata["text"] == prompt.label))


def test_each_owns_its_tokens_under_its_own_version(tokenizer):
    players = roles(tokenizer, solver=["4", "5"], verifier=["yes"])

    async def play(prompt: Prompt, cast: Agents):
        first = await cast["solver"].chat(prompt.messages)
        verdict = await cast["verifier"].chat([{"role": "user", "content": first.text}])
        more = [*prompt.messages, first.message, {"role": "user", "content": verdict.text}]
        second = await cast["solver"].chat(more)
        assert (first.text, verdict.text, second.text) == ("4", "yes", "5")
        return {"solver": 1.0, "verifier": Reward(value=0.5, parts={"format": 1.0})}

    attempt = made(play, players)
    assert attempt.metadata[ROLES] == ["solver", "verifier"]
    assert attempt.reward == Reward(value=1.0, parts={"solver": 1.0, "verifier": 0.5, "verifier.format": 1.0})
    for role in players:
        part = select_role_part(attempt, role.name)
        said = [span for span in part.spans if span.author is Author.POLICY]
        assert [span.tokens.tolist() for span in said] == role.engine.gave
        assert {span.version.policy for span in said} == {role.name}
        tokens = np.concatenate([span.tokens for span in part.spans]).tolist()
        asked, _ = role.engine.asked[-1]
        assert tokens == [*asked, *role.engine.gave[-1]], "behind the very context it was sampled in"
    assert attempt.metadata["cast"]["solver"]["turns"] == 2 and attempt.metadata["text"] == "5"
    assert (attempt.status, attempt.metadata["reason"]) == (Status.COMPLETED, "stop")


def test_seeds_are_the_trajectories_own_and_another_when_a_question_is_asked_again(tokenizer):
    async def play(prompt: Prompt, cast: Agents):
        for _ in range(2):
            await cast["a"].chat(prompt.messages)
            await cast["b"].chat(prompt.messages)
        return {"a": 0, "b": 0}

    def seeds(seed: int) -> list[int]:
        players = roles(tokenizer, a=["x"], b=["x"])
        made(play, players, seed=seed)
        return [sampling.seed for role in players for _, sampling in role.engine.asked]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 8


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"solver": 1.0}, "no reward for verifier, which spoke at prompt 3"),
        ({"solver": 1.0, "verifier": 0.0, "judge": 1.0}, "rewards 'judge' at prompt 3, which is no role"),
        ({"solver": "much", "verifier": 0.0}, "'much' as the reward of solver"),
        (0.5, "gave a float; return the roles' rewards by their names"),
    ],
)
def test_rewards_that_are_none_are_refused_by_name(tokenizer, given, expected):
    async def play(prompt: Prompt, cast: Agents):
        for player in cast.values():
            await player.chat(prompt.messages)
        return given

    with pytest.raises(HookError, match=expected):
        made(play, roles(tokenizer, solver=["4"], verifier=["no"]))


def test_a_function_that_raises_costs_the_attempt_and_not_the_run(tokenizer):
    async def play(prompt: Prompt, cast: Agents):
        await cast["solver"].chat(prompt.messages)
        raise KeyError("board")

    attempt = made(play, roles(tokenizer, solver=["4"]))
    assert (attempt.status, attempt.reward) == (Status.FAILED, None)
    assert attempt.metadata["failure"] == "KeyError: 'board'" and attempt.response_length == 2


def test_an_attempt_nobody_spoke_in_is_a_failure(tokenizer):
    async def play(prompt: Prompt, cast: Agents):
        return {}

    attempt = made(play, roles(tokenizer, solver=["4"]))
    assert (attempt.status, attempt.metadata[ROLES]) == (Status.FAILED, ["solver"])
    assert attempt.response_length == 0


def test_a_reply_that_is_cut_off_is_told_and_cannot_be_gone_on_behind(tokenizer):
    async def play(prompt: Prompt, cast: Agents):
        first = await cast["solver"].chat(prompt.messages)
        if first.finish_reason == "length":
            return {"solver": 0.0}
        raise AssertionError("it is longer than that")

    players = roles(tokenizer, solver=["a long answer"], length=3)
    attempt = made(play, players)
    assert (attempt.status, attempt.metadata["reason"]) == (Status.TRUNCATED, "length")

    async def goes_on(prompt: Prompt, cast: Agents):
        first = await cast["solver"].chat(prompt.messages)
        await cast["solver"].chat([*prompt.messages, first.message, {"role": "user", "content": "more"}])

    attempt = made(goes_on, roles(tokenizer, solver=["a long answer"], length=3))
    assert attempt.status is Status.FAILED and "cannot be extended" in attempt.metadata["failure"]


def test_a_full_context_ends_the_attempt_without_earning(tokenizer):
    async def play(prompt: Prompt, cast: Agents):
        messages = list(prompt.messages)
        while True:
            reply = await cast["solver"].chat(messages)
            messages += [reply.message, {"role": "user", "content": "again"}]

    attempt = made(play, roles(tokenizer, solver=["4"], limit=90))
    assert (attempt.status, attempt.metadata["reason"]) == (Status.TRUNCATED, "context")
    assert attempt.reward == Reward(value=0.0, parts={"solver": 0.0})

    async def compacts(prompt: Prompt, cast: Agents):
        with pytest.raises(ContextLengthError):
            await cast["solver"].chat([{"role": "user", "content": "x" * 100}])
        await cast["solver"].chat(prompt.messages)
        return {"solver": 1.0}

    assert made(compacts, roles(tokenizer, solver=["4"], limit=90)).status is Status.COMPLETED


def test_an_attempt_that_takes_too_long_is_cut_short(tokenizer):
    players = roles(tokenizer, solver=["4"], verifier=["no"])
    players[1].engine.hangs = True

    async def play(prompt: Prompt, cast: Agents):
        await cast["solver"].chat(prompt.messages)
        await cast["verifier"].chat(prompt.messages)

    attempt = made(play, players, wall_seconds=0.05)
    assert (attempt.status, attempt.metadata["reason"]) == (Status.TRUNCATED, "wall_time")
    assert attempt.metadata[ROLES] == ["solver"]


def test_an_engine_that_is_told_to_stop_ends_the_attempt(tokenizer):
    players = roles(tokenizer, solver=["forty-two"], verifier=["no"])
    players[0].engine.aborts = True

    async def play(prompt: Prompt, cast: Agents):
        await cast["solver"].chat(prompt.messages)
        raise AssertionError("nobody goes on behind a reply that was aborted")

    attempt = made(play, players)
    assert (attempt.status, attempt.metadata["reason"], attempt.reward) == (Status.ABORTED, "abort", None)
    assert "failure" not in attempt.metadata and 0 < attempt.response_length < len("forty-two")


@pytest.mark.parametrize(
    ("answer", "verdict", "earned"), [("4", "Yes.", (1, 1)), ("5", "yes", (0, 0)), ("5", "no", (0, 1))]
)
def test_a_verifier_earns_by_being_right_about_the_solver(tokenizer, answer, verdict, earned):
    attempt = made(solver_verifier, roles(tokenizer, solver=[answer], verifier=[verdict]), reward=exact)
    assert (attempt.reward.parts["solver"], attempt.reward.parts["verifier"]) == earned


def test_in_self_play_one_wins_what_the_other_loses(tokenizer):
    players = roles(tokenizer, white=["4"], black=["5"])
    attempt = made(self_play, players, reward=exact)
    assert attempt.reward.parts == {"white": 1.0, "black": -1.0}
    assert "Another answered" in tokenizer.decode(players[1].engine.asked[0][0])


def test_games_say_which_roles_they_want(tokenizer):
    with pytest.raises(HookError, match="there is no verifier"):
        made(solver_verifier, roles(tokenizer, solver=["4"], critic=["no"]), reward=exact)
    with pytest.raises(HookError, match="needs two roles"):
        made(self_play, roles(tokenizer, solver=["4"]), reward=exact)
    with pytest.raises(HookError, match="there is none; set --rm-type"):
        made(solver_verifier, roles(tokenizer, solver=["4"], verifier=["no"]))
