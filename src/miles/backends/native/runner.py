"""Run a plan: gather its tokens into one packed batch, put it through the decoder, give back logits.

Shapes: T new tokens, D hidden, V vocabulary, B rows that draw (in a layout: sequences of the step), L layers with
experts, k experts a token, S seats, P pages of the longest sequence, M most pages of one in this step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from miles.backends.native.scheduler import Plan
from miles.core.types import Array
from miles.kernels.head import logits_of
from miles.kernels.paged import Ints, KvShape, PagedAttend, PagedCache, States, lay_out
from miles.models.decoder import Decoder, Routing
from miles.models.door import Model
from miles.models.remembered import PerSequence, PerToken, remembered
from miles.models.spec import DecoderSpec


class Runner:
    """The decoder and what it remembers: keys and values in pages, states of recurrent layers by seat.

    The decoder is made without storage and adopts tensors it is given; ``model`` is one that was made so elsewhere.
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
    ) -> None:
        self.spec = spec
        self.device = device
        self.dtype = dtype
        self.decoder: Model = Decoder(spec, device="meta", dtype=dtype) if model is None else model
        self.none_expert: Array | None = None
        if spec.moe is not None and record_routing:
            # The greatest number of the dtype means "no expert", so it must not be an expert's own.
            kind = np.uint8 if spec.moe.num_experts <= 255 else np.uint16
            shape = (len(spec.moe_layers), spec.moe.experts_per_token)
            self.none_expert = np.full(shape, np.iinfo(kind).max, kind)
        self._pages = pages
        self._page_size = page_size
        self._seats = seats
        self._cache: PagedCache | None = None
        self._states: States | None = None
        self._places = [
            (self.decoder.get_submodule(path), leaf, f"{path}.{leaf}" if path else leaf)
            for path, leaf in (name.rpartition(".")[::2] for name, _ in self.decoder.named_parameters())
        ]
        self.allocate()

    def allocate(self) -> None:
        """Take memory for keys, values and states."""
        kept = [remembered(layer.mixer) for layer in self.spec.layers]
        self._cache = PagedCache(
            [_kv_shape(each) if isinstance(each, PerToken) else None for each in kept],
            pages=self._pages,
            page_size=self._page_size,
            device=self.device,
            dtype=self.dtype,
        )
        states = {i: _state_shapes(each, self.dtype) for i, each in enumerate(kept) if isinstance(each, PerSequence)}
        self._states = States(states, seats=self._seats, device=self.device) if states else None

    def free(self) -> None:
        """Give the memory of keys, values and states back; what they held is lost."""
        self._cache = self._states = None

    def clear(self) -> None:
        """Make every slot a finite number again."""
        if self._cache is not None:
            self.free()
            self.allocate()

    def expected(self) -> dict[str, Tensor]:
        """The tensors a publication must bring, by name."""
        return dict(self.decoder.named_parameters())

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute with these very tensors from now on; no byte is copied."""
        for module, leaf, name in self._places:
            setattr(module, leaf, nn.Parameter(tensors[name].detach(), requires_grad=False))

    @torch.inference_mode()
    def forward(self, plan: Plan, pages_SP: Ints) -> tuple[Tensor, Array | None]:
        """Logits [B, V] for ``plan.draws``, and the experts [T, L, k] of each new token where they are recorded."""
        cache, states = self._cache, self._states
        assert cache is not None, "an engine that sleeps makes no steps"
        if plan.copies:
            cache.copy(*_sources_and_targets(plan.copies))
        if plan.seat_copies and states is not None:
            states.copy(*_sources_and_targets(plan.seat_copies))
        tokens_T, starts_B, counts_B, seats_B = _gather(plan)
        most = -(-int((starts_B + counts_B).max()) // self._page_size)
        pages_BM = pages_SP[:, :most][seats_B]
        positions_T, layout = lay_out(
            starts_B, counts_B, pages_BM, self._page_size, device=self.device, dtype=self.dtype
        )
        routing = None if self.none_expert is None else Routing(record=True)
        hidden_TD = self.decoder(
            torch.from_numpy(tokens_T).to(self.device),
            torch.from_numpy(positions_T).to(self.device),
            PagedAttend(cache, layout, None if states is None else states.seated(seats_B, starts_B, counts_B)),
            routing,
        )
        logits_BV = self._logits(plan, hidden_TD, counts_B)
        if routing is None or self.none_expert is None:
            return logits_BV, None
        routed_TLk = torch.stack(routing.recorded, 1).to(torch.int32).cpu().numpy()
        return logits_BV, routed_TLk.astype(self.none_expert.dtype)

    def _logits(self, plan: Plan, hidden_TD: Tensor, counts_B: Ints) -> Tensor:
        singles = len(plan.singles)
        if plan.chunks:
            lasts = np.cumsum(counts_B[singles:]) + (singles - 1)
            rows = np.concatenate((np.arange(singles), lasts[plan.leaders]))
            hidden_TD = hidden_TD.index_select(0, torch.from_numpy(rows).to(self.device))
        logits_BV = logits_of(hidden_TD, self.decoder.head(), self.spec.logit_softcap)
        if plan.forks:
            rows = [*range(len(logits_BV)), *(row for row, _, _ in plan.forks)]
            logits_BV = logits_BV.index_select(0, torch.tensor(rows, device=self.device))
        return logits_BV


def _kv_shape(kept: PerToken) -> KvShape:
    return KvShape(kept.heads, kept.key_dim, kept.value_dim, kept.index_dim)


def _state_shapes(kept: PerSequence, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    wide = torch.promote_types(dtype, torch.float32)
    return [(shape, wide if is_wide else dtype) for shape, is_wide in zip(kept.shapes, kept.wide, strict=True)]


def _sources_and_targets(copies: Mapping[int, int]) -> tuple[Ints, Ints]:
    return np.array(list(copies.values()), np.int64), np.array(list(copies), np.int64)


def _gather(plan: Plan) -> tuple[Ints, Ints, Ints, Ints]:
    """The new tokens, and for each sequence where they start, how many they are and its seat."""
    tokens = [sequence.tokens[-1] for sequence in plan.singles]
    for sequence, length in plan.chunks:
        tokens += sequence.tokens[sequence.computed : sequence.computed + length]
    everyone = [*plan.singles, *(sequence for sequence, _ in plan.chunks)]
    starts_B = np.array([sequence.computed for sequence in everyone], np.int64)
    counts_B = np.ones(len(everyone), np.int64)
    counts_B[len(plan.singles) :] = [length for _, length in plan.chunks]
    seats_B = np.array([sequence.seat for sequence in everyone], np.int64)
    return np.array(tokens, np.int64), starts_B, counts_B, seats_B
