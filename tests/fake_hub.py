"""A Hugging Face hub on this machine: the part of its HTTP API that huggingface_hub needs to list, read and commit."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


class FakeHub:
    """Repositories by kind and name; every commit keeps its files, and ``requests`` are the lines it has seen."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.refs: dict[tuple[str, str], dict[str, str]] = {}
        self.requests: list[str] = []
        self.private: set[str] = set()
        self.token: str | None = None
        self.refuses_commits = False
        self.large: dict[str, bytes] = {}
        self.url = ""

    def commit(self, kind: str, repo: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Add a commit with these files over those the branch has; returns its hash."""
        refs = self.refs.setdefault((kind, repo), {})
        content = {**self.commits.get(refs.get(revision, ""), {}), **files}
        digest = hashlib.sha1(repr(sorted((k, hashlib.sha1(v).hexdigest()) for k, v in content.items())).encode())
        sha = digest.hexdigest()
        self.commits[sha] = content
        refs[revision] = sha
        return sha

    def commit_folder(self, kind: str, repo: str, folder: Path) -> str:
        return self.commit(kind, repo, {f.name: f.read_bytes() for f in sorted(folder.iterdir()) if f.is_file()})

    def files(self, repo: str, revision: str = "main", kind: str = "model") -> dict[str, bytes]:
        return self.commits[self.refs[kind, repo][revision]]

    def find(self, kind: str, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        sha = self.refs.get((kind, repo), {}).get(revision, revision)
        return (sha, self.commits[sha]) if sha in self.commits else None


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._read()

    def do_HEAD(self) -> None:
        self._read()

    def _read(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.token is not None and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._refuse(401, "RepoNotFound")
        if path.startswith("/api/"):
            return self._describe(path.split("/")[2:])
        kind, rest = ("dataset", path[10:]) if path.startswith("/datasets/") else ("model", path[1:])
        repo, _, tail = rest.partition("/resolve/")
        found, file = self._split_revision(kind, repo, tail)
        if found is None or file not in found[1]:
            return self._refuse(404, "EntryNotFound" if (kind, repo) in self.hub.refs else "RepoNotFound")
        content = found[1][file]
        etag = hashlib.sha256(content).hexdigest()
        self._send(content, {"ETag": f'"{etag}"', "X-Repo-Commit": found[0]}, "application/octet-stream")

    def _split_revision(self, kind: str, repo: str, tail: str) -> tuple[Any, str]:
        names = sorted(self.hub.refs.get((kind, repo), {}), key=len, reverse=True)
        name = next((n for n in names if tail.startswith(n + "/")), tail.partition("/")[0])
        return self.hub.find(kind, repo, name), tail[len(name) + 1 :]

    def _describe(self, parts: list[str]) -> None:
        kind = parts[0].removesuffix("s")
        action = next((word for word in ("revision", "tree") if word in parts), None)
        at = parts.index(action) if action else len(parts)
        repo, revision = "/".join(parts[1:at]), "/".join(parts[at + 1 :]) or "main"
        if (kind, repo) not in self.hub.refs:
            return self._refuse(404, "RepoNotFound")
        found = self.hub.find(kind, repo, revision)
        if found is None:
            return self._refuse(404, "RevisionNotFound")
        sha, files = found
        if action == "tree":
            entries = [
                {"type": "file", "path": f, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for f, c in files.items()
            ]
            return self._send_json(entries)
        self._send_json(
            {
                "id": repo,
                "sha": sha,
                "siblings": [{"rfilename": f, "size": len(c)} for f, c in files.items()],
                "private": False,
            }
        )

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"POST {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.hub.token is not None and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._refuse(401, "RepoNotFound")
        if path == "/api/repos/create":
            wanted = json.loads(body)
            repo = f"{wanted['organization']}/{wanted['name']}" if wanted.get("organization") else wanted["name"]
            if wanted.get("private") or wanted.get("visibility") == "private":
                self.hub.private.add(repo)
            self.hub.refs.setdefault((wanted.get("type", "model"), repo), {})
            return self._send_json({"url": f"{self.hub.url}/{repo}"})
        if path == "/api/validate-yaml":
            return self._send_json({"errors": [], "warnings": []})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {
                    "oid": o["oid"],
                    "size": o["size"],
                    "actions": {"upload": {"href": f"{self.hub.url}/lfs/{o['oid']}", "header": {}}},
                }
                for o in json.loads(body)["objects"]
            ]
            return self._send_json({"transfer": "basic", "objects": objects}, "application/vnd.git-lfs+json")
        parts = path.split("/")[3:]
        if "preupload" in parts:
            files = json.loads(body)["files"]
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for f in files
            ]
            return self._send_json({"files": modes})
        if "branch" in parts:
            at = parts.index("branch")
            self.hub.refs["model", "/".join(parts[:at])].setdefault("/".join(parts[at + 1 :]), "")
            return self._send_json({})
        return self._commit(parts, body)

    def _commit(self, parts: list[str], body: bytes) -> None:
        if self.hub.refuses_commits:
            return self._refuse(403, "Forbidden")
        at = parts.index("commit")
        repo, revision = "/".join(parts[:at]), "/".join(parts[at + 1 :])
        files: dict[str, bytes] = {}
        for line in body.splitlines():
            row = json.loads(line)
            if row["key"] == "file":
                files[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
            elif row["key"] == "lfsFile":
                files[row["value"]["path"]] = self.hub.large[row["value"]["oid"]]
        sha = self.hub.commit("model", repo, files, revision)
        self._send_json({"commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "commitOid": sha})

    def do_PUT(self) -> None:
        self.hub.large[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
        self._send(b"", {})

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"{}", {"X-Error-Code": code, "X-Error-Message": code}, status=status)

    def _send_json(self, value: Any, kind: str = "application/json") -> None:
        self._send(json.dumps(value).encode(), {}, kind)

    def _send(self, content: bytes, headers: dict[str, str], kind: str = "application/json", status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serving() -> Iterator[FakeHub]:
    """A hub that listens until the end."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def use_hub(patch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Let huggingface_hub, in this process and its children, use a hub and a cache; it reads both when imported."""
    from huggingface_hub import constants

    patch.setenv("HF_ENDPOINT", url)
    patch.setenv("HF_HOME", str(cache.parent))
    patch.setenv("HF_HUB_DISABLE_XET", "1")
    patch.delenv("HF_TOKEN", raising=False)
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
