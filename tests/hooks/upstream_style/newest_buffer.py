"""An async data buffer that returns the newest group."""

import asyncio

from miles.rollout.fully_async_data_buffer import DataBuffer, DataBufferConstructorInput, DataBufferInput


class NewestBuffer(DataBuffer):
    def __init__(self, input: DataBufferConstructorInput):
        self._limit = input.args.rollout_batch_size * 4
        self._entries: list[DataBufferInput] = []
        self._changed = asyncio.Condition()

    async def put(self, input: DataBufferInput) -> None:
        async with self._changed:
            self._entries.append(input)
            assert len(self._entries) <= self._limit
            self._changed.notify_all()

    async def get(self) -> DataBufferInput:
        async with self._changed:
            while not self._entries:
                await self._changed.wait()
            return self._entries.pop()

    def get_metrics(self) -> dict[str, float]:
        return {"queue_size": len(self._entries)}
