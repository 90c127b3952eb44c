# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A folder of a git repository at one commit, read with the node's own git.

The commit id is the pin: git checks every object that it receives against the ids below it, and the blob ids become
the manifest of the tree. The configuration of git on the node holds (proxies, credential helpers, mirrors by
``insteadOf``), for none of it can change what a commit id stands for. The repository lies in a directory of its own
that goes with the object.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from .tree import FileSpec, TreeError, parse_files
from .weights_module import need_tool

SCHEMES = ("https", "http", "git", "ssh", "file")
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
#: A kit has some ten MB; what takes longer than this hangs.
FETCH_SECONDS = 1800
#: Ends an HTTP transfer that gives less than so many bytes a second for so many seconds.
SLOW = ("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=60")
#: Servers that give no single commit say so in these words; their branches and tags are fetched whole.
_WHOLE_ONLY = ("unadvertised object", "does not support shallow")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def is_git(repo: str) -> bool:
    """Whether a repository is named by a URL, and not OWNER/NAME of a Hub."""
    return "://" in repo


def repo_folder(repo: str) -> str:
    """The directory name of a repository: OWNER--NAME, and HOST--OWNER--NAME of a URL."""
    plain = re.sub(r"\.git/?\Z", "", repo.partition("://")[2]) if is_git(repo) else repo
    return re.sub(r"[^A-Za-z0-9._-]+", "--", plain.strip("/"))


def check_git(url: str, revision: str) -> None:
    """Refuse what is no URL of git or no commit. Raises TreeError."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.path.strip("/"):
        raise TreeError(
            f"{url!r} is no URL of a git repository: it begins with one of {', '.join(SCHEMES)} and ://, and has a path"
        )
    if parts.password or (parts.username and parts.scheme in ("https", "http")):
        raise TreeError(
            f"the URL of {parts.hostname}{parts.path} holds a secret, which would stand in logs and file names; "
            "leave it out and give it to git on the node, in a credential helper of root"
        )
    if not _COMMIT.match(revision):
        raise TreeError(
            f"{url}: revision {revision!r} is not a commit id (40 hex digits). A branch can change under a running "
            "fleet; give the commit"
        )


def reason(said: str, url: str, revision: str) -> str:
    """What git's own last words mean, and what to do. Pure."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith(("fatal:", "error:"))), "") or "\n".join(
        lines[-1:]
    )
    where = f"{url} at {revision}: git said {last!r}: "
    low = said.lower()
    if "not our ref" in low or "unadvertised object" in low:
        return f"{where}the repository has no such commit; correct the revision"
    if "could not read username" in low or "authentication failed" in low or "permission denied" in low:
        return (
            f"{where}there is no such repository, or it is private; correct the URL, or let git on the node, as root, "
            "have access to it"
        )
    if any(
        words in low for words in ("not found", "not exported", "does not appear to be", "does not exist")
    ):
        return f"{where}there is no such repository; correct the URL"
    if any(
        words in low
        for words in (
            "could not resolve",
            "unable to look up",
            "unable to connect",
            "failed to connect",
            "timed out",
            "couldn't connect",
            "connection refused",
            "unreachable",
            "too slow",
        )
    ):
        return f"{where}the server cannot be reached from this node; give it a way there (a proxy: http.proxy of git)"
    return f"{where}the fetch failed"


class GitSource:
    """One commit, for a ``with`` block: it is fetched when it is first asked for anything. Raises TreeError."""

    def __init__(self, url: str, revision: str, folder: str = "") -> None:
        check_git(url, revision)
        self.url = url
        self.revision = revision
        self._folder = folder.strip("/")
        self._open = contextlib.ExitStack()
        self._scratch = ""
        self._files: tuple[FileSpec, ...] = ()

    def __enter__(self) -> GitSource:
        return self

    def __exit__(self, *_error: object) -> None:
        self._open.close()

    def _run(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        environment = {**os.environ, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
        environment = {
            name: value for name, value in environment.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")
        }
        environment.setdefault("GIT_SSH_COMMAND", "ssh -oBatchMode=yes -oConnectTimeout=20")
        argv = [need_tool("git", "git"), "--git-dir", self._scratch, *SLOW, *words]
        try:
            return subprocess.run(
                argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=FETCH_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise TreeError(
                f"{self.url} at {self.revision}: git {words[0]} did not end within {FETCH_SECONDS} s; look at the "
                "network and run again"
            ) from None

    def _ask(self, *words: str) -> bytes:
        done = self._run(*words)
        if done.returncode:
            raise TreeError(reason(done.stderr.decode("utf-8", "replace"), self.url, self.revision))
        return done.stdout

    def _fetch(self) -> None:
        self._scratch = self._open.enter_context(tempfile.TemporaryDirectory(prefix="sparkfleet-git-"))
        self._ask("init", "--quiet", "--bare", "--template=", self._scratch)
        done = self._run("fetch", "--quiet", "--no-tags", "--depth=1", self.url, self.revision)
        said = done.stderr.decode("utf-8", "replace")
        if done.returncode and any(words in said for words in _WHOLE_ONLY):
            self._ask("fetch", "--quiet", self.url, "+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
        elif done.returncode:
            raise TreeError(reason(said, self.url, self.revision))
        if self._run("cat-file", "-e", f"{self.revision}^{{commit}}").returncode:
            raise TreeError(f"{self.url} has no commit {self.revision}; correct the revision")

    def listing(self) -> tuple[FileSpec, ...]:
        """The files of the folder, named from there. Raises TreeError for a link, a submodule or an empty folder."""
        if self._files:
            return self._files
        self._fetch()
        start = f"{self._folder}/" if self._folder else ""
        words = ["--", start] if start else []
        raw = self._ask("ls-tree", "-r", "-l", "-z", "--full-tree", self.revision, *words).decode(
            "utf-8", "replace"
        )
        rows = []
        for line in filter(None, raw.split("\0")):
            facts, _tab, path = line.partition("\t")
            mode, kind, oid, size = facts.split()
            name = path[len(start) :]
            if name.rpartition("/")[2] in (".gitattributes", ".gitignore"):
                continue
            if kind != "blob" or not mode.startswith("100"):
                what = "a submodule" if kind == "commit" else "a symbolic link"
                raise TreeError(
                    f"{self.url} at {self.revision}: {path} is {what}; only plain files are brought"
                )
            rows.append({"name": name, "size": int(size), "blob_id": oid})
        if not rows:
            raise TreeError(
                f"{self.url} at {self.revision} has no files below {start or 'its root'}; correct the folder"
            )
        self._files = parse_files(rows)
        return self._files

    def read(self, name: str) -> bytes:
        """The bytes of a file of the listing. Raises TreeError for one that git-lfs keeps elsewhere."""
        oid = next(spec.blob_id for spec in self.listing() if spec.name == name)
        data = self._ask("cat-file", "blob", oid)
        if data.startswith(_LFS_POINTER):
            raise TreeError(
                f"{self.url} at {self.revision}: {name} lies in git-lfs, which is not read; name a repository that has "
                "the file itself, such as one on the Hub"
            )
        return data

    def export(self, name: str, work: Path) -> None:
        """Write a file of the listing below ``work``."""
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(self.read(name))
        path.chmod(0o644)
