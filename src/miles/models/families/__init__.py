"""Families: Hugging Face configs read into specs and written back; a file a family, a row in ``table``.

No torch. To add one: write ``<family>.py`` with ``read`` and ``write``, and put it in the table.
"""

from miles.models.families.table import config_of, spec_of

__all__ = ["config_of", "spec_of"]
