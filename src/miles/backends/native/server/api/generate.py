"""SGLang's ``/generate``: its body as parsed requests, and its response with ``meta_info``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field

from miles.backends.native.engine.request import FinishReason
from miles.backends.native.server.api.images import split_image_data, split_image_runs
from miles.backends.native.server.api.request_types import (
    EngineRequestFields,
    EngineSamplingFields,
    ParsedRequest,
    PromptInput,
    SessionParams,
    assign_rids,
    build_grammar,
    build_request,
    check_num_requests,
    split_token_prompts,
)
from miles.backends.native.server.output_state import LogprobRows, OutputState
from miles.core.indexer_topk import encode_indexer_topk
from miles.core.protocols import SpeculationCounts
from miles.core.routed_experts import encode_for_sglang
from miles.rollout.serving.body import Count, Int, OneOrMany, RequestBody, Texts, TokenLists, parse_body
from miles.rollout.serving.errors import RequestError

T = TypeVar("T")


class SamplingParamsBody(EngineSamplingFields):
    """SGLang's ``sampling_params``. ``sampling_drawn`` is ours: so many of the last prompt tokens were sampled with
    this seed before, when a completion is resumed. ``max_new_tokens`` null is all the context leaves."""

    model_config = ConfigDict(extra="forbid")
    closed_name: ClassVar[str | None] = "sampling_params"
    nullable: ClassVar[tuple[str, ...]] = ("max_new_tokens",)
    max_new_tokens: Count | None = 128
    min_new_tokens: Count = 0
    sampling_seed: Int | None = None
    sampling_drawn: Count = 0
    spaces_between_special_tokens: bool = True
    stream_interval: Count | None = None
    structural_tag: Any = None
    custom_params: Any = None

    def build(self) -> ParsedRequest:
        request = build_request(
            self,
            path="sampling_params.",
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            seed=self.sampling_seed,
            grammar=build_grammar(self),
        )
        return replace(request, sampling=replace(request.sampling, num_prior_tokens=self.sampling_drawn))


class SessionParamsBody(RequestBody):
    """SGLang's ``session_params``; without an id they do nothing."""

    id: str | None = None
    rid: str | None = None
    offset: Int = 0
    replace: bool = False
    drop_previous_output: bool = False

    def build(self) -> SessionParams | None:
        if self.id is None:
            return None
        return SessionParams(
            id=self.id,
            rid=self.rid,
            offset=self.offset,
            replace=self.replace,
            drop_previous_output=self.drop_previous_output,
        )


class GenerateBody(EngineRequestFields):
    """``/generate``: one prompt or a batch, as text or tokens, with ``n`` completions each.

    ``image_data`` are the images of a prompt, base64 or data URLs, with one marker in the prompt for each. With
    ``image_runs``, which is ours, the prompt has their placeholder tokens already.
    """

    unsupported: ClassVar[tuple[str, ...]] = (
        "input_embeds",
        "video_data",
        "audio_data",
        "custom_logit_processor",
        "return_hidden_states",
        "return_sampling_mask",
        "background",
        "bootstrap_host",
        "bootstrap_room",
        "return_flat_raw_top_logprobs",
        "multi_item_delimiter_indices",
    )
    text: Texts | None = None
    image_data: Any = None
    image_runs: Any = None
    input_ids: TokenLists | None = None
    sampling_params: OneOrMany[SamplingParamsBody] | None = None
    return_logprob: OneOrMany[bool | None] | None = None
    logprob_start_len: OneOrMany[Annotated[int, Field(ge=-1)] | None] | None = None
    top_logprobs_num: OneOrMany[Int | None] | None = None
    token_ids_logprob: TokenLists | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    return_weight_versions: bool = False
    return_indexer_topk: bool = False
    lora_path: OneOrMany[str | None] | None = None
    session_id: str | None = None
    session_params: OneOrMany[SessionParamsBody | None] | None = None


