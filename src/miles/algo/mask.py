"""Which samples are too far from the policy that wrote them to be learned from.

``_R``: one entry a trained token of this micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from miles.algo.objective import Corrected, Evidence
from miles.algo.reduce import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicySequences:
    """OPSM: a bad sample that the policy has moved away from teaches nothing more.

    A token weighs 0 where its advantage is negative and its sample's mean of (engine - logp), the sequence's
    divergence from the policy that wrote it, is above ``delta``; else 1.
    """

    delta: float

    def __call__(self, evidence: Evidence, layout: Layout) -> Corrected:
        logp_R = evidence.logp_R.detach()
        drift_R = layout.mean_of_sample(evidence.engine_logp_R - logp_R)
        masked_R = (evidence.advantage_R < 0) & (drift_R > self.delta)
        return Corrected(
            weight_R=(~masked_R).to(logp_R.dtype), metrics={"opsm_share": layout.mean(masked_R.to(logp_R.dtype))}
        )
