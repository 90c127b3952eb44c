#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The engine image: looked at, built, exported, imported, pulled."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_image
short_description: An engine image with the same content on every node
description:
  - Names an image by the hash of what it is built from, builds it when nobody has it, and moves it between
    nodes over the fabric.
  - Images are compared by that hash (tag and label C(sparkfleet.content)) and by their RootFS layers, never
    by C(.Id), which differs between image stores.
  - The build context lives on the controller. It is read there, and sent only when something is built.
author: The sparkfleet founders (@sparkfleet)
version_added: 1.0.0
options:
  state:
    description:
      - V(inspected) reads.
      - V(built) builds the image here when it is absent.
      - V(exported) lays the image down as files for the other nodes (a passing state, never a change).
      - V(imported) brings it from a node that exported it.
      - V(pulled) pulls O(reference), which then names a digest.
      - V(cleaned) removes what an export laid down.
    type: str
    choices: [inspected, built, exported, imported, pulled, cleaned]
    default: inspected
  context:
    description: Directory of the build context on the controller.
    type: str
    default: ""
  dockerfile:
    description: Dockerfile inside the context.
    type: str
    default: Dockerfile
  build_args:
    description: Build arguments. C(BASE_IMAGE) is set from O(base).
    type: dict
    default: {}
  base:
    description: Base image, by digest.
    type: str
    default: ""
  allow_base_tag:
    description: Accept a base image named by a tag.
    type: bool
    default: false
  patches:
    description: Patch files on the controller in the order of applying; they become C(patches/).
    type: list
    elements: str
    default: []
  target:
    description: Build stage.
    type: str
    default: ""
  name:
    description: Image name without tag.
    type: str
    default: ""
  content:
    description: Content hash. Computed from the context by the action plugin.
    type: str
    default: ""
  reference:
    description: Name and tag, or name and digest with V(pulled). Computed when O(context) is given.
    type: str
    default: ""
  context_tar:
    description: The context on the node, put there by the action plugin.
    type: path
    default: ""
  network:
    description: Network mode of the build, the engine's default when empty.
    type: str
    default: ""
  allow_outage:
    description: Build although ranks run here.
    type: bool
    default: false
  smoke:
    description: Commands (C(argv)) that must end with C(rc) in a fresh image without network.
    type: list
    elements: dict
    default: []
  expected_layers:
    description: Layers digest that an imported image must have.
    type: str
    default: ""
  members:
    description: What the export laid down, from its result.
    type: list
    elements: dict
    default: []
  source:
    description: C(address), C(port) and C(folder) of the share.
    type: dict
    default: {}
  reserve_bytes:
    description: Bytes that must be free under Docker's root before a build, import or pull.
    type: int
    default: 35000000000
extends_documentation_fragment:
  - sparkfleet.serving.transfer
  - sparkfleet.serving.transfer.parallel
  - sparkfleet.serving.transfer.docker
attributes:
  check_mode:
    description: Predicts; reads only.
    support: full
  diff_mode:
    description: The image on this node before and after.
    support: full
"""

EXAMPLES = r"""
- name: Look
  sparkfleet.serving.engine_image:
    state: inspected
    name: sparkfleet/engine
    context: "{{ role_path }}/files/tensorfold_native"
    base: nvcr.io/nvidia/pytorch@sha256:2140e699b3beaf7f96a0081fd9c9406bc3832b435cdb60dfa2d261f7d2f34a1c
"""

RETURN = r"""
reference:
  description: What to name in a container.
  type: str
  returned: always
content:
  description: Content hash.
  type: str
  returned: always
present:
  description: The image is on this node.
  type: bool
  returned: always
layers_digest:
  description: Identity over RootFS layers and inherited configuration; empty when absent.
  type: str
  returned: always
architecture:
  description: Architecture of the image.
  type: str
  returned: always
node_architecture:
  description: Architecture of the node.
  type: str
  returned: always
size:
  description: Bytes of the image.
  type: int
  returned: always
serving:
  description: Ranks of ours that run here.
  type: list
  elements: str
  returned: always
members:
  description: Files of an export.
  type: list
  elements: dict
  returned: with state exported
