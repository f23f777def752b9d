"""A small Hub on 127.0.0.1: the part of the Hub's HTTP protocol that hf_mot's use of huggingface_hub needs.

It keeps model repositories with commits, branches and pull requests, private ones, tokens that may read or write in
namespaces, large files (LFS, in one part), cards that are checked, tags computed from cards, and a listing by tags. It
can be told to break an upload, to refuse a card, and to change a repository just before a commit arrives.

What it does not cover: datasets and spaces, Xet storage, multipart uploads, redirects to a CDN and ranges of bytes,
gated repositories, quotas and rate limits, paging, deletion of repositories, merging of pull requests, the checks that
the real Hub makes of `.eval_results`, and git itself. It serves http, where huggingface_hub needs the error code that
the real Hub may leave out over https. A test against it says nothing about the real Hub's own rules.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml


class Refusal(Exception):
    """An error answer: status, the Hub's error code if it has one, and what it says."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass
class Repo:
    """Commits by hash, each with all of its files; refs are names of commits."""

    private: bool
    downloads: int = 0
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.sha(revision)]

    def sha(self, revision: str) -> str:
        sha = self.refs.get(revision, revision)
        if sha not in self.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    def commit(self, files: dict[str, bytes], ref: str) -> str:
        listing = sorted((path, hashlib.sha1(content).hexdigest()) for path, content in files.items())
        sha = hashlib.sha1(json.dumps([len(self.commits), listing]).encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.refs[ref] = sha
        return sha

    @property
    def metadata(self) -> dict[str, Any]:
        return front_matter(self.files().get("README.md", b"").decode())


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: bytes


class Hub:
    """
    The server and what it holds. Use it as a context manager.

    Args:
        tokens (`dict[str, dict[str, str]]`): Token → namespace → `"read"` or `"write"`.
    """

    def __init__(self, tokens: dict[str, dict[str, str]]):
        self.tokens = tokens
        self.repos: dict[str, Repo] = {}
        self.large_files: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.refuses_card: Callable[[dict[str, Any]], bool] = lambda metadata: False
        self.before_commit: Callable[[], None] = lambda: None
        self.uploads = 0
        self.broken_upload: tuple[int, int | None] = (0, None)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *args: Any) -> None:
        self.server.shutdown()
        self.server.server_close()

    def break_upload(self, number: int, status: int | None = None) -> None:
        """Breaks the upload of that number (large files and commits are counted, from 1): an error answer, or, without
        `status`, a connection that is closed."""
        self.uploads, self.broken_upload = 0, (number, status)

    def write(self, repo_id: str, path: str, text: str, ref: str = "main") -> str:
        """Commits a file, as a person does on the web page."""
        repo = self.repos[repo_id]
        return repo.commit({**repo.files(ref), path: text.encode()}, ref)


def front_matter(card: str) -> dict[str, Any]:
    match = re.match(r"\s*---\n(.*?)\n?---\s*?(?:\n|$)", card, flags=re.DOTALL)
    return (yaml.safe_load(match[1]) or {}) if match else {}


