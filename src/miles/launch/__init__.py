"""Launch: the command line, and the only package that reads the whole config and names implementations.

Layer 4: imports every layer. It reads the command line, applies the rules between options, derives the plan, builds
the objects and starts the loop. ``main``, ``config``, ``rules``, ``plan`` and what they import load neither torch nor
numpy; the rest is imported when a command needs it.
"""
