"""Room: plug.upstream -- functions written for upstream's ``(args, sample)`` signatures, fitted to our doors.

    fit       what a function's parameters say it is, and what is put around it
    sample    the object such a function reads and writes; ``convert`` makes one of our nouns, and nouns of one
    engine    the requests such a function makes, answered by the run's own engine
    modules   the names such a function imports

Floor 1. Imports: core, stdlib, numpy. No token is made anew from text: what cannot be traced back to the engine is
refused.
"""
