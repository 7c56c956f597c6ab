"""Requests of the Tinker API as the service keeps them: checked, with all defaults filled in."""

from __future__ import annotations

from dataclasses import asdict
from hashlib import sha256
from typing import Any

import numpy as np

from miles.backends.service.adapter import AdamParams, AdapterShape
from miles.backends.service.checkpoint_files import check_name
from miles.backends.service.config import ServiceConfig
from miles.backends.service.fields import Fields
from miles.backends.service.state import CheckpointKind, ServiceRun
from miles.rollout.serving.errors import RequestError

__all__ = ["build_optim_step", "build_sample", "build_save", "build_shape"]

_MAX_SAMPLES = 1024
_MAX_TOP = 64
_KINDS: dict[str, CheckpointKind] = {
    "save_weights": "training",
    "save_weights_for_sampler": "sampler",
    "save_weights_external": "external",
}
SAVES = tuple(_KINDS)
"""The requests that save a checkpoint."""
_MIN_TTL, _MAX_TTL = 3600, 10 * 366 * 24 * 3600


def build_shape(fields: Fields, config: ServiceConfig, run_id: str) -> dict[str, Any]:
    """Return the shape of a new adapter."""
    optimizer = fields.mapping("optimizer_config") or {}
    if optimizer.get("type", "adamw") != "adamw":
        raise RequestError(f"the optimizer {optimizer['type']!r} is not offered; use adamw.", status=422)
    if "lora_config" not in fields:
        raise RequestError("lora_config is missing: only LoRA adapters are trained, not all weights.", status=422)
    lora = fields.inner("lora_config")
    digest = int.from_bytes(sha256(run_id.encode()).digest()[:4], "little")
    shape = AdapterShape(
        rank=lora.integer("rank", least=1, most=config.service_max_rank),
        alpha=config.service_lora_alpha,
        train_attn=lora.flag("train_attn", True),
        train_mlp=lora.flag("train_mlp", True),
        train_unembed=lora.flag("train_unembed", True),
        seed=lora.integer("seed", digest, least=0),
    )
    return asdict(shape)


def build_optim_step(fields: Fields) -> dict[str, Any]:
    """Return the hyperparameters of an update."""
    if "optimizer_params" in fields:
        raise RequestError("optimizer_params are of an optimizer that is not offered; send adam_params.", status=422)
    params = fields.inner("adam_params")
    values = {name: params.number(name, default, least=0.0) for name, default in asdict(AdamParams()).items()}
    for name in ("beta1", "beta2"):
        if values[name] >= 1:
            raise RequestError(f"{name} is {values[name]:g}, must be less than 1.", status=422)
    return {"params": values}


def build_save(kind: str, run: ServiceRun, fields: Fields) -> dict[str, Any]:
    """Return what to save, under which name, and for how long."""
    ttl = fields.integer("ttl_seconds", least=_MIN_TTL, most=_MAX_TTL) if "ttl_seconds" in fields else None
    content: dict[str, Any] = {
        "kind": _KINDS[kind],
        "ttl_seconds": ttl,
        "overwrite": fields.flag("overwrite", False),
        "user_metadata": fields.mapping("user_metadata"),
    }
    if fields.raw("age_encryption_recipients"):
        raise RequestError(
            "age_encryption_recipients are not offered; download over an encrypted connection.", status=422
        )
    if kind == "save_weights_for_sampler" and "path" not in fields:
        number = fields.integer("sampling_session_seq_id", least=0)
        content |= {"name": f"unnamed-{number}", "sampler": f"{run.session_id}:sample:{number}"}
    else:
        content["name"] = check_name(fields.text("path", f"step-{fields.integer('seq_id', least=1)}"))
    return content


