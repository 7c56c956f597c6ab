"""What a step costs the host: planning, counting on it and absorbing it, with a device that takes no time.

    python benchmarks/host.py [--running 256] [--steps 400]

Prints processor time a step, the least and the median of runs of 20 steps, for two loads of requests that all run:
W (prompts of 100 to 1024 tokens, each its own) and GRPO (prompts of 1024 tokens, 8 samples each). Then one request
alone, through a whole engine with a thread of its own: steps that follow each other there, and steps with a trip to the
event loop after each, in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import numpy as np
import torch

from miles.backends.native.cache import Pages
from miles.backends.native.config import NativeConfig
from miles.backends.native.engine import NativeEngine
from miles.backends.native.flights import Flights
from miles.backends.native.gate import Gate
from miles.backends.native.hall import Hall
from miles.backends.native.order import Drawn, Order
from miles.backends.native.request import Ask
from miles.backends.native.scheduler import Scheduler
from miles.backends.native.seats import Seats
from miles.cluster.local import Threaded
from miles.core.protocols import Sampling
from miles.core.types import Version
from miles.models.decoder import Decoder
from miles.models.spec import DecoderSpec
from miles.sync.manifest import manifest_of

VOCABULARY, PAGE, POSITIONS, RUN = 151_936, 16, 40_960, 20
SPEC = DecoderSpec(
    family="qwen3",
    vocab_size=VOCABULARY,
    hidden_size=64,
    norm_eps=1e-6,
    layers=(),
    tie_embeddings=True,
    max_positions=POSITIONS,
    eos_token_ids=(151_643, 151_645),
)


class Done:
    """A step that has landed when it is launched."""

    def __init__(self, count: int) -> None:
        self._count = count

    def land(self) -> Drawn:
        tokens = np.arange(1000, 1000 + self._count)
        return Drawn(tokens_D=tokens, logprobs_D=np.full(self._count, -1.5, np.float32))


class Nothing:
    """A runner that does nothing, at once."""

    def launch(self, order: Order) -> Done:
        return Done(len(order.rows_D))


def load(name: str, running: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    if name == "W":
        return [rng.integers(0, 1000, rng.integers(100, 1024)).astype(np.int32) for _ in range(running)]
    return [prompt for prompt in rng.integers(0, 1000, (running // 8, 1024)).astype(np.int32) for _ in range(8)]


def measure(name: str, running: int, steps: int) -> list[float]:
    pages = 2 * running * (2 * 1024 // PAGE)
    hall = Hall(Pages(pages, PAGE, share=True), Seats(running, POSITIONS // PAGE, VOCABULARY), lead=True)
    scheduler = Scheduler(hall, prefill_chunk=8192, decode=None)
    flights, gate, runner = Flights(scheduler, 1), Gate("engine", SPEC, pages * PAGE, decodes=False), Nothing()
    version = Version()
    for seed, prompt in enumerate(load(name, running)):
        how = Sampling(max_new_tokens=steps + 200, seed=seed)
        scheduler.submit(gate.admit(Ask(tokens=prompt, sampling=how), 0.0))
    while scheduler.waiting or any(one.fresh for one in scheduler.everyone()):
        flights.step(runner, version)
    taken: list[float] = []
    for _ in range(steps // RUN):
        started = time.thread_time()
        for _ in range(RUN):
            flights.step(runner, version)
        taken.append((time.thread_time() - started) / RUN * 1e6)
    assert len(scheduler.running) == running
    return taken


class Trips(Threaded):
    """A thread of its own that comes back after every step."""

    apart = False


def alone(run: Threaded, steps: int) -> float:
    """Microseconds of processor time a step, of one request and a model that takes none."""
    config = NativeConfig(engine_kv_tokens=16 * steps, engine_max_running=256)
    where = {"device": torch.device("cpu"), "dtype": torch.float32}
    engine = NativeEngine(SPEC, **where, config=config, run=run, decode=None, _depth=1)
    tensors = dict(Decoder(SPEC, **where).named_parameters())
    engine.begin(manifest_of(Version(), tensors))
    for name, tensor in tensors.items():
        engine.receive(name, tensor)
    engine.verify()
    engine.commit()
    engine._runner.launch = Nothing().launch
    taken: list[float] = []
    for _ in range(5):
        started = time.process_time()
        how = Sampling(max_new_tokens=steps, ignore_eos=True)
        asyncio.run(engine.generate(np.arange(2, 130, dtype=np.int32), how))
        taken.append((time.process_time() - started) / steps * 1e6)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256, help="requests that run")
    parser.add_argument("--steps", type=int, default=400, help="steps to measure")
    given = parser.parse_args()
    for name in ("W", "GRPO"):
        taken = measure(name, given.running, given.steps)
        print(f"{name:5s} {min(taken):6.0f} us at least, {statistics.median(taken):6.0f} us median, a step")
    together, trips = (alone(run("steps"), 5 * given.steps) for run in (Threaded, Trips))
    print(f"alone {together:6.0f} us at least, with a trip a step {trips:6.0f}: {trips / together:.2f}x")


if __name__ == "__main__":
    main()
