"""Sampling of a turn: the session's parameters, what a request may change of them, and the seed."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import ConfigDict

from miles.core.protocols import SamplingParams
from miles.rollout.serving.body import Int, PositiveInt
from miles.rollout.serving.errors import RequestError
from miles.rollout.serving.sampling_params import (
    CoreSamplingFields,
    SamplingFields,
    find_sampling_changes,
    override_sampling,
)
from miles.rollout.session.server.types import TurnRequest


class SessionSampling(CoreSamplingFields):
    """The ``sampling`` of a session that is opened."""

    model_config = ConfigDict(extra="forbid")
    closed_name: ClassVar[str | None] = "sampling"
    max_new_tokens: PositiveInt | None = None
    seed: Int | None = None

    def apply(self, base: SamplingParams) -> SamplingParams:
        """``base``, changed by what the body sets."""
        return replace(
            override_sampling(base, _normalize_top_k(self), path="sampling."),
            max_new_tokens=base.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens,
            stop=base.stop if self.stop is None else self.stop_strings,
            stop_token_ids=tuple(self.stop_token_ids) or base.stop_token_ids,
            seed=base.seed if self.seed is None else self.seed,
        )


def find_biasing_fields(fields: SamplingFields) -> tuple[str, ...]:
    """The fields of a body that would bias what the policy samples."""
    sent = {
        "frequency_penalty": fields.frequency_penalty,
        "presence_penalty": fields.presence_penalty,
        "logit_bias": fields.logit_bias,
        "repetition_penalty": fields.repetition_penalty not in (None, 1),
    }
    return tuple(name for name, value in sent.items() if value)


def choose_turn_sampling(
    base: SamplingParams, request: TurnRequest, *, hold: bool, max_new_tokens: int
) -> tuple[SamplingParams, tuple[str, ...]]:
    """The sampling of a turn but for its seed, and the fields of the request it ignores.

    In a held session the run decides how tokens are sampled, since the trainer assumes it; a request may only end its
    reply earlier. Elsewhere a request gets what it asks for, or an error. ``max_new_tokens``: what the context leaves.
    """
    fields = _normalize_top_k(request.sampling)
    ignored: tuple[str, ...] = ()
    sampling = base
    if hold:
        seed = () if request.seed is None else ("seed",)
        ignored = (*find_sampling_changes(base, fields), *seed, *request.constraints)
    elif request.constraints:
        raise RequestError(
            f"{request.constraints[0]} would bias what the policy samples, which this server does not do; leave it "
            "out, or open the session with hold to have it ignored.",
            param=request.constraints[0],
        )
    else:
        sampling = override_sampling(base, fields)
    limits = (request.max_new_tokens, base.max_new_tokens, max_new_tokens)
    stops = (*base.stop, *(stop for stop in fields.stop_strings if stop not in base.stop))
    stop_ids = (*base.stop_token_ids, *(token for token in fields.stop_token_ids if token not in base.stop_token_ids))
    sampling = replace(
        sampling,
        max_new_tokens=min(limit for limit in limits if limit is not None),
        stop=stops,
        stop_token_ids=stop_ids,
    )
    return sampling, ignored


def _normalize_top_k(fields: CoreSamplingFields) -> CoreSamplingFields:
    """The chat APIs also write 0 for no top-k."""
    return fields.model_copy(update={"top_k": -1}) if fields.top_k == 0 else fields
