"""Request validation: reject what the engine can never serve, and turn the rest into ``Req``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from itertools import count

import numpy as np

from miles.backends.native.engine.forward_batch import derive_rng_stream
from miles.backends.native.engine.lora import ServedAdapter
from miles.backends.native.engine.req import Req, pack_token_mask
from miles.backends.native.engine.request import GenerateRequest, Ints
from miles.backends.native.engine.stop_regex import compile_stop_pattern
from miles.backends.native.engine.vision import PromptImages, place_images
from miles.core.errors import EngineError
from miles.core.media import ImageInput
from miles.core.protocols import SamplingParams
from miles.core.sampling_limits import (
    GREEDY_TEMPERATURE,
    MAX_LOGIT_BIAS,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    MIN_TOP_P,
)
from miles.core.types import Array
from miles.models.spec import DecoderSpec

_FEW_TOKENS = 64
"""So many numbers are compared faster in Python than by numpy."""


class RequestValidator:
    """Checks requests against the limits of the model and of the KV cache (``kv_tokens``).

    ``check_image`` raises a ValueError for an image that cannot be encoded.
    """

    def __init__(
        self,
        name: str,
        spec: DecoderSpec,
        kv_tokens: int,
        check_image: Callable[[ImageInput], None],
        *,
        has_tokenizer: bool,
    ) -> None:
        self._name = name
        self._spec = spec
        self._kv_tokens = kv_tokens
        self._has_tokenizer = has_tokenizer
        self._check_image = check_image
        self._numbers = count()

    def create_req(self, request: GenerateRequest, now: float, lora: ServedAdapter | None = None) -> Req:
        """Return the state of a request that can be served; raise ``EngineError`` otherwise."""
        prompt = np.asarray(request.tokens)
        sampling, spec = request.sampling, self._spec
        problem = self._check_lengths(prompt, request) or _check_sampling(sampling) or self._check_options(request)
        if problem is not None:
            raise EngineError(f"{self._name} cannot serve the request: {problem}")
        prompt_T = prompt.astype(np.int64)
        try:
            patterns = tuple(map(compile_stop_pattern, request.stop_regex))
            images = self._place_images(prompt_T, request) if request.images else None
        except (EngineError, ValueError) as error:
            raise EngineError(f"{self._name} cannot serve the request: {error}") from error
        number = next(self._numbers)
        end_tokens, stop_token_ids = _find_end_tokens(
            spec.eos_token_ids, sampling.stop_token_ids, sampling.ignore_eos, spec.vocab_size
        )
        req = Req(
            number=number,
            request=request,
            prompt_length=len(prompt),
            prompt_T=prompt_T,
            prompt_key=_build_prompt_key(prompt_T, images, lora),
            stop_token_ids=stop_token_ids,
            banned_tokens=end_tokens,
            stop_window=compute_stop_window(request),
            stop_patterns=patterns,
            tokens=prompt_T.tolist(),
            max_length=len(prompt) + sampling.max_new_tokens,
            sort_key=(-request.priority, number),
            images=images,
            lora=lora,
            lora_versions=[] if lora is None else [(0, lora.version)],
            rng_stream=derive_rng_stream(sampling.seed),
            vocab_size=spec.vocab_size,
            arrival_time=now,
        )
        req.reset_prompt_logprobs()
        if req.needs_last_token:
            req.token_counts = Counter()
        if request.constraint is not None:
            req.grammar_mask_Z = pack_token_mask(request.constraint.get_allowed_tokens(), spec.vocab_size)
        return req

    def _check_lengths(self, prompt: Array, request: GenerateRequest) -> str | None:
        """Return what is wrong with the lengths; None if nothing is."""
        if prompt.ndim != 1 or len(prompt) == 0 or prompt.dtype.kind not in "iu":
            return f"a prompt is a non-empty list of tokens, not {prompt.dtype} of shape {prompt.shape}"
        max_new, positions = request.sampling.max_new_tokens, self._spec.max_positions
        if (token := self._find_unknown_token(prompt)) is not None:
            return f"token {token} is outside the vocabulary of {self._spec.vocab_size}"
        if max_new < 0:
            return f"max_new_tokens is {max_new}, must be at least 0"
        if len(prompt) + max_new > min(positions, self._kv_tokens):
            lengths = f"{len(prompt)} prompt tokens and max_new_tokens {max_new}"
            if len(prompt) + max_new > positions:
                return f"{lengths} exceed the model's {positions} positions"
            if len(prompt) + max_new > self._kv_tokens:
                return f"{lengths} exceed the key-value cache of {self._kv_tokens} tokens; raise --engine-kv-tokens"
        start = request.logprob_start_len
        if start is not None and not 0 <= start <= len(prompt):
            return f"logprob_start_len is {start}, must be between 0 and the prompt's {len(prompt)} tokens"
        return None

    def _place_images(self, prompt_T: Ints, request: GenerateRequest) -> PromptImages:
        """Return where the images are; raise an ``EngineError`` or ``ValueError`` that says why they cannot be."""
        if self._spec.vision is None:
            raise EngineError("its model takes no images")
        for number, placed in enumerate(request.images):
            try:
                self._check_image(placed.image)
            except ValueError as error:
                raise EngineError(f"image {number}: {error}") from error
        images = place_images(self._spec, prompt_T, request.images)
        if images.rope_positions_3T is not None:
            last = len(prompt_T) + request.sampling.max_new_tokens - 1 + images.rope_offset
            last = max(last, int(images.rope_positions_3T.max()))
            if last >= self._spec.max_positions:
                raise EngineError(
                    f"its images and max_new_tokens reach position {last}, beyond the model's "
                    f"{self._spec.max_positions} positions"
                )
        return images

    def _check_options(self, request: GenerateRequest) -> str | None:
        """Return what is wrong with the options; None if nothing is."""
        if (request.sampling.stop or request.stop_regex) and not self._has_tokenizer:
            return "stop strings need a tokenizer, and this engine has none; use stop_token_ids"
        if request.top_logprobs_num < 0:
            return f"top_logprobs_num is {request.top_logprobs_num}, must be at least 0"
        if not 0 <= request.min_new_tokens <= request.sampling.max_new_tokens:
            return f"min_new_tokens is {request.min_new_tokens}, must be between 0 and max_new_tokens"
        for name, tokens in (("token_ids_logprob", request.token_ids_logprob), ("logit_bias", request.logit_bias)):
            if tokens and (token := self._find_unknown_token(np.array(tuple(tokens)))) is not None:
                return f"{name} names token {token}, outside the vocabulary of {self._spec.vocab_size}"
        if (problem := _check_penalties(request)) is not None:
            return problem
        if request.min_new_tokens:
            stops = {*self._spec.eos_token_ids, *request.sampling.stop_token_ids}
            if sum(0 <= token < self._spec.vocab_size for token in stops) == self._spec.vocab_size:
                return "every token is a stop token, so min_new_tokens leaves none to sample"
        return None

    def _find_unknown_token(self, tokens: Array) -> int | None:
        """Return a token outside the vocabulary, if there is one."""
        if len(tokens) <= _FEW_TOKENS:
            values = tokens.tolist()
            least, most = min(values), max(values)
        else:
            least, most = int(tokens.min()), int(tokens.max())
        return least if least < 0 else most if most >= self._spec.vocab_size else None


@lru_cache(256)
def _find_end_tokens(
    eos_token_ids: tuple[int, ...], stop_token_ids: tuple[int, ...], ignore_eos: bool, vocab_size: int
) -> tuple[tuple[int, ...], frozenset[int]]:
    """Return EOS and stop tokens, and those of them that end a request.

    Tokens outside the vocabulary cannot be sampled and end nothing.
    """
    tokens = tuple(token for token in (*eos_token_ids, *stop_token_ids) if 0 <= token < vocab_size)
    return tokens, frozenset(token for token in tokens if token in stop_token_ids or not ignore_eos)


def _build_prompt_key(prompt_T: Ints, images: PromptImages | None, lora: ServedAdapter | None) -> bytes:
    """Return what requests with the same prompt, images and adapter have in common."""
    keys_T = prompt_T if images is None else np.array(images.keys, np.int64)
    return keys_T.tobytes() if lora is None else keys_T.tobytes() + f"lora {lora.uid}".encode()


def _check_penalties(request: GenerateRequest) -> str | None:
    if request.logit_bias and not all(abs(bias) <= MAX_LOGIT_BIAS for bias in request.logit_bias.values()):
        return f"a logit_bias is not a number between {-MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}"
    for name, value in (("frequency", request.frequency_penalty), ("presence", request.presence_penalty)):
        if not -2 <= value <= 2:
            return f"{name}_penalty is {value}, must be between -2 and 2"
    if not MIN_REPETITION_PENALTY <= request.repetition_penalty <= 2:
        return f"repetition_penalty is {request.repetition_penalty}, must be between {MIN_REPETITION_PENALTY:g} and 2"
    return None


def _check_sampling(sampling: SamplingParams) -> str | None:
    if sampling.temperature != 0 and not GREEDY_TEMPERATURE <= sampling.temperature <= MAX_TEMPERATURE:
        bounds = f"between {GREEDY_TEMPERATURE:g} and {MAX_TEMPERATURE:g}"
        return f"temperature is {sampling.temperature}, must be 0 (greedy) or {bounds}"
    if not MIN_TOP_P <= sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}, must be between {MIN_TOP_P:g} and 1"
    if sampling.top_k != -1 and sampling.top_k < 1:
        return f"top_k is {sampling.top_k}, must be -1 (off) or at least 1"
    if not 0 <= sampling.min_p <= 1:
        return f"min_p is {sampling.min_p}, must be between 0 and 1"
    if "" in sampling.stop:
        return "a stop string is empty"
    return None


def compute_stop_window(request: GenerateRequest) -> int:
    """Return how many last tokens can hold a stop string that the last token completed; for a pattern, all of them.

    A token is at least one byte, so a string of n bytes lies in n tokens; four more keep it clear of a character
    split at the start of the window.
    """
    if request.stop_regex:
        return request.sampling.max_new_tokens
    return 4 + max(len(text.encode()) for text in request.sampling.stop) if request.sampling.stop else 0
