"""The web pages of the dashboard: which files there are, and one script of all modules for a report.

Modules are plain ES modules: imports are of the form ``import { a, b } from "./c.js";`` and names are unique over all
modules, so a report can join them into one script without a build tool.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "web"
_SCRIPT, _STYLE = "text/javascript", "text/css"
WEB_FILES = {
    "index.html": "text/html",
    "icon.svg": "image/svg+xml",
    "style.css": _STYLE,
    "uplot.min.css": _STYLE,
    "uplot.min.js": _SCRIPT,
    "uplot.LICENSE": "text/plain",
    "api.js": _SCRIPT,
    "chart.js": _SCRIPT,
    "cluster.js": _SCRIPT,
    "config.js": _SCRIPT,
    "curves.js": _SCRIPT,
    "dom.js": _SCRIPT,
    "format.js": _SCRIPT,
    "main.js": _SCRIPT,
    "overview.js": _SCRIPT,
    "reading.js": _SCRIPT,
    "runs.js": _SCRIPT,
    "state.js": _SCRIPT,
    "timeline.js": _SCRIPT,
    "timing.js": _SCRIPT,
    "trajectory.js": _SCRIPT,
}
"""Every file that is served, with its content type; nothing else can be asked for."""
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z_]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def read_web_file(name: str) -> bytes:
    """Return the content of a file of ``WEB_FILES``."""
    return (FOLDER / name).read_bytes()


def join_modules(entry: str = "main.js") -> str:
    """Return a module and all it imports as one script, each once and after those it imports."""
    found: dict[str, str] = {}

    def add(name: str) -> None:
        if name in found:
            return
        text = read_web_file(name).decode()
        found[name] = ""  # an import cycle ends here
        for imported in _IMPORT.findall(text):
            add(imported)
        del found[name]
        found[name] = _EXPORT.sub("", _IMPORT.sub("", text))

    add(entry)
    return "\n".join(found.values())
