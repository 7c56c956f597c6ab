"""User hooks: load the functions named by flags, and what functions with upstream signatures may read of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from miles.algo.advantages import build_samples
from miles.algo.config import uses_distillation
from miles.algo.distillation_loss import TeacherAssignedEstimator
from miles.algo.registry import AlgoHooks, build_advantage_estimator
from miles.config.cli import split_argv
from miles.config.provenance import flatten_values
from miles.config.schema import get_options
from miles.core.protocols import AdvantageEstimator
from miles.core.types import Prompt
from miles.hooks import registry
from miles.hooks.compat.engine import ROUTER_HOST
from miles.hooks.compat.types import NO_SERVICES, EvalDatasetConfig, UpstreamArgs, UpstreamContext, UpstreamServices
from miles.hooks.registry import HookPoint
from miles.launch.config import Config
from miles.launch.plan.drafts import choose_speculation
from miles.launch.plan.plan import parse_teacher_folders
from miles.models.tokenizer import HfTokenizer, load_tokenizer
from miles.rollout.data.schema import TOOLS
from miles.rollout.eval_options import lists_tools
from miles.rollout.prompt_renderer import PromptRenderer
from miles.rollout.span_extras import fill_span_extras
from miles.train.hooks import TrainHooks

_ONLY_UPSTREAM: Mapping[str, Any] = MappingProxyType(
    {
        "sglang_router_ip": ROUTER_HOST,
        "sglang_router_port": 80,
        "sglang_router_policy": None,
        "sglang_model_routers": None,
        "sglang_server_concurrency": 512,
        "sglang_dp_size": 1,
        "sglang_enable_deterministic_inference": False,
        "use_miles_router": False,
        "rollout_global_dataset": True,
        "rollout_skip_special_tokens": False,
        "chat_template_path": None,
        "eval_max_context_len": None,
        "tool_key": None,
        "dump_details": None,
        "ci_test": False,
    }
)
"""Arguments that upstream's functions read and no flag of ours sets, with what holds in every run."""
_DEFAULTS: Mapping[str, Any] = MappingProxyType({"tis_clip": 2.0, "tis_clip_low": 0.0, "use_rollout_logprobs": False})
"""Upstream's defaults of flags that have no fixed one here."""


def load_hook(
    config: Config, point: HookPoint, *, upstream: bool = True, services: UpstreamServices = NO_SERVICES
) -> Any:
    """The user's function for a hook point, checked against its protocol; None where no flag names one.

    ``upstream`` also accepts functions with the upstream signature, which may use ``services``. What it raises later
    names it.
    """
    path: str | None = getattr(getattr(config, get_options(Config)[point.option].section), point.option)
    if path is None:
        return None
    return point.load_guarded(path, build_upstream_context(config, services) if upstream else None)


def names_user_function(config: Config, point: HookPoint) -> bool:
    """Whether a hook point has a function of the user's, and not a built-in."""
    path: str | None = getattr(getattr(config, get_options(Config)[point.option].section), point.option)
    return path is not None and not point.is_builtin(path)


def load_trainer_hooks(config: Config) -> TrainHooks:
    """The hooks that the trainer calls, on every rank."""
    return TrainHooks(
        init=load_hook(config, registry.TRAINER_INIT),
        before_log_probs=load_hook(config, registry.BEFORE_LOG_PROBS),
        before_train_step=load_hook(config, registry.BEFORE_TRAIN_STEP),
    )


def load_algo_hooks(config: Config) -> AlgoHooks:
    """The user's loss, loss reducer and correction."""
    return AlgoHooks(
        loss_fn=load_hook(config, registry.OBJECTIVE),
        reducer=load_hook(config, registry.REDUCER),
        correction=load_hook(config, registry.CORRECTION),
    )


def build_policy_advantages(config: Config) -> AdvantageEstimator:
    """The advantage estimator of one policy: scored groups in, training samples out."""
    a = config.algo
    estimator = build_advantage_estimator(
        a,
        response_limit=config.rollout.rollout_max_response_len,
        advantage_fn=load_hook(config, registry.REWARD_POST_PROCESS),
        estimator=load_hook(config, registry.CONVERT_SAMPLES),
    )
    if uses_distillation(a) and config.train.opd_teachers:
        names = tuple(parse_teacher_folders(config))
        return TeacherAssignedEstimator(estimator=estimator, names=names, key=a.opd_teacher_key)
    return estimator


def build_upstream_context(config: Config, services: UpstreamServices = NO_SERVICES) -> UpstreamContext:
    """What functions with upstream signatures may read: flags, tokenizer (loaded on first use) and prompts."""
    r, m = config.rollout, config.models

    @cache
    def tokenizer() -> HfTokenizer:
        assert m.hf_checkpoint is not None
        return load_tokenizer(m.hf_checkpoint, m.trust_remote_code)

    @cache
    def renderer() -> PromptRenderer:
        template = r.apply_chat_template_kwargs
        return PromptRenderer(tokenizer(), chat=r.apply_chat_template, template=template, tools=lists_tools(r))

    def show_prompt(prompt: Prompt) -> str | Sequence[Mapping[str, Any]]:
        if r.apply_chat_template:
            tools = {TOOLS: prompt.metadata[TOOLS]} if lists_tools(r) and TOOLS in prompt.metadata else {}
            template = {**r.apply_chat_template_kwargs, **tools}
            return tokenizer().render_chat_text(prompt.messages, add_generation_prompt=True, **template)
        single = prompt.messages[0]["content"] if len(prompt.messages) == 1 else None
        return single if isinstance(single, str) else [dict(message) for message in prompt.messages]

    return UpstreamContext(
        args=_build_args(config),
        tokenizer=lambda: tokenizer().inner,
        render=lambda prompt: renderer()(prompt),
        prompt_text=show_prompt,
        fill_extras=fill_span_extras,
        build_samples=build_samples,
        services=services,
    )


def _build_args(config: Config) -> UpstreamArgs:
    """The run's flags with the values that upstream's functions expect of those that are not set."""
    speculative = {"sglang_speculative_algorithm": _get_speculative_algorithm(config)}
    values = {**_ONLY_UPSTREAM, **speculative, **flatten_values(config), **config.hooks.hook_arguments}
    values |= {name: default for name, default in _DEFAULTS.items() if values.get(name) is None}
    if values["eps_clip_high"] is None:
        values["eps_clip_high"] = values["eps_clip"]
    pairs = values["eval_prompt_data"] or ()
    sets = zip(pairs[::2], pairs[1::2], strict=False)
    values["eval_datasets"] = [EvalDatasetConfig(name=name, path=path) for name, path in sets]
    return UpstreamArgs(**values)


def _get_speculative_algorithm(config: Config) -> str | None:
    """SGLang's name of the engines' speculative decoding; None where they decode without."""
    if config.sglang.rollout_backend == "sglang":
        flags = {args.flag: args.words for args in split_argv(config.sglang.sglang_flags)[1]}
        return next(iter(flags.get("--speculative-algorithm", ())), None)
    name = choose_speculation(config).algorithm
    return None if name == "none" else name.upper()
