"""Screenshots of the built site in Chromium, which also report every request that leaves this machine.

make docs && .venv/bin/python scripts/docs_site/screenshots.py site docs/site
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

# Name of the picture, page of the site, and whether it is in dark colours.
SHOTS = (
    ("home", "index.html", False),
    ("concepts", "concepts.html#who-waits-for-whom", True),
    ("tutorial", "tutorials/math.html", False),
    ("family", "families/qwen.html", True),
    ("search", "index.html", False),
)
SEARCHED = "staleness"


def take(page: Page, site: Path, name: str, address: str, folder: Path) -> None:
    """Take one picture as WebP; the one of the search types a word first, and fails where nothing is found."""
    page.goto(f"{site.resolve().as_uri()}/{address}")
    page.wait_for_load_state("networkidle")
    if name == "search":
        page.keyboard.press("/")
        page.keyboard.type(SEARCHED)
        page.wait_for_selector(".md-search-result__item", timeout=30_000)
        page.wait_for_timeout(500)
    picture = Image.open(io.BytesIO(page.screenshot()))
    picture.convert("RGB").save(folder / f"{name}.webp", quality=70, method=6)


def main(site: Path, folder: Path) -> int:
    """Take all pictures; returns 1 if a page asked another machine for something."""
    outside: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name, address, is_dark in SHOTS:
            page = browser.new_page(
                viewport={"width": 1280, "height": 860}, color_scheme="dark" if is_dark else "light"
            )
            page.on("request", lambda request: outside.append(request.url) if request.url.startswith("http") else None)
            take(page, site, name, address, folder)
            page.close()
        browser.close()
    print(f"{len(SHOTS)} pictures in {folder}; requests to other machines: {outside or 'none'}")
    return bool(outside)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
