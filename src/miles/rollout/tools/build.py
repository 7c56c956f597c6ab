"""Build the tools and environments of a run from its options, and check user hooks before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles.core.errors import HookError, UsageError
from miles.core.media_store import MediaStore
from miles.hooks.import_path import find_object, is_path
from miles.hooks.load import check_signature
from miles.hooks.offload import offload_function
from miles.hooks.worker import HookWorker
from miles.rollout.sandbox.protocol import SandboxLimits
from miles.rollout.sandbox.run import CodeSandbox
from miles.rollout.tools.config import ToolsConfig
from miles.rollout.tools.custom import ExecuteToolFn, tool_from_function, tools_from_specs
from miles.rollout.tools.env_registry import ENVIRONMENTS, EnvironmentFactory, EnvironmentMaker, offload_environment
from miles.rollout.tools.mcp import MCPServers, read_mcp_config
from miles.rollout.tools.search import BM25Index, read_documents
from miles.rollout.tools.tool import Tool, ToolLimits
from miles.rollout.tools.toolbox import MCP, ToolRegistry, ToolResources

_TOOLS, _ENVIRONMENT = "--generate-tools", "--generate-environment"
_SPECS, _EXECUTE = "--generate-tool-specs-path", "--generate-execute-tool-function-path"


def build_environments(
    config: ToolsConfig,
    *,
    sandbox: Callable[[], CodeSandbox] | None,
    code_limits: SandboxLimits,
    environ: Mapping[str, str],
    worker: HookWorker | None = None,
    media: MediaStore | None = None,
) -> EnvironmentFactory:
    """Build the environment factory. ``sandbox`` is called when a prompt first runs code; ``environ`` is for MCP.

    User-defined tools and environments run in the ``worker``'s thread. ``media`` has the images of a model that reads
    images.
    """
    custom, default = _load_custom_tools(config)
    if worker is not None:
        custom = {
            name: replace(tool, call=offload_function(worker, tool.call, f"The tool {name}"))
            for name, tool in custom.items()
        }
    servers = None
    if config.mcp_servers is not None:
        servers = MCPServers(read_mcp_config(config.mcp_servers), environ=environ, media=media)
    index = None if config.search_documents is None else BM25Index(read_documents(config.search_documents))
    resources = ToolResources(
        sandbox=sandbox, code_limits=code_limits, index=index, servers=servers, custom=custom, media=media
    )
    default_environment, makers = _load_custom_environment(config.generate_environment)
    if worker is not None:
        makers = {name: offload_environment(worker, maker) for name, maker in makers.items()}
    return EnvironmentFactory(
        ToolRegistry(resources, default), build_tool_limits(config), default=default_environment, custom=makers
    )


def build_tool_limits(config: ToolsConfig) -> ToolLimits:
    """Tool limits from the options."""
    return ToolLimits(
        call_seconds=config.tool_call_timeout,
        tool_seconds=config.tool_timeout,
        calls_per_turn=config.tool_calls_per_turn,
        result_chars=config.tool_result_chars,
    )


def _load_custom_tools(config: ToolsConfig) -> tuple[dict[str, Tool], list[str]]:
    """The user's tools by name, and the names of all default tools."""
    custom: dict[str, Tool] = {}
    default: list[str] = []
    for name in config.generate_tools:
        if not is_path(name) or name.startswith(MCP):
            default.append(name)
            continue
        tool = tool_from_function(find_object(name, flag=_TOOLS), f"{_TOOLS} {name}")
        custom[tool.name] = tool
        default.append(tool.name)
    for tool in _load_spec_tools(config):
        custom[tool.name] = tool
        default.append(tool.name)
    return custom, default


def _load_spec_tools(config: ToolsConfig) -> Sequence[Tool]:
    specs, execute = config.generate_tool_specs_path, config.generate_execute_tool_function_path
    if specs is None and execute is None:
        return ()
    if specs is None or execute is None:
        raise UsageError(f"{_SPECS} and {_EXECUTE} belong together, and one is missing; give both, or {_TOOLS}.")
    run, specs_list = find_object(execute, flag=_EXECUTE), find_object(specs, flag=_SPECS)
    check_signature(run, ExecuteToolFn, f"{_EXECUTE} {execute}")
    if not isinstance(specs_list, Sequence) or not all(isinstance(spec, Mapping) for spec in specs_list):
        raise HookError(
            f"{_SPECS} {specs} is a {type(specs_list).__name__}; it must be a list of specs in OpenAI's form."
        )
    return tools_from_specs(specs_list, run, f"{_SPECS} {specs}")


def _load_custom_environment(spec: str | None) -> tuple[str | Mapping[str, Any] | None, dict[str, EnvironmentMaker]]:
    """The environment of prompts that name none, and the user-defined ones by name."""
    if spec is None or spec in ENVIRONMENTS:
        return spec, {}
    settings: Mapping[str, Any] = {"name": spec}
    if spec.lstrip().startswith("{"):
        try:
            settings = json.loads(spec)
        except ValueError as error:
            raise UsageError(f"{_ENVIRONMENT} {spec} is not a JSON object ({error}).") from error
    name = settings.get("name")
    if not isinstance(name, str):
        raise UsageError(f'{_ENVIRONMENT} {spec} has no name; write it as in {{"name": "textarena"}}.')
    if name in ENVIRONMENTS:
        return settings, {}
    maker: EnvironmentMaker = find_object(name, flag=_ENVIRONMENT)
    if not callable(maker) or not {"open", "step", "close"} <= set(dir(maker)):
        raise HookError(f"{_ENVIRONMENT} {name} is not a class with open, step and close (see tools.environment).")
    return settings, {name: maker}
