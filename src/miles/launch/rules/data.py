"""Rules of prompts, held-out sets, rewards and multi-turn generation."""

from collections.abc import Iterator
from pathlib import Path

from miles.algo.config import DISTILLATION_ESTIMATOR, OFFLINE_LOSSES, PREFERENCE_LOSSES
from miles.core.errors import UsageError
from miles.hooks.registry import GENERATE, ROLLOUT
from miles.launch.config import Config
from miles.launch.rules.flags import Rule, list_set_flags
from miles.launch.rules.paths import (
    check_first_rows,
    check_prompt_data,
    check_url,
    collect_problems,
    count_prompts,
    read_key_file,
    read_spec_or_none,
)
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.media_config import has_image_processor
from miles.rollout.data.paths import parse_entries, parse_named_paths
from miles.rollout.data.schema import Columns, PreferenceColumns
from miles.rollout.data.task_suites import is_suite
from miles.rollout.eval_options import list_set_options
from miles.rollout.reward.registry import BOXED, RewardTerm, check_rm_type, parse_rm_type
from miles.rollout.serving.http import is_loopback

# -- prompts and held-out sets ----------------------------------------------------------------


def check_prompts(c: Config) -> Iterator[str]:
    if c.observe.load_debug_rollout_data is not None:
        return
    if not c.rollout.prompt_data and c.hooks.data_source_path is None:
        yield "--prompt-data is missing: name a .jsonl, .parquet or .arrow file of prompts, or a folder of them."
    problems = [problem for word in c.rollout.prompt_data for problem in check_prompt_data("--prompt-data", word)]
    yield from problems or collect_problems(parse_entries, c.rollout.prompt_data)


def check_prompts_fill_a_step(c: Config) -> Iterator[str]:
    if c.schedule.num_epoch is None or not c.rollout.prompt_data:
        return
    prompts, size = count_prompts(c.rollout.prompt_data), c.rollout.rollout_batch_size
    if prompts and prompts * c.schedule.num_epoch < size:
        files = " and ".join(c.rollout.prompt_data)
        yield (
            f"The {prompts} prompts of {files} in --num-epoch {c.schedule.num_epoch} epochs do not fill one step of "
            f"--rollout-batch-size {size}; lower the batch size, or raise the epochs."
        )


def check_columns(c: Config) -> Iterator[str]:
    r = c.rollout
    if c.observe.load_debug_rollout_data is None:
        pair = PreferenceColumns(chosen=r.chosen_key, rejected=r.rejected_key)
        columns = Columns(
            input=r.input_key, label=r.label_key, pair=pair if c.algo.loss_type in PREFERENCE_LOSSES else None
        )
        for word in r.prompt_data:
            yield from check_first_rows(word, columns, skip_bad_rows=r.skip_bad_rows)


def check_multimodal_keys(c: Config) -> Iterator[str]:
    r = c.rollout
    if not r.multimodal_keys:
        return
    for kind, column in r.multimodal_keys.items():
        if kind not in ("image", "video"):
            yield f"--multimodal-keys has {kind}, which asks for other media than images and videos; remove it."
        elif not isinstance(column, str) or not column:
            yield f'--multimodal-keys names {column!r} for {kind}s; name a column, as in {{"image": "images"}}.'
    if not r.apply_chat_template:
        yield "--multimodal-keys needs --apply-chat-template, which places images in a prompt; add it."
    if (folder := c.models.hf_checkpoint) is None or not Path(folder).is_dir():
        return
    if not has_image_processor(folder):
        yield (
            f"--multimodal-keys needs a checkpoint that reads images, and {folder} has no image processor "
            "(preprocessor_config.json); remove it, or name another checkpoint."
        )
    elif (spec := read_spec_or_none(folder, c.models.model_impl)) is not None and spec.vision is None:
        if isinstance(spec, HfAdapterSpec):
            yield (
                f"--multimodal-keys cannot be used with --model-impl transformers and {spec.architecture}, which takes "
                "no images, or gives them positions in several axes (M-RoPE); remove one of them."
            )
            return
        yield (
            f"--multimodal-keys needs a model whose vision tower is supported, and of {spec.family} models the text "
            "part alone is (docs/models.md); remove it, or name another checkpoint."
        )


