"""``remote_rm`` and ``reward_model`` against a real server, with everything that can go wrong with one."""

import asyncio
from dataclasses import replace
from itertools import count

import pytest
from tests.rollout.reward.reward_case import prompt, trajectory
from tests.rollout.reward.scripted_server import Asked, Fault, serving

from miles.core.errors import HookError, UsageError
from miles.core.types import Prompt, Reward
from miles.rollout.reward.context import GraderContext, HTTPEndpoint, RewardModelEndpoint
from miles.rollout.reward.remote import ModelReward, RemoteReward, build_model_reward, build_remote_reward
from miles.rollout.reward.types import GradingError, NonRetryableError

PATIENT = HTTPEndpoint(url="", pause=0.0, seconds=20.0)


def scored(answer, *, replies=("yes",), server=PATIENT, wait_for=None, **kw):
    """The rewards of some replies, or what was raised instead; and the server."""

    async def run():
        async with serving(answer, wait_for=wait_for) as served:
            reward = RemoteReward(replace(server, url=served.url + "/score"), **kw)
            given = (reward(prompt("7"), trajectory(reply, index=i)) for i, reply in enumerate(replies))
            return await asyncio.gather(*given, return_exceptions=True), served

    return asyncio.run(run())


def faults(*first, then=0.5):
    """A server that answers with these first."""
    waiting = iter(first)
    return lambda asked: next(waiting, then)


@pytest.mark.parametrize("together", [1, 3])
def test_a_kept_connection_that_was_dropped_costs_no_try(together):
    """A server that hangs up on the second question of every connection, to clients that try but once."""
    connections = []

    async def answer(reader, writer):
        connections.append(0)
        mine = len(connections) - 1
        while (head := await reader.readuntil(b"\r\n\r\n")) and not connections[mine]:
            length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
            await reader.readexactly(length)
            connections[mine] += 1
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 3\r\n\r\n0.5")
            await writer.drain()
        writer.close()

    async def run():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/score"
            reward = RemoteReward(replace(PATIENT, url=url, retries=0))
            return [
                await asyncio.gather(*(reward(prompt("7"), trajectory("yes", index=i)) for i in range(together)))
                for _ in range(3)
            ]

    assert asyncio.run(run()) == [[Reward(value=0.5)] * together] * 3
    assert sum(connections) == 3 * together and max(connections) == 1


def test_a_trajectory_is_posted_with_all_a_server_may_want():
    (given,), served = scored(lambda asked: 0.25)
    assert given == Reward(value=0.25)
    (asked,) = served.asked
    assert asked.path == "/score"
    assert asked.body == {"prompt": "?", "response": "yes", "label": "7", "metadata": {}, "id": 3, "index": 0}
    assert "authorization" not in asked.headers


def test_a_conversation_is_posted_as_its_messages():
    messages = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"})

    async def run():
        async with serving(lambda asked: 1) as served:
            await RemoteReward(replace(PATIENT, url=served.url))(Prompt(id=1, messages=messages), trajectory("x"))
            return served.asked[0].body["prompt"]

    assert asyncio.run(run()) == list(messages)


def test_the_token_is_sent_and_nowhere_else_to_be_seen():
    server = replace(PATIENT, token="s3cret")
    (given,), served = scored(lambda asked: Fault(status=403, raw=b"who are you"), server=server)
    assert served.asked[0].headers["authorization"] == "Bearer s3cret"
    assert "s3cret" not in str(given)
    assert "status 403 (who are you)" in str(given)


def test_an_answer_in_parts_is_a_reward_in_parts():
    (given,), _ = scored(lambda asked: {"score": 1, "style": 0.5, "why": "because"})
    assert given == Reward(value=1.0, parts={"score": 1.0, "style": 0.5})
    (given,), _ = scored(lambda asked: {"style": 0.5, "form": 2.0}, reward_key="form")
    assert given == Reward(value=2.0, parts={"style": 0.5, "form": 2.0})
    (given,), _ = scored(lambda asked: {"style": 0.5})
    assert isinstance(given, HookError) and "--reward-key" in str(given)


@pytest.mark.parametrize(
    "fault", [Fault(status=500), Fault(status=503), Fault(status=429), Fault(raw=b"<html>"), Fault(hang_up=True)]
)
def test_a_fault_that_passes_is_got_over(fault):
    (given,), served = scored(faults(fault, fault))
    assert given == Reward(value=0.5)
    assert len(served.asked) == 3


@pytest.mark.parametrize(
    ("fault", "reason", "asked"),
    [
        (Fault(status=500), "answered with status 500", 3),
        (Fault(raw=b"<html>"), "answered with something that is not JSON", 3),
        (Fault(hang_up=True), "could not be reached", 3),
        (Fault(status=404, raw=b"no such page"), r"answered with status 404 \(no such page\)", 1),
        (Fault(raw=b'"good"'), "gave 'good' for a reward", 1),
        (Fault(raw=b"null"), "gave 'None' for a reward", 1),
        (Fault(raw=b"true"), "gave 'True' for a reward", 1),
        (Fault(raw=b"NaN"), "gave 'nan' for a reward", 1),
        (Fault(raw=b"0" * (17 << 20)), "more than 16 MiB", 1),
    ],
)
def test_a_fault_that_stays_fails_the_grade_with_its_reason(fault, reason, asked):
    (given,), served = scored(lambda asked: fault, server=replace(PATIENT, retries=2))
    with pytest.raises(GradingError, match=reason):
        raise given
    assert len(served.asked) == asked


