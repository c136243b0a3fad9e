"""A small Hub: what huggingface_hub's own client asks of huggingface.co, served from folders, with faults on demand.

    with HubServer({"org/model": {"a" * 40: folder}}) as hub:
        hub.use(monkeypatch)                  # the client in this process now talks to it
        hub.faults.append(Fault("GET .*/resolve/", status=503, times=2))

As on the real Hub, small files are served by the Hub itself after a relative redirect, and *.safetensors by a second
host (here "localhost" in place of 127.0.0.1) under signed URLs, which `expire_links` ends. `log` has every request.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

from huggingface_hub import constants

MODEL_URL = r"api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?"
FILE_URL = r"(?:api/resolve-cache/models/)?([^/]+/[^/]+)/(?:resolve/)?(refs/pr/\d+|[^/]+)/(.+)"


@dataclass
class Fault:
    """What the next `times` requests that match meet, in place of or on top of the plain answer."""

    match: str  # regular expression on "METHOD http://host:port/path?query"
    times: int = 1
    status: int | None = None  # answered in place of everything else, with `headers`
    headers: dict[str, str | None] = field(default_factory=dict)  # put in place of the answer's own; None drops one
    ignore_range: bool = False  # the whole file and 200 in place of 206
    cut_after: int | None = None  # bytes of the body before the connection is dropped
    body: bytes | None = None  # another body
    before: Callable[[], None] | None = None  # called first, such as to move a branch


@dataclass
class Request:
    method: str
    url: str
    headers: dict[str, str]  # names in lower case
    status: int = 0
    sent: int = 0  # bytes of body


class HubServer:
    """Two threaded HTTP servers on free ports: the Hub and its content network."""

    def __init__(self, repos: dict[str, dict[str, Path]]):
        self.repos = repos  # repo -> commit -> folder
        self.refs = {repo: {"main": list(commits)[-1]} for repo, commits in repos.items()}
        self.tokens: dict[str, set[str]] = {}  # valid token -> gated and private repositories that it may read
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.moved: dict[str, str] = {}  # old name -> new name
        self.faults: list[Fault] = []
        self.log: list[Request] = []
        self._links_era = 0
        self._lock = threading.Lock()
        self._servers = [_Server(("127.0.0.1", 0), handler) for handler in (_HubHandler, _ContentHandler)]
        for server in self._servers:
            server.hub = self
        self.endpoint = f"http://127.0.0.1:{self._servers[0].server_port}"
        self.content_endpoint = f"http://localhost:{self._servers[1].server_port}"

    def __enter__(self) -> "HubServer":
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def use(self, monkeypatch, token: str | None = None) -> None:
        """Points huggingface_hub in this process here. It reads HF_ENDPOINT when imported, hence its constants."""
        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        template = self.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", os.devnull)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        monkeypatch.setenv("HF_TOKEN", token or "")

    def expire_links(self) -> None:
        """Every signed URL given out so far is refused with 403 from now on."""
        self._links_era += 1

    def requests(self, pattern: str) -> list[Request]:
        """The requests whose "METHOD url" matches."""
        return [request for request in self.log if re.search(pattern, f"{request.method} {request.url}")]

    def take_fault(self, request: Request) -> Fault:
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.match, f"{request.method} {request.url}"):
                    fault.times -= 1
                    return fault
        return Fault("")

    def commit_of(self, repo: str, revision: str) -> str | None:
        revision = self.refs[repo].get(revision, revision)
        return revision if revision in self.repos[repo] else None

    def link(self, repo: str, commit: str, file: str) -> str:
        return f"{self.content_endpoint}/{repo}/{commit}/{quote(file)}?Expires=3600&Signature={self._links_era}"

    def accepts_link(self, query: str) -> bool:
        return parse_qs(query).get("Signature") == [str(self._links_era)]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: HubServer

    def handle_error(self, request, client_address):
        """A client that leaves in the middle of a body is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.hub = self.server.hub
        host = self.hub.endpoint if isinstance(self, _HubHandler) else self.hub.content_endpoint
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.request_log = Request(self.command, host + self.path, headers)
        self.hub.log.append(self.request_log)
        self.fault = self.hub.take_fault(self.request_log)
        if self.fault.before:
            self.fault.before()
        if self.fault.status:
            self.answer(self.fault.status, {}, b"")
        else:
            url = urlsplit(self.path)
            self.route(unquote(url.path).strip("/"), url.query)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass

    def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        body = body if self.fault.body is None else self.fault.body
        self.request_log.status = status
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers | self.fault.headers).items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault.cut_after is not None:
            body, self.close_connection = body[: self.fault.cut_after], True
        for start in range(0, len(body), 1 << 16):
            self.request_log.sent = min(len(body), start + (1 << 16))  # before the client can have it
            self.wfile.write(body[start : start + (1 << 16)])

    def send_file(self, path: Path, headers: dict[str, str]) -> None:
        body = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted or self.fault.ignore_range:
            return self.answer(200, headers, body)
        first, last = int(wanted[1]), min(int(wanted[2] or len(body)), len(body) - 1)
        if first > last:
            return self.answer(416, {"Content-Range": f"bytes */{len(body)}"}, b"")
        headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
        self.answer(206, headers, body[first : last + 1])


