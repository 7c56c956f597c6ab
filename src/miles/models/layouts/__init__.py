"""Layouts: how each kind of module lies in a Hugging Face checkpoint, one file a kind; names and shapes alone.

Floor 1, inside ``models``. May import the specs and ``pieces``; never torch. ``NAMES`` is what most families call
things; a family says where it differs.
"""
