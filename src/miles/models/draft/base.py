"""Draft: the interface of a draft model for speculative decoding, and what MTP and EAGLE-3 drafts have in common.

One step of a draft, at the token of position p of a sequence, reads a feature of position p and the token at p + 1, and
predicts the token at p + 2:

    step 0:  feature = draft.features(hidden_TD, capture)   what the policy computed at position p
    step j:  feature = the draft's own hidden state of step j - 1, with the next token that was drafted

The draft's layers have a KV cache of their own. Step j of a draft with one layer stores its keys and values at position
p + j, with RoPE at that position; when drafted tokens were verified, step 0 runs again on the accepted positions with
the policy's features and overwrites them. Of several layers, each has keys of all positions, and step j is the first of
layer j: an engine stores them at p, since RoPE depends on distances only, and those of steps behind the last layer at
the positions that follow.

Shapes: T tokens of a forward, D hidden, F feature, V vocabulary of the draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from miles.kernels.fused.lm_head import compute_logits
from miles.kernels.numerics import Numerics
from miles.models.draft.spec import DraftSpec
from miles.models.hidden_capture import HiddenCapture
from miles.models.layers.attention_backend import AttentionBackend

__all__ = ["Draft", "PolicyWeights"]


@dataclass(frozen=True, slots=True)
class PolicyWeights:
    """The policy's weights that a draft uses but does not own.

    ``embed`` maps tokens [T] to embeddings [T, D], before any scaling (``decoder.embedding``). ``head`` returns the
    output weight [V, D] (``decoder.head``).
    """

    embed: Callable[[Tensor], Tensor]
    head: Callable[[], Tensor]


class Draft(nn.Module, ABC):
    """A draft model. Parameters are uninitialized until ``draft.checkpoint`` fills them.

    Call ``share`` once before the first forward. The policy's weights are not parameters of the draft. A draft of a
    reduced vocabulary has the buffer ``token_offsets_v``: token i of it is the policy's token i + ``token_offsets_v``
    [i].
    """

    token_offsets_v: Tensor | None

    def __init__(self, spec: DraftSpec, *, numerics: Numerics) -> None:
        super().__init__()
        self.spec = spec
        self.numerics = numerics
        self._policy: PolicyWeights | None = None
        self.register_buffer("token_offsets_v", None)

    @property
    def policy(self) -> PolicyWeights:
        assert self._policy is not None, "call share() before the first forward"
        return self._policy

    def share(self, policy: PolicyWeights) -> None:
        """Use the policy's embedding and head from now on."""
        self._policy = policy

    def new_capture(self) -> HiddenCapture | None:
        """Return what to pass to the policy's forward as ``capture``; None if no layer's output is needed."""
        return HiddenCapture(self.spec.capture_layers) if self.spec.capture_layers else None

    def features(self, hidden_TD: Tensor, capture: HiddenCapture | None) -> Tensor:
        """Return the features [T, F] of step 0 from the output of the policy's forward, detached."""
        return hidden_TD.detach() if capture is None else capture.concatenate()

    @abstractmethod
    def forward(
        self,
        features_TF: Tensor,
        next_tokens_T: Tensor,
        positions_T: Tensor,
        attn_backend: AttentionBackend,
        *,
        step: int = 0,
    ) -> Tensor:
        """Run one step and return the draft's hidden states [T, D], which are also the features of the next step.

        ``features_TF`` are [T, F] at step 0 and [T, D] later. ``next_tokens_T`` are the tokens after the positions
        ``positions_T``. The attention backend is called with the layer ``spec.layer_of_step(step)``.
        """

    @abstractmethod
    def head_input(self, hidden_TD: Tensor, *, step: int = 0) -> Tensor:
        """Return the input of the head [T, D]: the hidden states of ``step`` after the draft's last norm."""

    def head(self) -> Tensor:
        """Return the output weight [V, D]: the policy's, unless the draft has a reduced vocabulary."""
        return self.policy.head()

    def logits(self, hidden_TD: Tensor, *, step: int = 0) -> Tensor:
        """Return the logits [T, V] of the tokens after the next tokens, in float32."""
        softcap = self.spec.decoder.logit_softcap
        return compute_logits(self.head_input(hidden_TD, step=step), self.head(), softcap, numerics=self.numerics)

    def token_ids(self, drafted_T: Tensor) -> Tensor:
        """Map tokens of the draft's vocabulary to the policy's."""
        offsets_v = self.token_offsets_v
        return drafted_T if offsets_v is None else drafted_T + offsets_v.index_select(0, drafted_T)
