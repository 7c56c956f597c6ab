"""Multi-tenant trainer: one packed forward and backward pass over the data of several adapters on one frozen base.

Data of different adapters are neighbours in the batch, each datum a sequence of its own. The loss of a datum depends
on its own tokens only, so one backward pass computes the gradients of all adapters. The log-probs of each item are
computed with its own adapter of the output layer.

Shapes: T tokens of the batch, R targets, r those of an item, N tokens of a datum, K targets of a token, D hidden, V
vocabulary, X rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.backends.service.adapter import Adapter, AdapterShape
from miles.backends.service.losses import check_inputs, compute_loss
from miles.backends.service.messages import Datum, TrainRequest
from miles.backends.service.multi_lora import LoraSegment, MultiLora
from miles.kernels.attention.gather_rows import index_rows
from miles.models.decoder import Decoder
from miles.models.lora.targets import LoraTarget
from miles.rollout.serving.errors import RequestError
from miles.train.logprobs import HeadOutput, TrainedHeadLora, compute_logprobs
from miles.train.prefix_sharing import build_attention

__all__ = ["MultiLoraTrainer", "PassItem", "PassOutput", "check_data", "split_data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassItem:
    """Some data of one request: what one adapter computes in a pass."""

    adapter: Adapter
    data: Sequence[Datum]
    loss_fn: str
    loss_config: Mapping[str, float | str]
    backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutput:
    """The log-probs and losses of the data of one item, and the sum of the losses."""

    outputs: list[dict[str, NDArray[np.float32]]]
    loss: float


def check_data(request: TrainRequest, *, vocab_size: int, max_positions: int) -> None:
    """RequestError with one sentence about what is wrong with the data of a request."""
    if not request.data:
        raise RequestError("the request has no data; send at least one datum.", status=422)
    for number, datum in enumerate(request.data):
        tokens = datum.tokens_N
        if not len(tokens):
            raise RequestError(f"datum {number} has no tokens.", status=422)
        if len(tokens) > max_positions:
            raise RequestError(
                f"datum {number} has {len(tokens)} tokens, more than the model's {max_positions} positions.", status=422
            )
        check_inputs(request.loss_fn, {name: array.shape for name, array in datum.inputs.items()}, number)
        targets = datum.inputs["target_tokens"]
        if len(targets) != len(tokens):
            raise RequestError(
                f"datum {number} has {len(tokens)} tokens, but {len(targets)} target_tokens; there is one for each.",
                status=422,
            )
        for name, values in (("tokens", tokens), ("target_tokens", targets)):
            if values.size and not 0 <= int(values.min()) <= int(values.max()) < vocab_size:
                raise RequestError(f"datum {number} has {name} outside the vocabulary of {vocab_size}.", status=422)
        for name, values in datum.inputs.items():
            if not np.isfinite(values).all():
                raise RequestError(f"{name} of datum {number} has values that are no finite numbers.", status=422)


def split_data(data: Sequence[Datum], max_tokens: int) -> list[range]:
    """Split a request's data into consecutive parts of at most ``max_tokens``; a longer datum is a part alone.

    The parts depend on the request only, so the sums of its gradients have one order, whatever it is computed with.
    """
    parts: list[range] = []
    first = size = 0
    for number, datum in enumerate(data):
        if number > first and size + len(datum.tokens_N) > max_tokens:
            parts.append(range(first, number))
            first, size = number, 0
        size += len(datum.tokens_N)
    return [*parts, range(first, len(data))]


class MultiLoraTrainer:
    """Trains adapters on the frozen ``decoder``, which an engine may share. One thread at a time uses it."""

    def __init__(
        self, decoder: Decoder, modules: Sequence[str], *, device: torch.device, gradient_checkpointing: bool = False
    ) -> None:
        decoder.requires_grad_(False)
        decoder.checkpoint_layers = gradient_checkpointing
        self.decoder = decoder
        self.device = device
        self._lora = MultiLora(decoder, modules)
        self._head = next((target.module for target in self._lora.targets if target.is_head), None)

    @property
    def targets(self) -> tuple[LoraTarget, ...]:
        """The projections that adapters may have."""
        return self._lora.targets

    def create(self, shape: AdapterShape) -> Adapter:
        """Return a new adapter, whose products are zero."""
        return Adapter(shape, self._lora.targets, device=self.device)

    def run(self, items: Sequence[PassItem]) -> list[PassOutput]:
        """Compute one pass. Gradients are added to the adapters when the whole pass has succeeded."""
        data = [datum for item in items for datum in item.data]
        lengths = [len(datum.tokens_N) for datum in data]
        segments = _build_segments(items)
        needs_grad = any(item.backward for item in items)
        heads = [self._build_head(segment) for segment in segments]
        with torch.enable_grad() if needs_grad else torch.no_grad(), self._lora.use(segments, device=self.device):
            logp_R = self._compute_logprobs(data, lengths, [len(item.data) for item in items], heads)
            losses, outputs = self._compute_losses(items, logp_R)
            if needs_grad:
                torch.stack([loss for item, loss in zip(items, losses, strict=True) if item.backward]).sum().backward()
        self._collect_head_grads(segments, heads)
        for item, segment in zip(items, segments, strict=True):
            if segment.grads is not None:
                item.adapter.add_gradients(segment.grads)
        totals = torch.stack([loss.detach() for loss in losses]).tolist()
        return [PassOutput(outputs=own, loss=total) for own, total in zip(outputs, totals, strict=True)]

    def _build_head(self, segment: LoraSegment) -> TrainedHeadLora | None:
        """Return the factors of a segment's adapter of the output layer, as leaves of the pass; None without any."""
        factors = None if self._head is None else segment.adapter.factors.get(self._head)
        if factors is None:
            return None
        a_XD, b_VX = (factor.detach().requires_grad_(segment.grads is not None) for factor in factors)
        return TrainedHeadLora(a_XD=a_XD, b_VX=b_VX, scale=segment.adapter.scale, merged=False)

    def _collect_head_grads(self, segments: Sequence[LoraSegment], heads: Sequence[TrainedHeadLora | None]) -> None:
        """Move the gradients of the output layer's factors to their segments."""
        for segment, head in zip(segments, heads, strict=True):
            if head is not None and segment.grads is not None and self._head is not None:
                assert head.a_XD.grad is not None and head.b_VX.grad is not None
                segment.grads[self._head] = (head.a_XD.grad, head.b_VX.grad)

    def _compute_logprobs(
        self,
        data: Sequence[Datum],
        lengths: Sequence[int],
        counts: Sequence[int],
        heads: Sequence[TrainedHeadLora | None],
    ) -> Tensor:
        """Return the log-probs of all targets, one datum after the other.

        ``counts`` are the data of each item, and ``heads`` the adapters of the output layer that it has.
        """
        decoder = self.decoder
        tokens_T = torch.from_numpy(np.concatenate([datum.tokens_N for datum in data])).to(self.device)
        positions_T = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        attention = build_attention(lengths, (), self.device, numerics=decoder.numerics)
        hidden_TD = decoder(tokens_T, positions_T, attention)
        targets = [datum.inputs["target_tokens"] for datum in data]
        counts_T = np.concatenate([np.full(len(each), 1 if each.ndim == 1 else each.shape[1]) for each in targets])
        before_R = torch.from_numpy(np.repeat(np.arange(len(counts_T)), counts_T)).to(self.device)
        target_R = torch.from_numpy(np.concatenate([each.reshape(-1) for each in targets])).to(self.device)
        repeated = len(before_R) != len(tokens_T)
        hidden_RD = index_rows(hidden_TD, before_R, repeated=True) if repeated else hidden_TD
        sizes = iter(int(np.prod(each.shape)) for each in targets)
        own = [sum(islice(sizes, count)) for count in counts]
        found: list[Tensor] = []
        for head, hidden_rD, target_r in zip(heads, hidden_RD.split(own), target_R.long().split(own), strict=True):
            output = HeadOutput(
                hidden_RD=hidden_rD,
                head_VD=decoder.head(),
                softcap=decoder.spec.logit_softcap,
                numerics=decoder.numerics,
                lora=head,
            )
            found.append(compute_logprobs(output, target_r)[0])
        return torch.cat(found)

    def _compute_losses(
        self, items: Sequence[PassItem], logp_R: Tensor
    ) -> tuple[list[Tensor], list[list[dict[str, NDArray[np.float32]]]]]:
        """Return the loss of each item, and the outputs of its data."""
        losses: list[Tensor] = []
        outputs: list[list[dict[str, NDArray[np.float32]]]] = []
        first = 0
        for item in items:
            total = logp_R.new_zeros(())
            own: list[dict[str, NDArray[np.float32]]] = []
            for datum in item.data:
                shape = datum.inputs["target_tokens"].shape
                size = int(np.prod(shape))
                logp = logp_R[first : first + size].view(shape)
                first += size
                inputs = {
                    name: torch.from_numpy(np.array(array, np.float32)).to(self.device)
                    for name, array in datum.inputs.items()
                    if name != "target_tokens"
                }
                with nullcontext() if item.backward else torch.no_grad():
                    loss = compute_loss(item.loss_fn, logp.float(), inputs, item.loss_config)
                    total = total + loss.sum()
                own.append(
                    {
                        "logprobs": logp.detach().float().cpu().numpy(),
                        "elementwise_loss": loss.detach().float().cpu().numpy(),
                    }
                )
            losses.append(total)
            outputs.append(own)
        return losses, outputs


def _build_segments(items: Sequence[PassItem]) -> list[LoraSegment]:
    segments: list[LoraSegment] = []
    start = 0
    for item in items:
        stop = start + sum(len(datum.tokens_N) for datum in item.data)
        grads = {} if item.backward else None
        segments.append(LoraSegment(adapter=item.adapter.factors, start=start, stop=stop, grads=grads))
        start = stop
    return segments
