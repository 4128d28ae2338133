"""A hub of one's own: what the Hugging Face Hub's client asks for, answered over HTTP from memory.

Repositories are dataset repositories with one branch. Large files go through the LFS calls into a store by sha256, as on the real hub:
what is in the store is not asked for again. `hub.puts` notes every file that was sent there.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

LARGE_SUFFIXES = (".arrow", ".npy", ".bin", ".png")
LARGE_BYTES = 100_000
Files = dict[str, tuple[bytes, bool]]  # name → contents, and whether it is a large file


def blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


@dataclass
class Repo:
    """`commits` maps each commit's name to its files, oldest first; `tags` name commits."""

    private: bool
    commits: dict[str, Files] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def add(self, files: Files) -> str:
        name = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[name] = files
        return name

    @property
    def head(self) -> str:
        return list(self.commits)[-1]

    @property
    def files(self) -> Files:
        return self.commits[self.head]

    def commit_of(self, revision: str) -> str | None:
        return self.head if revision == "main" else revision if revision in self.commits else self.tags.get(revision)


class Hub:
    """The state of the server, and what a test may have it do: `hang_up(sha256)` decides for a large file that begins to come whether
    the server hangs up in its middle, `refuse(method, path)` whether a call is answered with 403 and the
    `complaint`; files in `garbled` (by sha256) are
    stored with a flipped bit.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self.repos: dict[str, Repo] = {}
        self.store: dict[str, bytes] = {}
        self.puts: list[str] = []
        self.gets: list[str] = []
        self.authorizations: set[str | None] = set()
        self.hang_up: Callable[[str], bool] = lambda sha256: False
        self.refuse: Callable[[str, str], bool] = lambda method, path: False
        self.complaint = "You may not do that"
        self.garbled: set[str] = set()
        self.endpoint = ""

    def environment(self, folder: Path) -> dict[str, str]:
        """What makes a process use this hub, logged in, and `folder` for caches."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": self.token,
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "ARROWBANK_CACHE": str(folder / "cache"),
        }

    def spoil(self, repo: str, name: str) -> None:
        """Flip a bit of a file at the head of a repository; the listing says so."""
        data, large = self.repos[repo].files[name]
        self.repos[repo].files[name] = (flipped(data), large)

    def edit(self, repo: str, changes: Files) -> None:
        """Commit files as somebody else."""
        self.repos[repo].add({**self.repos[repo].files, **changes})


