"""Every Triton kernel compiles ahead of time for NVIDIA and AMD GPUs that are not there, and fits on them."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.kernels.compiled.fake_gpu import TARGETS

from miles.kernels.runtime.triton_compat import HAVE_TRITON

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "miles"
TABLE = Path(__file__).with_name("compiled.tsv")
PAGE = ROOT / "docs" / "kernels_platforms.md"
COLUMNS = ("kernel", "case", "target", "registers", "spilled_bytes", "shared_bytes", "warps", "not_used")
# Cases that compile within seconds, for the default tier.
DEFAULT_CASES = ("rms norm 1536", "graph inputs", "weight checksum 4")

needs_triton = pytest.mark.skipif(not HAVE_TRITON, reason="needs Triton")


class Row(NamedTuple):
    """A kernel of a case and target; ``not_used`` says why a GPU takes another path, and then there is no kernel."""

    kernel: str
    case: str
    target: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int
    not_used: str


@cache
def list_kernels(source: Path = SOURCE) -> frozenset[str]:
    """Functions decorated with Triton's jit that no other such function calls: those that are launched."""
    functions = dict(_find_jit_functions(source))
    used = {node.id for tree in functions.values() for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return frozenset(name for name in functions if name.rpartition(".")[2] not in used)


def _find_jit_functions(source: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    for file in sorted(source.rglob("*.py")):
        module = ".".join(file.relative_to(source).with_suffix("").parts).removeprefix("kernels.")
        text = file.read_text(encoding="utf-8")
        if "jit" not in text:  # most files, and parsing them takes seconds
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list):
                yield f"{module}.{node.name}", node


def run_cases(target: str, cache: Path, *cases: str) -> list[Row]:
    """Compile cases (none: all) in a process of its own, where Triton compiles and does not interpret."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled.cases", target, *cases],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    failed = {line["case"]: line["error"] for line in found if line["error"] is not None}
    assert not failed, f"{failed}\n{done.stderr[-3000:]}"
    return [row for line in found for row in _make_rows(target, line)]


def _make_rows(target: str, line: dict[str, Any]) -> Iterator[Row]:
    if line["not_used"] is not None:
        yield Row("", line["case"], target, 0, 0, 0, 0, line["not_used"])
    for each in line["compiled"]:
        yield Row(case=line["case"], target=target, not_used="", **each)


def read_table() -> list[Row]:
    version, header, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    assert version.startswith("# Triton ") and header == "\t".join(COLUMNS)
    return [
        Row(kernel, case, target, *map(int, figures), not_used)
        for kernel, case, target, *figures, not_used in (line.split("\t") for line in lines)
    ]


def read_triton_version() -> str:
    return TABLE.read_text(encoding="utf-8").splitlines()[0].removeprefix("# Triton ")


def write_rows(target: str, rows: list[Row]) -> None:
    """Replace the rows of a target."""
    import triton

    kept = [row for row in read_table() if row.target != target] if TABLE.exists() else []
    everything = sorted([*kept, *rows], key=lambda row: (row.case, [*TARGETS].index(row.target)))
    lines = [f"# Triton {triton.__version__}", "\t".join(COLUMNS), *("\t".join(map(str, row)) for row in everything)]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


# -- compilation ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gfx942", "sm_90"])
def small_rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return run_cases(request.param, tmp_path_factory.mktemp("cache"), *DEFAULT_CASES)


@needs_triton
def test_small_kernels_compile_and_fit(small_rows: list[Row]):
    assert {row.case for row in small_rows} == set(DEFAULT_CASES)
    assert all(row.shared_bytes <= TARGETS[row.target].shared_memory and not row.spilled_bytes for row in small_rows)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_and_fits(target: str, tmp_path: Path, regenerate: bool):
    import triton

    rows = run_cases(target, tmp_path)
    limit = TARGETS[target].shared_memory
    assert not [row for row in rows if row.shared_bytes > limit], f"a program has {limit} bytes of shared memory"
    if regenerate:
        write_rows(target, rows)
    if triton.__version__ == read_triton_version():
        recorded = [row for row in read_table() if row.target == target]
        assert sorted(rows) == sorted(recorded), f"run this test with --regenerate, and review {TABLE.name}"


# -- completeness, and the page ---------------------------------------------------------------


def test_every_kernel_has_a_case_on_every_kind_of_gpu():
    rows = read_table()
    kernels = list_kernels()
    assert {row.kernel for row in rows if row.kernel} == kernels
    assert {row.target for row in rows} == set(TARGETS)
    by_target = {target: {row.kernel for row in rows if row.target == target and row.kernel} for target in TARGETS}
    # A GPU that leaves a kernel out says why, in the case that would launch it.
    for target, compiled in by_target.items():
        skipped = {row.case for row in rows if row.target == target and row.not_used}
        launched_elsewhere = {row.kernel for row in rows if row.case in skipped and row.kernel}
        assert kernels - compiled <= launched_elsewhere, target


def test_a_kernel_without_a_case_is_found(tmp_path: Path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "new.py").write_text("@jit\ndef helper(x): pass\n\n@jit\ndef new_kernel(x): helper(x)\n")
    assert list_kernels(tmp_path) == {"new.new_kernel"}


def test_no_recorded_kernel_takes_more_shared_memory_than_there_is():
    assert not [row for row in read_table() if row.shared_bytes > TARGETS[row.target].shared_memory]


def test_the_page_of_platforms_is_generated(regenerate: bool):
    text = render_page(read_table())
    if regenerate:
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text, "make docs writes docs/kernels_platforms.md"


def render_page(rows: list[Row]) -> str:
    """The page: the introduction, and for each kernel and target the worst of its cases."""
    targets = "\n".join(
        f"| `{name}` | {each.gpus} | {each.warp_size} | {each.shared_memory >> 10} KiB | "
        f"{sum(row.target == name and bool(row.kernel) for row in rows)} |"
        for name, each in TARGETS.items()
    )
    kernels = "\n".join(_render_kernel(kernel, rows) for kernel in sorted(list_kernels()))
    introduction = Path(__file__).with_name("page.md").read_text(encoding="utf-8")
    header = "| kernel | " + " | ".join(f"`{name}`" for name in TARGETS) + " |\n|---|" + "---|" * len(TARGETS)
    return (
        introduction.replace("TRITON_VERSION", read_triton_version())
        .replace("TARGET_ROWS", targets)
        .replace("KERNEL_ROWS", f"{header}\n{kernels}")
    )


def _render_kernel(kernel: str, rows: list[Row]) -> str:
    cells = []
    for target in TARGETS:
        found = [row for row in rows if row.kernel == kernel and row.target == target]
        if not found:
            cells.append("not used")
            continue
        spilled = max(row.spilled_bytes for row in found)
        shared = max(row.shared_bytes for row in found) / 1024
        text = f"{max(row.registers for row in found)} / {shared:.0f}"
        cells.append(f"{text} / **{spilled}**" if spilled else text)
    return f"| `{kernel}` | " + " | ".join(cells) + " |"