"""

import contextlib
import hashlib
import os
import shutil
import tarfile
from pathlib import Path
from typing import IO, Any, cast

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.docker_api import (
    DockerApi,
    DockerApiError,
    DockerError,
    DockerNotFound,
    DockerStreamError,
    Stream,
)
from ..module_utils.fabric_copy import SizeWatch, parse_source, pull, runner
from ..module_utils.image_identity import (
    CONTENT_LABEL,
    ImageError,
    Member,
    architecture,
    layers_digest,
    member_tar,
    parse_members,
    refuse_architecture,
)
from ..module_utils.tree import (
    Progress,
    TreeError,
    exclusive,
    inspect,
    parse_files,
    proof_path,
    prove,
    read_proof,
    refuse_space,
    write_proof,
)
from ..module_utils.weights_module import (
    DOCKER_ARGS,
    HELPER_LABEL,
    PARALLEL_ARGS,
    TRANSFER_ARGS,
    entry,
    lock_dir,
    need_tool,
    own_parents,
    refusal,
)

Result = dict[str, Any]


def inspect_node(api: DockerApi, params: dict[str, Any], check_mode: bool) -> Result:
    """What this node has under the reference. Refuses a wrong architecture and a moved tag."""
    found: Result = {
        "reference": params["reference"],
        "content": params["content"],
        "present": False,
        "layers_digest": "",
        "architecture": "",
        "node_architecture": architecture(os.uname().machine),
        "size": 0,
        "serving": [],
    }
    if check_mode and not Path(params["docker_socket"]).exists():
        return found  # a bare node: Docker comes with a role that has only been predicted so far
    try:
        found["node_architecture"] = architecture(str(api.version().get("Arch", "")))
        ranks = api.container_list(labels=["sparkfleet.replica"], all_states=False)
        found["serving"] = sorted(str(one["Names"][0]).lstrip("/") for one in ranks)
        image = api.image_inspect(params["reference"])
    except DockerNotFound:
        return found
    refuse_architecture(params["reference"], str(image.get("Architecture", "")), found["node_architecture"])
    label = ((image.get("Config") or {}).get("Labels") or {}).get(CONTENT_LABEL, "")
    if params["content"] and "@" not in params["reference"] and label != params["content"]:
        raise ImageError(
            f"{params['reference']} exists here, but its label {CONTENT_LABEL} says {label or 'nothing'} "
            "instead "
            f"of {params['content']}: the tag was moved. Remove that tag; sparkfleet removes only its own "
            "images"
        )
    found.update(
        present=True,
        layers_digest=layers_digest(image),
        architecture=architecture(str(image.get("Architecture", ""))),
        size=int(image.get("Size") or 0),
    )
    return found


def docker_space(api: DockerApi, params: dict[str, Any], what: str) -> None:
    """Refuse when Docker's own filesystem is too small for the image."""
    root = Path(str(api.info().get("DockerRootDir") or "/var/lib/docker"))
    refuse_space(root, 1, params["reserve_bytes"], what)


def smoke(api: DockerApi, image: str, tests: list[dict[str, Any]]) -> None:
    """Run the image's own programs without network; each must end as stated."""
    for number, test in enumerate(tests):
        argv = [str(part) for part in test["argv"]]
        wanted = int(test.get("rc", 0))
        spec = {
            "Image": image,
            "Entrypoint": argv[:1],
            "Cmd": argv[1:],
            "Labels": {HELPER_LABEL: "smoke"},
            "HostConfig": {"NetworkMode": "none", "CapDrop": ["ALL"], "ReadonlyRootfs": True},
        }
        name = f"sparkfleet-smoke-{os.getpid()}-{number}"
        try:
            code, out, err = api.run(name, spec, timeout=120)
        except DockerApiError as exc:
            raise ImageError(f"{argv[0]} cannot be started in the image: {exc.message}") from exc
        if code != wanted:
            text = (err or out).decode("utf-8", "replace").strip()[-300:]
            raise ImageError(f"'{' '.join(argv)}' in the image ended with {code} instead of {wanted}: {text}")


def build(api: DockerApi, params: dict[str, Any], progress: Progress) -> None:
    """Build under a passing tag, try it, then give it its name: a broken image never carries it."""
    docker_space(api, params, f"building {params['reference']}")
    passing = f"{params['name']}:building-{params['content'][:12]}"
    args = {str(key): str(value) for key, value in params["build_args"].items()}
    args["BASE_IMAGE"] = params["base"]
    try:
        with Path(params["context_tar"]).open("rb") as context:
            api.image_build(
                context,
                tags=[passing],
                dockerfile=params["dockerfile"],
                buildargs=args,
                labels={CONTENT_LABEL: params["content"]},
                target=params["target"],
                network=params["network"],
                on_line=progress.line,
            )
    except DockerStreamError as exc:
        raise ImageError(
            f"the build of {params['reference']} failed: {exc}. Last output: " + " | ".join(exc.lines[-12:])
        ) from exc
    try:
        smoke(api, passing, params["smoke"])
        api.image_tag(passing, params["name"], params["content"][:12])
    finally:
        with contextlib.suppress(DockerError):
            api.image_remove(passing)


