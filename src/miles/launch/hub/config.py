"""Options of copies of a run elsewhere: an upload to the Hugging Face hub, a mirror in an object store."""

from dataclasses import dataclass

from miles.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig:
    """Where checkpoints of a run go besides its directory."""

    push_to_hub: str | None = option(
        None,
        "Upload the last checkpoint, with a model card, to this model repository (ORG/NAME) at the end of the run.",
    )
    hub_private: bool = option(False, "Create the repository of --push-to-hub as a private one.")
    save_remote: str | None = option(
        None,
        "Copy every checkpoint and the logs to this URL of an object store, such as s3://bucket/run, and continue from "
        "there where the run directory is gone.",
    )
    hub_revision: str | None = option(None, "Branch of that repository to upload to; main when not given.")
