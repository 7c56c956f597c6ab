"""The parsed request of the engine's HTTP server, and the sampling fields that its three endpoints share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from miles.backends.native.engine.stop_regex import compile_stop_pattern
from miles.core.errors import EngineError
from miles.core.media import Images
from miles.core.protocols import SamplingParams
from miles.core.sampling_limits import MAX_LOGIT_BIAS
from miles.rollout.serving.body import Count, Int, OneOrMany, RequestBody, Texts, as_list
from miles.rollout.serving.errors import RequestError
from miles.rollout.serving.openai_bodies import JsonSchema
from miles.rollout.serving.sampling_params import SamplingFields, override_sampling

MAX_SAMPLES_PER_PROMPT = 4096
MAX_REQUESTS = 65536
MAX_TOP_LOGPROBS = 1024
MAX_STOP_PATTERNS = 64
ANY_JSON = "$$ANY$$"
"""SGLang's word for the schema that any JSON value fulfils."""

PromptInput = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarRule:
    """What the text of a reply must match."""

    kind: Literal["json_schema", "regex", "ebnf"]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParams:
    """SGLang's ``session_params``: the request continues request ``rid`` of session ``id``, or starts it (None).

    ``offset``: after so many of that request's tokens (negative: from their end); ``drop_previous_output``: without
    its output; ``replace``: instead of everything that continued it.
    """

    id: str
    rid: str | None = None
    offset: int = 0
    replace: bool = False
    drop_previous_output: bool = False


@dataclass(frozen=True, slots=True)
class VideoData:
    """A video of a request: its frames, base64 or data URLs, and how many there are in a second."""

    frames: tuple[str, ...]
    fps: float | None


@dataclass(frozen=True, slots=True)
class ImageRun:
    """The run of prompt tokens that an image takes, and the digest that its processed arrays must have."""

    start: int
    length: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """One requested completion: the prompt, how it is sampled, and what is returned beside its tokens.

    ``max_new_tokens`` None is all the context leaves; ``seed`` None is a random one; ``sample_index`` counts the
    completions of one prompt. ``trim_stop``: the text ends before the stop that matched. ``logprob_start_len`` is the
    first prompt token whose log-prob is returned (None: none). ``routed_experts_start_len``: the routed experts of the
    tokens from that position on are returned; with ``return_indexer_topk`` what indexers selected for every token.

    ``image_data`` are the raw images of a prompt with one marker for each; with ``image_runs``, of a prompt that has
    their placeholder tokens already. ``images`` are the processed ones among the prompt's tokens. ``lora`` names the
    LoRA adapter.
    """

    prompt: PromptInput
    rid: str
    sampling: SamplingParams
    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    seed: int | None = None
    sample_index: int = 0
    priority: int = 0
    stop_regex: tuple[str, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    grammar: GrammarRule | None = None
    skip_special_tokens: bool = True
    trim_stop: bool = True
    return_logprob: bool = False
    logprob_start_len: int | None = None
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    return_text_in_logprobs: bool = False
    routed_experts_start_len: int | None = None
    return_prompt_token_ids: bool = False
    return_weight_versions: bool = False
    return_indexer_topk: bool = False
    session: SessionParams | None = None
    image_data: tuple[Any, ...] = ()
    image_runs: tuple[ImageRun, ...] | None = None
    images: Images = ()
    lora: str | None = None


class EngineSamplingFields(SamplingFields):
    """Sampling fields of ``sampling_params`` that the OpenAI endpoints accept too."""

    unsupported: ClassVar[tuple[str, ...]] = ("structural_tag", "custom_params")
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES_PER_PROMPT)] = 1
    stop_regex: Texts | None = None
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    json_schema: JsonSchema = None
    regex: str = ""
    ebnf: str = ""


class EngineRequestFields(RequestBody):
    """Fields of all generation endpoints besides the prompt and its sampling."""

    rid: OneOrMany[str] | None = None
    priority: Int = 0
    stream: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: Count = 0

    @property
    def experts_start(self) -> int | None:
        return self.routed_experts_start_len if self.return_routed_experts else None


