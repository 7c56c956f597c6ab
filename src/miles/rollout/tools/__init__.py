"""Tools and environments a policy may use during a rollout (layer 2).

Imports: core, config, hooks, rollout.sandbox, stdlib, numpy; a connector imports its package only when used.
Never: a network of its own, a shell outside the sandbox, files outside a trajectory's workspace.

::

    tool.py          Tool (name, schema, async call) and Toolbox (one trajectory's tools under limits)
    environment.py   Environment (open, step, close): all that the loop in generate/multi_turn.py uses
    calculator, search, files, code, mcp    built-in tools; toolbox.py opens those a prompt asks for
    environments/    connectors: text games, reasoning_gym, verifiers, OpenEnv servers, SWE-bench tasks
"""
