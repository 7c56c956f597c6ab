"""Speculative decoding of the embedded engine: throughput with drafts against without, in one run.

    python benchmarks/bench_speculative.py imposed [--models Qwen3-8B Qwen3-30B-A3B] [--batches 1 4 8 16 32 64 256]
    python benchmarks/bench_speculative.py run RUN [--epochs 2]
    python benchmarks/bench_speculative.py tail [--models Qwen3-8B]
    python benchmarks/bench_speculative.py overhead [--batches 1 8 32] [--new 256] [--rounds 7]
    python benchmarks/bench_speculative.py simulated [--models Qwen3-8B] [--rounds 5]

``imposed`` verifies drafts of random tokens and accepts a fixed number of them, whatever was sampled: the throughput
of bf16 random weights of a published shape at 2, 3 and 4 tokens a verification, of which the last is sampled and one
more was drafted in vain. ``run`` samples the prompts of a finished run again, with its last checkpoint and other seeds
each epoch: n-gram drafts against none. ``tail`` is a step of 256 requests with log-normal response lengths, at most
8,192 tokens, with 3 tokens a verification. ``overhead`` samples nearly uniformly from 32,000 tokens, so that nothing
repeats and no draft pays: the CPU time of a small model with n-gram drafts against without, in turns, and the share of
the time with drafts that is spent on them. ``simulated`` needs no GPU: the scheduler decodes the workloads of
``bench_engine_gpu.py`` with the host's real CPU time, and steps take a GPU the estimated time (``step_cost``), launched
before the last one's output as on a GPU. It prints the host's time of a step without and with n-gram drafts in turns,
the share of it that is spent on them, the steps that waited for the last one's output, and the throughput. In ``W`` and
``GRPO`` nothing repeats; in ``W, again`` and ``GRPO, again`` four of five samples are those of an earlier epoch.

The limit of a small batch is reading the weights once a step: speculation divides it by the tokens of a verification.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_engine_gpu import workload

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine import scheduler as scheduling
from miles.backends.native.engine.draft_tree import DraftRows
from miles.backends.native.engine.engine import InflightSteps, NativeEngine
from miles.backends.native.engine.forward_batch import ForwardBatch, StepOutput
from miles.backends.native.engine.ngram_draft import MIN_MATCH, DraftedTokens
from miles.backends.native.engine.prefix_cache import PageAllocator
from miles.backends.native.engine.req import Req
from miles.backends.native.engine.req_slots import ReqSlots
from miles.backends.native.engine.request import GenerateRequest
from miles.backends.native.engine.running_batch import RunningBatch
from miles.backends.native.engine.scheduler import Scheduler
from miles.backends.native.engine.speculation import Speculation, build_speculation
from miles.backends.native.engine.step_cost import StepCost, estimate_step_cost
from miles.backends.native.engine.validate import RequestValidator
from miles.cluster.executor import ThreadExecutor
from miles.cluster.platform import Platform, detect_platform
from miles.core.protocols import SamplingParams
from miles.core.types import Version
from miles.launch.runtime.gc_tuning import reduce_gc
from miles.models.accounting.known_models import find_known_config
from miles.models.checkpoint import hf
from miles.models.decoder import Decoder
from miles.models.families.registry import spec_from_config
from miles.observe.rollout_reader import read_step_rollouts
from miles.sync.publish import Publication

Prompts = Sequence[tuple[np.ndarray, SamplingParams]]


class RandomDrafter:
    """Random tokens, as many as are asked for, at no cost."""

    num_buckets = 1
    can_replay = False

    def __init__(self, vocab_size: int) -> None:
        self._tokens = np.random.default_rng(0).integers(0, vocab_size, 64).tolist()

    def draft(self, reqs: Sequence[Req], lengths: Sequence[int]) -> list[DraftedTokens | None]:
        return [DraftedTokens(self._tokens[:length], MIN_MATCH) for length in lengths]

    def observe(self, req: Req) -> bool:
        return False

    def prepare(self, batch: ForwardBatch, *, drafted: bool, needed: bool) -> None: ...

    def replay(self, req: Req, count: int) -> None: ...

    def estimate_replay_seconds(self, req: Req) -> float:
        return 0.0

    def estimate_seconds(self, num_reqs: int, length: int) -> float:
        return 0.0


@contextmanager
def accept(count: int) -> Iterator[None]:
    """Accept the first ``count`` drafts of each request, whatever was sampled."""
    found = scheduling.find_accepted_drafts

    def accept_first(drafts_D: DraftRows, tokens_D: np.ndarray) -> np.ndarray:
        return drafts_D.offsets <= count

    scheduling.find_accepted_drafts = accept_first
    try:
        yield
    finally:
        scheduling.find_accepted_drafts = found


class Engine:
    """An engine with weights, and how long it takes for requests."""

    def __init__(self, spec: Any, weights: dict[str, torch.Tensor], **options: Any) -> None:
        like = next(iter(weights.values()))
        self._run = ThreadExecutor("engine")
        self.engine = NativeEngine(
            spec,
            device=like.device,
            dtype=like.dtype,
            config=NativeConfig(**options),
            run=self._run,
            decode=None,
        )
        self._publication = Publication(
            weights=lambda: weights, engines=[self.engine], transport="shared", run=self._run
        )

    def measure(self, prompts: Prompts, *, warm_up: bool = False) -> tuple[float, dict[str, float], int]:
        """Return the seconds, what the engine counted, and the sampled tokens."""

        async def generate() -> tuple[float, dict[str, float], int]:
            await self._publication.publish(Version())
            if warm_up:
                await self.engine.warm_up()
            before, started = dict(self.engine.stats()), time.perf_counter()
            answers = await asyncio.gather(*(self.engine.generate(tokens, how) for tokens, how in prompts))
            seconds = time.perf_counter() - started
            counted = {name: value - before[name] for name, value in self.engine.stats().items()}
            return seconds, counted, sum(len(span.tokens) for answer in answers for span in answer.spans)

        with reduce_gc():
            return asyncio.run(generate())

    def close(self) -> None:
        asyncio.run(self.engine.close())
        self._run.close()


def build_random(model: str) -> tuple[Any, dict[str, torch.Tensor]]:
    config = find_known_config(model)
    assert config is not None, f"{model} is not among the published shapes"
    spec = spec_from_config(config)
    decoder = Decoder(spec, device=detect_platform("auto").device, dtype=torch.bfloat16)
    for parameter in decoder.parameters():
        parameter.data.normal_(std=0.02)
    return spec, {name: parameter.detach() for name, parameter in decoder.named_parameters()}


def make_prompts(count: int, prompt: int, lengths: Sequence[int]) -> Prompts:
    random = np.random.default_rng(0)
    return [
        (
            random.integers(0, 10_000, prompt).astype(np.int32),
            SamplingParams(max_new_tokens=lengths[i], ignore_eos=True, seed=i),
        )
        for i in range(count)
    ]


def measure_imposed(models: Sequence[str], batches: Sequence[int], new: int) -> None:
    print(f"{'model':16} {'batch':>5} {'none':>9} " + " ".join(f"{f'{n} tokens':>17}" for n in (2, 3, 4)))
    for model in models:
        spec, weights = build_random(model)
        limits = {"engine_kv_tokens": max(batches) * (256 + new + 64), "engine_max_running": max(256, 5 * max(batches))}
        plain = Engine(spec, weights, **limits)
        drafting = {tokens: _build_imposed(spec, weights, limits, tokens) for tokens in (2, 3, 4)}
        for batch in batches:
            prompts = make_prompts(batch, 256, [new] * batch)
            plain.measure(prompts, warm_up=True)
            rate = _rate(plain.measure(prompts))
            cells = []
            for tokens, engine in drafting.items():
                with accept(tokens - 1):
                    engine.measure(prompts)
                    found = _rate(engine.measure(prompts))
                cells.append(f"{found:9.0f} {found / rate:6.2f}x")
            print(f"{model:16} {batch:5} {rate:9.0f} " + " ".join(cells), flush=True)
        for engine in (plain, *drafting.values()):
            engine.close()
        del plain, drafting, weights
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _build_imposed(spec: Any, weights: dict[str, torch.Tensor], limits: dict[str, Any], tokens: int) -> Engine:
    engine = Engine(
        spec,
        weights,
        **limits,
        speculative_algorithm="ngram",
        speculative_num_draft_tokens=tokens,
        speculative_adaptive=False,
    )
    assert engine.engine._speculation is not None
    engine.engine._speculation._drafter = RandomDrafter(spec.vocab_size)
    return engine


def measure_tail(models: Sequence[str]) -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(6.0, 1.0, 256).astype(int) + 1, 8192).tolist()
    for model in models:
        spec, weights = build_random(model)
        limits = {"engine_kv_tokens": 420_000, "engine_max_running": 256}
        prompts = make_prompts(256, 256, lengths)
        plain = Engine(spec, weights, **limits)
        plain.measure(prompts[:8], warm_up=True)
        seconds, _, tokens = plain.measure(prompts)
        plain.close()
        drafting = _build_imposed(spec, weights, limits, 3)
        assert drafting.engine._speculation is not None
        drafting.engine._speculation._adaptive = True
        with accept(2):
            drafting.measure(prompts[:8], warm_up=True)
            with_drafts, counted, _ = drafting.measure(prompts)
        drafting.close()
        share = counted["speculative_steps"] / counted["steps"]
        print(f"{model}: {tokens} tokens, longest {max(lengths)}: {seconds:.2f} s without, {with_drafts:.2f} s with")
        print(f"  ({seconds / with_drafts:.2f} times; {share:.0%} of the steps had drafts)", flush=True)


def measure_run(folder: Path, epochs: int, samples: int) -> None:
    checkpoint = max((folder / "checkpoints").iterdir())
    weights_folder = checkpoint / "hf" if (checkpoint / "hf").is_dir() else checkpoint
    model = hf.load(weights_folder, device=detect_platform("auto").device, dtype=torch.float32)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    last = max((folder / "rollouts").glob("step-*.parquet"))
    groups = read_step_rollouts(last).groups
    prompts = [next(group.trajectories[0].spans).tokens for group in groups]
    longest = max(trajectory.response_length for group in groups for trajectory in group.trajectories)
    engines = {
        "none": Engine(model.spec, weights, engine_kv_tokens=100_000),
        "ngram": Engine(model.spec, weights, engine_kv_tokens=100_000, speculative_algorithm="ngram"),
    }
    print(f"{len(prompts)} prompts of {last.name} x {samples}, at most {longest} tokens")
    for epoch in range(epochs):
        requests = [
            (tokens, SamplingParams(max_new_tokens=longest, seed=1000 * epoch + i))
            for tokens in prompts
            for i in range(samples)
        ]
        rates = {}
        for name, engine in engines.items():
            found = engine.measure(requests)
            rates[name] = _rate(found)
            drafted, chains = found[1].get("drafted_tokens", 0), found[1].get("draft_chains", 0)
            accepted = found[1].get("accepted_draft_tokens", 0)
            print(
                f"epoch {epoch + 1} {name:6} {rates[name]:8.0f} tok/s, {found[1]['steps']:.0f} steps"
                + (f", {1 + accepted / chains:.2f} tokens a verification of {drafted / chains:.1f}" if chains else "")
            )
        print(f"epoch {epoch + 1} ratio  {rates['ngram'] / rates['none']:.2f}", flush=True)


def time_speculation(speculation: Speculation | None, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Return a list that gets the seconds of every call from the scheduler to an engine's speculation."""
    seconds = list[float]()
    assert speculation is not None

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = clock()
            try:
                return method(*args, **options)
            finally:
                seconds.append(clock() - began)

        return timed

    # Not choose_length, which the others call too: its result is cached.
    for name in ("propose", "prepare", "measure", "record", "observe"):
        setattr(speculation, name, wrap(getattr(speculation, name)))
    return seconds