def build_request(
    fields: EngineSamplingFields,
    *,
    path: str = "",
    max_new_tokens: int | None,
    min_new_tokens: int,
    seed: int | None,
    grammar: GrammarRule | None,
    defaults: Mapping[str, float] | None = None,
) -> ParsedRequest:
    """A request without its prompt from the sampling fields of a body; ``defaults`` are the model's own.

    ``path`` is where the fields are in the body.
    """
    minimum = "min_new_tokens" if path else "min_tokens"
    if min_new_tokens and grammar is not None:  # where a grammar has ended, only the end of the sequence may follow
        raise RequestError(f"{minimum} and {grammar.kind} cannot both be set.", param=minimum)
    if max_new_tokens is not None and min_new_tokens > max_new_tokens:
        message = f"{path}{minimum} is {min_new_tokens}, but must be at most the {max_new_tokens} tokens of the limit."
        raise RequestError(message, param=f"{path}{minimum}")
    model = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    model |= defaults or {}
    base = SamplingParams(
        temperature=model["temperature"],
        top_p=model["top_p"],
        top_k=int(model["top_k"]),
        min_p=model["min_p"],
        max_new_tokens=max_new_tokens or 0,
        stop=fields.stop_strings,
        # SGLang ignores stop tokens too when it ignores the end of the sequence.
        stop_token_ids=() if fields.ignore_eos else tuple(fields.stop_token_ids),
    )
    penalty = fields.repetition_penalty
    return ParsedRequest(
        prompt=(),
        rid="",
        sampling=override_sampling(base, fields, path=path),
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        seed=seed,
        stop_regex=_compile_patterns(as_list(fields.stop_regex)),
        frequency_penalty=fields.frequency_penalty,
        presence_penalty=fields.presence_penalty,
        repetition_penalty=model["repetition_penalty"] if penalty is None else penalty,
        logit_bias=_parse_logit_bias(fields.logit_bias),
        grammar=grammar,
        skip_special_tokens=fields.skip_special_tokens,
        trim_stop=not fields.no_stop_trim,
    )


def assign_rids(rid: str | list[str] | None, num_prompts: int, *, single: bool, n: int, new_rid: Any) -> list[str]:
    """A request id for each completion; one id is a prefix where there are several completions."""
    if rid is None or rid == "":
        return [new_rid() for _ in range(num_prompts * n)]
    if isinstance(rid, str):
        return [rid] if single and n == 1 else [f"{rid}_{i}" for i in range(num_prompts * n)]
    if len(rid) != num_prompts:
        raise RequestError(f"rid names {len(rid)} requests, but there are {num_prompts}.", param="rid")
    if len(set(rid)) != len(rid):
        duplicate = next(name for name in rid if rid.count(name) > 1)
        raise RequestError(f"rid names two requests {duplicate!r}, but ids must differ.", param="rid")
    return rid if n == 1 else [f"{name}_{i}" for name in rid for i in range(n)]


def check_num_requests(count: int) -> None:
    if count > MAX_REQUESTS:
        raise RequestError(f"The request asks for {count} completions, but the limit is {MAX_REQUESTS}.")


def split_token_prompts(value: list[int] | list[list[int]], name: str) -> tuple[list[PromptInput], bool]:
    """Prompts from token lists, and whether there is just one that was not in a list."""
    if not value:
        raise RequestError(f"{name} is empty, but a prompt has at least one token.", param=name)
    if not isinstance(value[0], list):
        return [tuple(value)], True  # pyright: ignore[reportReturnType]
    if not all(value):
        raise RequestError(f"A prompt in {name} is empty, but a prompt has at least one token.", param=name)
    return [tuple(tokens) for tokens in value], False  # pyright: ignore[reportArgumentType, reportReturnType]


def build_grammar(fields: EngineSamplingFields) -> GrammarRule | None:
    """The one of ``json_schema``, ``regex`` and ``ebnf`` that is set; an empty one is not."""
    rules: list[GrammarRule] = []
    if fields.json_schema:
        rules.append(GrammarRule(kind="json_schema", source=dump_schema(fields.json_schema, "json_schema")))
    if fields.regex:
        rules.append(GrammarRule(kind="regex", source=fields.regex))
    if fields.ebnf:
        rules.append(GrammarRule(kind="ebnf", source=fields.ebnf))
    if len(rules) > 1:
        raise RequestError(f"Only one of {' and '.join(rule.kind for rule in rules)} can be set.")
    return rules[0] if rules else None


def dump_schema(value: Any, name: str) -> str:
    """A JSON schema, sent as an object or as its text, as text."""
    if value == ANY_JSON:
        return "{}"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name} is not valid JSON: {error}.", param=name) from error
    if not isinstance(value, dict | bool):
        raise RequestError(f"{name} must be a JSON schema: an object, or its text.", param=name)
    return json.dumps(value)


def _compile_patterns(patterns: list[str]) -> tuple[str, ...]:
    if len(patterns) > MAX_STOP_PATTERNS:
        message = f"stop_regex has {len(patterns)} patterns, but the limit is {MAX_STOP_PATTERNS}."
        raise RequestError(message, param="stop_regex")
    for pattern in patterns:
        try:
            compile_stop_pattern(pattern)
        except EngineError as error:
            raise RequestError(f"{error}.", param="stop_regex") from error
    return tuple(pattern for pattern in patterns if pattern)


def _parse_logit_bias(values: Mapping[str, float]) -> dict[int, float]:
    for key, bias in values.items():
        if not (key.isascii() and key.isdigit() and len(key) < 19) or abs(bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                'logit_bias must be an object of token ids and numbers up to a million, such as {"42": -100}.',
                param="logit_bias",
            )
    return {int(key): bias for key, bias in values.items()}
