"""Backends: engines and trainers behind the protocols of ``core``, one package for each system.

Layer 3: imports every lower layer, never another backend. Only ``launch`` names them, and imports only the chosen ones.
"""
