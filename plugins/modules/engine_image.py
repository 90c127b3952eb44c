#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The engine image: looked at, built, exported, imported, pulled."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_image
short_description: An engine image with the same content on every node
description:
  - Names an image by the hash of what it is built from, builds it when nobody has it, and moves it between
    nodes over the fabric, where only those layers move that the receiver lacks.
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
      - V(pulled) pulls O(reference) when that names a digest, else O(prebuilt), which must have O(content).
      - V(cleaned) removes what an export laid down.
      - V(removed) removes images of our own that no release here needs.
    type: str
    choices: [inspected, built, exported, imported, pulled, cleaned, removed]
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
    description: Build arguments. C(BASE_IMAGE) is set from O(base), C(JOBS) from O(jobs) where the Dockerfile has it.
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
  prebuilt:
    description: Name and digest of an image that somebody built from the same recipe, for V(pulled).
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
  memory_bytes:
    description: Memory that one step of a build may take, without swap; 0 sets no limit. Not part of the content.
    type: int
    default: 34359738368
  jobs:
    description: Processors that one step of a build may use; 0 sets no limit. Not part of the content.
    type: int
    default: 8
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
  holdings:
    description: What the receivers of an export have of images, from RV(holding) of each.
    type: list
    elements: dict
    default: []
  laid:
    description: What the export laid down, from its result RV(laid).
    type: dict
    default: {}
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
outage:
  description: What a build here costs those who are served; empty when no rank runs here.
  type: str
  returned: always
own:
  description:
    - Images of ours on this node, each with C(reference), C(content), C(size) and C(kept), the reasons why it stays.
    - An empty C(kept) means that no release here needs it.
  type: list
  elements: dict
  returned: always
old:
  description: References of images of ours that no release here needs.
  type: list
  elements: str
  returned: always
holding:
  description: What this node has of images, for O(holdings).
  type: dict
  returned: with state inspected, when the image is absent
laid:
  description: Configuration and layers of an export.
  type: dict
  returned: with state exported
brought_bytes:
  description: Bytes that came over the fabric.
  type: int
  returned: with state imported