def measure_overhead(batches: Sequence[int], new: int, rounds: int) -> None:
    """CPU time, not wall time: another process on the machine must not count."""
    config = {
        "model_type": "qwen3",
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 32_000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    spec = spec_from_config(config)
    model = hf.init_random(spec, seed=0, device="cpu", dtype=torch.float32)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for batch in batches:
        limits = {"engine_kv_tokens": batch * (new + 128), "engine_max_running": 256}
        engines = {name: Engine(spec, weights, **limits, speculative_algorithm=name) for name in ("none", "ngram")}
        own_seconds = time_speculation(engines["ngram"].engine._speculation)
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        steps: dict[str, float] = {}
        prompts = make_prompts(batch, 64, [new] * batch)
        for number in range(rounds + 1):
            order = list(engines) if number % 2 else list(engines)[::-1]
            for name in order:
                other = [(tokens + number, how) for tokens, how in prompts]  # no prompt a second time
                began = time.process_time()
                _, counted, _ = engines[name].measure(other)
                if number:  # the first round warms up
                    seconds[name].append(time.process_time() - began)
                steps[name] = counted["steps"]
        ratios = sorted(drafts / none for drafts, none in zip(seconds["ngram"], seconds["none"], strict=True))
        share = sum(own_seconds) / engines["ngram"].engine.stats()["seconds"]
        each = sorted(seconds["none"])[rounds // 2] / steps["none"] * 1e3
        print(
            f"batch {batch:3}: {each:6.2f} CPU ms a step; with n-gram drafts {ratios[rounds // 2]:.3f} times "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f}), {share:.2%} of the step time on drafts",
            flush=True,
        )
        for engine in engines.values():
            engine.close()


