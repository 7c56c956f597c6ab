"""The names under which spans, and the samples made of them, carry what belongs to each token beside its log-prob.

The shape of each array's entries is in brackets; -1 stands for "no token".
"""

ROUTED = "routed_experts"
"""[L, k] The experts it went to, in each layer that has any; the greatest number of the type where none is known."""
TOP_TOKENS = "top_tokens"
"""[k] The tokens that were likeliest where this one was drawn."""
TEACHER_LOGPROB = "teacher_logprob"
"""[] What a teacher that is served gives this token."""
TEACHER_TOKENS = "teacher_tokens"
"""[S] The tokens at its place that are looked at one by one."""
TEACHER_LOGPROBS = "teacher_logprobs"
"""[S] What the teacher gives those."""
