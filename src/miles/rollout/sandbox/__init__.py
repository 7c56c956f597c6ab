"""Sandbox for model-written programs: no network, private files only, resource limits (layer 2).

Imports: core, stdlib. Never: a shell, a network, the run's own files.

::

    run.py (this process)  --request-->  supervisor.py (small fresh interpreter)  --fork-->  child.py --exec--> program
          sends, waits     <--result---  isolates, monitors, kills all                    restricts itself

``isolation.py`` probes which mechanisms this machine has and refuses to run with fewer than the minimum. The modules of
the supervisor's side (``libc``, ``seccomp``, ``landlock``, ``namespaces``, ``child``, ``process_tree``, ``monitor``)
import only quick parts of the standard library, because the supervisor starts anew for every program.
"""
