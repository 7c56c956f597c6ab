"""Loss of a draft model: cross-entropy against the policy's distribution or against the sampled tokens.

The policy's hidden states and its head are detached: nothing of it gets a gradient.

``_R`` trained tokens, ``_C`` those of a chunk, ``D`` hidden, ``V`` vocabulary, ``v`` the draft's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from miles.models.draft.base import Draft
from miles.train.logprobs import default_chunk_size

DraftLossKind = Literal["soft", "hard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLossOutput:
    """Sums over tokens: the loss, and how often draft and policy have the same most likely token."""

    loss: Tensor
    agreed: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLoss:
    """``soft`` is the cross-entropy against the policy's distribution at ``temperature``, ``hard`` the negative
    log-prob of the sampled tokens. Logits of ``chunk`` tokens exist at a time.
    """

    kind: DraftLossKind
    temperature: float
    chunk: int | None = None

    def __call__(
        self,
        draft: Draft,
        input_RD: Tensor,
        policy_RD: Tensor,
        rows_R: Tensor,
        target_R: Tensor,
        *,
        softcap: float | None,
    ) -> DraftLossOutput:
        """Sum the loss of the draft's head inputs ``input_RD`` at rows ``rows_R`` of the policy's, ``policy_RD``."""
        size = self.chunk or default_chunk_size(draft.policy.head())
        policy_RD = policy_RD.index_select(0, rows_R)
        target_R = target_R.index_select(0, rows_R)
        zero = input_RD.new_zeros((), dtype=torch.promote_types(input_RD.dtype, torch.float32))
        loss, agreed = zero, zero.detach()
        for start in range(0, len(input_RD), size):
            part = slice(start, start + size)
            args = (draft, input_RD[part], policy_RD[part], target_R[part], softcap)
            one, same = checkpoint(self._sum_chunk, *args, use_reentrant=False, preserve_rng_state=False)
            loss, agreed = loss + one, agreed + same
        return DraftLossOutput(loss=loss, agreed=agreed)

    def _sum_chunk(
        self, draft: Draft, input_CD: Tensor, policy_CD: Tensor, target_C: Tensor, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        logits_Cv = self._compute_logits(input_CD, draft.head(), softcap)
        with torch.no_grad():
            policy_CV = self._compute_logits(policy_CD, draft.policy.head(), softcap)
            agreed = (draft.token_ids(logits_Cv.argmax(-1)) == policy_CV.argmax(-1)).sum().to(logits_Cv.dtype)
            if draft.token_offsets_v is not None:  # the policy's distribution over the draft's tokens
                ids_v = draft.token_ids(torch.arange(logits_Cv.shape[1], device=logits_Cv.device))
                policy_CV = policy_CV.index_select(1, ids_v)
            teacher_Cv = policy_CV.softmax(-1)
        if self.kind == "hard":
            return F.cross_entropy(logits_Cv, target_C.long(), reduction="sum"), agreed
        return (logits_Cv.logsumexp(-1) - (teacher_Cv * logits_Cv).sum(-1)).sum(), agreed

    def _compute_logits(self, hidden_CD: Tensor, head_VD: Tensor, softcap: float | None) -> Tensor:
        logits_CV = hidden_CD.to(head_VD.dtype) @ head_VD.T
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        if softcap is not None:
            logits_CV = (logits_CV / softcap).tanh() * softcap
        return logits_CV / self.temperature