def test_a_server_that_never_answers_is_given_up():
    (given,), served = scored(lambda asked: Fault(stall=True), server=replace(PATIENT, seconds=0.05, retries=1))
    assert isinstance(given, GradingError) and "did not answer within 0.05 s" in str(given)
    assert len(served.asked) == 2


def test_a_server_that_is_not_there_is_told_of():
    async def run():
        async with serving(lambda asked: 1) as served:
            url = served.url
        await RemoteReward(replace(PATIENT, url=url, retries=1))(prompt(), trajectory("x"))

    with pytest.raises(GradingError, match="could not be reached"):
        asyncio.run(run())


def test_no_more_requests_are_under_way_than_allowed():
    async def together(served):  # nobody is answered before as many are there as may be
        while served.at_once < 3 and len(served.asked) < 9:
            await asyncio.sleep(0)

    server = replace(PATIENT, concurrency=3)
    given, served = scored(lambda asked: 1, replies=["a"] * 9, server=server, wait_for=together)
    assert given == [Reward(value=1.0)] * 9
    assert served.most_at_once == 3


def test_trajectories_travel_in_batches_and_come_back_to_their_own():
    def answer(asked: Asked):
        assert isinstance(asked.body, list) and len(asked.body) <= 4
        return [len(one["response"]) for one in asked.body]

    given, served = scored(
        answer, replies=["x" * n for n in range(10)], server=replace(PATIENT, batch=4, concurrency=1)
    )
    assert [reward.value for reward in given] == list(map(float, range(10)))
    assert len(served.asked) == 3


def test_one_that_the_server_refuses_does_not_take_its_batch_along():
    def answer(asked: Asked):
        if any(one["response"] == "bad" for one in asked.body):
            return Fault(status=422, raw=b"too long")
        return [1] * len(asked.body)

    given, _ = scored(answer, replies=["a", "bad", "b"], server=replace(PATIENT, batch=8))
    assert [type(one) for one in given] == [Reward, NonRetryableError, Reward]


@pytest.mark.parametrize("answer", [{"a": 1}, [1, 2, 3]])
def test_a_batch_answered_out_of_shape_fails(answer):
    given, _ = scored(lambda asked: answer, replies=["a", "b"], server=replace(PATIENT, batch=2, concurrency=1))
    assert all(isinstance(one, GradingError) for one in given)


def test_a_trajectory_whose_grade_is_no_longer_wanted_is_not_asked_for():
    async def run():
        async with serving(lambda asked: Fault(stall=True)) as served:
            reward = RemoteReward(replace(PATIENT, url=served.url, concurrency=1))
            waiting = [asyncio.create_task(reward(prompt(), trajectory("x"))) for _ in range(3)]
            while not served.asked:
                await asyncio.sleep(0)
            for task in waiting[1:]:
                task.cancel()
            await asyncio.gather(*waiting[1:], return_exceptions=True)
            served.released.set()
            await asyncio.gather(*waiting, return_exceptions=True)
            return len(served.asked)

    assert asyncio.run(run()) == 1


def asked_model(answer, *, replies=("yes",), batch=1, **settings):
    async def run():
        async with serving(answer) as served:
            server = replace(PATIENT, url=served.url, batch=batch)
            reward = ModelReward(RewardModelEndpoint(server=server, **settings))
            given = (reward(prompt(content="Hi "), trajectory(reply)) for reply in replies)
            return await asyncio.gather(*given, return_exceptions=True), served

    return asyncio.run(run())


def test_a_served_model_is_asked_in_sglang_s_manner():
    (given,), served = asked_model(lambda asked: [{"embedding": [-1.5], "meta_info": {}}])
    assert given == Reward(value=-1.5)
    assert (served.asked[0].path, served.asked[0].body) == ("/classify", {"text": ["Hi yes"]})


def test_a_served_model_is_asked_in_openai_s_manner():
    (given,), served = asked_model(
        lambda asked: {"data": [{"index": 0, "probs": [0.75]}]}, api="openai", model="scorer"
    )
    assert given == Reward(value=0.75)
    assert served.asked[0].body == {"model": "scorer", "input": ["Hi yes"]}


def test_a_conversation_is_rendered_by_the_reward_model_s_own_template():
    numbers = count()
    given, served = asked_model(
        lambda asked: [{"embedding": [float(next(numbers))]} for _ in asked.body["input_ids"]],
        replies=("a", "bb"),
        batch=2,
        render_tokens=lambda messages: [len(m["content"]) for m in messages],
    )
    assert [reward.value for reward in given] == [0.0, 1.0]
    assert served.asked[0].body == {"input_ids": [[3, 1], [3, 2]]}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"error": "x"}, "holds no list of scores"),
        ([{"embedding": [1.0, 2.0]}], "gives 2 numbers per trajectory"),
        ([{"label": "good"}], "for a reward"),
        ([{"embedding": [None]}], "for a reward"),
        ([], "0 answers for 1 requests"),
    ],
)
def test_a_model_that_is_no_scalar_one_fails_the_grade(answer, reason):
    (given,), _ = asked_model(lambda asked: answer)
    with pytest.raises(GradingError, match=reason):
        raise given


def test_a_server_that_was_not_named_is_asked_for():
    with pytest.raises(UsageError, match="--rm-url"):
        build_remote_reward(GraderContext())
    with pytest.raises(UsageError, match="--reward-model-url"):
        build_model_reward(GraderContext())
