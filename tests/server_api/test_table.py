"""The tables of docs/http_api.md are made of what the suite found and of what SGLang answered, and say nothing else."""

from pathlib import Path

from tests.server_api import results
from tests.server_api.differences import DIFFERENCES
from tests.server_api.test_exchanges import ALL, recorded

PAGE = Path(__file__).parents[2] / "docs" / "http_api.md"
BEGIN = "<!-- conformance: written by `make generated`, from tests/server_api/results.json -->\n"
END = "<!-- end of conformance -->"


def tables() -> str:
    parts = [
        ["### Endpoints", "", *results.endpoints_table(ALL, recorded())],
        ["### Numbers", "", *results.measured_table()],
        ["### Behaviours", "", *results.checks_table()],
        ["### Requests answered otherwise on purpose", "", *results.differences_table(ALL, recorded())],
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def test_the_generated_tables_of_the_wire_are_up_to_date(regenerate: bool):
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    written, after = rest.split(END)
    if regenerate:
        PAGE.write_text(f"{before}{BEGIN}\n{tables()}\n\n{END}{after}", encoding="utf-8")
        return
    assert written.strip() == tables(), "run make generated"


def test_the_results_that_are_kept_are_those_of_this_suite():
    checks = results.load()["checks"]
    assert checks.keys() == results.behaviours(), "run the suite against both servers with --regenerate"
    differ = {(each.test, each.server): "not run" if each.fatal else "differs" for each in DIFFERENCES}
    stated = {(test, kind): row.get(kind) for test, row in checks.items() for kind in results.KINDS}
    assert stated == {(test, kind): differ.get((test, kind), "yes") for test in checks for kind in results.KINDS}


def test_no_number_that_is_kept_is_beyond_its_bound():
    assert results.load()["measured"] and max(results.load()["measured"].values()) <= 1e-4
