"""A stand-in for the Hugging Face Hub: the HTTP endpoints that `huggingface_hub` calls to upload and download a model.

It stores commits in memory: regular files arrive in the commit, large ones by the Git LFS protocol ("basic" transfer).
Tests change `answers` or a stored commit to act as a faulty or hostile server.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "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"
_LARGE = (".safetensors", ".arcx", ".pkl", ".bin")


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # commit -> files
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        state = {**self.commits.get(self.branches.get(branch, ""), {}), **files}
        name = hashlib.sha1(repr(sorted(state.items())).encode()).hexdigest()
        self.commits[name], self.branches[branch] = state, name
        return name


@dataclass
class Hub:
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    large_files: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)  # path prefix -> status, or bytes of a body

    def add(self, name: str, files: dict[str, bytes], private: bool = False) -> str:
        return self.repositories.setdefault(name, Repository(private)).commit(files)


def is_large(name: str) -> bool:
    return name.endswith(_LARGE)


@contextmanager
def run_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        server_hub = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def do_PUT(self) -> None:
        if "Content-Length" in self.headers:
            self._answer(self.rfile.read(int(self.headers["Content-Length"])))
            return
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        self._answer(body)

    def _answer(self, body: bytes) -> None:
        hub, path = self.server_hub, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        for prefix, answer in hub.answers.items():
            if path.startswith(prefix):
                self._send(answer, {}) if isinstance(answer, int) else self._send(200, answer)
                return
        for pattern, function in _ROUTES.items():
            if found := re.fullmatch(pattern, f"{self.command} {path}"):
                function(self, body, *found.groups())
                return
        self._send(404, {"error": "no such address"})

    @property
    def _is_authorised(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _send(self, status: int, content: Any, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _repository(self, name: str, write: bool = False) -> Repository | None:
        found = self.server_hub.repositories.get(name)
        if found is None or ((found.private or write) and not self._is_authorised):
            self._send(401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return None
        return found

    # --- upload ---

    def create(self, body: bytes) -> None:
        wanted = json.loads(body)
        if not self._is_authorised:
            self._send(401, {"error": "Invalid username or password."})
            return
        name = f"{wanted['organization']}/{wanted['name']}"
        url = f"{self.server_hub.url}/{name}"
        if name in self.server_hub.repositories:
            self._send(409, {"error": "You already created this model repo", "url": url})
            return
        private = wanted.get("private") is True or wanted.get("visibility") == "private"
        self.server_hub.repositories[name] = Repository(private)
        self._send(200, {"url": url, "name": name})

    def validate_yaml(self, body: bytes) -> None:
        block = re.match(r"---\n(.*?)\n---", json.loads(body)["content"], re.DOTALL)
        metadata = yaml.safe_load(block.group(1)) if block else {}
        errors = [] if isinstance(metadata.get("license", "mit"), str) else [{"message": '"license" must be a string'}]
        self._send(400 if errors else 200, {"errors": errors, "warnings": []})

    def preupload(self, body: bytes, name: str, revision: str) -> None:
        if self._repository(name, write=True) is None:
            return
        modes = [
            {"path": f["path"], "uploadMode": "lfs" if is_large(f["path"]) else "regular", "shouldIgnore": False}
            for f in json.loads(body)["files"]
        ]
        self._send(200, {"files": modes})

    def batch(self, body: bytes, name: str) -> None:
        if self._repository(name, write=True) is None:
            return
        objects = [
            {**o, "actions": {"upload": {"href": f"{self.server_hub.url}/lfs/{o['oid']}"}}}
            for o in json.loads(body)["objects"]
        ]
        self._send(200, {"transfer": "basic", "objects": objects})

    def put_large(self, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.server_hub.large_files[oid] = body
        self._send(200, {})

    def commit(self, body: bytes, name: str, revision: str) -> None:
        repository = self._repository(name, write=True)
        if repository is None:
            return
        files = {}
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            elif entry["key"] == "lfsFile":
                files[entry["value"]["path"]] = self.server_hub.large_files[entry["value"]["oid"]]
        oid = repository.commit(files, revision)
        self._send(200, {"commitUrl": f"{self.server_hub.url}/{name}/commit/{oid}", "commitOid": oid})

    # --- download ---

    def _commit_of(self, repository: Repository, revision: str) -> str | None:
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            self._send(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
            return None
        return commit

    def info(self, body: bytes, name: str, revision: str | None = None) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        if not repository.commits:
            self._send(200, {"id": name, "private": repository.private, "siblings": []})
            return
        commit = self._commit_of(repository, revision or "main")
        if commit is None:
            return
        siblings = []
        for file, content in repository.commits[commit].items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entry: dict[str, Any] = {"rfilename": file, "size": len(content), "blobId": blob}
            if is_large(file):
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 134}
            siblings.append(entry)
        self._send(200, {"id": name, "sha": commit, "private": repository.private, "siblings": siblings})

    def resolve(self, body: bytes, name: str, revision: str, file: str) -> None:
        repository = self._repository(name)
        commit = self._commit_of(repository, revision) if repository is not None else None
        if repository is None or commit is None:
            return
        content = repository.commits[commit].get(file)
        if content is None:
            self._send(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            return
        etag = hashlib.sha256(content).hexdigest()
        self._send(200, content, ETag=f'"{etag}"', X_Repo_Commit=commit)


_NAME = r"([^/]+/[^/]+)"
_ROUTES: dict[str, Any] = {
    r"POST /api/repos/create": _Handler.create,
    r"POST /api/validate-yaml": _Handler.validate_yaml,
    rf"POST /api/models/{_NAME}/preupload/([^/]+)": _Handler.preupload,
    rf"POST /{_NAME}\.git/info/lfs/objects/batch": _Handler.batch,
    r"PUT /lfs/(\w+)": _Handler.put_large,
    rf"POST /api/models/{_NAME}/commit/([^/]+)": _Handler.commit,
    rf"GET /api/models/{_NAME}": _Handler.info,
    rf"GET /api/models/{_NAME}/revision/(.+)": _Handler.info,
    rf"(?:GET|HEAD) /{_NAME}/resolve/([^/]+)/(.+)": _Handler.resolve,
}
