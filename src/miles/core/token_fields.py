"""Names of the per-token arrays in ``extras`` of spans and samples.

The shape of one token's entry is in brackets; -1 stands for "no token".
"""

ROUTED_EXPERTS = "routed_experts"
"""[L, k] Experts the token was routed to in each MoE layer; the dtype's maximum where not recorded."""
INDEXER_TOPK = "indexer_topk"
"""[L, k] What the indexer of each sparse-attention layer that has one selected for the token: tokens, pools or blocks
of its sequence; the dtype's maximum where it saw all tokens before it, or was not recorded."""
TOP_TOKENS = "top_tokens"
"""[k] The most likely tokens at the position where this token was sampled."""
TEACHER_LOGPROB = "teacher_logprob"
"""[] Log-prob of the token under a served teacher."""
TEACHER_TOKENS = "teacher_tokens"
"""[S] Token set at this position for which the teacher's log-probs are known."""
TEACHER_LOGPROBS = "teacher_logprobs"
"""[S] The teacher's log-probs of that token set."""

SAMPLING_FIELDS = (TOP_TOKENS, TEACHER_LOGPROB, TEACHER_TOKENS, TEACHER_LOGPROBS)
"""Those about how a token was sampled; a context token does not need them, but it needs its routing."""
