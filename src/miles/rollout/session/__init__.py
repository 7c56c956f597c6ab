"""Room: rollout/session -- an agent's conversations, kept as the tokens that were sampled.

    a request (messages) --> Session.begin --> Turn.tokens --> the engine --> Session.end --> Reply (a message)
                                 |                                               |
                                 `---- the append-only tree of what was asked and answered ---- Session.trajectory

Tokens are the truth: what is replayed keeps its tokens, only what is new is tokenised, and nothing is tokenised twice.
Floor 2. Imports: core, stdlib, numpy. Tokenizers and engines are handed to it.
"""
