"""From the knobs to the tools and worlds of a run; what a user's plugs lack is said here, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles.core.errors import PlugError, UsageError
from miles.plug.load import check_fit, find, is_path
from miles.rollout.sandbox.limits import Limits
from miles.rollout.sandbox.run import Sandbox
from miles.rollout.tools.box import MCP, Box, Means
from miles.rollout.tools.config import ToolsConfig
from miles.rollout.tools.mcp import Servers, read_servers
from miles.rollout.tools.own import Execute, tool_of, tools_of
from miles.rollout.tools.search import Index, read_documents
from miles.rollout.tools.tool import Tool, ToolLimits
from miles.rollout.tools.worlds import ENVIRONMENTS, Make, Worlds

_TOOLS, _WORLD = "--generate-tools", "--generate-environment"
_SPECS, _EXECUTE = "--generate-tool-specs-path", "--generate-execute-tool-function-path"


def worlds_of(
    config: ToolsConfig,
    *,
    sandbox: Callable[[], Sandbox] | None,
    programs: Limits,
    environ: Mapping[str, str],
) -> Worlds:
    """What the knobs say. ``sandbox`` is asked for when a prompt first runs a program; ``environ`` is for servers."""
    own, default = _own_tools(config)
    servers = None if config.mcp_servers is None else Servers(read_servers(config.mcp_servers), environ=environ)
    index = None if config.search_documents is None else Index(read_documents(config.search_documents))
    means = Means(sandbox=sandbox, programs=programs, index=index, servers=servers, own=own)
    world, made = _own_world(config.generate_environment)
    return Worlds(Box(means, default), tool_limits(config), default=world, own=made)


def tool_limits(config: ToolsConfig) -> ToolLimits:
    """The limits the knobs set."""
    return ToolLimits(
        call_seconds=config.tool_call_timeout,
        tool_seconds=config.tool_timeout,
        calls_per_turn=config.tool_calls_per_turn,
        result_chars=config.tool_result_chars,
    )


def _own_tools(config: ToolsConfig) -> tuple[dict[str, Tool], list[str]]:
    """The user's tools by name, and the names of all that prompts have which name none."""
    own: dict[str, Tool] = {}
    default: list[str] = []
    for name in config.generate_tools:
        if not is_path(name) or name.startswith(MCP):
            default.append(name)
            continue
        tool = tool_of(find(name, flag=_TOOLS), f"{_TOOLS} {name}")
        own[tool.name] = tool
        default.append(tool.name)
    for tool in _specified(config):
        own[tool.name] = tool
        default.append(tool.name)
    return own, default


def _specified(config: ToolsConfig) -> Sequence[Tool]:
    specs, execute = config.generate_tool_specs_path, config.generate_execute_tool_function_path
    if specs is None and execute is None:
        return ()
    if specs is None or execute is None:
        raise UsageError(f"{_SPECS} and {_EXECUTE} belong together, and one is missing; give both, or {_TOOLS}.")
    run, listed = find(execute, flag=_EXECUTE), find(specs, flag=_SPECS)
    check_fit(run, Execute, f"{_EXECUTE} {execute}")
    if not isinstance(listed, Sequence) or not all(isinstance(spec, Mapping) for spec in listed):
        raise PlugError(f"{_SPECS} {specs} is a {type(listed).__name__}; it must be a list of specs in OpenAI's form.")
    return tools_of(listed, run, f"{_SPECS} {specs}")


def _own_world(asked: str | None) -> tuple[str | Mapping[str, Any] | None, dict[str, Make]]:
    """The world of prompts that name none, and the user's own by name."""
    if asked is None or asked in ENVIRONMENTS:
        return asked, {}
    settings: Mapping[str, Any] = {"name": asked}
    if asked.lstrip().startswith("{"):
        try:
            settings = json.loads(asked)
        except ValueError as error:
            raise UsageError(f"{_WORLD} {asked} is not a JSON object ({error}); mend it.") from error
    name = settings.get("name")
    if not isinstance(name, str):
        raise UsageError(f'{_WORLD} {asked} has no name; write it as in {{"name": "textarena"}}.')
    if name in ENVIRONMENTS:
        return settings, {}
    made: Make = find(name, flag=_WORLD)
    if not callable(made) or not {"open", "step", "close"} <= set(dir(made)):
        raise PlugError(f"{_WORLD} {name} is not a class with open, step and close, as tools.environment has it.")
    return settings, {name: made}
