"""An agent of upstream's shape, for a launch line that names one."""

from typing import Any


async def run(base_url: str, prompt: Any, metadata: dict[str, Any], **options: Any) -> None:
    """Answers nothing: the line is planned, not run."""
