"""Multi-agent rollouts: several policies interact over one prompt, each in conversations of its own (layer 2).

    play(prompt, agents) -- agents["solver"].chat(...) --> the solver's session --> the solver's engine
                         `- agents["judge"].chat(...)  --> the judge's session  --> the judge's engine
                            all sessions' tokens, role by role, are the branches of one trajectory

Imports: core, rollout.session, rollout.generate, stdlib, numpy. Engines are passed in.
"""
