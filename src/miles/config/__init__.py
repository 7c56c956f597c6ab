"""Room: config -- the mechanism of knobs: dataclass fields <-> flags <-> files, and who set what.

Floor 0. Imports: stdlib, core.errors, and yaml when a YAML file is read. Knows no knob: each room
keeps its own in its ``config.py``.
"""
