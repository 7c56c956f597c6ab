"""Rules about rewards that ask others: their servers have addresses, and nobody waits for them for ever."""

from collections.abc import Callable, Iterator

from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.launch.found import why_not_an_address
from miles.rollout.reward.table import BOXED, parts_of


def a_reward_that_asks_a_server_knows_its_address(c: Config) -> Iterator[str]:
    needs = {
        "remote_rm": (("--rm-url", c.rollout.rm_url),),
        "reward_model": (("--reward-model-url", c.rollout.reward_model_url),),
        "llm_judge": (("--judge-url", c.rollout.judge_url), ("--judge-model", c.rollout.judge_model)),
    }
    for name in _names(c):
        for flag, value in needs.get(name.removeprefix(BOXED), ()):
            if value is None:
                yield f"--rm-type {name} asks a server: {flag} is missing."


def an_address_of_a_server_is_http_and_holds_no_secret(c: Config) -> Iterator[str]:
    for flag, url in {
        "--rm-url": c.rollout.rm_url,
        "--reward-model-url": c.rollout.reward_model_url,
        "--judge-url": c.rollout.judge_url,
    }.items():
        if url is not None:
            yield from why_not_an_address(flag, url, flag.removesuffix("-url") + "-token-env")


def a_reward_gives_up_before_the_run_does(c: Config) -> Iterator[str]:
    r = c.rollout
    if r.reward_timeout >= c.schedule.stall_timeout:
        yield (
            f"--reward-timeout {r.reward_timeout:g} is no sooner than --stall-timeout {c.schedule.stall_timeout:g}, so "
            "one reward that hangs would stop the run; make it smaller."
        )
    if r.rm_type is not None and r.grade_timeout >= r.reward_timeout:
        yield (
            f"--grade-timeout {r.grade_timeout:g} is no sooner than --reward-timeout {r.reward_timeout:g}; make it "
            "smaller."
        )


def workers_have_a_reward_to_compute(c: Config) -> Iterator[str]:
    r = c.rollout
    if r.reward_num_workers and r.rm_type is None and r.custom_rm_path is None:
        yield (
            f"--reward-num-workers {r.reward_num_workers} computes rewards, and there is none: choose one with "
            "--rm-type or --custom-rm-path, or leave it out."
        )


def _names(c: Config) -> list[str]:
    try:
        return [part.name for part in parts_of(c.rollout.rm_type)] if c.rollout.rm_type is not None else []
    except UsageError:  # told by another rule
        return []


REWARDS: tuple[Callable[[Config], Iterator[str]], ...] = (
    a_reward_that_asks_a_server_knows_its_address,
    an_address_of_a_server_is_http_and_holds_no_secret,
    a_reward_gives_up_before_the_run_does,
    workers_have_a_reward_to_compute,
)
