"""Knobs of conversations in several turns: the tools a policy has, the world it is in, and the limits of both."""

from dataclasses import dataclass

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsConfig:
    """What ``--custom-generate-function-path multi_turn`` offers a policy."""

    generate_tools: tuple[str, ...] = knob(
        (),
        "Tools of prompts that name none: calculator, python, shell, files, search, mcp:SERVER, or package.module:name "
        "of a tool of your own, which prompts may then name too.",
    )
    generate_tool_specs_path: str | None = knob(
        None, "Plug that is a list of tool specs in OpenAI's form, all run by the execute function."
    )
    generate_execute_tool_function_path: str | None = knob(
        None, "Plug that runs the tools of the specs: async def (name, params) -> str."
    )
    generate_environment: str | None = knob(
        None,
        "World of prompts that name none: gymnasium, textarena, reasoning_gym, verifiers, openenv or "
        "package.module:name of your own, or a JSON object with a name and settings.",
    )
    generate_max_turns: int = knob(16, "Most replies of one attempt.", unit="replies")
    generate_max_turn_len: int | None = knob(
        None, "Most tokens of one reply; as many as the attempt has left when absent.", unit="tokens"
    )
    generate_timeout: float = knob(1800.0, "Longest an attempt may take from first to last.", unit="seconds")
    tool_call_timeout: float = knob(30.0, "Longest one call of a tool may take.", unit="seconds")
    tool_timeout: float = knob(300.0, "Longest all calls of an attempt may take together.", unit="seconds")
    tool_calls_per_turn: int = knob(16, "Calls of one reply that are answered.", unit="calls")
    tool_result_chars: int = knob(8192, "Characters of a result that are shown.", unit="characters")
    search_documents: str | None = knob(
        None, "JSONL file of documents (text, title, id) that the tool search looks through.", path=True
    )
    mcp_servers: str | None = knob(
        None, "JSON file of MCP servers to start over stdio, as other programs have it (mcpServers).", path=True
    )
