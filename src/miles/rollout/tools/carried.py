"""Runs a command in the sandbox with an attempt's files around it, and gives the files back; run inside the sandbox.

Standard input: one JSON object with ``password``, ``argv``, ``most`` (bytes of files). Standard output: what the
command wrote, and after the password, which it cannot know, one JSON object with ``exit`` and ``files`` (base64).
"""

import base64
import json
import os
import subprocess
import sys

FOLDER = "work"


def gathered(most: int) -> tuple[dict[str, str], list[str]]:
    """The regular files in the folder, as base64, as far as they fit; and the names of those that do not."""
    files: dict[str, str] = {}
    left_out: list[str] = []
    for here, folders, names in os.walk(FOLDER):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(here, name)
            short = os.path.relpath(path, FOLDER)
            if os.path.islink(path) or not os.path.isfile(path):
                continue
            try:
                with open(path, "rb") as file:
                    data = file.read(most + 1)
            except OSError:
                left_out.append(short)
                continue
            most -= len(data)
            if most < 0:
                left_out.append(short)
                most = 0
            else:
                files[short] = base64.b64encode(data).decode()
    return files, left_out


def main() -> None:
    order = json.loads(sys.stdin.buffer.read())
    os.makedirs(FOLDER, exist_ok=True)
    done = subprocess.run(order["argv"], cwd=FOLDER, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    files, left_out = gathered(order["most"])
    said = json.dumps({"exit": done.returncode, "files": files, "left_out": left_out})
    sys.stdout.write(order["password"] + said)


if __name__ == "__main__":
    main()
