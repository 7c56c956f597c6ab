"""One module per ``miles`` command (layer 4)."""
