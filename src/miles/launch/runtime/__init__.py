"""Run-time services of a command: run directory, supervisor, watchdog, garbage collection (layer 4)."""
