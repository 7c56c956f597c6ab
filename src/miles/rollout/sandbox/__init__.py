"""Room: rollout.sandbox -- runs programs a model wrote, without network, with files of their own only, within limits.

Floor 2. Imports: core, stdlib. Never: a shell, a network, the run's own files.

::

    run.py (this process)  --order-->  supervisor.py (a small fresh interpreter)  --fork-->  child.py --exec--> program
          asks, waits       <-answer--   builds the walls, watches, kills all         locks itself in, becomes it

``layers.py`` finds out which walls this machine has and refuses to do with fewer than the minimum.
What is on the supervisor's side (``kernel``, ``filter``, ``landlock``, ``jail``, ``child``, ``tree``, ``watch``)
imports only the standard library's quick parts, because it starts anew for every program.
"""