"""

import contextlib
import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.docker_api import (
    DockerApi,
    DockerApiError,
    DockerError,
    DockerNotFound,
    DockerStreamError,
)
from ..module_utils.fabric_copy import parse_source
from ..module_utils.host_io import Host, Refusal
from ..module_utils.image_archive import parse_holding, parse_laid
from ..module_utils.image_identity import (
    CONTENT_LABEL,
    ImageError,
    architecture,
    layers_digest,
    outage,
    refuse_architecture,
)
from ..module_utils.image_keep import Own, judge, own_images, releases
from ..module_utils.image_move import (
    bring,
    clean,
    docker_root,
    export,
    holding,
    name_whole,
    prepare_base,
    stage_dir,
)
from ..module_utils.tree import Progress, TreeError, refuse_space
from ..module_utils.weights_module import (
    DOCKER_ARGS,
    HELPER_LABEL,
    PARALLEL_ARGS,
    TRANSFER_ARGS,
    entry,
    lock_dir,
    refusal,
)

Result = dict[str, Any]


def label_of(image: dict[str, Any]) -> str:
    """The content label of an image."""
    return str(((image.get("Config") or {}).get("Labels") or {}).get(CONTENT_LABEL, ""))


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
        "outage": "",
        "own": [],
        "old": [],
    }
    if check_mode and not Path(params["docker_socket"]).exists():
        return found  # a bare node: Docker comes with a role that has only been predicted so far
    found["node_architecture"] = architecture(str(api.version().get("Arch", "")))
    ranks = api.container_list(labels=["sparkfleet.replica"], all_states=False)
    found["serving"] = sorted(str(one["Names"][0]).lstrip("/") for one in ranks)
    found["outage"] = outage(
        os.uname().nodename,
        found["serving"],
        sorted({str(one["Labels"]["sparkfleet.replica"]) for one in ranks}),
    )
    kept = keeping(api, params)
    found["own"] = [one.as_dict() for one in kept]
    found["old"] = [one.reference for one in kept if not one.kept]
    try:
        image = api.image_inspect(params["reference"])
    except DockerNotFound:
        return found
    refuse_architecture(params["reference"], str(image.get("Architecture", "")), found["node_architecture"])
    label = label_of(image)
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


def keeping(api: DockerApi, params: dict[str, Any]) -> list[Own]:
    """Images of ours on this node and why each of them stays."""
    needed = releases(Host(), str(Path(params["data_dir"]) / "releases"))
    if params["content"]:
        needed.setdefault(params["content"], []).append("this run")
    users: dict[str, list[str]] = {}
    for one in api.container_list():
        users.setdefault(str(one.get("ImageID")), []).append(str(one["Names"][0]).lstrip("/"))
    return judge(own_images(api.image_list(label=CONTENT_LABEL)), needed, users)


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
        text = (err or out).decode("utf-8", "replace").strip()
        if code != wanted:
            raise ImageError(
                f"'{' '.join(argv)}' in the image ended with {code} instead of {wanted}: {text[-300:]}"
            )


def build(api: DockerApi, params: dict[str, Any], progress: Progress) -> None:
    """Build under a passing tag, try it, then give it its name: a broken image never carries it."""
    refuse_space(docker_root(api.info()), 1, params["reserve_bytes"], f"building {params['reference']}")
    passing = f"{params['name']}:building-{params['content'][:12]}"
    args = {str(key): str(value) for key, value in params["build_args"].items()}
    args["BASE_IMAGE"] = params["base"]
    prepare_base(api, params["base"], progress.line)
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
                memory=params["memory_bytes"],
                cpus=params["jobs"],
                on_line=progress.line,
            )
    except DockerStreamError as exc:
        killed = (
            f" (137: killed, as when a step takes more than image_build_memory_bytes, {params['memory_bytes']})"
            if "non-zero code: 137" in str(exc)
            else ""
        )
        raise ImageError(
            f"the build of {params['reference']} failed: {exc}{killed}. Last output: "
            + " | ".join(exc.lines[-12:])
        ) from exc
    try:
        smoke(api, passing, params["smoke"])
        name_whole(api, passing, params["reference"])
    finally:
        with contextlib.suppress(DockerError):
            api.image_remove(passing)


def fetch(api: DockerApi, params: dict[str, Any], node: str, progress: Progress) -> None:
    """Pull by digest; what is not what it should be does not stay."""
    wanted = params["prebuilt"] or params["reference"]
    refuse_space(docker_root(api.info()), 1, params["reserve_bytes"], f"pulling {wanted}")
    try:
        api.image_inspect(wanted)
        had = True
    except DockerNotFound:
        had = False
    try:
        try:
            api.image_pull(wanted, platform=f"linux/{node}", on_line=progress.line)
        except (DockerStreamError, DockerApiError) as exc:
            with contextlib.suppress(DockerNotFound):  # a graph driver keeps an image of another architecture
                refuse_architecture(wanted, str(api.image_inspect(wanted).get("Architecture", "")), node)
            raise ImageError(
                f"{wanted} cannot be pulled: {exc}. The registry lacks it or a layer of it, gives other bytes than "
                "the digest names, or does not answer; correct the registry or the digest"
            ) from exc
        image = api.image_inspect(wanted)
        refuse_architecture(wanted, str(image.get("Architecture", "")), node)
        if params["prebuilt"]:
            if label_of(image) != params["content"]:
                raise ImageError(
                    f"{wanted} has {label_of(image) or 'nothing'} in its label {CONTENT_LABEL}, wanted "
                    f"{params['content']}: it was built from another recipe. Name the digest of one that was built "
                    "from this one, or let it be built"
                )
            smoke(api, wanted, params["smoke"])
            if name_whole(api, wanted, params["reference"]) and not had:
                api.image_remove(wanted)
    except ImageError:
        if not had:
            with contextlib.suppress(DockerError):
                api.image_remove(wanted)
        raise


def spec() -> dict[str, Any]:
    """The argument spec."""
    return {
        **TRANSFER_ARGS,
        **PARALLEL_ARGS,
        **DOCKER_ARGS,
        "state": {
            "type": "str",
            "choices": ["inspected", "built", "exported", "imported", "pulled", "cleaned", "removed"],
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
        "prebuilt": {"type": "str", "default": ""},
        "context_tar": {"type": "path", "default": ""},
        "network": {"type": "str", "default": ""},
        "memory_bytes": {"type": "int", "default": 34_359_738_368},
        "jobs": {"type": "int", "default": 8},
        "allow_outage": {"type": "bool", "default": False},
        "smoke": {"type": "list", "elements": "dict", "default": []},
        "expected_layers": {"type": "str", "default": ""},
        "holdings": {"type": "list", "elements": "dict", "default": []},
        "laid": {"type": "dict", "default": {}},
        "source": {"type": "dict", "default": {}},
        "reserve_bytes": {"type": "int", "default": 35_000_000_000},
    }


def receive(api: DockerApi, params: dict[str, Any], progress: Progress) -> int:
    """Bring the image from the node that laid it down."""
    return bring(
        api,
        params["reference"],
        stage_dir(params["data_dir"], params["content"]),
        laid=parse_laid(params["laid"]),
        mine=holding(api),
        source=parse_source(params["source"]),
        data_dir=params["data_dir"],
        reserve_bytes=params["reserve_bytes"],
        parallel=params["parallel"],
        progress=progress,
    )


def apply(api: DockerApi, params: dict[str, Any], before: Result, progress: Progress) -> Result:
    """Do what the state asks on a node that lacks the image; returns more result fields."""
    state = params["state"]
    more: Result = {}
    if state == "built":
        build(api, params, progress)
    elif state == "imported":
        more["brought_bytes"] = receive(api, params, progress)
    elif state == "pulled":
        fetch(api, params, before["node_architecture"], progress)
    after = inspect_node(api, params, False)
    if not after["present"]:
        raise ImageError(f"{params['reference']} is still absent after it was {state}")
    refuse_other_layers(params, after)
    if state == "imported":
        clean(stage_dir(params["data_dir"], params["content"]))
    return {**after, **more}


def refuse_other_layers(params: dict[str, Any], found: Result) -> None:
    """Refuse an image whose layers are not those of the node that has it."""
    if found["present"] and params["expected_layers"] not in ("", found["layers_digest"]):
        raise ImageError(
            f"{params['reference']} has layers {found['layers_digest'][:12]} here and "
            f"{params['expected_layers'][:12]} on the node that has it: the ranks would not run the same "
            "thing. Remove the image here and run again"
        )


def lay(api: DockerApi, params: dict[str, Any], before: Result, progress: Progress) -> dict[str, Any]:
    """Lay down what any of the receivers lacks."""
    if not before["present"]:
        raise ImageError(f"{params['reference']} is not here, so it cannot be exported")
    layers = (api.image_inspect(params["reference"]).get("RootFS") or {}).get("Layers") or []
    receivers = [parse_holding(item) for item in params["holdings"]]
    needed = sorted({one for receiver in receivers for one in receiver.lacks(layers)})
    progress.step("export of the image", before["size"])
    root = stage_dir(params["data_dir"], params["content"])
    return export(
        api, params["reference"], root, size=before["size"], needed=needed, progress=progress
    ).as_dict()


def remove_old(api: DockerApi, images: list[Own]) -> None:
    """Remove images of ours that nobody needs, by the name that we gave them and the digest that they came by."""
    for one in images:
        for name in () if one.kept else (one.reference, *one.digests):
            try:
                api.image_remove(name)
            except DockerNotFound:
                continue
            except DockerApiError as exc:
                raise ImageError(f"{name} cannot be removed: {exc.message}") from exc


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
    lock = lock_dir(params["data_dir"]) / stage_dir(params["data_dir"], params["content"]).name
    if params["state"] == "imported" and not lock.exists():
        found.append(entry(str(lock)))
    return found


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=spec(), supports_check_mode=True)
    params = module.params
    if not params["content"] and "@sha256:" in params["reference"]:
        params["content"] = params["reference"].partition("@sha256:")[2]  # what a digest names is its content
    state = params["state"]
    api = DockerApi(params["docker_socket"])
    progress = Progress(Path(params["progress_file"]) if params["progress_file"] else None, state, 0)
    result: Result = {}
    changed = False
    diff: list[dict[str, str]] = []
    try:
        if not params["reference"]:
            raise ImageError("no reference was given, and no context from which the action plugin makes one")
        if state == "cleaned":
            if not module.check_mode:
                clean(stage_dir(params["data_dir"], params["content"]))
            module.exit_json(changed=False)
        before = result = inspect_node(api, params, module.check_mode)
        changed = state in ("built", "imported", "pulled") and not before["present"]
        if changed and state == "built" and before["outage"]:
            if not params["allow_outage"]:
                raise ImageError(
                    f"{before['outage']} Name another builder by image_builder, a prebuilt image by "
                    "image_prebuilt, or accept the outage by image_allow_outage"
                )
            module.warn(before["outage"])
        if changed:
            diff = announced(api, params, module.check_mode)
        if changed and not module.check_mode:
            result = apply(api, params, before, progress)
        if state == "inspected" and not before["present"] and Path(params["docker_socket"]).exists():
            result["holding"] = holding(api).as_dict()
        if state == "exported" and not module.check_mode:
            result["laid"] = lay(api, params, before, progress)
        if state == "removed":
            changed = bool(before["old"])
            diff = [entry(f"image {name}", "ours, needed by no release here\n", "") for name in before["old"]]
            if changed and not module.check_mode:
                remove_old(api, keeping(api, params))
        refuse_other_layers(params, before)
    except (ImageError, TreeError, DockerError, OSError) as exc:
        refusal(module, exc)
    except Refusal as exc:
        module.fail_json(**exc.as_failure())
    finally:
        progress.close()
    if changed:
        result["diff"] = diff
    module.exit_json(changed=changed, **result)


if __name__ == "__main__":
    main()
