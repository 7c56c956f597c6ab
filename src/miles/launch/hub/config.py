"""Options of the upload of a finished run to the Hugging Face hub."""

from dataclasses import dataclass

from miles.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig:
    """Where the last checkpoint of a run is uploaded when the run has finished."""

    push_to_hub: str | None = option(
        None,
        "Upload the last checkpoint, with a model card, to this model repository (ORG/NAME) at the end of the run.",
    )
    hub_private: bool = option(False, "Create the repository of --push-to-hub as a private one.")
    hub_revision: str | None = option(None, "Branch of that repository to upload to; main when not given.")
