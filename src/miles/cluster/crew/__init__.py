"""Room: cluster/crew -- workers that answer questions: processes of this machine, or of the nodes of a cluster.

Floor 1. Imports: core, stdlib. Questions and answers are bytes; what they mean is known to whoever asks, and to the
function that a worker was told to make.

``asked`` deals questions out and asks again what was lost; ``near`` is a worker's process as its parent sees it, and
``child`` that process itself.
"""
