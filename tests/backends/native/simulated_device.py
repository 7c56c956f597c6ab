"""A scheduler with a simulated device that stores for which prefix each cache location and state was written."""

from collections import Counter
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np

from miles.backends.native.engine.forward_batch import (
    ForwardBatch,
    ScheduledStep,
    StepOutput,
    compute_cache_locs,
    compute_positions,
    compute_rope_positions,
)
from miles.backends.native.engine.ngram_draft import NgramDrafter
from miles.backends.native.engine.prefix_cache import PageAllocator
from miles.backends.native.engine.req import Req
from miles.backends.native.engine.req_slots import ReqSlots
from miles.backends.native.engine.request import GenerateRequest
from miles.backends.native.engine.running_batch import RunningBatch
from miles.backends.native.engine.scheduler import PrefillDelay, Scheduler
from miles.backends.native.engine.speculation import Speculation
from miles.backends.native.engine.step_cost import StepCost
from miles.backends.native.engine.vision import PromptImages, place_images
from miles.core.media import PlacedImage, make_image_input
from miles.core.protocols import SamplingParams
from miles.core.types import Version

PLACEHOLDER = 902
# Elements of prompts that are images, and their tokens; 903 is a separator.
IMAGE_TOKENS = {990: [902, 902], 991: [902, 902], 992: [902, 903, 902, 902]}
VISION_SPEC = SimpleNamespace(
    vision=SimpleNamespace(
        image_token_id=PLACEHOLDER, video_token_id=None, positions="sequential", bidirectional_spans=False
    )
)


