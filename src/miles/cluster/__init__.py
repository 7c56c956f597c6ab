"""Room: cluster -- processes and devices: how work is run (local, in this process) and what it is run on (platform).

Floor 1. Imports: core, config, torch. Never: a plane, a backend, a knob of another room.
"""