def is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def blob_id(path: str, content: bytes) -> str:
    if is_large(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


MODEL, REVISION = r"/api/models/(?P<repo_id>[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
ROUTES = [
    ("POST", r"/api/repos/create", "create_repo"),
    ("POST", r"/api/validate-yaml", "validate_card"),
    ("GET", r"/api/models", "list_models"),
    ("GET", MODEL, "model_info"),
    ("GET", rf"{MODEL}/revision/{REVISION}", "model_info"),
    ("POST", rf"{MODEL}/branch/{REVISION}", "create_branch"),
    ("POST", rf"{MODEL}/preupload/{REVISION}", "preupload"),
    ("POST", rf"{MODEL}/commit/{REVISION}", "commit"),
    ("POST", r"/(?P<repo_id>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "large_files"),
    ("PUT", r"/large-files/(?P<oid>[0-9a-f]{64})", "put_large_file"),
    ("GET", rf"/(?P<repo_id>[^/]+/[^/]+)/resolve/{REVISION}/(?P<path>.+)", "resolve"),
    ("GET", r"/", "home"),
]


class _Handler(BaseHTTPRequestHandler):
    """One request. A route's method returns what the JSON answer is made of, or answers itself and returns `None`."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.query, self.body = parse_qs(url.query), self._read_body()
        self.hub.requests.append(Request(self.command, self.path, self.body))
        method = "GET" if self.command == "HEAD" else self.command
        try:
            self._rights()  # an invalid token is refused everywhere
            for verb, pattern, name in ROUTES:
                match = re.fullmatch(pattern, url.path)
                if verb == method and match:
                    # Slashes within a part (refs/pr/1) come quoted.
                    answer = getattr(self, name)(**{key: unquote(part) for key, part in match.groupdict().items()})
                    if answer is not None:
                        self._answer(200, json.dumps(answer).encode())
                    return
            raise Refusal(501, f"This small Hub does not know {self.command} {url.path}")
        except Refusal as refusal:
            headers = {"X-Error-Message": refusal.message} | ({"X-Error-Code": refusal.code} if refusal.code else {})
            self._answer(refusal.status, json.dumps({"error": refusal.message}).encode(), headers)

    do_HEAD = do_POST = do_PUT = do_GET

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _rights(self) -> dict[str, str] | None:
        """What the caller's token may do, by namespace; `None` without one."""
        given = self.headers.get("Authorization")
        if given is None:
            return None
        token = given.removeprefix("Bearer ")
        if token not in self.hub.tokens:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return self.hub.tokens[token]

    def _readable(self, repo_id: str) -> bool:
        return not self.hub.repos[repo_id].private or repo_id.split("/")[0] in (self._rights() or {})

    def _repo(self, repo_id: str, write: bool = False) -> Repo:
        rights = self._rights()
        if repo_id not in self.hub.repos or not self._readable(repo_id):
            raise Refusal(401 if rights is None else 404, "Repository not found", "RepoNotFound")
        if write:
            self._check_write(repo_id)
        return self.hub.repos[repo_id]

    def _check_write(self, repo_id: str) -> None:
        rights = self._rights()
        if rights is None:
            raise Refusal(401, "Invalid username or password.")
        if rights.get(repo_id.split("/")[0]) != "write":
            raise Refusal(403, "You don't have the rights to write here")

    def _break_upload(self) -> bool:
        """Whether this upload was cut off."""
        self.hub.uploads += 1
        number, status = self.hub.broken_upload
        if self.hub.uploads != number:
            return False
        if status is not None:
            raise Refusal(status, "The upload was cut off")
        self.close_connection = True
        return True

    def home(self) -> dict[str, Any]:
        return {}

    def create_repo(self) -> dict[str, Any] | None:
        given = json.loads(self.body)
        repo_id = f"{given['organization']}/{given['name']}"
        self._check_write(repo_id)
        answer = {"url": f"{self.hub.url}/{repo_id}"}
        if repo_id in self.hub.repos:
            self._answer(409, json.dumps({"error": "You already created this model repo", **answer}).encode())
            return None
        repo = self.hub.repos[repo_id] = Repo(private=given.get("visibility") == "private")
        repo.commit({".gitattributes": b"*.safetensors filter=lfs\n"}, "main")
        return answer

    def validate_card(self) -> dict[str, Any] | None:
        try:
            metadata = front_matter(json.loads(self.body)["content"])
            refused = not isinstance(metadata, dict) or self.hub.refuses_card(metadata)
        except yaml.YAMLError:
            refused = True
        if not refused:
            return {"errors": [], "warnings": []}
        message = "The metadata are not valid"
        plain = self.headers.get("Accept") == "text/plain"
        body = message if plain else json.dumps({"errors": [{"message": message}], "warnings": []})
        self._answer(400, body.encode(), {"Content-Type": "text/plain" if plain else "application/json"})
        return None

    def list_models(self) -> list[dict[str, Any]]:
        wanted = set(self.query.get("filter", []))
        found = [
            self._describe(repo_id, repo)
            for repo_id, repo in self.hub.repos.items()
            if self._readable(repo_id) and wanted <= set(tags_of(repo))
        ]
        found.sort(key=lambda model: -model["downloads"])
        return found[: int(self.query.get("limit", [len(found)])[0])]

    def model_info(self, repo_id: str, revision: str = "main") -> dict[str, Any]:
        repo = self._repo(repo_id)
        sha = repo.sha(revision)
        siblings = [{"rfilename": path} for path in repo.commits[sha]]
        return {**self._describe(repo_id, repo), "sha": sha, "siblings": siblings}

    def _describe(self, repo_id: str, repo: Repo) -> dict[str, Any]:
        known = {"id": repo_id, "modelId": repo_id, "private": repo.private, "downloads": repo.downloads}
        return {**known, "likes": 0, "tags": tags_of(repo), "createdAt": "2025-01-01T00:00:00.000Z"}

    def create_branch(self, repo_id: str, revision: str) -> dict[str, Any]:
        repo = self._repo(repo_id, write=True)
        if revision in repo.refs:
            raise Refusal(409, "This branch exists")
        repo.refs[revision] = repo.refs["main"]
        return {}

    def preupload(self, repo_id: str, revision: str) -> dict[str, Any]:
        repo = self._repo(repo_id, write="create_pr" not in self.query)
        there = repo.files(revision)
        return {
            "files": [
                {
                    "path": path,
                    "uploadMode": "lfs" if is_large(path) else "regular",
                    "shouldIgnore": False,
                    "oid": blob_id(path, there[path]) if path in there else None,
                }
                for path in (file["path"] for file in json.loads(self.body)["files"])
            ]
        }

    def large_files(self, repo_id: str) -> dict[str, Any]:
        self._repo(repo_id)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            known = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.large_files:
                known["actions"] = {"upload": {"href": f"{self.hub.url}/large-files/{wanted['oid']}", "header": {}}}
            objects.append(known)
        return {"transfer": "basic", "objects": objects}

    def put_large_file(self, oid: str) -> dict[str, Any] | None:
        if self._break_upload():
            return None
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refusal(400, "The content does not have this hash")
        self.hub.large_files[oid] = self.body
        return {}

    def commit(self, repo_id: str, revision: str) -> dict[str, Any] | None:
        proposed = "create_pr" in self.query
        repo = self._repo(repo_id, write=not proposed)
        if proposed and self._rights() is None:
            raise Refusal(401, "Invalid username or password.")
        if self._break_upload():
            return None
        self.hub.before_commit()
        lines = [json.loads(line) for line in self.body.splitlines()]
        base = repo.sha(revision)
        if not proposed and revision not in repo.refs:
            raise Refusal(400, "Commits go to a branch")
        if lines[0]["value"].get("parentCommit") not in (None, base):
            raise Refusal(412, "A commit has happened since. Please refresh and try again")
        files = dict(repo.commits[base])
        for line in lines[1:]:
            kind, value = line["key"], line["value"]
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.hub.large_files[value["oid"]]
            elif kind == "deletedFile":
                del files[value["path"]]
            else:
                raise Refusal(501, f"This small Hub does not know {kind}")
        number = 1 + sum(ref.startswith("refs/pr/") for ref in repo.refs)
        sha = repo.commit(files, f"refs/pr/{number}" if proposed else revision)
        answer = {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{sha}"}
        return answer | ({"pullRequestUrl": f"{self.hub.url}/{repo_id}/discussions/{number}"} if proposed else {})

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        repo = self._repo(repo_id)
        sha = repo.sha(revision)
        files = repo.commits[sha]
        headers = {"X-Repo-Commit": sha, "Content-Type": "application/octet-stream"}
        if path not in files:
            code = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            return self._answer(404, b"", headers | code)
        return self._answer(200, files[path], headers | {"ETag": f'"{blob_id(path, files[path])}"'})


def tags_of(repo: Repo) -> list[str]:
    """The tags of a card, and those that the Hub adds."""
    metadata = repo.metadata
    tags = list(metadata.get("tags") or [])
    bases = metadata.get("base_model") or []
    bases = [bases] if isinstance(bases, str) else bases
    for base in bases:
        tags += [f"base_model:{base}", f"base_model:{metadata.get('base_model_relation', 'finetune')}:{base}"]
    if "library_name" in metadata:
        tags.append(metadata["library_name"])
    if "license" in metadata:
        tags.append(f"license:{metadata['license']}")
    return list(dict.fromkeys(tags))