def parse_generate(value: Any, new_rid: Callable[[], str]) -> tuple[list[ParsedRequest], bool, bool]:
    """The requests of a body, whether the response is one object and not a list, and whether it streams."""
    body = parse_body(GenerateBody, value)
    prompts, single = _split_prompts(body)
    count = len(prompts)
    params = _broadcast("sampling_params", body.sampling_params, count, single, SamplingParamsBody())
    n = params[0].n
    if any(param.n != n for param in params):
        raise RequestError("sampling_params.n must be the same for all prompts.", param="sampling_params")
    check_num_requests(count * n)
    samplings = [param.build() for param in params] if isinstance(body.sampling_params, list) else [params[0].build()]
    rids = assign_rids(body.rid, count, single=single, n=n, new_rid=new_rid)
    logprobs = _broadcast("return_logprob", body.return_logprob, count, single, False)
    starts = _broadcast("logprob_start_len", body.logprob_start_len, count, single, -1)
    tops = _broadcast("top_logprobs_num", body.top_logprobs_num, count, single, 0)
    chosen = _broadcast_token_lists(body.token_ids_logprob, count, single)
    sessions = _broadcast("session_params", body.session_params, count, single, None)
    adapters = _broadcast("lora_path", body.lora_path, count, single, None)
    images = split_image_data(body.image_data, count, single)
    runs = split_image_runs(body.image_runs, images, single)
    if body.session_params is not None and n > 1:
        raise RequestError("A session continues one completion: set n to 1.", param="session_params")
    requests: list[ParsedRequest] = []
    for i, prompt in enumerate(prompts):
        session = sessions[i]
        request = replace(
            samplings[i % len(samplings)],
            prompt=prompt,
            priority=body.priority,
            return_logprob=logprobs[i],
            logprob_start_len=starts[i] if logprobs[i] and starts[i] >= 0 else None,
            top_logprobs_num=max(0, tops[i]) if logprobs[i] else 0,  # SGLang takes a negative number for 0
            token_ids_logprob=chosen[i] if logprobs[i] else (),
            return_text_in_logprobs=body.return_text_in_logprobs,
            routed_experts_start_len=body.experts_start,
            return_prompt_token_ids=body.return_prompt_token_ids,
            return_weight_versions=body.return_weight_versions,
            return_indexer_topk=body.return_indexer_topk,
            session=None if session is None else session.build(),
            lora=adapters[i] or None,
            image_data=images[i],
            image_runs=runs[i],
        )
        requests += [replace(request, rid=rids[i * n + sample], sample_index=sample) for sample in range(n)]
    return requests, single and n == 1, body.stream


def _split_prompts(body: GenerateBody) -> tuple[list[PromptInput], bool]:
    """The prompts, and whether there is just one that was not in a list. Tokens take precedence over text."""
    if body.input_ids is not None:
        return split_token_prompts(body.input_ids, "input_ids")
    if body.text is None:
        raise RequestError("The prompt is missing: give text or input_ids.")
    if isinstance(body.text, str):
        return [body.text], True
    if not body.text:
        raise RequestError("text is an empty list, but must hold at least one prompt.", param="text")
    return list(body.text), False


def _broadcast(name: str, value: Any, count: int, single: bool, default: T) -> list[T]:
    """A field that is sent once for all prompts or once for each, as one value per prompt."""
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if single or len(value) != count:
        prompts = "is one prompt" if single else f"are {count} prompts"
        raise RequestError(f"{name} is a list of {len(value)}, but there {prompts}.", param=name)
    return [default if each is None else each for each in value]


def _broadcast_token_lists(value: Any, count: int, single: bool) -> Sequence[tuple[int, ...]]:
    if not value:
        return [()] * count
    if not isinstance(value[0], list):
        return [tuple(value)] * count
    return [tuple(tokens) for tokens in _broadcast("token_ids_logprob", value, count, single, [])]


# -- the response ---------------------------------------------------------------------------


