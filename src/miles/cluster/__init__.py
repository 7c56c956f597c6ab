"""Room: cluster -- processes and devices: how work is run (local, in this process), what it is run on (platform),
and how requests find one of several engines (route, without torch).

Floor 1. Imports: core, config, torch. Never: a plane, a backend, a knob of another room.
"""
