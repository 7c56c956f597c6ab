"""Package: cluster/workers -- pool of worker processes, on this machine or on the nodes of a Ray cluster.

Layer 1. Imports: core, stdlib. Requests and responses are bytes; only the caller and the worker's handler know their
meaning.

``pool`` dispatches requests and retries those that were lost; ``local`` is a worker's process as its parent sees it,
and ``process`` the program that runs in it.
"""
