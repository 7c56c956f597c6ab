"""Draw what a command prints to a terminal as an SVG picture, with its colours.

python examples/shared/terminal_picture.py PICTURE.svg COLUMNS COMMAND [ARGUMENT ...]

The command runs on a pseudo-terminal of that width, as some programs print colours to terminals only.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios

from rich.console import Console
from rich.text import Text


def run_on_terminal(command: list[str], columns: int) -> str:
    """What a command prints to a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    printed = bytearray()
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environment) as process:
        os.close(theirs)
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # how Linux says that the last writer has closed
                break
            if not piece:
                break
            printed += piece
    os.close(ours)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed with code {process.returncode}")
    return printed.decode().replace("\r\n", "\n")


def draw(text: str, columns: int, title: str) -> str:
    """The SVG picture of a text with ANSI colours. It names no font of another site."""
    console = Console(width=columns, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=False)
    picture = console.export_svg(title=title, unique_id="terminal")
    picture = re.sub(r"@font-face \{.*?\}\n", "", picture, flags=re.DOTALL)
    return picture.replace("font-family: Fira Code, monospace", "font-family: monospace")


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit(f"usage: python {sys.argv[0]} PICTURE.svg COLUMNS COMMAND [ARGUMENT ...]")
    picture, columns, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    text = run_on_terminal(command, columns)
    with open(picture, "w", encoding="utf-8") as file:
        file.write(draw(text, columns, " ".join(command)))


if __name__ == "__main__":
    main()
