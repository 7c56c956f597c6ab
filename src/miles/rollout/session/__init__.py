"""Agent sessions: conversations stored as the tokens that were sampled (layer 2).

    request (messages) --> Session.begin --> SessionTurn.tokens --> engine --> Session.end --> SessionReply (a message)
                                 |                                                |
                                 `---- the append-only tree of questions and replies ---- Session.trajectory

What a request replays keeps its tokens, only what is new is tokenized, and nothing is tokenized twice.
Imports: core, rollout/serving, the standard library, numpy. Tokenizers and engines are passed in.
"""
