"""A stand-in for the Hugging Face hub on 127.0.0.1: data set repositories from memory, with faults on demand.

It answers what `datasets` and `huggingface_hub` ask for: who has the repository at which commit, what files it lists,
and the files themselves. Every request is noted in `requests`, as (method, path).

    with Hub({"owner/name": {"README.md": b"...", "data/train-0.parquet": b"..."}}) as hub:
        run_program("prepare.py", "--dataset=owner/name", env=hub.environment(home), cwd=folder)
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow
import pyarrow.parquet


def parquet(**columns: list) -> bytes:
    """A Parquet file with these columns."""
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def card(configs: dict[str, dict[str, str]]) -> bytes:
    """A README.md that names the files of each configuration: {configuration: {split: glob}}."""
    lines = ["---", "configs:"]
    for name, splits in configs.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, pattern in splits.items():
            lines += [f"  - split: {split}", f"    path: {pattern}"]
    return "\n".join([*lines, "---", "# A data set", ""]).encode()


class Hub:
    """Serves {repository: {path: content}}; use as a context manager.

    `broken` maps a regular expression of request paths to a fault: a status code, or "cut" to close the connection
    after half of a file.
    """

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        self.repositories = repositories
        self.requests: list[tuple[str, str]] = []
        self.broken: dict[str, int | str] = {}

    def __enter__(self) -> Hub:
        handler = type("Handler", (HubHandler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def environment(self, home: Path) -> dict[str, str]:
        """What makes a process ask here, with its downloads under `home`."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def commit(self, repository: str) -> str:
        """The commit of a repository: changes with its files."""
        digest = hashlib.sha1()
        for path, content in sorted(self.repositories[repository].items()):
            digest.update(path.encode() + b"\0" + content)
        return digest.hexdigest()


class HubHandler(BaseHTTPRequestHandler):
    """One request; `hub` is set by the server's own subclass."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        """File details."""
        self.answer()

    def do_GET(self) -> None:
        """Files and details of repositories."""
        self.answer()

    def do_POST(self) -> None:
        """Details of some paths."""
        self.answer()

    def log_message(self, *_: object) -> None:
        """Keeps the tests' output clean."""

    def answer(self) -> None:
        """Finds what is asked for and sends it, or the fault that a test has put in its place."""
        path = unquote(urlsplit(self.path).path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.hub.requests.append((self.command, path))
        self.fault = next((fault for pattern, fault in self.hub.broken.items() if re.search(pattern, path)), None)
        if isinstance(self.fault, int):
            self.send(self.fault, b"out of order", {"Retry-After": "0"})
            return
        match = re.fullmatch(r"/(api/)?datasets/([^/]+/[^/]+)(?:/(.*))?", path)
        files = self.hub.repositories.get(match[2]) if match else None
        if files is None:
            self.send(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif match[1]:
            self.answer_api(match[2], files, match[3] or "")
        else:
            self.send_file(match[2], files, match[3] or "")

    def answer_api(self, repository: str, files: dict[str, bytes], rest: str) -> None:
        """Details: of the repository, of a folder of it, or of the paths that are asked for."""
        verb, _, rest = rest.partition("/")
        commit = self.hub.commit(repository)
        if verb in ("", "revision"):
            names = [{"rfilename": path} for path in files]
            self.send_json(
                {"_id": "0", "id": repository, "sha": commit, "private": False, "siblings": names, "tags": []}
            )
        elif verb == "tree":
            folder = rest.partition("/")[2].strip("/")
            recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
            self.send_json(list_folder(files, folder, recursive))
        elif verb == "paths-info":
            asked = parse_qs(self.body).get("paths") or json.loads(self.body or "{}").get("paths", [])
            known = {entry["path"]: entry for entry in list_folder(files, "", True)}
            self.send_json([known[path] for path in asked if path in known])
        else:
            self.send(404, b"{}")

    def send_file(self, repository: str, files: dict[str, bytes], rest: str) -> None:
        """A file of a repository, or the part of it that is asked for."""
        path = rest.removeprefix("resolve/").partition("/")[2]
        headers = {"X-Repo-Commit": self.hub.commit(repository), "Accept-Ranges": "bytes"}
        if path not in files:
            self.send(404, b"", headers | {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        content, status = files[path], 200
        headers["ETag"] = f'"{blob_id(content)}"'
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if part:
            first, last = int(part[1]), min(int(part[2] or len(content)), len(content) - 1)
            headers["Content-Range"], status = f"bytes {first}-{last}/{len(content)}", 206
            content = content[first : last + 1]
        self.send(status, content, headers)

    def send_json(self, content: object) -> None:
        """An answer of the programming interface."""
        self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        """Status, headers, and unless only those are asked for the content."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            cut = self.fault == "cut"
            self.wfile.write(content[: len(content) // 2] if cut else content)
            self.close_connection = self.close_connection or cut


def list_folder(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict]:
    """The entries of a folder as the hub lists them: files with their size, folders above them."""
    entries, prefix = {}, f"{folder}/" if folder else ""
    for path, content in files.items():
        if not path.startswith(prefix):
            continue
        parts = path.removeprefix(prefix).split("/")
        for depth in range(1, len(parts)):
            if depth == 1 or recursive:
                name = prefix + "/".join(parts[:depth])
                entries[name] = {"type": "directory", "oid": blob_id(name.encode()), "size": 0, "path": name}
        if len(parts) == 1 or recursive:
            entries[path] = {"type": "file", "oid": blob_id(content), "size": len(content), "path": path}
    return list(entries.values())


def blob_id(content: bytes) -> str:
    """Git's name for a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
