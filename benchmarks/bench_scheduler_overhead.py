"""Host CPU time per engine step: scheduling, bookkeeping and output processing, with a device that takes no time.

    python benchmarks/bench_scheduler_overhead.py [--running 256] [--steps 400]

Prints CPU time per step, the minimum and the median of runs of 20 steps, for two workloads of requests that all run: W
(prompts of 100 to 1024 tokens, all different) and GRPO (prompts of 1024 tokens, 8 samples each). Then one request in a
whole engine on a thread: steps that follow each other there, and steps with a return to the event loop after each.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import numpy as np
import torch

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import InflightSteps, NativeEngine
from miles.backends.native.engine.forward_batch import ForwardBatch, StepOutput
from miles.backends.native.engine.prefix_cache import PageAllocator
from miles.backends.native.engine.req_slots import ReqSlots
from miles.backends.native.engine.request import GenerateRequest
from miles.backends.native.engine.running_batch import RunningBatch
from miles.backends.native.engine.scheduler import Scheduler
from miles.backends.native.engine.validate import RequestValidator
from miles.cluster.executor import ThreadExecutor
from miles.core.protocols import SamplingParams
from miles.core.types import Version
from miles.models.decoder import Decoder
from miles.models.spec import DecoderSpec
from miles.sync.manifest import build_manifest

VOCAB_SIZE = 151_936
PAGE_SIZE = 16
MAX_POSITIONS = 40_960
STEPS_PER_RUN = 20
SPEC = DecoderSpec(
    family="qwen3",
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    norm_eps=1e-6,
    layers=(),
    tie_embeddings=True,
    max_positions=MAX_POSITIONS,
    eos_token_ids=(151_643, 151_645),
)


class FinishedStep:
    """A step whose output is ready at launch."""

    def __init__(self, count: int) -> None:
        self._count = count

    def result(self) -> StepOutput:
        tokens = np.arange(1000, 1000 + self._count)
        return StepOutput(tokens_D=tokens, logprobs_D=np.full(self._count, -1.5, np.float32))


class NullRunner:
    """A model runner that computes nothing."""

    def launch(self, batch: ForwardBatch) -> FinishedStep:
        return FinishedStep(len(batch.rows_D))

    def clear(self) -> None:
        pass


def build_prompts(workload: str, running: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    if workload == "W":
        return [rng.integers(0, 1000, rng.integers(100, 1024)).astype(np.int32) for _ in range(running)]
    return [prompt for prompt in rng.integers(0, 1000, (running // 8, 1024)).astype(np.int32) for _ in range(8)]


def measure_steps(workload: str, running: int, steps: int) -> list[float]:
    """Return microseconds of CPU time per step, one value per run of steps."""
    pages = 2 * running * (2 * 1024 // PAGE_SIZE)
    running_batch = RunningBatch(
        PageAllocator(pages, PAGE_SIZE, share=True),
        ReqSlots(running, MAX_POSITIONS // PAGE_SIZE, VOCAB_SIZE),
        share_prefill=True,
    )
    scheduler = Scheduler(running_batch, prefill_chunk=8192, decode=None)
    inflight, runner, version = InflightSteps(scheduler, 1), NullRunner(), Version()
    validator = RequestValidator("engine", SPEC, pages * PAGE_SIZE, lambda image: None, has_tokenizer=False)
    for seed, prompt in enumerate(build_prompts(workload, running)):
        sampling = SamplingParams(max_new_tokens=steps + 200, seed=seed)
        scheduler.submit(validator.create_req(GenerateRequest(tokens=prompt, sampling=sampling), 0.0))
    while scheduler.waiting or any(req.has_no_output for req in scheduler.iter_reqs()):
        inflight.run_step(runner, version)
    microseconds: list[float] = []
    for _ in range(steps // STEPS_PER_RUN):
        started = time.thread_time()
        for _ in range(STEPS_PER_RUN):
            inflight.run_step(runner, version)
        microseconds.append((time.thread_time() - started) / STEPS_PER_RUN * 1e6)
    assert len(scheduler.running) == running
    return microseconds


class ReturningExecutor(ThreadExecutor):
    """A thread that returns to the event loop after every step."""

    is_threaded = False


def measure_bs1(run: ThreadExecutor, steps: int) -> float:
    """Return microseconds of CPU time per step of one request."""
    config = NativeConfig(engine_kv_tokens=16 * steps, engine_max_running=256)
    device, dtype = torch.device("cpu"), torch.float32
    engine = NativeEngine(SPEC, device=device, dtype=dtype, config=config, run=run, decode=None, _depth=1)
    tensors = dict(Decoder(SPEC, device=device, dtype=dtype).named_parameters())
    engine.begin(build_manifest(Version(), tensors))
    for name, tensor in tensors.items():
        engine.receive(name, tensor)
    engine.verify()
    engine.commit()
    engine._runner.launch = NullRunner().launch
    microseconds: list[float] = []
    for _ in range(5):
        started = time.process_time()
        sampling = SamplingParams(max_new_tokens=steps, ignore_eos=True)
        asyncio.run(engine.generate(np.arange(2, 130, dtype=np.int32), sampling))
        microseconds.append((time.process_time() - started) / steps * 1e6)
    return min(microseconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256, help="running requests")
    parser.add_argument("--steps", type=int, default=400, help="steps to measure")
    args = parser.parse_args()
    for workload in ("W", "GRPO"):
        microseconds = measure_steps(workload, args.running, args.steps)
        print(
            f"{workload:5s} {min(microseconds):6.0f} us min, {statistics.median(microseconds):6.0f} us median per step"
        )
    staying, returning = (measure_bs1(run("steps"), 5 * args.steps) for run in (ThreadExecutor, ReturningExecutor))
    print(f"bs=1  {staying:6.0f} us min, returning each step {returning:6.0f} us: {returning / staying:.2f}x")


if __name__ == "__main__":
    main()
