"""The library: ``miles.train`` runs a training from Python, ``miles.open`` gives the verbs of a loop of one's own.

Layer 5: imports launch and what is below, and is imported by nobody but the lazy exports of ``miles``. It reads options
with the reader of the command line, builds what ``miles train`` builds, and runs the same loop.
"""
