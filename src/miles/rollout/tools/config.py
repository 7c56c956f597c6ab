"""Options of multi-turn rollouts: the policy's tools and environment, and their limits."""

from dataclasses import dataclass

from miles.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsConfig:
    """Tools, environments and limits of multi-turn generation (--custom-generate-function-path multi_turn)."""

    generate_tools: tuple[str, ...] = option(
        (),
        "Tools of prompts that name none: calculator, python, shell, files, search, crop, zoom, mcp:SERVER, or "
        "package.module:name "
        "of a user-defined tool, which prompts may then name too.",
    )
    generate_tool_specs_path: str | None = option(
        None, "Hook: a list of tool specs in OpenAI's format, all run by the execute function."
    )
    generate_execute_tool_function_path: str | None = option(
        None, "Hook that runs the tools of the specs: async def (name, params) -> str."
    )
    generate_environment: str | None = option(
        None,
        "Environment of prompts that name none: gymnasium, textarena, reasoning_gym, verifiers, openenv, swebench or "
        "package.module:name of your own, or a JSON object with a name and settings.",
    )
    generate_max_turns: int = option(16, "Maximum replies per trajectory.", unit="replies", ge=1)
    generate_max_turn_len: int | None = option(
        None, "Maximum tokens per reply; when absent, as many as the trajectory has left.", unit="tokens", ge=1
    )
    generate_timeout: float = option(1800.0, "Time limit of a trajectory.", unit="seconds", gt=0)
    tool_call_timeout: float = option(30.0, "Time limit of one tool call.", unit="seconds", gt=0)
    tool_timeout: float = option(300.0, "Time limit of all tool calls of a trajectory together.", unit="seconds", gt=0)
    tool_calls_per_turn: int = option(16, "Maximum tool calls that are answered per reply.", unit="calls", ge=1)
    tool_result_chars: int = option(8192, "Characters of a tool result that the policy sees.", unit="characters", ge=1)
    search_documents: str | None = option(
        None, "JSONL file of documents (text, title, id) for the tool search.", path=True
    )
    mcp_servers: str | None = option(
        None, "JSON file of MCP servers to start over stdio, in the usual format (mcpServers).", path=True
    )
