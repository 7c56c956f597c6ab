"""The journal: what was acknowledged is there after a crash at any byte, and nothing that was not complete."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.backends.service.journal import Record, RequestJournal, encode_record
from miles.core.errors import MilesError

RECORDS = [Record("a", {"x": 1}, b"body"), Record("b", {}, b""), Record("c", {"text": "ä"}, bytes(range(256)))]


def append(folder, *records):
    async def write():
        journal = RequestJournal(folder)
        journal.open()
        await asyncio.gather(*(journal.append(record) for record in records))
        journal.close()

    asyncio.run(write())


def read(folder):
    journal = RequestJournal(folder)
    try:
        return journal.open()
    finally:
        journal.close()


def test_records_are_read_as_they_were_written(tmp_path):
    append(tmp_path, *RECORDS)
    append(tmp_path, RECORDS[0])
    assert read(tmp_path) == [*RECORDS, RECORDS[0]]


@given(cut=st.integers(0, 400))
def test_a_record_that_was_cut_off_is_dropped(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("journal")
    data = b"".join(map(encode_record, RECORDS))
    cut = min(cut, len(data))
    (folder / "journal.bin").write_bytes(data[:cut])
    ends = [sum(len(encode_record(record)) for record in RECORDS[:n]) for n in range(len(RECORDS) + 1)]
    complete = max(n for n, end in enumerate(ends) if end <= cut)
    assert read(folder) == RECORDS[:complete]
    append(folder, RECORDS[2])
    assert read(folder) == [*RECORDS[:complete], RECORDS[2]]


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_damaged_record_ends_the_journal(tmp_path_factory, position, bit):
    folder = tmp_path_factory.mktemp("journal")
    data = bytearray(b"".join(map(encode_record, RECORDS)))
    data[position % len(data)] ^= 1 << bit
    (folder / "journal.bin").write_bytes(bytes(data))
    found = read(folder)
    assert found == RECORDS[: len(found)] and len(found) < len(RECORDS)


def test_rewriting_replaces_everything_and_goes_on(tmp_path):
    async def run():
        journal = RequestJournal(tmp_path)
        journal.open()
        await journal.append(*RECORDS)
        await journal.rewrite([RECORDS[1]])
        await journal.append(RECORDS[0])
        journal.close()

    asyncio.run(run())
    assert read(tmp_path) == [RECORDS[1], RECORDS[0]]


def test_a_disk_that_fails_acknowledges_nothing(tmp_path, monkeypatch):
    async def run():
        journal = RequestJournal(tmp_path)
        journal.open()

        def fail(data):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(journal, "_write", fail)
        for _ in range(2):
            with pytest.raises(MilesError, match=r"cannot be written: .*No space left"):
                await journal.append(RECORDS[0])

    asyncio.run(run())
    assert read(tmp_path) == []
