"""Model FLOPs utilisation (MFU) and memory-bandwidth utilisation of training and rollout, from token counts. No torch.

A step is given as its metrics and its seconds; FLOPs are those the model needs, so that recomputed activations, and
log-probs that are computed once more, count as time and not as work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from miles.kernels.numerics import Numerics
from miles.models.accounting.params import forward_flops_per_token, kv_bytes_per_token
from miles.models.accounting.step_limit import EngineSide
from miles.models.spec import DecoderSpec

_TERA = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilizationMeter:
    """Computes the rates of each step, per device.

    ``peak_flops`` and ``peak_bandwidth`` are what a device can do at most in a second, None where unknown; without them
    there are rates and no utilisation. ``backward`` is the cost of a backward pass relative to the forward pass: 2, and
    1 where the weights are frozen, as with LoRA. ``overlaps`` says that engines generate during the whole step and not
    only while the loop waits.
    """

    spec: DecoderSpec
    rollout_dtype: str
    numerics: Numerics
    train_devices: int
    rollout_devices: int
    peak_flops: float | None = None
    peak_bandwidth: float | None = None
    backward: float = 2.0
    overlaps: bool = False

    def measure(
        self, metrics: Mapping[str, float], seconds: Mapping[str, float], engine: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the rates of a step from its metrics, its phases, and what the engine's counters have grown by.

        ``engine`` may lack counters; then there is no figure of the memory bandwidth.
        """
        rates = self._measure_train(metrics, seconds.get("train", 0.0))
        generating = sum(seconds.values()) if self.overlaps else seconds.get("rollout", 0.0)
        return rates | self._measure_rollout(metrics, generating, engine)

    def _measure_train(self, metrics: Mapping[str, float], seconds: float) -> dict[str, float]:
        tokens, samples = metrics.get("train_tokens", 0.0), metrics.get("samples", 0.0)
        if not tokens or not samples or seconds <= 0:
            return {}
        # Causal attention sees half of a sample on average.
        flops = tokens * forward_flops_per_token(self.spec, tokens / samples / 2) * (1 + self.backward)
        return self._format_flops("train", flops / seconds / self.train_devices)

    def _measure_rollout(
        self, metrics: Mapping[str, float], seconds: float, engine: Mapping[str, float]
    ) -> dict[str, float]:
        generated, samples = metrics.get("rollout_tokens", 0.0), metrics.get("samples", 0.0)
        if not generated or not samples or seconds <= 0:
            return {}
        response = generated / samples
        prompt = max(0.0, metrics.get("tokens", generated) / samples - response)
        context = prompt + response / 2
        prefilled = engine.get("prefilled_tokens", samples * prompt)
        flops = generated * forward_flops_per_token(self.spec, context)
        flops += prefilled * forward_flops_per_token(self.spec, prompt / 2)
        rates = self._format_flops("rollout", flops / seconds / self.rollout_devices)
        steps = engine.get("steps", 0.0)
        if steps > 0:
            rows = engine.get("generated_tokens", generated) / steps
            moved = steps * self._engines.weight_bytes_per_step(rows)
            moved += generated * context * kv_bytes_per_token(self.spec, self.rollout_dtype, self.numerics)
            bandwidth = moved / seconds / self.rollout_devices
            rates["perf/rollout_gb_per_second"] = bandwidth / 1e9
            if self.peak_bandwidth is not None:
                rates["perf/rollout_mbu"] = bandwidth / self.peak_bandwidth
        return rates

    @property
    def _engines(self) -> EngineSide:
        return EngineSide(spec=self.spec, dtype=self.rollout_dtype, numerics=self.numerics)

    def _format_flops(self, plane: str, rate: float) -> dict[str, float]:
        rates = {f"perf/{plane}_tflops": rate / _TERA}
        return rates if self.peak_flops is None else rates | {f"perf/{plane}_mfu": rate / self.peak_flops}