@contextmanager
def serving(token: str = "hf_secretsecretsecret") -> Iterator[Hub]:
    """A hub that runs while the block does."""
    hub = Hub(token)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._route()

    do_HEAD = do_POST = do_PUT = do_GET

    def _route(self) -> None:
        path = unquote(urlsplit(self.path).path)
        length = int(self.headers.get("Content-Length") or 0)
        if self.command == "PUT" and self.hub.hang_up(path.rpartition("/")[2]):
            self.rfile.read(min(length, 10))
            self.close_connection = True  # hang up in the middle of a file
            self.connection.shutdown(2)
            return
        self.body = self.rfile.read(length)
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = b"".join(iter(self._chunk, b""))
        self.hub.authorizations.add(self.headers.get("Authorization"))
        if self.command in ("POST", "PUT") and "store" not in path and not self._known:
            self._json({"error": "Invalid username or password."}, 401)
            return
        if self.hub.refuse(self.command, path):
            self._json({"error": self.hub.complaint}, 403)
            return
        for method, pattern, answer in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method:
                answer(self, **match.groupdict())
                return
        self._json({"error": f"no such call: {self.command} {path}"}, 404)

    @property
    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _chunk(self) -> bytes:
        size = int(self.rfile.readline(), 16)
        data = self.rfile.read(size)
        self.rfile.readline()
        return data

    def _answer(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _json(self, value: object, status: int = 200, code: str = "") -> None:
        headers = {"Content-Type": "application/json"} | ({"X-Error-Code": code} if code else {})
        if isinstance(value, dict) and "error" in value:
            headers["X-Error-Message"] = value["error"]
        self._answer(json.dumps(value).encode(), status, headers)

    def _at(self, repo: str, revision: str) -> tuple[Repo, str, Files] | None:
        """The repository, commit and files asked for; answers itself where they are not for this caller."""
        found = self.hub.repos.get(repo)
        if found is None or (found.private and not self._known):
            self._json({"error": "Repository not found"}, 404 if self._known else 401, "RepoNotFound")
            return None
        commit = found.commit_of(revision)
        if commit is None:
            self._json({"error": f"Invalid rev id: {revision}"}, 404, "RevisionNotFound")
            return None
        return found, commit, found.commits[commit]

    def create(self) -> None:
        asked = json.loads(self.body)
        repo = f"{asked['organization']}/{asked['name']}"
        if repo in self.hub.repos:
            self._json({"error": "You already created this dataset repo"}, 409)
            return
        self.hub.repos[repo] = Repo(private=asked["visibility"] == "private")
        self.hub.repos[repo].add({".gitattributes": (b"*.arrow filter=lfs\n", False)})
        self._json({"url": f"{self.hub.endpoint}/datasets/{repo}", "name": repo})

    def validate_yaml(self) -> None:
        asked = json.loads(self.body)
        front = re.match(r"---\n(.*?)\n---\n", asked["content"], re.DOTALL)
        try:
            value = yaml.safe_load(front[1]) if front else None
        except yaml.YAMLError as error:
            value = str(error)
        errors = [] if isinstance(value, dict) else [{"message": f"front matter: {value}"}]
        self._json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def info(self, repo: str, revision: str | None = None) -> None:
        if found := self._at(repo, revision or "main"):
            state, commit, files = found
            siblings = [{"rfilename": name} for name in files]
            self._json({"id": repo, "sha": commit, "private": state.private, "siblings": siblings, "tags": [], "downloads": 0})

    def tree(self, repo: str, revision: str, folder: str | None = None) -> None:
        found = self._at(repo, revision)
        if not found:
            return
        prefix = f"{folder}/" if folder else ""
        inside = {name: file for name, file in sorted(found[2].items()) if name.startswith(prefix)}
        if folder and not inside:
            self._json({"error": f"{folder} does not exist"}, 404, "EntryNotFound")
        elif "recursive=true" in self.path.lower():
            self._json([_entry(name, *file) for name, file in inside.items()])
        else:
            deeper = dict.fromkeys(
                name.removeprefix(prefix).partition("/")[0] for name in inside if "/" in name.removeprefix(prefix)
            )
            folders = [{"type": "directory", "path": prefix + name, "oid": blob(name.encode())} for name in deeper]
            self._json([*folders, *(_entry(n, *file) for n, file in inside.items() if "/" not in n.removeprefix(prefix))])

    def paths_info(self, repo: str, revision: str) -> None:
        if found := self._at(repo, revision):
            asked = json.loads(self.body)["paths"]
            self._json([_entry(name, *found[2][name]) for name in asked if name in found[2]])

    def preupload(self, repo: str, revision: str) -> None:
        if found := self._at(repo, revision):
            modes = []
            for file in json.loads(self.body)["files"]:
                large = file["path"].endswith(LARGE_SUFFIXES) or file["size"] > LARGE_BYTES
                mode = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
                if file["path"] in found[2]:
                    data, was_large = found[2][file["path"]]
                    mode["oid"] = hashlib.sha256(data).hexdigest() if was_large else blob(data)
                modes.append(mode)
            self._json({"files": modes})

    def batch(self, repo: str) -> None:
        if self._at(repo, "main"):
            objects = []
            for item in json.loads(self.body)["objects"]:
                if item["oid"] not in self.hub.store:
                    upload = {"href": f"{self.hub.endpoint}/store/{item['oid']}"}
                    item |= {"actions": {"upload": upload, "verify": {"href": f"{self.hub.endpoint}/verify"}}}
                objects.append(item)
            self._json({"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        self.hub.puts.append(oid)
        self.hub.store[oid] = flipped(self.body) if oid in self.hub.garbled else self.body
        self._answer(b"")

    def verify(self) -> None:
        asked = json.loads(self.body)
        right = len(self.hub.store.get(asked["oid"], b"")) == asked["size"]
        self._json({}, 200 if right else 404)

    def commit(self, repo: str, revision: str) -> None:
        if not (found := self._at(repo, revision)):
            return
        files = dict(found[2])
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = (base64.b64decode(value["content"]), False)
            elif item["key"] == "lfsFile":
                files[value["path"]] = (self.hub.store[value["oid"]], True)
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        commit = found[0].add(files)
        self._json({"commitUrl": f"{self.hub.endpoint}/datasets/{repo}/commit/{commit}", "commitOid": commit, "success": True})

    def resolve(self, repo: str, revision: str, name: str) -> None:
        if not (found := self._at(repo, revision)):
            return
        if name not in found[2]:
            self._json({"error": "Entry not found"}, 404, "EntryNotFound")
            return
        data, large = found[2][name]
        if self.command == "GET":
            self.hub.gets.append(name)
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest() if large else blob(data)}"', "X-Repo-Commit": found[1]}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked:
            start, stop = int(asked[1]), int(asked[2] or len(data) - 1) + 1
            headers["Content-Range"] = f"bytes {start}-{min(stop, len(data)) - 1}/{len(data)}"
            self._answer(data[start:stop], 206, headers)
        else:
            self._answer(data, 200, headers)


def _entry(name: str, data: bytes, large: bool) -> dict[str, Any]:
    entry = {"type": "file", "path": name, "size": len(data), "oid": blob(data)}
    if large:
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry


_API = r"/api/datasets/(?P<repo>[^/]+/[^/]+)"
ROUTES: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.validate_yaml),
    ("GET", _API, _Handler.info),
    ("GET", _API + "/revision/(?P<revision>[^/]+)", _Handler.info),
    ("GET", _API + "/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", _Handler.tree),
    ("POST", _API + "/paths-info/(?P<revision>[^/]+)", _Handler.paths_info),
    ("POST", _API + "/preupload/(?P<revision>[^/]+)", _Handler.preupload),
    ("POST", _API + "/commit/(?P<revision>[^/]+)", _Handler.commit),
    ("POST", r"/datasets/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", "/store/(?P<oid>[0-9a-f]+)", _Handler.put),
    ("POST", "/verify", _Handler.verify),
    ("GET HEAD", r"/datasets/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)", _Handler.resolve),
)
