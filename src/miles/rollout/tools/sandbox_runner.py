"""Runs a command with a workspace's files and returns the files; its source is executed inside the sandbox.

Standard input: one JSON object with ``password``, ``argv``, ``max_bytes`` (of files). Standard output: the command's
output, then the password, which the command cannot know, then one JSON object with ``exit`` and ``files`` (base64).
"""

import base64
import json
import os
import subprocess
import sys

FOLDER = "work"


def collect_files(max_bytes: int) -> tuple[dict[str, str], list[str]]:
    """The regular files in the folder as base64, as far as they fit; and the names of those that do not."""
    files: dict[str, str] = {}
    left_out: list[str] = []
    for directory, folders, names in os.walk(FOLDER):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(directory, name)
            short = os.path.relpath(path, FOLDER)
            if os.path.islink(path) or not os.path.isfile(path):
                continue
            try:
                with open(path, "rb") as file:
                    data = file.read(max_bytes + 1)
            except OSError:
                left_out.append(short)
                continue
            max_bytes -= len(data)
            if max_bytes < 0:
                left_out.append(short)
                max_bytes = 0
            else:
                files[short] = base64.b64encode(data).decode()
    return files, left_out


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    os.makedirs(FOLDER, exist_ok=True)
    process = subprocess.run(request["argv"], cwd=FOLDER, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    files, left_out = collect_files(request["max_bytes"])
    reply = json.dumps({"exit": process.returncode, "files": files, "left_out": left_out})
    sys.stdout.write(request["password"] + reply)


if __name__ == "__main__":
    main()
