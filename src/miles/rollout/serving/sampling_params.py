"""Sampling parameters of a request body: the fields all APIs share, and how they change a base ``SamplingParams``."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from miles.core.protocols import SamplingParams
from miles.core.sampling_limits import GREEDY_TEMPERATURE, MAX_TEMPERATURE, MIN_REPETITION_PENALTY, MIN_TOP_P
from miles.rollout.serving.body import Int, Number, RequestBody, Texts, as_list
from miles.rollout.serving.errors import RequestError

MAX_STOP_STRINGS = 1024

Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class CoreSamplingFields(RequestBody):
    """The sampling fields of ``SamplingParams`` itself."""

    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(ge=MIN_TOP_P, le=1)] | None = None
    top_k: Int | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: Texts | None = None
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    ignore_eos: bool | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings; an empty string is none."""
        if len(as_list(self.stop)) > MAX_STOP_STRINGS:  # each is searched for after every token
            message = f"stop has {len(as_list(self.stop))} strings, but the limit is {MAX_STOP_STRINGS}."
            raise RequestError(message, param="stop")
        return tuple(text for text in as_list(self.stop) if text)


class SamplingFields(CoreSamplingFields):
    """The sampling fields that SGLang's ``sampling_params`` and the bodies of OpenAI and Anthropic share."""

    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=2)] | None = None
    logit_bias: dict[str, Number] = Field(default_factory=dict)


def find_sampling_changes(base: SamplingParams, fields: CoreSamplingFields) -> dict[str, Any]:
    """The fields of a body that would change how ``base`` samples."""
    sent = {
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": fields.top_k,
        "min_p": fields.min_p,
        "ignore_eos": fields.ignore_eos,
    }
    return {name: value for name, value in sent.items() if value is not None and value != getattr(base, name)}


def override_sampling(base: SamplingParams, fields: CoreSamplingFields, *, path: str = "") -> SamplingParams:
    """``base`` with the sampling fields of a body; greedy decoding in any form becomes temperature 0.

    Length limits, stop strings and seeds differ between the APIs and are left to the caller.
    """
    changed = replace(base, **find_sampling_changes(base, fields))
    if changed.temperature < GREEDY_TEMPERATURE or changed.top_k == 1:
        return replace(changed, temperature=0.0, top_k=-1)
    if changed.top_k < 1 and changed.top_k != -1:
        raise RequestError(f"{path}top_k is {changed.top_k}, but must be -1 (off) or at least 1.", param=f"{path}top_k")
    return changed
