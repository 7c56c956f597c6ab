"""Run an order: its tokens as one packed batch through the decoder, a token drawn from each row that is to draw.

Shapes: as in ``order``; S seats, D also hidden channels, R rows that logits are computed of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from miles.backends.native.card import Card, fits
from miles.backends.native.graphs import Graphs
from miles.backends.native.order import Flight, Ints, Order, Scoring, positions_of
from miles.backends.native.sampler import draw, edit, exact_logprobs, look
from miles.backends.native.sending import Landing, Sender
from miles.backends.native.weights import Adopt, Weights
from miles.cluster.returnable import returnable
from miles.core.errors import UsageError
from miles.core.routed import expert_dtype, unrecorded
from miles.core.types import Array
from miles.kernels.arithmetic import exact
from miles.kernels.exact.head import logp_of
from miles.kernels.exact.paged import ExactPagedAttend
from miles.kernels.head import logits_of
from miles.kernels.paged import KvShape, PagedAttend, PagedCache, States, lay_out
from miles.models.decoder import Attend, Decoder, Routing
from miles.models.door import Model
from miles.models.exactness import inexact
from miles.models.remembered import PerSequence, PerToken, remembered
from miles.models.spec import DecoderSpec

# The most logits of prompt tokens that are written out at once.
_LOGITS = 1 << 25


class Runner:
    """The decoder and what it remembers: keys and values in pages, states of recurrent layers by seat.

    ``drawn_S`` is the token last drawn for each seat. The decoder is made without storage and adopts tensors it is
    given; ``model`` is one that was made so elsewhere.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        pages: int,
        page_size: int,
        seats: int,
        record_routing: bool,
        device: torch.device,
        dtype: torch.dtype,
        model: Model | None = None,
        graphs: bool = True,
    ) -> None:
        if exact() and (problem := inexact(spec)) is not None:
            raise UsageError(f"exact arithmetic cannot be had of this model: {problem}; leave --parity exact out.")
        self.spec = spec
        self.device = device
        self.dtype = dtype
        self.decoder: Model = Decoder(spec, device="meta", dtype=dtype) if model is None else model
        self.none_expert: Array | None = None
        if spec.moe is not None and record_routing:
            kind = expert_dtype(spec.moe.num_experts)
            shape = (len(spec.moe_layers), spec.moe.experts_per_token)
            self.none_expert = np.full(shape, unrecorded(kind), kind)
        self.send = Sender(device)
        # A seat and a page more than requests are given: rows of a recorded step that no request has go there.
        self.drawn_S = torch.zeros(seats + 1, dtype=torch.int64, device=device)
        self._card: Card | None = None
        self._records = graphs
        self._graphs: Graphs | None = None
        self._pages = pages
        self._page_size = page_size
        self._seats = seats
        if fits(spec, self.decoder, device):
            longest = min(pages, -(-spec.max_positions // page_size))
            sizes = {"seats": seats, "longest": longest, "page_size": page_size}
            self._card = Card(spec, **sizes, send=self.send, device=device, dtype=dtype)
        # Recordings stay true while the cache comes back where it was.
        self._memory = returnable(device) if self._card is not None and graphs else None
        self._own: set[str] = set()
        self._cache: PagedCache | None = None
        self._states: States | None = None
        self._places = [
            (self.decoder.get_submodule(path), leaf, f"{path}.{leaf}" if path else leaf)
            for path, leaf in (name.rpartition(".")[::2] for name, _ in self.decoder.named_parameters())
        ]
        self.allocate()

    @property
    def records(self) -> bool:
        """Whether steps that draw one token for everyone are recorded."""
        return self._graphs is not None and self._graphs.whole

    def allocate(self) -> None:
        """Take memory for keys, values and states, where it was before if recordings count on that."""
        if self._memory is not None and self._graphs is not None:
            self._memory.take()
            self._cache = self._graphs.cache
            return
        kept = [remembered(layer.mixer) for layer in self.spec.layers]
        self._cache = PagedCache(
            [_kv_shape(each) if isinstance(each, PerToken) else None for each in kept],
            pages=self._pages + (self._card is not None),
            page_size=self._page_size,
            device=self.device,
            dtype=self.dtype,
            zeros=None if self._memory is None else self._memory.zeros,
        )
        if self._card is not None and self._records and isinstance(self.decoder, Decoder):
            self._graphs = self._card.graphs(self.decoder, self._cache, self.drawn_S, self._pages, self.none_expert)
        states = {i: _state_shapes(each, self.dtype) for i, each in enumerate(kept) if isinstance(each, PerSequence)}
        self._states = States(states, seats=self._seats, device=self.device) if states else None

    def free(self) -> None:
        """Give the memory of keys, values and states back; what they held is lost."""
        self._cache = self._states = None
        if self._memory is None:
            self._graphs = None
        else:
            self._memory.give_back()

    def clear(self) -> None:
        """Make every slot a finite number again."""
        if self._cache is not None:
            self.free()
            self.allocate()

    def expected(self) -> dict[str, Tensor]:
        """The tensors a publication must bring, by name."""
        return dict(self.decoder.named_parameters())

    def weights(self) -> Mapping[str, Tensor]:
        """The tensors it computes with now, by name."""
        return dict(self.decoder.named_parameters())

    def receiver(self, name: str, adopt: Adopt) -> Weights:
        """Where publications to an engine of that ``name`` arrive; ``adopt`` is called with what passed."""
        return Weights(name, self.expected(), self.device, adopt)

    def check(self) -> None:
        """Raise what keeps this runner from ever making another step, if anything does."""

    def close(self) -> None:
        """End whatever was started for this runner."""

    def adopt(self, tensors: Mapping[str, Tensor], own: Collection[str] = ()) -> None:
        """Compute with these very tensors from now on, of which some are the engine's ``own``; no byte is copied.

        But where its own come in place of its own, and steps were recorded over these, they are written over: the
        recordings stay true.
        """
        before = {name: getattr(module, leaf) for module, leaf, name in self._places}
        moved = {name for name, at in before.items() if tensors[name].data_ptr() != at.data_ptr()}
        if moved and self._graphs is not None and self._graphs.any and moved <= self._own & set(own):
            with torch.no_grad():
                for name in moved:
                    before[name].copy_(tensors[name])
            return
        self._own = moved & set(own) | self._own - moved
        if moved and self._graphs is not None:
            self._graphs.forget()
        for module, leaf, name in self._places:
            setattr(module, leaf, nn.Parameter(tensors[name].detach(), requires_grad=False))

    def warm_up(self, told: Callable[[int, int], None]) -> None:
        """Record every step that can be recorded; ``told`` hears how many are done, and of how many."""
        for done, of in () if self._graphs is None or self._cache is None else self._graphs.warm_up():
            told(done, of)

    def launch(self, order: Order) -> Flight:
        """Begin a step: compute its tokens, draw, score. Nothing here waits for the device."""
        assert self._cache is not None, "an engine that sleeps makes no steps"
        if len(order.copies[0]):
            self._cache.copy(*order.copies)
        if len(order.seat_copies[0]) and self._states is not None:
            self._states.copy(*order.seat_copies)
        if self._graphs is not None and self._graphs.holds(order):
            return self._graphs.launch(order)
        return self._eager(order)

    @torch.inference_mode()
    def _eager(self, order: Order) -> Flight:
        """A step, operation by operation."""
        positions_T = positions_of(order)
        rows_R, which_D = np.unique(order.rows_D, return_inverse=True)
        tokens_T, at_T, seats_B, rows_there_R, which_there_D, seats_D = self.send(
            order.tokens_T, positions_T, order.seats_B[: order.singles], rows_R, which_D, order.seats_D
        )
        single_B = tokens_T[: order.singles]
        single_B = torch.where(single_B < 0, self.drawn_S.index_select(0, seats_B), single_B)
        tokens_T = torch.cat((single_B, tokens_T[order.singles :]))
        routing = None if self.none_expert is None else Routing(record=True)
        hidden_TD = self.decoder(tokens_T, at_T, self._attend(order, positions_T), routing)
        logits_DV = self._logits(hidden_TD if len(rows_R) == len(tokens_T) else hidden_TD[rows_there_R])
        if len(rows_R) != len(order.rows_D):
            logits_DV = logits_DV.index_select(0, which_there_D)
        if order.edits is not None:
            logits_DV = edit(logits_DV, order.edits, self.send)
        if self._card is not None and order.looks is None:
            tokens_D, logprobs_D = self._card.draw(logits_DV, order.manner)
            logprobs_DV = logits_DV
        else:
            tokens_D, logprobs_D, logprobs_DV = draw(logits_DV, order.manner, self.send)
        self.drawn_S.index_copy_(0, seats_D, tokens_D)
        scores_N, scores_looked = (None, None) if order.scoring is None else self._scores(hidden_TD, order.scoring)
        return Landing(
            tokens_D,
            logprobs_D,
            routed_TLx=None if routing is None else self._routed(routing),
            looked=None if order.looks is None else look(logprobs_DV, order.looks, self.send),
            scores_N=scores_N,
            scores_looked=scores_looked,
        )

    def _attend(self, order: Order, positions_T: Ints) -> Attend:
        """Who remembers, for this step."""
        assert self._cache is not None
        if self._card is not None:
            return self._card.attend(order, positions_T, self._cache)
        if exact():
            return ExactPagedAttend(self._cache, order.starts_B, order.counts_B, order.pages_BM, self._page_size)
        where = order.starts_B, order.counts_B, order.pages_BM, self._page_size
        _, layout = lay_out(*where, device=self.device, dtype=self.dtype)
        states = self._states
        seated = None if states is None else states.seated(order.seats_B, order.starts_B, order.counts_B)
        return PagedAttend(self._cache, layout, seated)

    def _logits(self, hidden_RD: Tensor) -> Tensor:
        return logits_of(hidden_RD, self.decoder.head(), self.spec.logit_softcap)

    def _scores(self, hidden_TD: Tensor, scoring: Scoring) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        """Log-probs of tokens that are there already, and what is looked up beside them, some rows at a time."""
        rows_N, tokens_N = self.send(scoring.rows_N, scoring.tokens_N)
        step = max(1, _LOGITS // self.spec.vocab_size)
        scores: list[Tensor] = []
        looked: list[tuple[Tensor, Tensor, Tensor]] = []
        for lo in range(0, len(scoring.rows_N), step):
            logits_RV = self._logits(hidden_TD[rows_N[lo : lo + step]]).float()
            tokens_R = tokens_N[lo : lo + step]
            if exact():
                logprobs_RV, lse_R = exact_logprobs(logits_RV, logits_RV.new_ones(len(logits_RV)))
                scores.append(logp_of(logits_RV, tokens_R, 1.0, lse_R))
            else:
                logprobs_RV = logits_RV.log_softmax(-1)
                scores.append(logprobs_RV.gather(1, tokens_R[:, None]).squeeze(1))
            if scoring.looks is not None:
                looked.append(look(logprobs_RV, scoring.looks.cut(lo, lo + step), self.send))
        parts = [torch.cat(part) for part in zip(*looked, strict=True)]
        return torch.cat(scores), (parts[0], parts[1], parts[2]) if parts else None

    def _routed(self, routing: Routing) -> Tensor:
        assert self.none_expert is not None
        return torch.stack(routing.recorded, 1).to(torch.uint8 if self.none_expert.itemsize == 1 else torch.int32)


def _kv_shape(kept: PerToken) -> KvShape:
    return KvShape(kept.heads, kept.key_dim, kept.value_dim, kept.index_dim)


def _state_shapes(kept: PerSequence, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    wide = torch.promote_types(dtype, torch.float32)
    return [(shape, wide if is_wide else dtype) for shape, is_wide in zip(kept.shapes, kept.wide, strict=True)]
