"""A trajectory's folder keeps what is inside inside."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.rollout.tools.files import build_file_tools
from miles.rollout.tools.tool import ToolError
from miles.rollout.tools.workspace import Workspace, temporary_workspace


def use(place: Workspace, name: str, **arguments) -> str:
    (tool,) = (tool for tool in build_file_tools(place) if tool.name == name)
    return asyncio.run(tool.call(arguments))


def test_files_are_written_listed_read_and_searched(tmp_path):
    place = Workspace(tmp_path)
    assert use(place, "list_files") == "No files."
    assert use(place, "write_file", path="a/b.txt", content="one\nTwo\nthree\n") == "Wrote 14 bytes to a/b.txt."
    use(place, "write_file", path="c.py", content="two = 2")
    assert use(place, "list_files") == "a/b.txt (14 bytes)\nc.py (7 bytes)"
    assert use(place, "list_files", pattern="*.py") == "c.py (7 bytes)"
    assert use(place, "read_file", path="a/b.txt", first_line=2, last_line=2) == "Two\n"
    assert use(place, "grep", text="two") == "a/b.txt:2: Two\nc.py:1: two = 2"
    assert use(place, "grep", text="(two") == "No line contains it."


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret", "a/../../secret", "..", "link/passwd", "out", "x\0y"])
def test_no_path_leads_out(tmp_path, path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret").write_text("secret")
    (inside / "link").symlink_to("/etc")
    (inside / "out").symlink_to(tmp_path / "secret")
    place = Workspace(inside)
    for tool, more in (("read_file", {}), ("write_file", {"content": "x"})):
        with pytest.raises(ToolError):
            use(place, tool, path=path, **more)
    assert (tmp_path / "secret").read_text() == "secret"
    assert use(place, "list_files") == "No files." and use(place, "grep", text="secret") == "No line contains it."


@given(path=st.text(alphabet="a./\\~$ ", max_size=12))
def test_any_path_stays_inside_or_is_refused(path):
    with temporary_workspace() as place:
        try:
            place.write(path, b"x")
        except ToolError:
            return
        assert place.contents() == {place.names()[0]: b"x"}
        assert place.resolve(path).is_relative_to(place.root)


def test_there_is_only_so_much_room(tmp_path):
    place = Workspace(tmp_path, max_bytes=10, max_files=2)
    place.write("a", b"12345678")
    place.write("a", b"1234567890")  # in its own place
    with pytest.raises(ToolError, match="10 bytes"):
        place.write("b", b"1")
    place.write("a", b"")
    place.write("b", b"")
    with pytest.raises(ToolError, match="2 files"):
        place.write("c", b"")
    with pytest.raises(ToolError, match="is a folder"):
        place.write(".", b"")


def test_the_folder_is_gone_when_the_trajectory_is():
    with temporary_workspace() as place:
        place.write("deep/er/file", b"x")
        root = place.root
    assert not root.exists()
