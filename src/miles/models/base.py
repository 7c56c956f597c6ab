"""CausalLM: the protocol of a model, implemented by the decoder and by the transformers adapter.

Shapes: T all tokens of a packed batch, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn

from miles.kernels.numerics import Numerics
from miles.models.activation_checkpointing import CheckpointFn
from miles.models.hidden_capture import HiddenCapture
from miles.models.layers.attention_backend import AttentionBackend
from miles.models.layers.moe import Routing
from miles.models.spec import DecoderSpec
from miles.models.vision.inputs import VisionInputs


class CausalLM(Protocol):
    """A decoder that owns no KV cache. With ``checkpoint_layers``, its first ``recompute_num_layers`` layers (or all)
    run under ``checkpoint_fn`` and are recomputed in backward.
    """

    checkpoint_layers: bool
    checkpoint_fn: CheckpointFn
    recompute_num_layers: int | None

    @property
    def spec(self) -> DecoderSpec:
        """The architecture, from which the layout of the KV cache follows."""
        ...

    @property
    def numerics(self) -> Numerics:
        """The numerics of its layers, and of what computes its attention and its log-probs."""
        ...

    def __call__(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attn_backend: AttentionBackend,
        routing: Routing | None = None,
        vision: VisionInputs | None = None,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        """Compute hidden states [T, D] after the final norm; ``positions_T`` may be [3, T] with multimodal RoPE.

        ``capture`` takes the output of some layers, for a draft model; only the native decoder has them.
        """
        ...

    def head(self) -> Tensor:
        """Return the output weight [V, D]."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over everything a checkpoint holds, a tied head once."""
        ...

    def get_submodule(self, target: str) -> nn.Module:
        """Return the module that owns a parameter, by the parameter's name without its last component."""
        ...

    def requires_grad_(self, requires_grad: bool = True) -> object: ...
