"""Room: rollout.tools -- what a model may use while it answers: tools, and worlds that answer back.

Floor 2. Imports: core, config, plug, rollout.sandbox, stdlib, numpy; a connector imports its package only when chosen.
Never: a network of its own, a shell outside the sandbox, files outside an attempt's folder.

::

    tool.py          Tool (a name, a schema, an async call) and Toolbox (one attempt's tools under limits)
    environment.py   Environment (open, step, close): all that the loop in generate/multi_turn.py talks to
    calculator, search, files, programs, mcp    tools in the box; box.py opens those a prompt asks for
    environments/    connectors: text games, reasoning_gym, verifiers, OpenEnv servers
"""