class SimulatedGpu:
    """Runs steps one after the other for as long as ``cost`` says; the host's own time is its CPU time.

    A token is a function of its request's seed and its position.
    """

    def __init__(self, cost: StepCost, vocab_size: int) -> None:
        self._cost = cost
        self._vocab_size = vocab_size
        self._waited = 0.0
        self._free_at = 0.0

    def now(self) -> float:
        return time.thread_time() + self._waited

    def launch(self, batch: ForwardBatch) -> SimulatedStep:
        tokens_D = (batch.sampling.uniform_D * self._vocab_size).astype(np.int64)
        self._free_at = max(self.now(), self._free_at) + self._cost(len(batch.tokens_T))
        return SimulatedStep(self, self._free_at, tokens_D)

    def clear(self) -> None: ...

    def wait(self, until: float) -> None:
        self._waited += max(0.0, until - self.now())


class SimulatedStep:
    def __init__(self, gpu: SimulatedGpu, done_at: float, tokens_D: np.ndarray) -> None:
        self._gpu = gpu
        self._done_at = done_at
        self._tokens_D = tokens_D

    def result(self) -> StepOutput:
        self._gpu.wait(self._done_at)
        return StepOutput(tokens_D=self._tokens_D, logprobs_D=np.full(len(self._tokens_D), -1.0, np.float32))


