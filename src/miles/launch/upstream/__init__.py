"""Flags of upstream's launch lines: what each means here, and whether what it restates agrees."""
