"""Room: core -- the nouns (types), the doors (protocols), what may go wrong (errors), what happened (events).

Floor 0. Imports: stdlib, numpy. Holds no policy and no knob.
"""
