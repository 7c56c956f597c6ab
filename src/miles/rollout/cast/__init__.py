"""Room: rollout/cast -- several policies that meet over one prompt, each in conversations of its own.

    play(prompt, cast) -- cast["solver"].say(...) --> the solver's session --> the solver's engine
                       `- cast["judge"].say(...)  --> the judge's session  --> the judge's engine
                          all sessions' tokens, role by role, are the branches of one trajectory

Floor 2. Imports: core, rollout/session, rollout/generate, stdlib, numpy. Engines are handed to it.
"""