def expand(prompt) -> tuple[list[int], PromptImages | None]:
    """The tokens of a prompt and its images, with positions on three axes that are not those of the tokens."""
    tokens, places, positions, position = [], [], [], 0
    for element in prompt:
        run = IMAGE_TOKENS.get(element, [element])
        if element in IMAGE_TOKENS:
            image = make_image_input({"pixels": np.array([element])}, run.count(PLACEHOLDER))
            places.append(PlacedImage(start=len(tokens), length=len(run), image=image))
            positions += [(position, position + i // 2, position + i % 2) for i in range(len(run))]
        else:
            positions.append((position, position, position))
        tokens += run
        position += -(-len(run) // 2)
    if not places:
        return tokens, None
    images = place_images(VISION_SPEC, np.array(tokens, np.int64), places)
    rope = np.array(positions, np.int64).T
    return tokens, replace(images, rope_positions_3T=rope, rope_offset=position - len(tokens))


def content_of(req):
    """Tokens, and in place of placeholders the image and the feature that are there."""
    content = list(req.tokens)
    for placed in () if req.images is None else req.images.images:
        feature = count()
        for at in range(placed.start, placed.end):
            if content[at] == PLACEHOLDER:
                content[at] = name_feature(placed.image, next(feature))
    return tuple(content)


def name_feature(image, feature):
    return int(image.digest[:12], 16), feature


def sample_after(prefix):
    """A deterministic function of the prefix, nearly always 0 so that prefixes coincide."""
    return int(hash(prefix) % 11 == 0)


def score_after(prefix, token):
    return float(hash((prefix, token)) % 1000)


class Device:
    """Runs batches in order, storing prefixes instead of keys, values and states."""

    def __init__(self, pages, size, num_slots, recurrent, num_draft_states=0):
        self.size, self.recurrent = size, recurrent
        self.cache_locs = [None] * (pages * size)
        self.states = [None] * (num_slots + num_draft_states)
        self.last_tokens = [None] * num_slots

    def launch(self, batch: ForwardBatch, version: int, born: list[int]) -> StepOutput:
        self.copy(batch)
        tokens, cache_locs = (
            batch.tokens_T.tolist(),
            compute_cache_locs(batch, compute_positions(batch), self.size).tolist(),
        )
        if batch.vision is not None:
            names = [
                name_feature(image, first + i)
                for image, first, length in zip(
                    batch.vision.images, batch.vision.first_J.tolist(), batch.vision.count_J.tolist(), strict=True
                )
                for i in range(length)
            ]
            for row, name in zip(batch.vision.token_I.tolist(), names, strict=True):
                assert tokens[row] == PLACEHOLDER
                tokens[row] = name
        assert PLACEHOLDER not in tokens
        assert batch.vision is None or not batch.decode_only
        rows, row = [], 0
        columns = (column.tolist() for column in (batch.req_slots_B, batch.starts_B, batch.counts_B))
        for slot, start, length in zip(*columns, strict=True):
            new = [self.last_tokens[slot] if token == -1 else token for token in tokens[row : row + length]]
            rows.append((slot, start, new, cache_locs[row : row + length]))
            row += length
        # A step writes before it reads: rows may continue what others of the same step write.
        prefixes = {b: self.write(batch, b, *rows[b], version) for b in np.argsort(batch.starts_B).tolist()}
        if self.recurrent:
            self.advance_states(batch, [prefixes[b] for b in range(len(rows))])
        self.check_reads(batch, rows, born)
        everything = [prefix for b in range(len(rows)) for prefix in prefixes[b]]
        tokens_out = [sample_after(everything[row]) for row in batch.rows_D]
        for slot, token in zip(batch.req_slots_D.tolist(), tokens_out, strict=True):
            self.last_tokens[slot] = token
        scores = None
        if batch.prompt_scoring is not None:
            pairs = zip(batch.prompt_scoring.rows_N.tolist(), batch.prompt_scoring.tokens_N.tolist(), strict=True)
            scores = np.array([score_after(everything[row], token) for row, token in pairs], np.float32)
        return StepOutput(
            tokens_D=np.array(tokens_out, np.int64),
            logprobs_D=np.zeros(len(tokens_out), np.float32),
            prompt_logprobs_N=scores,
        )

    def copy(self, batch: ForwardBatch):
        cache_locs, states, size = list(self.cache_locs), list(self.states), self.size
        for source, target in zip(*(side.tolist() for side in batch.page_copies), strict=True):
            self.cache_locs[target * size : (target + 1) * size] = cache_locs[source * size : (source + 1) * size]
        for source, target in zip(*(side.tolist() for side in batch.state_copies), strict=True):
            self.states[target] = states[source]

    def write(self, batch, b, slot, start, new, cache_locs, version):
        """Every new token continues the prefix stored before it."""
        before = batch.block_table_BM[b, (start - 1) // self.size] * self.size + (start - 1) % self.size
        prefix = self.cache_locs[before][0] if start else ()
        assert len(prefix) == start
        prefixes = [(*prefix, *new[: i + 1]) for i in range(len(new))]
        for loc, written in zip(cache_locs, prefixes, strict=True):
            self.cache_locs[loc] = (written, version)
        return prefixes

    def advance_states(self, batch, prefixes):
        """Every sequence reads the state of its prefix, all of one depth before any of them writes."""
        reads_B = writes_B = batch.req_slots_B
        depths_B = np.zeros_like(reads_B)
        if batch.draft_states is not None:
            reads_B, writes_B, depths_B = (
                batch.draft_states.reads_B,
                batch.draft_states.writes_B,
                batch.draft_states.depths_B,
            )
        for depth in range(int(depths_B.max(initial=0)) + 1):
            level = (depths_B == depth).nonzero()[0].tolist()
            for b in level:
                before = prefixes[b][0][:-1]
                assert (self.states[reads_B[b]] if before else ()) == before
            assert len({int(writes_B[b]) for b in level}) == len(level)
            for b in level:
                self.states[writes_B[b]] = prefixes[b][-1]

    def check_reads(self, batch, rows, born):
        """Every location a query reads was written for its prefix, and not under weights older than the request."""
        for b, (_, start, new, cache_locs) in enumerate(rows):
            full = self.cache_locs[cache_locs[-1]][0]
            for position in range(start + len(new)):
                loc = batch.block_table_BM[b, position // self.size] * self.size + position % self.size
                prefix, version = self.cache_locs[loc]
                assert prefix == full[: position + 1]
                assert version >= born[b]
        for b in range(1, batch.num_decodes):
            if batch.group_B[b] == batch.group_B[b - 1] >= 0:
                shared = int(batch.shared_B[b])
                assert shared == batch.shared_B[b - 1] > 0
                assert self.cache_locs[rows[b][3][0]][0][:shared] == self.cache_locs[rows[b - 1][3][0]][0][:shared]
                assert shared <= rows[b][1]


class World:
    """A scheduler and a device with ``depth`` steps in flight.

    A ``recurrent`` model shares no page; its followers copy the state of their leader.
    """

    def __init__(
        self,
        *,
        pages=8,
        size=4,
        num_slots=6,
        chunk=7,
        share=True,
        recurrent=False,
        depth=0,
        prefill_delay=0,
        min_running=1,
        draft_tokens=0,
        num_branches=1,
        adaptive=True,
        row_seconds=0.01,
    ):
        self.running_batch = RunningBatch(
            PageAllocator(pages, size, share=share and not recurrent),
            ReqSlots(num_slots, pages, 1000),
            share_prefill=share,
        )
        self.speculation = None
        num_draft_states = 5 if recurrent and draft_tokens else None
        if draft_tokens:
            cost = StepCost(fixed_seconds=1, row_seconds=row_seconds, expert_seconds=0, expert_share=0)
            self.speculation = Speculation(
                NgramDrafter(500, num_branches),
                max_draft_tokens=draft_tokens,
                cost=cost,
                page_size=size,
                adaptive=adaptive,
            )
        self.scheduler = Scheduler(
            self.running_batch,
            prefill_chunk=chunk,
            decode=None,
            speculation=self.speculation,
            num_draft_states=num_draft_states,
        )
        self.scheduler.prefill_delay = PrefillDelay(prefill_delay, min_running)
        self.device = Device(pages, size, num_slots, recurrent, num_draft_states or 0)
        self.depth = depth
        self.inflight = []
        self.numbers = count()
        self.version = Version()
        self.born = {}
        self.ended = []

    # -- events -----------------------------------------------------------------------------

    def submit(self, prompt, new, *, priority=0, logprob_start_len=None, needs_last_token=False):
        request = GenerateRequest(
            tokens=np.array(prompt, np.int32),
            sampling=SamplingParams(max_new_tokens=new),
            priority=priority,
            logprob_start_len=logprob_start_len,
            repetition_penalty=1.5 if needs_last_token else 1.0,
        )
        number = next(self.numbers)
        prompt, images = expand(prompt)
        req = Req(
            number=number,
            request=request,
            prompt_length=len(prompt),
            prompt_T=np.array(prompt, np.int64),
            prompt_key=np.array(prompt if images is None else images.keys).tobytes(),
            images=images,
            stop_token_ids=frozenset(),
            stop_window=0,
            tokens=list(prompt),
            max_length=len(prompt) + new,
            sort_key=(-priority, number),
            token_counts=Counter() if needs_last_token else None,
        )
        req.reset_prompt_logprobs()
        self.scheduler.submit(req)
        self.born[req] = self.version.number
        return req

    def submit_many(self, prompt, new, copies, priority, logprob_start_len, needs_last_token):
        logprob_start_len = None if logprob_start_len is None else min(logprob_start_len, len(expand(prompt)[0]))
        for _ in range(copies):
            self.submit(
                prompt, new, priority=priority, logprob_start_len=logprob_start_len, needs_last_token=needs_last_token
            )

    def publish(self):
        self.process_inflight()
        self.scheduler.restart_prompts()
        self.version = self.version.next()
        self.running_batch.pages.flush()

    def remove(self, which):
        """Abort a request, whatever is in flight."""
        alive = list(self.scheduler.iter_reqs())
        if alive:
            self.scheduler.remove(alive[which % len(alive)])

    def retract(self):
        self.process_inflight()
        for req in list(self.scheduler.running):
            self.scheduler.preempt(req)

    def sleep(self):
        self.retract()
        self.running_batch.pages.flush()
        self.device.cache_locs = [None] * len(self.device.cache_locs)
        self.device.states = [None] * len(self.device.states)

    def steps(self, most):
        for _ in range(most):
            if self.scheduler.running or self.scheduler.waiting or self.inflight:
                self.step()

    # -- a step -----------------------------------------------------------------------------

    def step(self) -> ScheduledStep | None:
        if self.inflight and self.scheduler.must_wait_for_inflight():
            self.process_inflight()
        step = self.scheduler.schedule_step()
        if step is None:
            self.process_inflight()
            return None
        for req in step.sampled_reqs:
            if req.token_counts is not None:
                assert len(req.tokens) == self.running_batch.slots.length_S[req.slot]
                assert req.token_counts == Counter(req.tokens[req.prompt_length :])
        born = [self.born[self.running_batch.req_at(slot)] for slot in step.batch.req_slots_B.tolist()]
        self.check_rope_positions(step.batch)
        output = self.device.launch(step.batch, self.version.number, born)
        self.scheduler.mark_launched(step)
        self.inflight.append((step, output, self.version))
        self.process_inflight(keep=self.depth)
        self.scheduler.check()
        return step

    def check_rope_positions(self, batch):
        positions_T = compute_positions(batch)
        found = compute_rope_positions(batch, positions_T)
        assert not batch.decode_only or found.ndim == 1
        reqs = [self.running_batch.req_at(slot) for slot in batch.req_slots_B.repeat(batch.counts_B).tolist()]
        expected = [
            (position,) * 3 if req.images is None else req.images.slice_rope_positions(position, position + 1)[:, 0]
            for req, position in zip(reqs, positions_T.tolist(), strict=True)
        ]
        np.testing.assert_array_equal(np.broadcast_to(found, (3, len(expected))).T, expected)

    def process_inflight(self, keep=0):
        while len(self.inflight) > keep:
            self.ended += self.scheduler.process_output(*self.inflight.pop(0))

    def drain(self):
        self.steps(5000)
        assert not list(self.scheduler.iter_reqs())
        assert all(req.finish_kind for req in self.born)
        assert self.running_batch.pages.available == self.running_batch.pages.total
        for req in self.ended:
            tokens, content = tuple(req.tokens), content_of(req)
            assert len(tokens) == req.max_length
            for i in range(req.prompt_length, len(tokens)):
                assert tokens[i] == sample_after(content[:i])
            if req.request.logprob_start_len is not None:
                places = range(req.request.logprob_start_len, req.prompt_length)
                assert req.prompt_logprobs == [score_after(content[:i], tokens[i]) if i else None for i in places]
