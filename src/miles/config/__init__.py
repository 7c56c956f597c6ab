"""Package config: the mechanism of options (dataclass fields <-> flags <-> recipe files) and the origin of each value.

Layer 0. Imports the standard library, core.errors, and yaml when a YAML file is read. Declares no option itself: each
package keeps its own in its ``config.py``.
"""