class _Reader:
    """A Docker stream as the file that tarfile reads from."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes."""
        return self._stream.read(size if size > 0 else 1 << 20)


def stage_dir(params: dict[str, Any]) -> Path:
    """Where an image lies as files while it moves."""
    return Path(params["data_dir"]) / "transfer" / f"image-{params['content'][:12]}"


def export(api: DockerApi, params: dict[str, Any], size: int, progress: Progress) -> list[Member]:
    """Lay the image down as files, hashed while they are written."""
    root = stage_dir(params)
    refuse_space(root, size, 1_000_000_000, f"exporting {params['reference']}")
    own_parents(root)
    members: list[Member] = []
    platform = f"linux/{architecture(os.uname().machine)}"
    with (
        api.image_save([params["reference"]], platform=platform) as stream,
        tarfile.open(fileobj=cast("IO[bytes]", _Reader(stream)), mode="r|") as tar,
    ):
        for info in tar:
            name = info.name.strip("/")
            if name in ("", "."):
                continue
            parse_members([{"name": name, "kind": "file"}])
            path = root / name
            if info.isdir():
                path.mkdir(parents=True, exist_ok=True)
                members.append(Member(name, "dir"))
            elif info.issym() or info.islnk():
                members.append(Member(name, "link", link=info.linkname))
            elif info.isfile():
                source = tar.extractfile(info)
                if source is None:
                    raise ImageError(f"the saved image has an unreadable member {name}")
                path.parent.mkdir(parents=True, exist_ok=True)
                digest = hashlib.sha256()
                with path.open("wb") as out:
                    while True:
                        data = source.read(1 << 20)
                        if not data:
                            break
                        digest.update(data)
                        out.write(data)
                        progress.add(len(data))
                members.append(Member(name, "file", info.size, digest.hexdigest()))
            else:
                raise ImageError(f"the saved image holds {name}, which is neither file, directory nor link")
    for folder, _names, files in os.walk(root):
        Path(folder).chmod(0o755)
        for name in files:
            (Path(folder) / name).chmod(0o644)
    return members


def bring(api: DockerApi, params: dict[str, Any], progress: Progress) -> None:
    """Copy an exported image, prove its files, load it."""
    members = parse_members(params["members"])
    files = parse_files(
        [
            {"name": item.name, "size": item.size, "sha256": item.sha256}
            for item in members
            if item.kind == "file"
        ]
    )
    docker_space(api, params, f"loading {params['reference']}")
    root = stage_dir(params)
    total = sum(item.size for item in files)
    own_parents(root)
    own_parents(lock_dir(params["data_dir"]))
    proof = read_proof(proof_path(root))
    with exclusive(lock_dir(params["data_dir"]) / root.name, params["reference"]) as handle:
        report = prove(root, inspect(root, files, proof), proof, params["parallel"])
        refuse_space(root, report.needed_bytes, 1_000_000_000, f"receiving {params['reference']}")
        progress.step("copy of the image", report.needed_bytes)
        try:
            with SizeWatch(root, total - report.needed_bytes, progress.set):
                pull(
                    need_tool("rsync", "rsync"),
                    parse_source(params["source"]),
                    root,
                    report.needed,
                    proof,
                    run=runner(handle),
                    parallel=params["parallel"],
                )
        finally:
            write_proof(proof_path(root), proof)
        progress.step("load of the image", total)
        api.image_load(member_tar(root, members), on_line=progress.line)


def clean(params: dict[str, Any]) -> None:
    """Remove what an export or import laid down."""
    root = stage_dir(params)
    shutil.rmtree(root, ignore_errors=True)
    with contextlib.suppress(OSError):
        proof_path(root).unlink()
    with contextlib.suppress(OSError):
        root.parent.rmdir()  # the place of passing things, when this was the last


