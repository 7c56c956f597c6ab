"""Model families: Hugging Face configs read into decoder specs and written back. No torch.

To add a family, write ``<family>.py`` with a ``read`` function and ``FAMILIES``, and list it in ``registry``.
"""

from miles.models.families.registry import config_from_spec, spec_from_config

__all__ = ["config_from_spec", "spec_from_config"]
