"""User hooks: from a dotted path in the options to a callable that matches its protocol (layer 1).

    registry  every hook point: flag, protocol, default
    load      loads an object by path and checks its signature against the protocol
    compat    adapts functions with upstream signatures
    config    the options of hooks at the boundaries of rollout, training and scheduling

Imports: core, config, stdlib. A user's module is imported only when it is loaded.
"""
