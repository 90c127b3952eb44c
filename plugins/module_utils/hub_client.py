# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What is asked of a Hub before anything is downloaded, and the download in a container of the engine image.

The questions (does the token open this repository at this revision, which files has it) need the standard
library alone. The bytes are brought by ``huggingface_hub`` inside the engine image: resumable, with hf-xet,
and no Python package on the node. The token reaches that container as a 0600 file in a tmpfs, never by
argument, environment, label or log.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any, NoReturn

from .tree import FileSpec, TreeError, parse_files

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)?\Z")
_REVISION = re.compile(r"[0-9a-f]{40}\Z")
USER_AGENT = "sparkfleet"


class HubRefusal(TreeError):
    """The Hub will not give the files. ``kind`` is one of the keys of ``REMEDIES``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{message}. {REMEDIES[kind]}")
        self.kind = kind


REMEDIES = {
    "no_token": "Give a token of an account that may read the repository (variable or 0600 file)",
    "bad_token": "The Hub rejects the token: make a new one and replace the old",
    "gated": "Accept the repository's terms in a browser with the token's account; a fine-grained token also "
    "needs the permission to read gated repositories",
    "no_repo": "Correct the repository name; a private one looks the same without a token that may read it",
    "no_revision": "Correct the revision: 40 hex digits of a commit of this repository",
    "no_file": "The manifest belongs to another revision: make the model lock for this one",
    "offline": "Check the node's way to the Hub and the endpoint variable; files that are here already are "
    "used without it",
    "range": "Remove the partial directory that the message names and run again",
    "server": "Try again later; what came is kept and the next run resumes",
    "space": "Free space on that filesystem; what came is kept and the next run resumes",
    "client": "The engine image must bring python3 with huggingface_hub",
}


def check_repo(repo: str, revision: str) -> None:
    """A repository name and a full commit id: a branch moves, so it is no pin."""
    if not _REPO.match(repo):
        raise TreeError(f"{repo!r} is not a repository name (OWNER/NAME)")
    if not _REVISION.match(revision):
        raise TreeError(
            f"revision {revision!r} of {repo} is not a commit id of 40 hex digits; a branch or tag can move. "
            "Copy the commit id from the repository's history"
        )


def token_of(params: Mapping[str, Any]) -> str:
    """The token of a module's options, or that of its token file when there is one."""
    if params["token"]:
        return str(params["token"]).strip()
    if params["token_file"]:
        with contextlib.suppress(FileNotFoundError):
            return Path(params["token_file"]).read_text(encoding="utf-8").strip()
    return ""


def slug(repo: str) -> str:
    """The repository name as one path part: ``/`` becomes ``--``."""
    return repo.replace("/", "--")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer: the file may be read. Following it could carry the token elsewhere."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        return None


@dataclass(frozen=True)
class Hub:
    """One endpoint, such as ``https://huggingface.co``."""

    endpoint: str
    token: str = ""
    timeout: float = 20.0

    def _request(self, method: str, path: str) -> tuple[int, Message, bytes]:
        url = self.endpoint.rstrip("/") + path
        if not url.startswith(("https://", "http://")):
            raise TreeError(f"the Hub endpoint {self.endpoint!r} is not an http(s) URL")
        request = urllib.request.Request(url, method=method, headers={"User-Agent": USER_AGENT})  # noqa: S310
        if self.token:
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        opener = urllib.request.build_opener(_NoRedirect())
        try:
            with opener.open(request, timeout=self.timeout) as answer:
                return answer.status, answer.headers, answer.read() if method == "GET" else b""
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.headers, b""
        except (urllib.error.URLError, socket.timeout, OSError) as exc:
            reason = getattr(exc, "reason", exc)
            raise HubRefusal("offline", f"{self.endpoint} does not answer ({reason})") from exc

    def probe(self, repo: str, revision: str, name: str) -> None:
        """One HEAD of one file: returns when it may be read, else ``HubRefusal`` with what is in the way."""
        path = f"/{repo}/resolve/{revision}/{urllib.parse.quote(name)}"
        status, headers, _body = self._request("HEAD", path)
        if status >= 400:
            refuse(
                status,
                str(headers.get("X-Error-Code") or ""),
                repo,
                revision,
                name=name,
                token=bool(self.token),
            )

    def listing(self, repo: str, revision: str, prefix: str = "") -> tuple[FileSpec, ...]:
        """The files of a revision (below ``prefix``, which is cut off) with sizes and digests."""
        status, headers, body = self._request("GET", f"/api/models/{repo}/revision/{revision}?blobs=true")
        if status != 200:
            refuse(
                status,
                str(headers.get("X-Error-Code") or ""),
                repo,
                revision,
                name="",
                token=bool(self.token),
            )
        try:
            siblings = json.loads(body.decode("utf-8"))["siblings"]
        except (ValueError, KeyError) as exc:
            raise HubRefusal("server", f"{self.endpoint}: the file list of {repo} is not readable") from exc
        start = f"{prefix.strip('/')}/" if prefix else ""
        rows = []
        for item in siblings:
            name = str(item.get("rfilename", ""))
            if not name.startswith(start) or name.rpartition("/")[2] == ".gitattributes":
                continue
            lfs = item.get("lfs") or {}
            rows.append(
                {
                    "name": name[len(start) :],
                    "size": lfs.get("size", item.get("size")),
                    "sha256": lfs.get("sha256", ""),
                    "blob_id": "" if lfs else item.get("blobId", ""),
                }
            )
        if not rows:
            raise HubRefusal("no_file", f"{repo} at {revision} has no files below {start or 'its root'}")
        return parse_files(rows)


