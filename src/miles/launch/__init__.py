"""Room: launch -- the front door. The only room that sees the whole config and names implementations.

Top floor. Imports: every room. Reads the command line, applies the rules between rooms, says what
follows from them (the plan), builds the objects and starts the loop. ``main``, ``config``, ``rules``,
``plan`` and what they import load neither torch nor numpy; the rest is imported when a command needs it.
"""
