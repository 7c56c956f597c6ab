"""Knobs of agents: the function that is one, and the sessions it speaks to the policy in."""

from dataclasses import dataclass

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """How an agent of the user's own meets the policy."""

    custom_agent_function_path: str | None = knob(
        None,
        "Plug that answers a prompt by asking the policy over HTTP at the address it is given.",
    )
    session_message_matcher_path: str = knob(
        "loose_tool_call",
        "When a message sent again is the one remembered: strict, loose_tool_call, role_content_only, or a plug.",
    )
    session_sample_picker_path: str | None = knob(
        None, "Plug that says which conversations of a session are trained on; all of them when absent."
    )
    session_audit: bool = knob(
        True,
        "Hold the tokens of answers in several turns against what the chat template writes, and count differences.",
        off="--disable-session-audit",
    )
    session_server_port: int = knob(
        0, "Port of the agents' session server on this machine; 0 takes a free one.", unit="port"
    )
    agent_timeout: float = knob(3600.0, "Longest an agent may take over one attempt.", unit="seconds")
    agent_max_turns: int | None = knob(None, "Most replies an agent is given in one attempt.", unit="replies")
