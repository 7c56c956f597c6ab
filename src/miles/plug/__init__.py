"""Room: plug -- from a name in a config to a callable that fits its door.

    points    the table of every place for a user's code; a row is a ``point``
    load      an address, found and held against its door
    upstream  functions of upstream's signatures, fitted to our doors
    config    the knobs of those at the edges of the planes

Floor 1. Imports: core, config, stdlib. Imports a user's module only when asked to load it; knows no plane.
"""
