# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""From the disk part of a plan to what preflight judges: which bytes will be written where, on which node.

The plan counts by location; preflight counts by path and subtracts what the probe found there. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DOCKER_ROOT = "/var/lib/docker"
#: Digits of the index hash in the name of a rank file and of its directory.
INDEX_DIGITS = 20


class NeedsError(ValueError):
    """A plan or a list of members from which no needs follow."""


def slug(repo: str) -> str:
    return repo.replace("/", "--")


def disk_needs(
    plan: Mapping[str, Any],
    members: Sequence[Mapping[str, Any]],
    data_dir: str,
    *,
    model: str = "",
    engram: str = "",
    variant: str = "",
    overlay: Sequence[Mapping[str, Any]] = (),
    overlay_source: str = "",
    docker_root: str = DOCKER_ROOT,
) -> list[dict[str, Any]]:
    """[{node, path, bytes, what, image}] of every member of ONE replica, from `plan["disk"]` and `plan["ranks"]`.

    `model` and `engram` are REPO@REVISION of the checkpoint and of the Engram source: they make the paths exact,
    so that what lies there already can be subtracted. `variant` names the directory of the rank files where it is
    not the revision (an overlay); `overlay` is its manifest, `overlay_source` its REPO@REVISION. `image` marks
    bytes that an image which is there makes unneeded; `unless` and `unless_bytes` do so for a path that holds as
    much. What is only needed for a while (an image lies there twice while it is loaded) is a row of its own. `second`
    is what a second release adds beside this one.
    Raises NeedsError for a plan without a row for a member's rank.
    """
    if not data_dir.startswith("/"):
        raise NeedsError(f"{data_dir!r} is not an absolute path")
    root = data_dir.rstrip("/")

    def below(folder: str, source: str) -> str:
        repo, _mark, revision = source.partition("@")
        return f"{root}/{folder}/{slug(repo)}/{revision}" if repo and revision else f"{root}/{folder}"

    revision = variant or model.partition("@")[2]
    disks = {int(row["rank"]): row for row in plan.get("disk") or []}
    ranks = {int(row["rank"]): row for row in plan.get("ranks") or []}
    sizes = {
        rank: sum(int(item["first"]) for item in row["components"] if item["location"] == "rank_files")
        for rank, row in disks.items()
    }
    found: list[dict[str, Any]] = []
    for member in members:
        rank, node = int(member.get("rank", 0)), str(member["name"])
        if rank not in disks:
            raise NeedsError(f"the plan has no disk row for rank {rank} ({node})")
        index = str((ranks.get(rank) or {}).get("index_sha256") or "")[:INDEX_DIGITS]
        own = f"{root}/rank-files/{revision}/{index}" if revision and index else f"{root}/rank-files"
        paths = {
            "models": below("models", model),
            "engram": below("engram", engram),
            "rank_files": own,
            "docker": docker_root,
            "data": root,
        }
        if overlay and rank == 0:
            size = sum(int(item["size"]) for item in overlay)
            place = below("models", overlay_source)
            found.append({"node": node, "path": place, "image": False, "bytes": size, "what": "overlay"})
        for item in disks[rank]["components"]:
            place = str(item["location"])
            if place not in paths:
                raise NeedsError(f"the plan names an unknown location {place!r}")
            row = {"node": node, "path": paths[place], "image": place == "docker"}
            if int(item["first"]):
                second = {"second": int(item["second"])} if item.get("second") else {}
                found.append({**row, "bytes": int(item["first"]), "what": str(item["name"]), **second})
            if int(item.get("passing") or 0):
                # Files of other ranks wait beside the own one, not in its directory.
                spot = f"{root}/rank-files" if place == "rank_files" else row["path"]
                found.append(
                    {
                        **row,
                        "path": spot,
                        "bytes": int(item["passing"]),
                        "what": f"{item['name']}, for a while",
                        "held": 0,
                        # Files pass through while the own one is made, too: where it is there, none is on its way.
                        **({"unless": own, "unless_bytes": sizes[rank]} if place == "rank_files" else {}),
                    }
                )
    return found


def lacking(need: Mapping[str, Any], paths: Mapping[str, Any], docker: Mapping[str, Any]) -> int:
    """Bytes of one need that are not there yet, by the probe's `disk.paths` and `docker`."""
    wanted = int(need["bytes"])
    if need.get("image"):
        return 0 if docker.get("image_bytes") else wanted
    if need.get("unless"):
        there = (paths.get(str(need["unless"])) or {}).get("held_bytes") or 0
        if int(there) >= int(need["unless_bytes"]):
            return 0
    held = need.get("held", (paths.get(str(need["path"])) or {}).get("held_bytes"))
    return max(0, wanted - int(held or 0))