def check_held_out_columns(c: Config) -> Iterator[str]:
    r = c.rollout
    for name, path in zip(r.eval_prompt_data[::2], r.eval_prompt_data[1::2], strict=False):
        own = list_set_options(r, name)
        columns = Columns(
            input=own.get("eval_input_key") or r.eval_input_key or r.input_key,
            label=own.get("eval_label_key") or r.eval_label_key or r.label_key,
        )
        yield from check_first_rows(path, columns, skip_bad_rows=r.skip_bad_rows)


def check_eval_options(c: Config) -> Iterator[str]:
    r = c.rollout
    for name, given in r.eval_options.items():
        if name not in r.eval_prompt_data[::2]:
            yield f"--eval-options has {name}, which is no held-out set of --eval-prompt-data; add it, or remove it."
        if "rm_type" in given:
            yield from (f"Held-out set {name}: {text}" for text in collect_problems(check_rm_type, given["rm_type"]))
        if "rm_type" in given and "custom_rm_path" in given:
            yield f"Held-out set {name} has both rm_type and custom_rm_path; keep one."


def check_tool_key(c: Config) -> Iterator[str]:
    r = c.rollout
    for flag in list_set_flags(c, "--tool-key", "--eval-tool-key"):
        if not r.apply_chat_template:
            yield f"{flag} lists tools in the chat template; add --apply-chat-template, or remove {flag}."
        elif c.algo.loss_type in OFFLINE_LOSSES and flag == "--tool-key":
            yield f"--loss-type {c.algo.loss_type} trains on replies of the data, so {flag} has no effect; remove it."


def check_eval_context(c: Config) -> Iterator[str]:
    generates = (c.rollout.custom_generate_function_path, c.agents.custom_agent_function_path)
    if c.rollout.eval_max_context_len is not None and any(path is not None for path in generates):
        yield (
            "--eval-max-context-len limits single-turn responses; remove it, or use --rollout-max-context-len, which "
            "limits every conversation."
        )


def check_label_key(c: Config) -> Iterator[str]:
    names = [name for name in _list_reward_names(c) if RewardTerm(name, 1.0).grader.needs_label]
    if not names:
        return
    scores_training = c.algo.loss_type not in OFFLINE_LOSSES and c.observe.load_debug_rollout_data is None
    training = [word for word in c.rollout.prompt_data if not is_suite(word)]
    if training and scores_training and c.rollout.label_key is None:
        yield f"--rm-type {names[0]} compares with a reference answer; name its column with --label-key."
    elif any(not is_suite(path) for path in c.rollout.eval_prompt_data[1::2]) and not (
        c.rollout.eval_label_key or c.rollout.label_key
    ):
        yield (
            f"--rm-type {names[0]} compares with a reference answer; name its column in the held-out sets with "
            "--eval-label-key or --label-key."
        )


def check_prompt_template(c: Config) -> Iterator[str]:
    r, loss = c.rollout, c.algo.loss_type
    if r.system_prompt is not None and not r.apply_chat_template:
        yield "--system-prompt is a message of a chat; add --apply-chat-template, or use --prompt-template."
    if r.prompt_template is not None and "{prompt}" not in r.prompt_template:
        yield "--prompt-template has no {prompt}, the place of the question; put it in."
    for flag in list_set_flags(c, "--system-prompt", "--prompt-template") if loss in PREFERENCE_LOSSES else ():
        yield f"--loss-type {loss} trains on conversations as they are, so {flag} has no effect; remove it."


def check_held_out_sets(c: Config) -> Iterator[str]:
    problems = list(collect_problems(parse_named_paths, c.rollout.eval_prompt_data))
    yield from problems
    for name, path in {} if problems else parse_named_paths(c.rollout.eval_prompt_data).items():
        yield from check_prompt_data(f"--eval-prompt-data {name}", path)


