"""Simulation for ``bench_scale.py``: engines and a trainer that only wait, on a clock that jumps to the next event.

Everything between them is real: loop, admission, reorder buffer, rollout, engine pool, clients, publication, logs. A
simulated server answers as ``miles serve`` would, after a time sampled from a log-normal by the trajectory's seed, and
checks the digests of the weights it receives if it is one of those that ``prove``.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import math
import selectors
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load

from miles.algo.config import AlgoConfig
from miles.algo.registry import build_advantage_estimator
from miles.backends.remote.client import PauseMode, SglangClient, loads
from miles.backends.remote.pool.engine_pool import EnginePool
from miles.backends.remote.response import GenerateResponse
from miles.backends.remote.transports.senders import HttpTransport
from miles.backends.remote.weight_update import RemoteWeightUpdate
from miles.cluster.executor import InlineExecutor
from miles.core.events import Event
from miles.core.protocols import OnTokens, SamplingParams
from miles.core.types import Batch, Prompt, Reward, StepReport, Tokens, Trajectory, Version
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.observe.event_bus import EventBus
from miles.observe.log import RunLogs
from miles.observe.metric import group_metrics
from miles.rollout.data.dataset import Dataset, DatasetSource
from miles.rollout.filters import nonzero_std
from miles.rollout.generate.single_turn import SingleTurn
from miles.rollout.group_rollout import GroupRollout
from miles.rollout.seeds import make_training_seed_fn, mix
from miles.schedule.admission import compute_admission_slots
from miles.schedule.checkpoints import CheckpointDirectory
from miles.schedule.device_lease import DisjointLease
from miles.schedule.loop import Loop, LoopSettings, Planes
from miles.sync.manifest import compute_digest

_VOCABULARY = 32_000
_END = 2
_CONTROL = 0.002  # seconds a server takes for a word that is no work
_REWARD = 0.05  # mean seconds of a reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of everything. ``inside`` counts trajectories between the gate and the weights trained on them.

    ``overtake`` is how many steps' worth of groups may overtake a late one, ``seconds`` what an attempt takes on
    average, ``longest`` how many times as much one may take, ``mode`` what new weights do to requests under way.
    """

    engines: int = 16
    inside: int = 2048
    steps: int = 6
    staleness: int = 4
    overtake: int = 1
    attempts: int = 8
    tokens: int = 32
    seconds: float = 60.0
    sigma: float = 1.0
    longest: int = 8
    tensors: int = 400
    prove: int = 2
    mode: PauseMode = "abort"
    seed: int = 0

    @property
    def groups_per_step(self) -> int:
        return self.inside // self.attempts // (1 + self.staleness - self.overtake)

    @property
    def window(self) -> int:
        return self.overtake * self.groups_per_step + 1

    @property
    def limit(self) -> int:
        """Most tokens of an attempt."""
        return self.longest * self.tokens

    @property
    def admission_slots(self) -> int:
        """Groups that may be inside at once."""
        return compute_admission_slots(
            groups_per_step=self.groups_per_step, max_staleness=self.staleness, window=self.window
        )


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop on a clock of its own: where nothing is left to do now, it is the time of what is due next."""

    def __init__(self) -> None:
        selector = selectors.DefaultSelector()
        self._look, self._now = selector.select, 0.0
        self._due: list[tuple[float, int, asyncio.Future[bool]]] = []
        self._count = itertools.count()
        selector.select = self._jump
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def after(self, seconds: float) -> asyncio.Future[bool]:
        """True so many seconds from now; whoever cannot wait for that may settle it before."""
        future: asyncio.Future[bool] = self.create_future()
        heapq.heappush(self._due, (self._now + seconds, next(self._count), future))
        return future

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Work takes no simulated time, and is done here, where what it costs is counted."""
        future = self.create_future()
        future.set_result(func(*args))
        return future

    def _jump(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout > 0:
            while self._due and self._due[0][2].done():
                heapq.heappop(self._due)
            assert self._due or timeout is not None, "everyone waits and nothing is due"
            timer = math.inf if timeout is None else self._now + timeout
            if self._due and self._due[0][0] <= timer:
                self._now, _, future = heapq.heappop(self._due)
                future.set_result(True)
            else:
                self._now = timer
        return self._look(0)


class SimulatedServer(SglangClient):
    """The client of a server that is not there: what goes out is put together as ever, what comes is made up."""

    def __init__(self, world: World, name: str, *, proves: bool) -> None:
        super().__init__("http://simulated", name, vocab_size=_VOCABULARY)
        self._world, self._proves = world, proves
        self._answers: set[asyncio.Future[bool]] = set()
        self._label = "none"
        self._committed: list[tuple[float, str]] = []
        self._going = asyncio.Event()
        self._going.set()
        self._held: dict[str, int] = {}
        self.busy = 0.0

    async def _stream(self, body: dict[str, Any], response: GenerateResponse, on_tokens: OnTokens) -> None:
        world, how = self._world, body["sampling_params"]
        left = world.length(how["sampling_seed"]) - how.get("sampling_drawn", 0)
        seconds = left * world.size.seconds / world.size.tokens
        began, completed = world.loop.time(), world.loop.after(seconds)
        self._answers.add(completed)
        world.busy(+1)
        try:
            whole = await completed
            await self._going.wait()  # what is kept while weights come is not told before they are there
        finally:
            self._answers.discard(completed)
            world.busy(-1)
        done = world.loop.time() - began
        self.busy += done
        written = left if whole else min(left - 1, int(left * done / seconds))
        reported = loads(world.build_stream(written, "stop" if whole else "abort", self._label))
        if body.get("return_weight_versions"):
            reported["meta_info"]["weight_versions"] = self._runs(began, written, seconds / left)
        response.add_event(reported)
        on_tokens(response.tokens)

    def _runs(self, began: float, written: int, each: float) -> list[list[Any]]:
        """Which weights drew how many of so many tokens, at ``each`` so many seconds."""
        marks = [(min(written, max(0, int((at - began) / each))), label) for at, label in self._committed]
        stops = [*(start for start, _ in marks[1:]), written]
        return [[label, end - at] for (at, label), end in zip(marks, stops, strict=True) if end > at]

    async def request(self, method: str, path: str, body: Any = None, *, seconds: float = 60.0, **how: Any) -> Any:
        data = how.get("data")
        raw = data or (body if isinstance(body, bytes) else json.dumps(body).encode())
        self._world.sent[path] += len(raw)
        async with asyncio.timeout(seconds):
            await self._world.loop.after(_CONTROL)
        if (path, body) == ("/pause_generation", {"mode": "abort"}):
            for answer in self._answers:
                if not answer.done():
                    answer.set_result(False)
        elif path == "/pause_generation":
            self._going.clear()
        elif path == "/continue_generation":
            self._going.set()
        return self._build_response(path, body, data)

    def _build_response(self, path: str, body: Any, data: bytes | None) -> Any:
        if path == "/model_info":
            return {"model_path": "simulated", "weight_version": self._label}
        if path == "/v1/models":
            return {"data": [{"owned_by": "miles"}]}
        if path.endswith("/bucket") and self._proves and data is not None:
            self._held |= {name: compute_digest(tensor) for name, tensor in load(data).items()}
        if path.endswith("/weights_publication"):
            body = loads(body) if isinstance(body, bytes) else body
            match body["action"]:
                case "verify" if self._proves:
                    asked = {name: int(number) for name, number in body["digests"].items()}
                    return {"verified": sum(self._held.get(name) == number for name, number in asked.items())}
                case "verify":
                    return {"verified": len(body["digests"])}
                case "commit":
                    self._label = body["weight_version"]
                    self._committed = [*self._committed[-8:], (self._world.loop.time(), self._label)]
        return {}


@dataclass(slots=True)
class Seen:
    """What a run was, for whoever holds it to its promises."""

    trained: Counter[tuple[int, int]] = field(default_factory=Counter)
    stalest: int = 0
    most_inside: int = 0
    most_under_way: int = 0
    events: int = 0
    groups: int = 0
    dropped: int = 0
    steps: int = 0


class World:
    """All planes of one run, and what was seen of it."""

    def __init__(self, size: Size, folder: Path, loop: JumpingLoop) -> None:
        self.size, self.loop, self.seen = size, loop, Seen()
        self.sent: Counter[str] = Counter()
        self._under_way, self._inside, self._version = 0, 0, 0
        self._training = 0.0
        self._replies: dict[tuple[int, str], bytes] = {}
        self._asked: dict[int, Tokens] = {}
        self.folder = folder
        self.pool = EnginePool(
            [f"engine {i:04d}" for i in range(size.engines)], eos_token_ids=frozenset([_END]), mode=size.mode
        )
        self.servers = [SimulatedServer(self, s.name, proves=i < size.prove) for i, s in enumerate(self.pool.slots)]
        weights = {f"layers.{i}.weight": torch.full((16,), float(i)) for i in range(size.tensors)}
        self.sync = RemoteWeightUpdate(
            self.pool,
            weights=lambda: weights,
            spec=_nameless(),
            transport=HttpTransport(),
            executor=InlineExecutor(),
            bucket_bytes=size.tensors * 16,
            seconds=600.0,
        )
        self.logs = RunLogs(folder, resume_at=None, strict=False, clock=loop.time)
        self.planes = self._planes(folder)

    def _planes(self, folder: Path) -> Planes:
        size = self.size
        count = min(100_000, size.steps * size.groups_per_step + size.admission_slots)
        prompts = tuple(Prompt(id=i, messages=({"role": "user", "content": str(i)},)) for i in range(count))
        producer = GroupRollout(
            engine=self.pool,
            generate=SingleTurn(self._render, lambda ids: ""),
            sampling=SamplingParams(max_new_tokens=size.limit),
            allow_duplicates=True,  # simulated tokens depend on the context alone
            group_size=size.attempts,
            seed_fn=make_training_seed_fn(size.seed),
            reward=self._reward,
        )
        return Planes(
            source=DatasetSource(Dataset(path="simulated", prompts=prompts), shuffle=True, seed=size.seed),
            rollout=producer,
            group_filter=nonzero_std,
            estimator=build_advantage_estimator(AlgoConfig(), response_limit=size.limit),
            trainer=self,
            sync=self.sync,
            lease=DisjointLease(),
            evaluate=None,
            checkpoints=CheckpointDirectory(folder / "checkpoints"),
            journal=_CountingEventBus(EventBus(self.logs), self),
            measure=group_metrics,
        )

    async def run(self) -> None:
        """The whole run, from the servers' joining on."""
        for slot, server in zip(self.pool.slots, self.servers, strict=True):
            await self.sync.join(slot, server)
        size = self.size
        tempo = LoopSettings(
            steps=size.steps,
            groups_per_step=size.groups_per_step,
            max_staleness=size.staleness,
            window=size.window,
            stall_timeout=1e9,
        )
        await Loop(self.planes, tempo).run()
        self.logs.close()

    # -- what is simulated ------------------------------------------------------------------

    def length(self, seed: int) -> int:
        """Tokens of an attempt: log-normal, with the mean that was asked for."""
        size, chance = self.size, (mix(seed) >> 11) / (1 << 53)
        normal = math.sqrt(2) * _inverse_erf(2 * chance - 1)
        return int(min(max(size.tokens * math.exp(size.sigma * normal - size.sigma**2 / 2), 1), size.limit))

    def build_stream(self, tokens: int, reason: str, label: str) -> bytes:
        """What a server streams of an answer, all in one piece."""
        if (tokens, reason) not in self._replies:
            ids = [3 + i % 1000 for i in range(tokens)]
            meta = {
                "completion_tokens": tokens,
                "output_token_logprobs": [[-0.5, token, None] for token in ids],
                "finish_reason": {"type": reason},
                "weight_version": "LABEL",
                "cached_tokens": 0,
            }
            self._replies[tokens, reason] = json.dumps({"output_ids": ids, "meta_info": meta}).encode()
        return self._replies[tokens, reason].replace(b"LABEL", label.encode())

    def busy(self, change: int) -> None:
        self._under_way += change
        self.seen.most_under_way = max(self.seen.most_under_way, self._under_way)

    def _render(self, prompt: Prompt) -> Tokens:
        if prompt.id not in self._asked:
            self._asked[prompt.id] = np.array([3 + (prompt.id >> shift) % 256 for shift in range(32)], np.int32)
        return self._asked[prompt.id]

    async def _reward(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        chance = (mix(prompt.id, prompt.epoch, trajectory.index) >> 11) / (1 << 53)
        await self.loop.after(-_REWARD * math.log(1 - chance))
        return Reward(value=float(chance < 0.5))

    async def step(self, batch: Batch) -> StepReport:
        now = Version(number=self._version)
        self.seen.stalest = max(self.seen.stalest, batch.staleness(now))
        for sample in batch.samples:
            self.seen.trained[sample.prompt_id, sample.trajectory] += 1
        # a trainer that keeps up with the engines when these are as busy as on average
        seconds = 0.8 * self.size.seconds * len(batch.samples) / self.size.inside
        await self.loop.after(seconds)
        self._training += seconds
        self._version += 1
        self.seen.steps += 1
        return StepReport(version=Version(number=self._version))

    async def save(self, folder: Path) -> None:
        (folder / "weights").write_text(str(self._version))

    async def load(self, folder: Path) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...

    # -- what is seen -----------------------------------------------------------------------

    def on_tokens(self, event: Event) -> None:
        seen, kind = self.seen, type(event).__name__
        seen.events += 1
        if kind == "PromptAdmitted":
            self._inside += 1
            seen.most_inside = max(seen.most_inside, self._inside)
        elif kind == "GroupFinished" and not event.kept:  # pyright: ignore[reportAttributeAccessIssue]
            self._inside -= 1
            seen.dropped += 1
        elif kind == "StepFinished":
            self._inside -= self.size.groups_per_step
        seen.groups += kind == "GroupFinished"

    def utilisation(self) -> Mapping[str, float]:
        """Of simulated time: requests a busy engine has on average over the most it had room for, and training."""
        span = self.loop.time()
        room = span * self.size.engines * max(1.0, self.size.inside / self.size.engines)
        return {"engines": sum(s.busy for s in self.servers) / room, "trainer": self._training / span, "span": span}


class _CountingEventBus:
    """The journal, and someone who counts."""

    def __init__(self, journal: EventBus, world: World) -> None:
        self._journal, self._world = journal, world
        self.commit, self.offsets = journal.commit, journal.offsets

    def __call__(self, event: Event) -> None:
        self._journal(event)
        self._world.on_tokens(event)


def _nameless() -> HfAdapterSpec:
    """Tensors are published under the names they have, and there are no adapters."""
    spec = object.__new__(HfAdapterSpec)
    object.__setattr__(spec, "adapters", None)
    return spec


def _inverse_erf(x: float) -> float:
    """Winitzki's approximation, good to 2 in 1,000."""
    logarithm = math.log(max(1e-300, 1 - x * x))
    middle = 2 / (math.pi * 0.147) + logarithm / 2
    return math.copysign(math.sqrt(math.sqrt(middle**2 - logarithm / 0.147) - middle), x)
