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
import signal
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from .tree import FileSpec, TreeError, check_name, parse_files
from .weights_module import need_tool

SCHEMES = ("https", "http", "git", "ssh", "file")
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
#: A kit has some ten MB; what takes longer than this hangs.
FETCH_SECONDS = 1800
#: Ends an HTTP transfer that gives less than so many bytes a second for so many seconds.
SLOW = ("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=60")
#: Servers that give no single commit say so in these words; their branches and tags are fetched whole.
_WHOLE_ONLY = ("unadvertised object", "does not support shallow")
#: What git takes from the environment about a repository that somebody works in.
_LOCAL = frozenset(
    {
        *(
            "GIT_DIR",
            "GIT_WORK_TREE",
            "GIT_COMMON_DIR",
            "GIT_INDEX_FILE",
            "GIT_NAMESPACE",
            "GIT_DEFAULT_HASH",
        ),
        *("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES"),
    }
)
#: A file that stands for one in git-lfs is smaller than this.
_POINTER_BYTES = 1024
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def is_git(repo: str) -> bool:
    """Whether a repository is named by a URL, and not OWNER/NAME of a Hub."""
    return "://" in repo


def repo_folder(repo: str) -> str:
    """The directory name of a repository: OWNER--NAME, and HOST--OWNER--NAME of a URL."""
    plain = re.sub(r"\.git/?\Z", "", repo.partition("://")[2]) if is_git(repo) else repo
    return re.sub(r"[^A-Za-z0-9._-]+", "--", plain.strip("/"))


def shown(url: str) -> str:
    """A URL without what may be a secret: user, query, fragment."""
    plain = url.partition("?")[0].partition("#")[0]
    return re.sub(r"//[^/]*@", "//", plain)


def check_git(url: str, revision: str) -> None:
    """Refuse what is no URL of git or no commit. Raises TreeError, which never repeats a secret."""
    try:
        parts = urlsplit(url)
    except ValueError as exc:
        raise TreeError(f"{shown(url)} is no URL: {exc}") from None
    if parts.password or parts.query or parts.fragment or (parts.username and parts.scheme != "ssh"):
        raise TreeError(
            f"the URL of {shown(url)} holds a secret or options, which would stand in logs and file names; leave them "
            "out and give a secret to git on the node, in a credential helper of root"
        )
    if not url.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)) or not parts.path.strip("/"):
        raise TreeError(
            f"{shown(url)} is no URL of a git repository: it begins with one of {', '.join(SCHEMES)} and ://, and has "
            "a path"
        )
    if not _COMMIT.match(revision):
        raise TreeError(
            f"{shown(url)}: revision {revision!r} is not a commit id (40 hex digits). A branch can change under a "
            "running fleet; give the commit"
        )


#: Words of git's or ssh's messages, in this order, and what they mean with what to do.
MEANINGS = (
    (("not our ref", "unadvertised object"), "the repository has no such commit; correct the revision"),
    (("no space left",), "the directory for passing files is full (/tmp, or TMPDIR); free space there"),
    (
        ("dubious ownership",),
        "the repository belongs to another user; give it to root, or use safe.directory of git",
    ),
    (
        ("host key verification",),
        "root on the node does not know the key of that host; add it to known_hosts",
    ),
    (
        (
            "could not read username",
            "could not read password",
            "authentication failed",
            "permission denied",
            "error: 403",
        ),
        "there is no such repository, or it is private; correct the URL, or let git on the node, as root, have access "
        "to it",
    ),
    (("407",), "the proxy wants a login; give it to git on the node (http.proxy)"),
    (
        ("not found", "not exported", "does not appear to be", "does not exist"),
        "there is no such repository; correct the URL",
    ),
    (
        (
            *(
                "could not resolve",
                "unable to look up",
                "unable to connect",
                "failed to connect",
                "timed out",
            ),
            *("couldn't connect", "connection refused", "unreachable", "too slow"),
        ),
        "the server cannot be reached from this node; give it a way there (a proxy: http.proxy of git)",
    ),
)
#: Last words of git that say only that something before them went wrong.
_GENERIC = (
    "could not read from remote repository",
    "unpack-objects failed",
    "index-pack failed",
    "early eof",
)


def reason(said: str, url: str, revision: str) -> str:
    """What git's own words mean, and what to do. Pure."""
    lines = [shown(line.strip()) for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if not any(words in line.lower() for words in _GENERIC)] or lines
    first = next((line for line in telling if line.startswith(("fatal:", "error:"))), "".join(telling[-1:]))
    low = said.lower()
    meaning = next(
        (text for words, text in MEANINGS if any(word in low for word in words)), "the fetch failed"
    )
    return f"{shown(url)} at {revision}: git said {first!r}: {meaning}"


class GitSource:
    """One commit, for a ``with`` block: it is fetched when it is first asked for anything. Raises TreeError."""

    def __init__(self, url: str, revision: str, folder: str = "") -> None:
        check_git(url, revision)
        self.url = url
        self.revision = revision
        self._folder = check_name(folder.strip("/")) if folder.strip("/") else ""
        self._open = contextlib.ExitStack()
        self._scratch = ""
        self._files: tuple[FileSpec, ...] = ()

    def __enter__(self) -> GitSource:
        return self

    def __exit__(self, *_error: object) -> None:
        self._open.close()

    def _run(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        environment = {name: value for name, value in os.environ.items() if name not in _LOCAL}
        environment.update(LC_ALL="C", GIT_TERMINAL_PROMPT="0")
        argv = [need_tool("git", "git"), "--git-dir", self._scratch, *SLOW, *words]
        # Of a session of its own: nothing can ask on a terminal, and all of it ends together.
        with subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as git:
            try:
                out, err = git.communicate(timeout=FETCH_SECONDS)
            except BaseException as exc:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(git.pid, signal.SIGKILL)
                if not isinstance(exc, subprocess.TimeoutExpired):
                    raise
                raise TreeError(
                    f"{shown(self.url)} at {self.revision}: git {words[0]} did not end within {FETCH_SECONDS} s; look "
                    "at the network and run again"
                ) from None
        return subprocess.CompletedProcess(argv, git.returncode, out, err)

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
            if not path.startswith(start):
                continue
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
        files = parse_files(rows)
        for spec in files:
            if spec.size <= _POINTER_BYTES and self._blob(spec.blob_id).startswith(_LFS_POINTER):
                raise TreeError(
                    f"{self.url} at {self.revision}: {spec.name} lies in git-lfs, which is not read; name a repository "
                    "that has the file itself, such as one on the Hub"
                )
        self._files = files
        return files

    def _blob(self, oid: str) -> bytes:
        return self._ask("cat-file", "blob", oid)

    def read(self, name: str) -> bytes:
        """The bytes of a file of the listing."""
        return self._blob(next(spec.blob_id for spec in self.listing() if spec.name == name))

    def export(self, name: str, work: Path) -> None:
        """Write a file of the listing below ``work``. Raises TreeError where a link stands in for a folder."""
        path = work / name
        for parent in path.parents[: name.count("/")]:
            if parent.is_symlink():
                raise TreeError(f"{parent} is a symbolic link, and nothing of ours; move it elsewhere")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(self.read(name))
        path.chmod(0o644)