def format_generate(state: OutputState, tokens_since: int = 0, text_since: int = 0) -> dict[str, Any]:
    """A completion so far; or only what is new since a token and a character, for incremental streams."""
    body: dict[str, Any] = {}
    text = state.text
    if text is not None:
        body["text"] = text[text_since:]
    body["output_ids"] = state.tokens[tokens_since:]
    body["meta_info"] = format_meta_info(state, tokens_since)
    if state.request.return_prompt_token_ids:
        body["prompt_token_ids"] = [int(token) for token in state.prompt]
    return body


def format_meta_info(state: OutputState, tokens_since: int = 0) -> dict[str, Any]:
    """SGLang's ``meta_info``."""
    output, request = state.output, state.request
    cached = output.cached_tokens
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": _format_finish_reason(state.finish_reason),
        "prompt_tokens": len(state.prompt),
        "weight_version": state.weight_version,
        "num_retractions": output.preemptions,
        "queue_time": output.queue_seconds,
    }
    if request.return_weight_versions:
        meta["weight_versions"] = state.weight_versions
    if request.return_logprob:
        meta |= _format_logprobs(state, tokens_since)
    meta |= {
        "reasoning_tokens": 0,
        "completion_tokens": len(state.tokens),
        "cached_tokens": cached,
        "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
        "dp_rank": None,
    }
    if output.speculation is not None:
        meta |= format_speculation(output.speculation)
    experts = None if state.finish_reason is None else format_routed_experts(state)
    if experts is not None:
        meta["routed_experts"] = experts
    if request.return_indexer_topk and state.finish_reason is not None:
        selected = output.indexer_topk()
        assert selected is not None, "a server that does not record refuses the request"
        meta["indexer_topk"] = encode_indexer_topk(selected)
    if state.end_time is not None:
        meta["e2e_latency"] = state.end_time - state.start_time
    return meta


def format_speculation(counts: SpeculationCounts) -> dict[str, Any]:
    """Counts of speculative decoding under SGLang's names, its former ones included, and a field of our own."""
    fields: dict[str, Any] = {
        "spec_verify_ct": counts.verifications,
        "spec_accept_token_num": counts.accepted,
        "spec_draft_token_num": counts.drafted,
        "spec_num_correct_drafts": counts.accepted,
        "spec_num_proposed_drafts": counts.drafted,
        "spec_correct_drafts_histogram": list(counts.histogram),
        "spec_drafted_ends": counts.drafted_ends,
    }
    if counts.verifications:
        fields |= {"spec_accept_rate": counts.accept_rate, "spec_accept_length": counts.accept_length}
    return fields


def _format_finish_reason(reason: FinishReason | None) -> dict[str, Any] | None:
    if reason is None:
        return None
    if reason.kind == "stop":
        return {"type": "stop", "matched": reason.matched}
    if reason.kind == "length":
        return {"type": "length", "length": reason.length}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def _format_logprobs(state: OutputState, since: int) -> dict[str, Any]:
    request, output = state.request, state.output_logprobs
    prompt = LogprobRows() if request.logprob_start_len is None else state.prompt_logprobs()
    fields: dict[str, Any] = {
        "input_token_logprobs": prompt.tokens,
        "output_token_logprobs": output.tokens[since:] if since else output.tokens,
        "output_token_logprobs_length": len(output.tokens),
    }
    if request.top_logprobs_num:
        fields["input_top_logprobs"] = prompt.top_logprobs
        fields["output_top_logprobs"] = output.top_logprobs[since:] if since else output.top_logprobs
    if request.token_ids_logprob:
        fields["input_token_ids_logprobs"] = prompt.token_ids_logprobs
        fields["output_token_ids_logprobs"] = output.token_ids_logprobs[since:] if since else output.token_ids_logprobs
    return fields


def format_routed_experts(state: OutputState) -> str | None:
    """The routed experts of every token but the last, from the requested position on, as base64 of int32.

    The array is [tokens, layers, experts per token]; None where the model has none. Expert -1 was not recorded.
    """
    start = state.request.routed_experts_start_len
    experts = None if start is None else state.output.routed_experts(start)
    return None if experts is None else encode_for_sglang(experts)