def check_eval_has_held_out_sets(c: Config) -> Iterator[str]:
    if not c.rollout.eval_prompt_data:
        yield "--eval-prompt-data is missing: give a name and a file for each held-out set."


def check_curriculum_order(c: Config) -> Iterator[str]:
    if c.rollout.curriculum_path is not None and c.schedule.reorder_window > 1:
        yield (
            f"--curriculum-path chooses prompts by the results of earlier ones, but --reorder-window "
            f"{c.schedule.reorder_window} trains groups out of order; remove one of them."
        )


def check_context_fits_prompt(c: Config) -> Iterator[str]:
    context, prompt = c.rollout.rollout_max_context_len, c.rollout.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt >= context:
        yield (
            f"--rollout-max-prompt-len {prompt} leaves no tokens for a response within --rollout-max-context-len "
            f"{context}; lower it."
        )


def check_max_positions(c: Config) -> Iterator[str]:
    spec, r = read_spec_or_none(c.models.hf_checkpoint, c.models.model_impl), c.rollout
    flag, length = "--rollout-max-context-len", r.rollout_max_context_len
    if length is None:
        flag, length = "--rollout-max-prompt-len", r.rollout_max_prompt_len
    if spec is not None and length is not None and length > spec.max_positions:
        yield f"{flag} {length} exceeds the {spec.max_positions} positions of --hf-checkpoint; lower it."


# -- rewards --------------------------------------------------------------------------------


def check_reward_is_named(c: Config) -> Iterator[str]:
    r = c.rollout
    learns = c.algo.loss_type not in OFFLINE_LOSSES and c.algo.advantage_estimator != DISTILLATION_ESTIMATOR
    samples = (learns and c.observe.load_debug_rollout_data is None) or r.eval_prompt_data
    if samples and r.rm_type is None and r.custom_rm_path is None and not _may_score_itself(c):
        yield "--rm-type is missing: name a built-in reward, or your own with --custom-rm-path."


def _may_score_itself(c: Config) -> bool:
    """Whether what generates responses may also return rewards; unscored trajectories fail during the run."""
    generate = GENERATE.resolve_name(c.rollout.custom_generate_function_path)
    custom = generate is not None and generate not in GENERATE.runtime_names
    rollout = c.hooks.rollout_function_path
    functions = (
        c.tools.generate_environment,
        c.agents.custom_agent_function_path,
        c.multi_agent.custom_cast_function_path,
    )
    makes_groups = rollout is not None and not ROLLOUT.is_builtin(rollout)
    return custom or makes_groups or any(function is not None for function in functions)


def check_reward_type(c: Config) -> Iterator[str]:
    if c.rollout.rm_type is not None:
        yield from collect_problems(check_rm_type, c.rollout.rm_type)


def check_reward_servers(c: Config) -> Iterator[str]:
    r = c.rollout
    needs = {
        "remote_rm": (("--rm-url", r.rm_url),),
        "reward_model": (("--reward-model-url", r.reward_model_url),),
        "llm_judge": (("--judge-url", r.judge_url), ("--judge-model", r.judge_model)),
    }
    for name in _list_reward_names(c):
        for flag, value in needs.get(name.removeprefix(BOXED), ()):
            if value is None:
                yield f"--rm-type {name} calls a server, but {flag} is missing; add it."
    urls = {"--rm-url": r.rm_url, "--reward-model-url": r.reward_model_url, "--judge-url": r.judge_url}
    for flag, url in urls.items():
        if url is not None:
            yield from check_url(flag, url, flag.removesuffix("-url") + "-token-env")


def _list_reward_names(c: Config) -> list[str]:
    try:
        return [part.name for part in parse_rm_type(c.rollout.rm_type)] if c.rollout.rm_type is not None else []
    except UsageError:  # check_reward_type reports it
        return []


