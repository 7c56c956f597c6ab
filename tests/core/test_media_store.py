"""The store of raw images: each once by its hash, within a budget, and checked when it is read back."""

import pytest
from tests.models.small_vision import draw_png

from miles.core.errors import DataError
from miles.core.image_files import ImageFileError
from miles.core.media_store import MediaStore, parse_reference


def test_equal_files_have_one_reference_and_are_kept_once(tmp_path):
    store = MediaStore(tmp_path / "media")
    first, again, other = store.put(draw_png(0)), store.put(draw_png(0)), store.put(draw_png(1))
    assert first == again != other
    path = store.keep(first)
    assert path == store.keep(again)
    assert [file.name for file in (tmp_path / "media").iterdir()] == [f"{parse_reference(first)}.png"]
    assert path is not None and path.read_bytes() == draw_png(0)


def test_files_beyond_the_budget_are_still_there():
    store = MediaStore(budget_bytes=1)
    references = [store.put(draw_png(seed)) for seed in range(4)]
    assert [store.get(reference) for reference in references] == [draw_png(seed) for seed in range(4)]


def test_a_file_on_disk_is_read_again_and_a_changed_one_is_refused(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(draw_png(0))
    store = MediaStore()
    reference = store.put(draw_png(0), path=path)
    assert store.get(reference) == draw_png(0)
    path.write_bytes(draw_png(1))
    with pytest.raises(DataError, match=r"a\.png has changed"):
        store.get(reference)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read any more"):
        store.get(reference)


def test_another_process_of_the_run_reads_what_was_kept(tmp_path):
    reference = (first := MediaStore(tmp_path)).put(draw_png(0))
    first.keep(reference)
    assert MediaStore(tmp_path).get(reference) == draw_png(0)


def test_unknown_references_and_no_images_are_refused():
    store = MediaStore()
    with pytest.raises(DataError, match="There is no image"):
        store.get("sha256:" + 64 * "0")
    with pytest.raises(ValueError, match="no reference"):
        store.get("../../etc/passwd")
    with pytest.raises(ImageFileError):
        store.put(b"no image")