def build_sample(fields: Fields, path: str | None, *, max_tokens: int, vocab_size: int) -> dict[str, Any]:
    """Return a sampling request with all defaults; RequestError if it cannot be served."""
    tokens = _read_prompt(fields)
    if not tokens or not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        raise RequestError(f"the prompt must be tokens between 0 and {vocab_size - 1}, at least one.", status=422)
    if fields.integer("prompt_alt_tokens_k", 0, least=0):
        raise RequestError("prompt_alt_tokens_k is not offered; use topk_prompt_logprobs.", status=422)
    if fields.flag("record_stability_info", False):
        raise RequestError("record_stability_info is not offered, as the loss stable_reinforce is not.", status=422)
    top_k = fields.integer("topk_prompt_logprobs", 0, least=0, most=_MAX_TOP)
    wants_prompt = fields.flag("prompt_logprobs", False) or top_k > 0
    last = fields.integer("prompt_logprobs_last_n", 0, least=0)
    if last and not 1 <= last <= len(tokens) - 1:
        raise RequestError(f"prompt_logprobs_last_n is {last}, must be from 1 to {len(tokens) - 1}.", status=422)
    return {
        "path": path,
        "tokens": tokens,
        "num_samples": fields.integer("num_samples", 1, least=1, most=_MAX_SAMPLES),
        "params": _build_params(fields.inner("sampling_params"), len(tokens), max_tokens),
        "seed": _read_seed(fields.inner("sampling_params")),
        "score_from": (len(tokens) - last if last else 0) if wants_prompt else None,
        "top_k": top_k,
        "top_k_sample": fields.integer("topk_sample_logprobs", 0, least=0, most=_MAX_TOP),
        "targets": _read_targets(fields, len(tokens), vocab_size),
    }


def _read_prompt(fields: Fields) -> list[int]:
    tokens: list[int] = []
    for chunk in fields.inner("prompt").items("chunks"):
        part = Fields(chunk, "a chunk of the prompt")
        if part.text("type", "encoded_text") != "encoded_text":
            raise RequestError("the prompt has a chunk that is not text; send tokens only.", status=422)
        tokens += part.items("tokens")
    return tokens


def _read_seed(params: Fields) -> int | None:
    return params.integer("seed", least=0, most=(1 << 64) - 1) if "seed" in params else None


def _build_params(params: Fields, prompt_length: int, max_tokens: int) -> dict[str, Any]:
    room = max_tokens - prompt_length
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt_length} tokens, which leave none of the {max_tokens} for a response.", status=422
        )
    stop = params.raw("stop")
    strings = [stop] if isinstance(stop, str) else [each for each in stop or () if isinstance(each, str)]
    tokens = [] if isinstance(stop, str) else [each for each in stop or () if type(each) is int]
    if (
        stop is not None
        and not isinstance(stop, str)
        and (not isinstance(stop, list) or len(strings) + len(tokens) != len(stop))
    ):
        raise RequestError("stop in sampling_params must be a text, or a list of texts or of tokens.", status=422)
    if any(not text for text in strings):
        raise RequestError("a stop text is empty; leave it out.", status=422)
    temperature = params.number("temperature", 1.0, least=0.0)
    top_k = params.integer("top_k", -1, least=-1)
    return {
        "max_new_tokens": min(params.integer("max_tokens", room, least=1), room),
        "temperature": temperature,
        "top_p": params.number("top_p", 1.0, least=0.0),
        "top_k": -1 if top_k == 0 else top_k,
        "stop": strings,
        "stop_token_ids": tokens,
        "ignore_eos": stop is not None,
    }


def _read_targets(fields: Fields, length: int, vocab_size: int) -> list[list[int]] | None:
    """Return the tokens to score at each position of the prompt but the first; -1 is none."""
    if "target_prompt_logprobs" not in fields:
        return None
    tensor = fields.inner("target_prompt_logprobs")
    shape, data = tensor.raw("shape"), tensor.items("data")
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or shape[0] != length - 1
        or type(shape[1]) is not int
        or shape[1] < 1
    ):
        raise RequestError(
            f"target_prompt_logprobs must have {length - 1} rows, one per token but the first.", status=422
        )
    if "sparse_crow_indices" in tensor:
        starts, columns = tensor.items("sparse_crow_indices"), tensor.items("sparse_col_indices")
        rows = np.full(tuple(shape), -1, np.int64)
        try:
            for row in range(shape[0]):
                for index in range(starts[row], starts[row + 1]):
                    rows[row, columns[index]] = data[index]
        except (IndexError, TypeError) as error:
            raise RequestError("target_prompt_logprobs is not a valid sparse (CSR) tensor.", status=422) from error
    elif len(data) == shape[0] * shape[1]:
        rows = np.array(data, np.int64).reshape(shape)
    else:
        raise RequestError("target_prompt_logprobs has another number of values than its shape says.", status=422)
    if rows.size and not -1 <= int(rows.min()) <= int(rows.max()) < vocab_size:
        raise RequestError(f"target_prompt_logprobs has tokens outside the vocabulary of {vocab_size}.", status=422)
    return [[int(token) for token in row] for row in rows]
