"""MkDocs hooks: the navigation from docs/index.md, links to files of the repository, drawings in place, llms.txt.

The pages are written to be read in the repository. What differs on the site is done here: files outside docs/ that a
page links to become pages below repository/, lists are indented as Python-Markdown wants it, and an SVG of
docs/drawings is put into its page, where it takes the colours of the theme.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OUTSIDE = "repository"
SHIM = "https://unpkg.com/iframe-worker/shim"
FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?\[)([^\]\n]*)\]\(([^)\s]+)\)")
ENTRY = re.compile(r"^- \[([^\]]+)\]\(([^)#\s]+)\)(?:: *(.*))?$")
DRAWING = re.compile(r"^!\[([^\]\n]*)\]\(((?:\.\./)*drawings/[\w.-]+\.svg)\)$", re.MULTILINE)
ITEM = re.compile(r"^( *)([-*]|\d+\.) +\S")
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".sbatch": "bash"}


# -- navigation and llms.txt ----------------------------------------------------------------


class IndexEntry(NamedTuple):
    """A page of docs/index.md: its title, file and line, under a heading of the third level or none."""

    title: str
    file: str
    about: str
    group: str


def read_index(text: str) -> list[tuple[str, list[IndexEntry]]]:
    """The sections of docs/index.md with their pages."""
    sections: list[tuple[str, list[IndexEntry]]] = []
    group = ""
    for line in text.splitlines():
        if line.startswith("## "):
            sections.append((line[3:].strip(), []))
            group = ""
        elif line.startswith("### "):
            group = line[4:].strip()
        elif sections and (entry := ENTRY.match(line)):
            sections[-1][1].append(IndexEntry(entry[1], entry[2], entry[3] or "", group))
    return [section for section in sections if section[1]]


def build_nav(text: str) -> list[dict[str, Any]]:
    """The navigation of the site: a tab for each section of docs/index.md, and groups within it."""
    nav: list[dict[str, Any]] = [{"Home": "index.md"}]
    for title, entries in read_index(text):
        items: list[dict[str, Any]] = []
        for group, members in groupby(entries, key=lambda entry: entry.group):
            pages = [{entry.title: entry.file} for entry in members]
            items += [{group: pages}] if group else pages
        nav.append({title: items})
    return nav


def build_llms_txt(text: str) -> str:
    """The file llms.txt: what the project is, and every page as Markdown with a line about it."""
    title = next(line[2:] for line in text.splitlines() if line.startswith("# "))
    about = next(part for part in text.split("\n\n")[1:] if part and part[0] not in "#!<|-").replace("\n", " ")
    parts = [f"# {title}", f"> {about}"]
    for section, pages in read_index(text):
        lines = [f"- [{page.title}]({page.file}){': ' + page.about if page.about else ''}" for page in pages]
        parts.append("\n".join([f"## {section}", "", *lines]))
    return "\n\n".join(parts) + "\n"


# -- links out of docs/ ---------------------------------------------------------------------


def split_code(text: str) -> Iterator[tuple[bool, str]]:
    """The parts of a page in order, each with whether it is a fenced code block."""
    end = 0
    for fence in FENCE.finditer(text):
        yield False, text[end : fence.start()]
        yield True, fence[0]
        end = fence.end()
    yield False, text[end:]


def resolve(source: str, link: str) -> str | None:
    """The path in the repository that a link of the file ``source`` leads to; None for addresses and anchors."""
    path = link.partition("#")[0]
    if not path or "://" in link or link.startswith("mailto:"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def site_path(path: str) -> str:
    """The source path on the site of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        has_readme = (ROOT / path / "README.md").is_file()
        return f"{OUTSIDE}/{path}/{'README.md' if has_readme else 'index.md'}"
    return f"{OUTSIDE}/{path}" if path.endswith((".md", ".png")) else f"{OUTSIDE}/{path}.md"


@cache
def read_title(path: str) -> str:
    """The heading of a page, or the name of a file that has none."""
    if path.endswith(".md") and (ROOT / path).is_file():
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        return next((line[2:].strip() for line in lines if line.startswith("# ")), posixpath.basename(path))
    return posixpath.basename(path)


def rewrite_links(text: str, source: str) -> str:
    """The page with its links to files of the repository as links between pages of the site.

    A link whose text is the name of its file gets the page's title.
    """
    here = posixpath.dirname(site_path(source))

    def rewrite(match: re.Match[str]) -> str:
        path = resolve(source, match[3])
        if path is None:
            return match[0]
        target = posixpath.relpath(site_path(path), here or ".")
        anchor = match[3].partition("#")[2]
        text = read_title(path) if match[2] == posixpath.basename(path) else match[2]
        return f"{match[1]}{text}]({target}{'#' + anchor if anchor else ''})"

    return "".join(part if is_code else LINK.sub(rewrite, part) for is_code, part in split_code(text))


