"""The page of upstream's flags says what the table says."""

from pathlib import Path

from miles.launch.upstream.table import Kind, UpstreamFlag, load_upstream_flags

PAGE = Path(__file__).parents[3] / "docs" / "upstream_flags.md"
HEAD = """# Flags of upstream

Every flag of upstream's launch files, with what becomes of it here; [migrate.md](migrate.md) explains the outcomes.
The page is generated from `src/miles/launch/upstream/flags.tsv` by `make regenerate`.

"""
TITLES: dict[Kind, str] = {
    "used": "Used: options of the same name",
    "map": "Mapped to another option",
    "engine": "Mapped to an option of the native engine; passed on to SGLang under `--rollout-backend sglang`",
    "served": "No effect on the native engine; passed on to SGLang under `--rollout-backend sglang`",
    "pass": "Passed on under `--train-backend megatron`; no effect elsewhere",
    "router": "Load balancing of routers: passed on under `--train-backend megatron`; elsewhere as follows",
    "shape": "Compared with `config.json` of the checkpoint",
    "exact": "Agreed: how Megatron computes",
    "design": "Agreed: what a run does anyway",
    "fresh": "Agreed where a run starts fresh; refused where `--load` names a run",
    "noted": "Noted: no effect",
    "use": "Refused: something else does it",
    "missing": "Refused: the feature is missing",
    "other": "Not flags of `train.py`: options of Ray and of launch scripts",
}


def format_page() -> str:
    rows = load_upstream_flags()
    sections = [
        f"## {title}\n\n{format_rows({flag: row for flag, row in rows.items() if row.kind == kind})}\n"
        for kind, title in TITLES.items()
    ]
    return HEAD + "\n".join(sections)


def format_rows(rows: dict[str, UpstreamFlag]) -> str:
    """Flags with the same text in one row of a table; a plain list where there is no text."""
    texts: dict[str, list[str]] = {}
    for flag, row in rows.items():
        values = " or ".join(value.partition("=")[0] for value in row.values)
        other = f"; another value than {values} asks for {row.feature}" if row.feature else ""
        texts.setdefault(row.text + other, []).append(f"`{flag}`")
    if set(texts) <= {""}:
        return ", ".join(flag for flags in texts.values() for flag in flags)
    lines = [f"| {', '.join(flags)} | {text} |" for text, flags in texts.items()]
    return "\n".join(["| flags | |", "|---|---|", *lines])


def test_the_generated_page_is_up_to_date(regenerate: bool):
    if regenerate:
        PAGE.write_text(format_page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == format_page(), "run make regenerate"


def test_every_kind_has_a_section():
    assert {row.kind for row in load_upstream_flags().values()} == set(TITLES)
