# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""One lock file a replica on each of its nodes: two runs must not start and stop the same ranks.

The file is made by an exclusive create, so of two runs one wins. It says who holds it, from where, since when
and under which run id; nothing but that id breaks it, because only a person can know that a run is dead.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from .host_io import Host, Refusal

Json = dict[str, Any]
DIRECTORY = "/var/lib/sparkfleet/locks"


def lock_path(replica: str, directory: str = DIRECTORY) -> str:
    return f"{directory.rstrip('/')}/{replica}.lock"


def read(host: Host, path: str) -> Json | None:
    """Who holds the lock; None when nobody. A damaged file is a lock whose holder is not known."""
    text = host.read(path)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        value = {}
    return value if isinstance(value, dict) else {}


def age(seconds: float) -> str:
    """``"3 h 12 min"``: for a message."""
    minutes = int(max(0, seconds) // 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _broken(host: Host, path: str, dead: str) -> Json | None:
    """Take the lock of the run ``dead`` away; what then holds the replica (None: nobody).

    Two people may break the same lock at once. It is moved aside first and read there, so that the second of
    them does not remove the new lock of the first.
    """
    aside = host.path(f"{path}.broken-{os.getpid()}")
    try:
        host.path(path).rename(aside)
    except FileNotFoundError:
        return None
    found = read(host, f"{path}.broken-{os.getpid()}") or {}
    try:
        if found.get("run") != dead:
            os.link(aside, host.path(path))
            return found
    except FileExistsError:
        return read(host, path)
    finally:
        aside.unlink()
    return None


def acquire(host: Host, path: str, run: str, owner: str, origin: str, *, force: str = "") -> Json:
    """Take the lock for ``run``. Held by the same run is success; held by another is refused.

    :param force: the run id of a lock that a person declared dead; that one, and no other, is replaced.
    """
    holder = read(host, path)
    if holder is not None and holder.get("run") == run:
        return {"changed": False, "holder": holder}
    if holder is not None and force and holder.get("run") == force:
        holder = _broken(host, path, force)
    mine: Json = {"run": run, "owner": owner, "host": origin, "since": round(time.time())}
    target = host.path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if holder is None:
        try:
            handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            holder = read(host, path) or {}
        else:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(json.dumps(mine, sort_keys=True) + "\n")
            return {"changed": True, "holder": mine}
    since = holder.get("since")
    held = age(time.time() - since) if isinstance(since, (int, float)) else "an unknown time"
    name = str(holder.get("run") or "unknown")
    who = f"{holder.get('owner', 'somebody')} on {holder.get('host', 'an unknown host')}"
    raise Refusal(
        "another run holds this replica",
        f"{who} for {held}, run {name}",
        "no lock",
        f"wait for it; if that run is dead, break its lock: -e ranks_break_lock={name}"
        if holder.get("run")
        else f"if no run is alive, remove {path}",
    )


def release(host: Host, path: str, run: str) -> Json:
    """Give the lock back; another run's lock is left alone."""
    holder = read(host, path)
    if holder is None or holder.get("run") != run:
        return {"changed": False, "holder": holder}
    host.remove(path)
    return {"changed": True, "holder": None}
