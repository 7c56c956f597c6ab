"""Unmerged adapters of a run as named versions of an engine's adapter registry, for an engine in this process.

The base is published once and shared with the trainer. After that a publication is one adapter, named as its version
(``actor-7``): requests in flight end with the adapter that they began with, new ones use the new one, and a request may
name one of the last versions. The prefix cache is keyed by adapter, so no update empties it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import Executor
from miles.core.protocols import WeightSync
from miles.core.types import Version
from miles.models.checkpoint.peft import lora_a_name, lora_b_name
from miles.models.lora.factors import LoraFactors, ModuleFactors
from miles.models.lora.layout import build_factor_map, build_lora_spec
from miles.models.spec import DecoderSpec
from miles.sync.digest_cache import StorageTracker

__all__ = ["AdapterVersionSync", "select_factors"]


def select_factors(spec: DecoderSpec, weights: Mapping[str, Tensor]) -> LoraFactors:
    """Return the factors of a decoder's adapters among its ``weights``; those that experts share, for each of them."""
    lora = build_lora_spec(spec)
    assert lora is not None, "the decoder has adapters"
    tensors = {
        piece.hf_name: piece.view(weights[name]) for name, pieces in build_factor_map(spec).items() for piece in pieces
    }
    modules: dict[str, ModuleFactors] = {}
    for target in lora.targets:
        a, b = tensors[lora_a_name(target)], tensors[lora_b_name(target)]
        if target.num_experts:
            a, b = (factor.expand(target.num_experts, *factor.shape[1:]) for factor in (a, b))
        modules[target.module] = ModuleFactors(a, b, lora.scale)
    return LoraFactors(modules)


class AdapterVersionSync:
    """Implements core.protocols.WeightSync. ``base`` publishes what is no factor among ``weights``.

    ``spec`` has the adapters, which the engine's own does not. The last ``keep`` versions stay in the engine.
    """

    def __init__(
        self,
        base: WeightSync,
        engine: NativeEngine | None,
        weights: Callable[[], Mapping[str, Tensor]],
        spec: DecoderSpec,
        run: Executor,
        *,
        keep: int,
    ) -> None:
        self._base = base
        self._engine = engine
        self._weights = weights
        self._spec = spec
        self._factor_names = frozenset(build_factor_map(spec))
        self._run = run
        self._keep = keep
        self._published_base = StorageTracker()

    async def publish(self, version: Version) -> Mapping[str, float]:
        """Publish the current adapters as ``version``, and the base if it is not in the engine as it is here."""
        started = time.perf_counter()
        weights = await self._run(self._weights)
        base = {name: tensor for name, tensor in weights.items() if name not in self._factor_names}
        metrics = {} if self._published_base.same(base) else await self._base.publish(version)
        described = time.perf_counter()
        size = await self._run(lambda: self._publish_factors(version, weights))
        seconds = {"publish/describe": described - started, "publish/transfer": time.perf_counter() - described}
        return {**seconds, **metrics, "publish/bytes": float(size)}

    @torch.no_grad()
    def _publish_factors(self, version: Version, weights: Mapping[str, Tensor]) -> int:
        """Copy the factors into the engine; return their bytes."""
        factors = {name: tensor for name, tensor in weights.items() if name in self._factor_names}
        if self._engine is not None:
            self._engine.publish_lora(version, select_factors(self._spec, factors), keep=self._keep)
        return sum(factor.nbytes for factor in factors.values())
