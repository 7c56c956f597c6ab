"""A rollout function with a worker thread that never stops asking for prompts."""

import asyncio
import atexit
import queue
import threading

from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.async_utils import run
from slime.utils.types import Sample

_worker = None
_lock = threading.Lock()


def get_worker(args, data_buffer):
    global _worker
    with _lock:
        if _worker is None:
            _worker = Worker(args, data_buffer)
            _worker.thread.start()
        return _worker


def stop_worker():
    global _worker
    with _lock:
        if _worker is not None:
            _worker.running = False
            _worker = None


atexit.register(stop_worker)


class Worker:
    def __init__(self, args, data_buffer):
        self.args = args
        self.data_buffer = data_buffer
        self.running = True
        self.output: queue.Queue = queue.Queue(maxsize=1000)
        self.state = GenerateState(args)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.loop()), daemon=True)

    async def loop(self):
        active: set = set()
        while self.running:
            active = {task for task in active if not task.done()}
            while len(active) < self.args.rollout_batch_size and self.output.qsize() < 4:
                for group in self.data_buffer.get_samples(1):
                    task = asyncio.create_task(
                        generate_and_rm_group(
                            self.args, group, sampling_params=self.state.sampling_params.copy(), evaluation=False
                        )
                    )
                    task.add_done_callback(lambda done: self.output.put(done.result()))
                    active.add(task)
            await asyncio.sleep(0.01)


async def generate_rollout_async(args, rollout_id: int, data_buffer) -> list[list[Sample]]:
    assert args.rollout_global_dataset
    worker = get_worker(args, data_buffer)
    data: list[list[Sample]] = []
    while len(data) < args.rollout_batch_size:
        try:
            group = worker.output.get_nowait()
        except queue.Empty:
            await asyncio.sleep(0.01)
            continue
        if all(sample.reward is not None for sample in group):
            data.append(group)
    return sorted(data, key=lambda group: group[0].index)


def generate_rollout_fully_async(args, rollout_id, data_buffer, evaluation=False):
    if evaluation:
        raise ValueError("Evaluation mode not supported in simple async rollout")
    return run(generate_rollout_async(args, rollout_id, data_buffer))