class _HubHandler(_Handler):
    def route(self, path: str, query: str) -> None:
        if found := re.fullmatch(MODEL_URL, path):
            repo, kind, revision = found[1], found[2], found[3] or "main"
        elif found := re.fullmatch(FILE_URL, path):
            repo, kind, revision = found[1], "file", found[2]
        else:
            return self.refuse(404, None, "not found")
        if repo in self.hub.moved:
            return self.answer(307, {"Location": self.path.replace(repo, self.hub.moved[repo], 1)}, b"")
        if not self.may_pass(repo, reads=kind == "file"):
            return
        commit = self.hub.commit_of(repo, revision)
        if commit is None:
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        folder = Path(self.hub.repos[repo][commit])
        if kind == "file":
            return self.resolve(repo, commit, folder, found[3], cached=path.startswith("api/"))
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        sizes = [(folder / file).stat().st_size if kind == "tree" or "blobs" in query else None for file in files]
        if kind == "tree":
            answer = [{"type": "file", "oid": _etag(folder / file), "size": size, "path": file}
                      for file, size in zip(files, sizes, strict=True)]
        else:
            siblings = [{"rfilename": file, "size": size} for file, size in zip(files, sizes, strict=True)]
            answer = {"id": repo, "sha": commit, "siblings": siblings}
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def may_pass(self, repo: str, reads: bool) -> bool:
        """The Hub's rules: 401 for who is unknown, 404 for what a known user may not see, 403 for a closed gate."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        granted = self.hub.tokens.get(token)
        if token and granted is None:
            self.refuse(401, None, "Invalid credentials in Authorization header")
        elif repo not in self.hub.repos or (repo in self.hub.private and repo not in (granted or ())):
            self.refuse(401 if granted is None else 404, "RepoNotFound", "Invalid username or password.")
        elif reads and repo in self.hub.gated and repo not in (granted or ()):
            self.refuse(401 if granted is None else 403, "GatedRepo", f"Access to model {repo} is restricted.")
        else:
            return True
        return False

    def resolve(self, repo: str, commit: str, folder: Path, file: str, cached: bool) -> None:
        path = folder / file
        if not path.is_file():
            return self.refuse(404, "EntryNotFound", "Entry not found")
        etag = f'"{_etag(path)}"'
        headers = {"X-Repo-Commit": commit, "ETag": etag, "Accept-Ranges": "bytes"}
        if cached:
            return self.send_file(path, headers)
        headers |= {"X-Linked-Size": str(path.stat().st_size), "X-Linked-Etag": etag}
        if file.endswith(".safetensors"):
            return self.answer(302, headers | {"Location": self.hub.link(repo, commit, file)}, b"")
        self.answer(307, headers | {"Location": f"/api/resolve-cache/models/{repo}/{commit}/{quote(file)}"}, b"")

    def refuse(self, status: int, code: str | None, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer(status, headers, json.dumps({"error": message}).encode())


class _ContentHandler(_Handler):
    def route(self, path: str, query: str) -> None:
        if not self.hub.accepts_link(query):
            return self.answer(403, {}, b"<Error><Code>AccessDenied</Code></Error>")
        org, name, commit, file = path.split("/", 3)
        path = Path(self.hub.repos[f"{org}/{name}"][commit], file)
        self.send_file(path, {"ETag": f'"{_etag(path)}"', "Accept-Ranges": "bytes"})


def _etag(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
