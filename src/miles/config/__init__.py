"""Room: config -- the mechanism of knobs: dataclass fields <-> flags <-> files, and who set what.

Floor 0. Imports: stdlib, yaml. Knows no knob: each room keeps its own in its ``config.py``.
"""