def refuse(status: int, code: str, repo: str, revision: str, *, name: str, token: bool) -> NoReturn:
    """The refusal that belongs to an HTTP status and the Hub's own ``X-Error-Code``."""
    where = f"{repo} at {revision}" + (f", file {name}" if name else "")
    found = f"the Hub answered {status}" + (f" ({code})" if code else "")
    if code == "GatedRepo" or status == 403:
        kind = "gated" if token else "no_token"
        raise HubRefusal(kind, f"{where}: {found}: access to this repository is restricted")
    if code == "RevisionNotFound":
        raise HubRefusal("no_revision", f"{where}: {found}: there is no such revision")
    if code == "EntryNotFound":
        raise HubRefusal("no_file", f"{where}: {found}: there is no such file")
    if status == 401:
        # The Hub says 401 RepoNotFound for a name that does not exist when no token is given.
        kind = "bad_token" if token else ("no_repo" if code == "RepoNotFound" else "no_token")
        raise HubRefusal(
            kind, f"{where}: {found}: " + ("the token is refused" if token else "no token was given")
        )
    if status == 404:
        kind = "no_repo" if code in ("RepoNotFound", "") and not name else "no_revision"
        if code == "RepoNotFound":
            kind = "no_repo"
        raise HubRefusal(kind, f"{where}: {found}: not found")
    if status == 416:
        raise HubRefusal("range", f"{where}: {found}: a partial file is longer than the file on the Hub")
    raise HubRefusal("server", f"{where}: {found}")


#: Runs in the engine image. Reads the job from a file, prints one JSON line at the end.
FETCH_SCRIPT = r"""
import concurrent.futures, json, os, sys, traceback
here = os.path.dirname(os.path.abspath(__file__))
job = json.load(open(os.path.join(here, "job.json")))
os.environ.update(job["environment"], HF_ENDPOINT=job["endpoint"], HF_HOME=job["home"],
                  HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_PROGRESS_BARS="1",
                  HF_HUB_DISABLE_IMPLICIT_TOKEN="1")
def end(**fields):
    print(json.dumps(fields), flush=True)
    sys.exit(0 if fields.get("ok") else 1)
try:
    from huggingface_hub import hf_hub_download
    from huggingface_hub import errors as hf
except Exception as exc:
    end(kind="client", message=f"huggingface_hub cannot be imported: {exc}")
token = open(os.path.join(here, "token")).read().strip() or False
def fetch(name):
    hf_hub_download(repo_id=job["repo"], filename=name, revision=job["revision"], local_dir=job["dest"],
                    token=token)
    return name
def status_of(exc):
    response = getattr(exc, "response", None)
    headers = getattr(response, "headers", None) or {}
    return getattr(response, "status_code", 0) or 0, headers.get("X-Error-Code", "")
try:
    with concurrent.futures.ThreadPoolExecutor(max_workers=job["parallel"]) as pool:
        futures = [pool.submit(fetch, name) for name in job["files"]]
        for future in concurrent.futures.as_completed(futures):
            try:
                print(json.dumps({"done": future.result()}), flush=True)
            except BaseException:
                for other in futures:
                    other.cancel()
                raise
    end(ok=True)
except SystemExit:
    raise
except BaseException as exc:
    chain, seen = exc, []
    while chain is not None and chain not in seen:
        seen.append(chain)
        chain = chain.__cause__ or chain.__context__
    for one in seen:
        status, code = status_of(one)
        if status >= 400:
            end(kind="http", status=status, code=code, message=str(one).splitlines()[0][:300])
    for one in seen:
        if isinstance(one, OSError) and one.errno == 28:
            end(kind="space", message=str(one)[:300])
    names = " ".join(type(one).__name__ for one in seen)
    end(kind="offline" if "onnect" in names or "imeout" in names else "server",
        message=f"{type(exc).__name__}: {exc}".splitlines()[0][:300])
"""


def explain(last: Mapping[str, Any], repo: str, revision: str, token: bool, work: str) -> NoReturn:
    """The refusal that belongs to the last line of the download script."""
    kind = str(last.get("kind") or "server")
    message = str(last.get("message") or "the download ended without a word")
    if kind == "http":
        status = int(last.get("status") or 0)
        if status == 416:
            raise HubRefusal("range", f"{repo} at {revision}: {message} (partial directory {work})")
        refuse(status, str(last.get("code") or ""), repo, revision, name="", token=token)
    raise HubRefusal(kind if kind in REMEDIES else "server", f"{repo} at {revision}: {message}")


#: A part that no later download can go on with: newer clients (2.x) write each file under a name of its own and
#: begin anew after a kill. The part of an older one has no such word before its ending, and is resumed.
_DEAD_PART = re.compile(r"[^.]+\.[^.]+\.[0-9a-f]{8}\.incomplete\Z")


def dead_parts(stage: Path) -> list[Path]:
    """Parts that a killed download left in its stage and that only hold space."""
    return sorted(path for path in (stage / ".cache").rglob("*.incomplete") if _DEAD_PART.match(path.name))


def last_result(output: Sequence[str]) -> dict[str, Any]:
    """The last JSON object among the lines that the script printed."""
    for line in reversed(output):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and "done" not in found:
            return found
    return {"kind": "server", "message": (output[-1][:300] if output else "no output")}
