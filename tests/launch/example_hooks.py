"""Example hooks of runs: some that work, and some that violate their protocol."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from miles.core.events import StepFinished
from miles.core.protocols import FilterResult
from miles.core.types import Group, Prompt


class Counting:
    """Prompts that are made as they are asked for."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.read, self.made = len(prompts), 0

    def next(self) -> Prompt:
        self.made += 1
        word = "abcdefgh"[self.made % 5 : self.made % 5 + 3]
        return Prompt(id=self.made, messages=[{"role": "user", "content": word}], label=word[::-1])

    def state(self) -> dict[str, Any]:
        return {"made": self.made}

    def load(self, state) -> None:
        self.made = state["made"]


def not_every_third(group: Group, version) -> FilterResult:
    return FilterResult(keep=group.prompt.id % 3 != 0, reason="third")


def halved(batch):
    return [sample.advantages / 2 for sample in batch.samples]


def first_only(group: Group) -> list[bool]:
    return [index == 0 for index in range(len(group.trajectories))]


def silent_tracker(event) -> None:
    if isinstance(event, StepFinished):
        raise OSError("the service is down")


async def doubled(name, prompts, engine, sampling, usual):
    groups = [await usual.produce(prompt) for prompt in prompts]
    return [replace(g, trajectories=(*g.trajectories, *g.trajectories)) for g in groups]


def eval_of_mine(step, groups, metrics):
    return {"eval/mine": float(sum(len(g.trajectories) for found in groups.values() for g in found)), "eval/step": step}


# -- what does not keep to its door ---------------------------------------------------------


async def too_few(prompt, engine, sampling, attempts, usual):
    group = await usual.produce(prompt)
    return replace(group, trajectories=group.trajectories[1:])


async def unscored(prompt, engine, sampling, attempts, usual):
    group = await usual.produce(prompt)
    return replace(group, trajectories=tuple(replace(t, reward=None) for t in group.trajectories))


async def no_group(prompt, engine, sampling, attempts, usual):
    return None


def no_source(prompts):
    return object()


class NoPrompts(Counting):
    def next(self):
        return "a prompt"


async def half_a_set(name, prompts, engine, sampling, usual):
    return [await usual.produce(prompt) for prompt in prompts[:2]]


def one_answer(group):
    return [True]


def one_array(batch):
    return [batch.samples[0].advantages]


def too_short(batch):
    return [sample.advantages[1:] for sample in batch.samples]


def fewer_rows(batch):
    return replace(batch, samples=batch.samples[1:])


def no_batch(batch):
    return None


def no_model(model):
    return None


def other_shape(model):
    import torch

    weight = model.norm.weight
    model.norm.weight = torch.nn.Parameter(torch.ones(weight.shape[0] + 1))
    return model


def no_metrics(step, groups, metrics):
    return {"name": "value"}


def words(step, groups, metrics):
    return None