def spec() -> dict[str, Any]:
    """The argument spec."""
    return {
        **TRANSFER_ARGS,
        **PARALLEL_ARGS,
        **DOCKER_ARGS,
        "state": {
            "type": "str",
            "choices": ["inspected", "built", "exported", "imported", "pulled", "cleaned"],
            "default": "inspected",
        },
        "context": {"type": "str", "default": ""},
        "dockerfile": {"type": "str", "default": "Dockerfile"},
        "build_args": {"type": "dict", "default": {}},
        "base": {"type": "str", "default": ""},
        "allow_base_tag": {"type": "bool", "default": False},
        "patches": {"type": "list", "elements": "str", "default": []},
        "target": {"type": "str", "default": ""},
        "name": {"type": "str", "default": ""},
        "content": {"type": "str", "default": ""},
        "reference": {"type": "str", "default": ""},
        "context_tar": {"type": "path", "default": ""},
        "network": {"type": "str", "default": ""},
        "allow_outage": {"type": "bool", "default": False},
        "smoke": {"type": "list", "elements": "dict", "default": []},
        "expected_layers": {"type": "str", "default": ""},
        "members": {"type": "list", "elements": "dict", "default": []},
        "source": {"type": "dict", "default": {}},
        "reserve_bytes": {"type": "int", "default": 35_000_000_000},
    }


def apply(api: DockerApi, params: dict[str, Any], before: Result, progress: Progress) -> Result:
    """Do what the state asks on a node that lacks the image; returns more result fields."""
    state = params["state"]
    if state == "built":
        build(api, params, progress)
    elif state == "imported":
        bring(api, params, progress)
    elif state == "pulled":
        docker_space(api, params, f"pulling {params['reference']}")
        platform = f"linux/{before['node_architecture']}"
        api.image_pull(params["reference"], platform=platform, on_line=progress.line)
    after = inspect_node(api, params, False)
    if not after["present"]:
        raise ImageError(f"{params['reference']} is still absent after it was {state}")
    if params["expected_layers"] and after["layers_digest"] != params["expected_layers"]:
        raise ImageError(
            f"{params['reference']} has layers {after['layers_digest'][:12]} here and "
            f"{params['expected_layers'][:12]} on the node that has it: the ranks would not run the same "
            "thing. "
            "Remove the image here and run again"
        )
    if state == "imported":
        clean(params)
    return after


def announced(api: DockerApi, params: dict[str, Any], check_mode: bool) -> list[dict[str, str]]:
    """What a build, import or pull will have changed on this node."""
    found = [entry(f"image {params['reference']}", "", f"{params['state']}\n")]
    if params["state"] == "built":
        bare = check_mode and not Path(params["docker_socket"]).exists()
        try:
            if bare:
                raise DockerNotFound(404, "no Docker yet", "image")
            api.image_inspect(params["base"])
        except DockerNotFound:
            found.append(entry(f"image {params['base']}", "", "base of the build\n"))
    lock = lock_dir(params["data_dir"]) / stage_dir(params).name
    if params["state"] == "imported" and not lock.exists():
        found.append(entry(str(lock)))
    return found


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=spec(), supports_check_mode=True)
    params = module.params
    if not params["content"] and "@sha256:" in params["reference"]:
        params["content"] = params["reference"].partition("@sha256:")[2]  # what a digest names is its content
    api = DockerApi(params["docker_socket"])
    progress = Progress(
        Path(params["progress_file"]) if params["progress_file"] else None, params["state"], 0
    )
    result: Result = {}
    changed = False
    diff: list[dict[str, str]] = []
    try:
        if not params["reference"]:
            raise ImageError("no reference was given, and no context from which the action plugin makes one")
        if params["state"] == "cleaned":
            if not module.check_mode:
                clean(params)
        else:
            before = result = inspect_node(api, params, module.check_mode)
            changed = params["state"] in ("built", "imported", "pulled") and not before["present"]
            if changed and params["state"] == "built" and before["serving"] and not params["allow_outage"]:
                raise ImageError(
                    f"{', '.join(before['serving'])} run here, and a build takes memory that they need. Name "
                    "another "
                    "builder by image_builder, or accept the outage by image_allow_outage"
                )
            if changed:
                diff = announced(api, params, module.check_mode)
            if changed and not module.check_mode:
                result = apply(api, params, before, progress)
            if params["state"] == "exported" and not module.check_mode:
                if not before["present"]:
                    raise ImageError(f"{params['reference']} is not here, so it cannot be exported")
                progress.step("export of the image", before["size"])
                result["members"] = [item.as_dict() for item in export(api, params, before["size"], progress)]
            if before["present"] and params["expected_layers"] not in ("", before["layers_digest"]):
                raise ImageError(
                    f"{params['reference']} has layers {before['layers_digest'][:12]} here and "
                    f"{params['expected_layers'][:12]} on the node that built it. Remove the image here and "
                    "run again"
                )
    except (ImageError, TreeError, DockerError, OSError, tarfile.TarError) as exc:
        refusal(module, exc)
    finally:
        progress.close()
    if changed:
        result["diff"] = diff
    module.exit_json(changed=changed, **result)


if __name__ == "__main__":
    main()