class CountingSteps(InflightSteps):
    """Counts the steps that waited for the output of the last one."""

    waits = 0

    def _must_drain(self) -> bool:
        must = super()._must_drain()
        self.waits += must
        return must


def _measure_clock(count: int = 10_000) -> float:
    """Return what reading the clock adds to the time between two readings."""
    readings = [time.thread_time() for _ in range(count)]
    return (readings[-1] - readings[0]) / (count - 1)


class SimulatedEngine:
    """The scheduler of an engine for a published shape, over a simulated GPU.

    With ``timed`` the calls to its speculation are timed, which itself takes the host some time.
    """

    def __init__(self, spec: Any, algorithm: str, *, timed: bool = False) -> None:
        platform = Platform(kind="cuda", device=torch.device("cpu"), name="simulated", memory_bytes=0)
        config = NativeConfig(speculative_algorithm=algorithm)  # pyright: ignore[reportArgumentType]
        self._pages = PageAllocator(420_000 // config.engine_page_size, config.engine_page_size, share=True)
        slots = ReqSlots(config.max_running, -(-spec.max_positions // config.engine_page_size), spec.vocab_size)
        self.speculation = build_speculation(spec, config, platform, torch.bfloat16)
        self.own_seconds = time_speculation(self.speculation, time.thread_time) if timed else []
        self._scheduler = Scheduler(
            RunningBatch(self._pages, slots, share_prefill=True),
            prefill_chunk=8192,
            decode=None,
            prefill_delay=config.engine_prefill_delay_steps or 0,
            speculation=self.speculation,
        )
        self._steps = CountingSteps(self._scheduler, 1)
        self._validator = RequestValidator("simulated", spec, 420_000, lambda _: None, has_tokenizer=False)
        self._clock_seconds = _measure_clock()
        self._gpu = SimulatedGpu(estimate_step_cost(spec, platform, "bfloat16"), spec.vocab_size)

    def measure(self, prompts: Prompts) -> dict[str, float]:
        """Return tokens a second, the host's milliseconds a step, the share of drafts in it, and steps that waited."""
        for tokens, sampling in prompts:
            req = self._validator.create_req(GenerateRequest(tokens=tokens, sampling=sampling), 0.0)
            req.accepted_drafts = []
            self._scheduler.submit(req)
        self.own_seconds.clear()
        before, began, busy = self._scheduler.counters.steps, self._gpu.now(), time.thread_time()
        waits, ended = self._steps.waits, 0
        while ended < len(prompts):
            ended += len(self._steps.run_step(self._gpu, Version()))
        busy, seconds = time.thread_time() - busy, self._gpu.now() - began
        own = sum(self.own_seconds) - len(self.own_seconds) * self._clock_seconds
        steps = self._scheduler.counters.steps - before
        self._pages.flush()
        return {
            "rate": sum(sampling.max_new_tokens for _, sampling in prompts) / seconds,
            "host_ms": busy / steps * 1e3,
            "share": own / busy,
            "waits": (self._steps.waits - waits) / steps,
        }


def make_workload(name: str, number: int) -> Prompts:
    """The requests of a round; with "again" in four of five those of the first round, and new ones otherwise."""
    prompts, lengths = workload(name.partition(",")[0])
    again = "again" in name
    return [
        (
            np.array(prompt, np.int32) + (0 if again else number),
            SamplingParams(
                max_new_tokens=length, ignore_eos=True, seed=i if again and i % 5 else i + len(prompts) * number
            ),
        )
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def measure_simulated(models: Sequence[str], rounds: int) -> None:
    for model, name in product(models, ("W", "GRPO", "W, again", "GRPO, again")):
        config = find_known_config(model)
        assert config is not None, f"{model} is not among the published shapes"
        spec = spec_from_config(config)
        engines = {algorithm: SimulatedEngine(spec, algorithm) for algorithm in ("none", "ngram")}
        engines["timed"] = SimulatedEngine(spec, "ngram", timed=True)
        found: dict[str, list[dict[str, float]]] = {algorithm: [] for algorithm in engines}
        for number in range(rounds + 1):
            for algorithm in list(engines) if number % 2 else list(engines)[::-1]:
                result = engines[algorithm].measure(make_workload(name, number))
                found[algorithm] += [result] if number else []  # the first round warms up
        middle = {
            (algorithm, key): sorted(result[key] for result in results)[rounds // 2]
            for algorithm, results in found.items()
            for key in results[0]
        }
        pairs = zip(found["ngram"], found["none"], strict=True)
        host = sorted(drafts["host_ms"] / none["host_ms"] for drafts, none in pairs)[rounds // 2]
        rates = middle["none", "rate"], middle["ngram", "rate"]
        print(
            f"{model} {name:11}: host {middle['none', 'host_ms']:.3f} ms a step without drafts, {host:.3f} times with, "
            f"{middle['timed', 'share']:.2%} of it on drafts; {middle['ngram', 'waits']:.1%} of the steps waited; "
            f"{rates[0]:,.0f} tok/s without, {rates[1]:,.0f} with ({rates[1] / rates[0]:.3f} times)",
            flush=True,
        )


def _rate(found: tuple[float, dict[str, float], int]) -> float:
    seconds, _, tokens = found
    return tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("imposed", "run", "tail", "overhead", "simulated"))
    parser.add_argument("run", nargs="?", type=Path, help="run directory of the part run")
    parser.add_argument("--models", nargs="+", default=["Qwen3-8B"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8, 16, 32, 64, 256])
    parser.add_argument("--new", type=int, default=256, help="tokens of a response")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7, help="turns of the parts overhead and simulated")
    args = parser.parse_args()
    if args.part == "imposed":
        measure_imposed(args.models, args.batches, args.new)
    elif args.part == "tail":
        measure_tail(args.models)
    elif args.part == "simulated":
        measure_simulated(args.models, args.rounds)
    elif args.part == "overhead":
        measure_overhead(args.batches, args.new, args.rounds)
    else:
        measure_run(args.run, args.epochs, args.samples)


if __name__ == "__main__":
    main()
