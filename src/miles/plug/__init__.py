"""Room: plug -- from a name in a config to a callable that fits its door.

Floor 1. Imports: core, stdlib. Imports a user's module only when asked to load it; knows no plane.
"""
