"""Hooks that fit, and some that do not."""

import functools


async def reward(prompt, trajectory):
    return 1.0


async def reward_with_default(prompt, trajectory, scale=2.0):
    return scale


async def reward_of_anything(*args, **kwargs):
    return 0.0


async def too_many(prompt, trajectory, extra):
    return None


async def too_few(prompt):
    return None


async def keyword_only(prompt, trajectory, *, scale):
    return None


def not_async(prompt, trajectory):
    return None


def keep(group):
    return True


async def keep_async(group):
    return True


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    return None


class Scorer:
    async def __call__(self, prompt, trajectory):
        return 1.0


class NeedsArguments:
    def __init__(self, scale):
        self.scale = scale

    async def __call__(self, prompt, trajectory):
        return self.scale


class NotCallable:
    pass


async def _scaled(scale, prompt, trajectory):
    return scale


partial = functools.partial(_scaled, 3.0)
scorer = Scorer()
NUMBER = 3


class Buffer:
    reward = staticmethod(reward)
