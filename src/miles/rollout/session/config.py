"""Options of agents and of the session server they talk to."""

from dataclasses import dataclass

from miles.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Your agent function, and the session server through which it reaches the policy."""

    custom_agent_function_path: str | None = option(
        None,
        "Hook: an agent function that answers a prompt by calling the policy over HTTP at the URL it is given.",
    )
    session_message_matcher_path: str = option(
        "loose_tool_call",
        "When a message sent again equals the stored one: strict, loose_tool_call, role_content_only, or a hook.",
    )
    session_sample_picker_path: str | None = option(
        None, "Hook: picks the conversations of a session that are trained on; all of them by default."
    )
    session_sample_postprocessor_path: str | None = option(
        None, "Hook: returns the trajectory of an agent to train on, with fewer trained tokens or another reward."
    )
    session_audit: bool = option(
        True,
        "Compare the tokens of multi-turn sessions with what the chat template renders, and count mismatches.",
        off="--disable-session-audit",
    )
    session_server_host: str = option(
        "127.0.0.1",
        "Address the agents' session server listens on; 0.0.0.0 is all of this machine's.",
        aliases=("--session-server-ip",),
    )
    session_server_port: int = option(
        0, "Port of the agents' session server on this machine; 0 picks a free one.", unit="port", ge=0, le=65535
    )
    session_server_api_key_file: str | None = option(
        None,
        "File with the API key that agents must send to the session server; without it, a key is made for the run if "
        "other machines can reach the server.",
        path=True,
    )
    session_server_advertise_host: str | None = option(
        None,
        "Host in the URLs that agents get, where they reach this machine by another name or address than the session "
        "server listens on.",
    )
    session_server_ssl_certfile: str | None = option(
        None, "PEM file with the TLS certificate of the session server, and its chain; URLs are then https.", path=True
    )
    session_server_ssl_keyfile: str | None = option(
        None, "PEM file with the key of that certificate, where the certificate's file does not have it.", path=True
    )
    agent_timeout: float = option(3600.0, "Time limit of an agent for one trajectory.", unit="seconds", gt=0)
    agent_max_turns: int | None = option(None, "Maximum replies an agent gets in one trajectory.", unit="replies", ge=1)