def check_reward_timeouts(c: Config) -> Iterator[str]:
    r, stall = c.rollout, c.schedule.stall_timeout
    if r.reward_timeout >= stall:
        yield (
            f"--reward-timeout {r.reward_timeout:g} is not below --stall-timeout {stall:g}, so one reward that hangs "
            "would stop the run; lower it."
        )
    if r.rm_type is not None and r.grade_timeout >= r.reward_timeout:
        yield f"--grade-timeout {r.grade_timeout:g} is not below --reward-timeout {r.reward_timeout:g}; lower it."


# -- multi-turn generation ------------------------------------------------------------------


def check_one_generate_function(c: Config) -> Iterator[str]:
    agent, path = c.agents.custom_agent_function_path, c.rollout.custom_generate_function_path
    uses_agent = GENERATE.resolve_name(path) == "agent"
    if agent and path and not uses_agent:
        yield (
            f"--custom-agent-function-path {agent} and --custom-generate-function-path {path} both generate responses; "
            "keep one."
        )
    if uses_agent and not agent:
        yield f"{GENERATE.flag} {path} runs an agent; name it with --custom-agent-function-path."


def check_session_server(c: Config) -> Iterator[str]:
    a = c.agents
    if a.session_server_api_key_file is not None:
        try:
            read_key_file("--session-server-api-key-file", a.session_server_api_key_file)
        except UsageError as error:
            yield str(error)
    elif c.multi_agent.custom_cast_function_path and not is_loopback(a.session_server_host):
        yield (
            f"--session-server-ip {a.session_server_host} is reachable from other machines, and a multi-agent function "
            "is given no key: give --session-server-api-key-file."
        )
    if a.session_server_ssl_keyfile and not a.session_server_ssl_certfile:
        yield "--session-server-ssl-keyfile needs --session-server-ssl-certfile; add it."
    for flag, file in (
        ("--session-server-ssl-certfile", a.session_server_ssl_certfile),
        ("--session-server-ssl-keyfile", a.session_server_ssl_keyfile),
    ):
        if file is not None and not Path(file).is_file():
            yield f"{flag} {file} does not exist; give a PEM file."
    if "/" in (a.session_server_advertise_host or ""):
        yield f"--session-server-advertise-host {a.session_server_advertise_host} is not a host; leave out the scheme."


def check_multi_turn_is_chat(c: Config) -> Iterator[str]:
    several = GENERATE.resolve_name(c.rollout.custom_generate_function_path) == "multi_turn"
    if not several and not c.agents.custom_agent_function_path:
        return
    if not c.rollout.apply_chat_template:
        yield "Multi-turn generation needs a chat template; add --apply-chat-template."
    if c.algo.loss_type in OFFLINE_LOSSES and not c.rollout.eval_prompt_data:  # evaluation generates too
        yield f"--loss-type {c.algo.loss_type} generates nothing, so multi-turn generation has no effect; remove it."


def check_multi_agent(c: Config) -> Iterator[str]:
    path = c.multi_agent.custom_cast_function_path
    if path is None:
        return
    for flag, other in {
        "--custom-agent-function-path": c.agents.custom_agent_function_path,
        "--custom-generate-function-path": c.rollout.custom_generate_function_path,
    }.items():
        if other:
            yield f"--custom-cast-function-path {path} and {flag} both generate responses; keep one."
    if not c.rollout.apply_chat_template:
        yield "Multi-agent generation needs a chat template; add --apply-chat-template."


GENERATION_RULES: tuple[Rule, ...] = (
    check_reward_is_named,
    check_reward_type,
    check_reward_servers,
    check_reward_timeouts,
    check_context_fits_prompt,
    check_held_out_sets,
    check_held_out_columns,
    check_eval_options,
    check_tool_key,
    check_eval_context,
    check_label_key,
    check_prompt_template,
)
DATA_RULES: tuple[Rule, ...] = (
    check_prompts,
    check_columns,
    check_multimodal_keys,
    check_prompts_fill_a_step,
    check_curriculum_order,
    check_one_generate_function,
    check_session_server,
    check_multi_turn_is_chat,
    check_multi_agent,
)