def list_links(text: str, source: str) -> list[str]:
    """The paths in the repository that a page links to."""
    prose = "".join(part for is_code, part in split_code(text) if not is_code)
    return [path for match in LINK.finditer(prose) if (path := resolve(source, match[3])) is not None]


def collect_outside(pages: Sequence[str]) -> list[str]:
    """Files and folders outside docs/ that these pages link to, and those that those link to."""
    found: dict[str, None] = {}
    waiting = list(pages)
    while waiting:
        source = waiting.pop()
        for path in list_links((ROOT / source).read_text(encoding="utf-8"), source):
            if path.startswith("docs/") or path in found or not (ROOT / path).exists():
                continue
            found[path] = None
            pages_of = [path, f"{path}/README.md"] if (ROOT / path).is_dir() else [path]
            waiting += [page for page in pages_of if page.endswith(".md") and (ROOT / page).is_file()]
    return sorted(found)


def render_outside(path: str) -> str:
    """The page of a file or folder outside docs/."""
    where = ROOT / path
    if where.is_dir() and not (where / "README.md").is_file():
        files = sorted(file.name for file in where.iterdir() if file.is_file())
        return f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in files) + "\n"
    if where.is_dir():
        return (where / "README.md").read_text(encoding="utf-8")
    text = where.read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = LANGUAGES.get(where.suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n````{language}\n{text.rstrip()}\n````\n"


# -- Markdown as Python-Markdown reads it ---------------------------------------------------


def indent_lists(text: str) -> str:
    """Continue list items with four spaces, and start a list after a blank line."""
    lines: list[str] = []
    width, is_code = 0, False
    for line in text.split("\n"):
        item = ITEM.match(line)
        if line.lstrip().startswith("```") and (not width or line.startswith(" " * width)):
            is_code = not is_code
        if item and not is_code:
            if lines and lines[-1].strip() and not width:
                lines.append("")
            level = len(item[1]) // 2
            width = len(item[1]) + len(item[2]) + 1
            lines.append("    " * level + line.lstrip())
        elif width and line.startswith(" " * width):
            lines.append("    " * (1 + (width - 2) // 2 if width > 3 else 1) + line[width:])
        else:
            width = width if not line.strip() else 0
            lines.append(line)
    return "\n".join(lines)


def put_drawings_in(text: str, folder: Path) -> str:
    """The page with the SVGs of docs/drawings in it, so that they take the colours of the theme."""

    def read(match: re.Match[str]) -> str:
        svg = (folder / match[2]).resolve().read_text(encoding="utf-8").strip()
        return f'<div class="drawing" role="img" aria-label="{match[1]}">{svg}</div>'

    return DRAWING.sub(read, text)


# -- what MkDocs calls ----------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from docs/index.md."""
    config.nav = build_nav((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages for the files outside docs/ that are linked to."""
    from mkdocs.structure.files import File

    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    for path in collect_outside(pages):
        if path.endswith(".png"):
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
        else:
            files.append(File.generated(config, site_path(path), content=render_outside(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links, lists and drawings of one page."""
    uri = page.file.src_uri
    outside = uri.removeprefix(f"{OUTSIDE}/")
    source = f"docs/{uri}" if outside == uri else outside
    if not (ROOT / source).is_file():  # a page made of a file that is no Markdown
        return markdown
    markdown = indent_lists(rewrite_links(markdown, source))
    return put_drawings_in(markdown, (ROOT / source).parent)


def take_shim_from_here(html: str, url: str) -> str:
    """Load the script that the search needs on file:// pages from this site instead of from the network."""
    depth = url.count("/")
    return html.replace(SHIM, "../" * depth + "site/iframe-worker.js")


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Scripts of one page."""
    return take_shim_from_here(output, page.url)


def on_post_template(output_content: str, **_: Any) -> str:
    """Scripts of the page for addresses that do not exist."""
    return take_shim_from_here(output_content, "")


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt, and beside each page its Markdown, which llms.txt names."""
    docs, site = ROOT / "docs", Path(config.site_dir)
    (site / "llms.txt").write_text(build_llms_txt((docs / "index.md").read_text(encoding="utf-8")), encoding="utf-8")
    for page in docs.rglob("*.md"):
        target = site / page.relative_to(docs)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, target)
