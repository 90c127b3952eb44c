"""From profile and facts to what each rank runs: the rules that keep a pair from hanging."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ansible_collections.sparkfleet.serving.plugins.module_utils import launch as L
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[3]
ENGINES = sorted((ROOT / "roles" / "ranks" / "vars" / "engines").glob("*.yml"))
PROFILE: dict[str, Any] = yaml.safe_load(
    (ROOT / "roles/ranks/vars/engines/tensorfold_native.yml").read_text()
)
GOLDEN = ROOT / "tests" / "fixtures" / "ranks" / "golden-launch.txt"
SCHEMA = ROOT / "roles" / "ranks" / "vars" / "engines" / "schema-1.json"

PATHS = {
    name: f"/var/lib/sparkfleet/{name}"
    for name in ("model", "kit", "engram", "rank_file_dir", "token_map_dir", "cache")
}
MEMBERS = tuple(
    L.Member(
        f"spark-{rank + 1}",
        rank,
        (
            L.Rail(f"10.77.0.{rank + 1}/30", "enp1s0f0np0", "rocep1s0f0"),
            L.Rail(f"10.77.0.{rank + 5}/30", "enP2p1s0f0np0", "roceP2p1s0f0"),
        ),
    )
    for rank in range(2)
)


def given_input(rank: int = 0, settings: Mapping[str, Any] | None = None, **more: Any) -> L.LaunchInput:
    values: dict[str, Any] = {
        "replica": "spark-a",
        "rank": rank,
        "members": MEMBERS,
        "image": "sparkfleet/tensorfold-native:0123456789ab",
        "image_content": "c" * 64,
        "model": {"id": "m", "revision": "r", "lock": "l"},
        "rank_file": {"name": f"rank{rank}of2-{'0' * 20}.bin", "bytes": 106_107_109_192},
        "paths": PATHS,
        "settings": {"context": 524288, **(settings or {})},
        "install_id": "i" * 32,
    }
    values.update(more)
    return L.LaunchInput(**values)


def both(settings: Mapping[str, Any] | None = None, **more: Any) -> list[dict[str, Any]]:
    return [L.build(PROFILE, given_input(rank, settings, **more)) for rank in (0, 1)]


def problems(profile: Mapping[str, Any], given: L.LaunchInput) -> str:
    with pytest.raises(L.LaunchError) as caught:
        L.build(profile, given)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize("path", ENGINES, ids=lambda path: path.stem)
def test_profiles_follow_the_schema(path: Path) -> None:
    profile = yaml.safe_load(path.read_text())
    assert L.profile_problems(profile) == []
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(profile)
    assert profile["name"] == path.stem


def test_the_published_schema_is_the_one_in_use() -> None:
    assert json.loads(SCHEMA.read_text()) == L.published_schema(), "run tools/engine-schema"


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda p: p.pop("waves"), "waves: is missing"),
        (lambda p: p["settings"]["context"].update(type="number"), "settings.context.type"),
        (lambda p: p["settings"]["graphs"]["head"][0].pop("source"), "settings.graphs.head[0].source"),
        (
            lambda p: p["settings"]["graphs"].pop("workers"),
            "settings.graphs: is shared by all ranks but not spelled",
        ),
        (lambda p: p["settings"]["top_k"].update(default=-1), "settings.top_k.default: -1 is below 0"),
        (lambda p: p["mounts"][2].update(target="engram"), "mounts[2].target"),
        (lambda p: p["waves"].update(stop=[["head"]]), "waves.stop: must name head and workers once"),
        (lambda p: p.update(gid={"setting": "nothing"}), "gid.setting: nothing is no setting"),
        (lambda p: p.update(surprise=1), "surprise: is not a key of schema 1"),
    ],
)
def test_an_error_names_its_path_in_the_profile(change: Any, path: str) -> None:
    profile = copy.deepcopy(PROFILE)
    change(profile)
    assert path in "\n".join(L.profile_problems(profile))


@pytest.mark.field("T31", "E03", "E04")
def test_the_golden_launch() -> None:
    """Both ranks next to the documented command lines, each line with its source."""
    text = GOLDEN.read_text()
    documented, _mark, rendered = text.partition("== rendered ==\n")
    assert rendered == L.annotated(PROFILE, both()), (
        "run tools/engine-schema --golden and read the difference"
    )
    names = {"spark-1": "rank 0", "spark-2": "rank 1"}
    assert all(node in rendered for node in names)
    wanted = [line.split(" ", 2)[1:] for line in documented.splitlines() if line.startswith("want ")]
    assert len(wanted) >= 12
    for ranks, words in wanted:
        for rank in ranks.split(","):
            shown = L.render(both()[int(rank)]).replace("\\\n", " ").split()
            for word in words.split():
                assert word in shown, f"rank {rank}: the documented {word} is not rendered"


def test_the_golden_launch_is_the_whole_command() -> None:
    """Nothing that the shown `docker run` has is without a source."""
    shown = L.annotated(PROFILE, both())
    for rank in both():
        part = shown.partition(f"-- {rank['node']}: rank {rank['rank']}")[2].partition("\n-- ")[0]
        sourced = [line.rpartition(" # ") for line in part.splitlines()[1:]]
        assert all(source.strip() for _text, _mark, source in sourced)
        words = " ".join(text for text, _mark, _source in sourced).split()
        wanted = (
            L.render(rank).replace("\\\n", " ").replace("<resolved at start (unknown yet)>", "{gid_index}")
        )
        assert sorted(wanted.split()[3:]) == sorted(words)


@pytest.mark.field("B22")
def test_an_empty_value_drops_its_key_or_flag() -> None:
    for spec in (rank["container"] for rank in both({"gid_mode": "auto", "rdma_ring": False})):
        assert not [name for name, text in spec["env"].items() if text == ""]
        assert "" not in spec["argv"]
        assert not {"NCCL_IB_GID_INDEX", "TF_RDMA_GID_INDEX", "TF_RDMA_DEVICES"} & set(spec["env"])
        assert "--rdma" not in spec["argv"]


@pytest.mark.field("B25")
def test_the_gid_index_is_always_given_unless_auto_was_asked_for() -> None:
    for rank in both():
        body = L.create_body(rank, 3, ["/dev/infiniband"])
        assert "NCCL_IB_GID_INDEX=3" in body["Env"]
        assert rank["gid"]["wanted"]


@pytest.mark.field("B23")
def test_the_engine_ring_gets_the_same_index_as_nccl() -> None:
    for rank in both():
        env = dict(word.split("=", 1) for word in L.create_body(rank, 4, [])["Env"])
        assert env["NCCL_IB_GID_INDEX"] == env["TF_RDMA_GID_INDEX"] == "4"
    fixed = both({"ring_gid_fixed": 5})[0]
    assert "TF_RDMA_GID_INDEX" not in fixed["container"]["env"]
    assert fixed["gid"]["fixed"] == 5
    assert both({"ring_gid_fixed": 5, "rdma_ring": False})[0]["gid"]["fixed"] is None


@pytest.mark.field("B20", "E05")
def test_each_rank_has_its_own_devices() -> None:
    other = (MEMBERS[0], L.Member("spark-2", 1, (L.Rail("10.77.0.2/30", "enp1s0f1np1", "rocep1s0f1"),) * 2))
    worker = L.build(PROFILE, given_input(1, members=other))
    assert worker["container"]["env"]["NCCL_IB_HCA"] == "rocep1s0f1,rocep1s0f1"
    assert worker["container"]["env"]["NCCL_SOCKET_IFNAME"] == "enp1s0f1np1"


@pytest.mark.field("B82", "T06")
def test_all_ranks_have_one_contract() -> None:
    head, worker = both({"idx_split": True, "round_rows": 32, "drafts": False, "arena_gib": 1.5})
    assert head["contract"] == worker["contract"]
    assert head["contract"]["switches"]["idx_split"] == "1"
    other = L.build(PROFILE, given_input(1))
    differences = L.contract_differences(head["contract"], other["contract"])
    assert any("switch idx_split: '1' here, None there" in line for line in differences)
    for change in ({"settings": {"nccl_rails": 1}}, {"image_content": "d" * 64}):
        other = L.build(PROFILE, given_input(1, **change))
        assert L.contract_differences(both()[0]["contract"], other["contract"]), "the engine's BadInfo"


def test_what_was_rendered_is_read_back() -> None:
    """A switch that reaches one rank by another way than its setting is seen all the same."""
    head, worker = both()
    env = {**worker["container"]["env"], "TF_DS_IDX_SPLIT": "1"}
    tampered = L.logical(PROFILE, "workers", env, worker["container"]["argv"])
    assert tampered["idx_split"] == "1"
    assert "idx_split" not in L.logical(PROFILE, "head", head["container"]["env"], head["container"]["argv"])


def values_of(setting: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "choices" in setting:
        return st.sampled_from(setting["choices"])
    if setting["type"] == "bool":
        return st.booleans()
    if setting["type"] == "int":
        return st.integers(setting["min"], min(setting["max"], setting["min"] + 5000))
    if setting["type"] == "float":
        return st.sampled_from([setting["min"], setting["max"]])
    return st.just("/opt/x" if setting["pattern"].startswith("/") else "10.0")


@given(
    st.fixed_dictionaries({}, optional={name: values_of(row) for name, row in PROFILE["settings"].items()})
)
def test_any_settings_give_equal_switches_or_a_refusal(settings: dict[str, Any]) -> None:
    settings.setdefault("context", 524288)
    try:
        head, worker = both(settings)
    except L.LaunchError:
        return
    assert head["contract"]["switches"] == worker["contract"]["switches"]
    for rank in (head, worker):
        assert all(rank["container"]["env"].values())
        assert all(rank["container"]["argv"])
        json.dumps(rank)


@pytest.mark.parametrize("name", sorted(PROFILE["settings"]))
def test_every_setting_changes_the_launch(name: str) -> None:
    """An option that does nothing is a lie."""
    setting = PROFILE["settings"][name]
    other: Any
    if "choices" in setting:
        other = next(choice for choice in setting["choices"] if choice != setting.get("default"))
    elif setting["type"] == "bool":
        other = not setting.get("default", False)
    elif setting["type"] == "str":
        other = "/opt/x" if setting.get("pattern", "").startswith("/") else "10.9.8.7"
    else:
        tries = [setting["min"] + 1, setting["min"] + 2, setting["min"]]
        other = next(n for n in tries if n != setting.get("default") and n <= setting["max"])
    other = {"streams": 8}.get(name, other)
    plain, changed = both(), both({name: other})
    assert [rank["hash"] for rank in plain] != [rank["hash"] for rank in changed]
    if setting.get("shared"):
        assert all(a["hash"] != b["hash"] for a, b in zip(plain, changed, strict=True))


@pytest.mark.field("T25")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"context": None}, "context: has no default"),
        ({"context": 2000000}, "context: 2000000 is above 1048576"),
        ({"parallel": 5}, "parallel: 5 is more than streams (4)"),
        ({"port": 29620}, "master_port: must differ from port"),
        ({"idx_split": "yes"}, "idx_split: 'yes' is not of type bool"),
        ({"no_such": 1}, "no_such: the engine tensorfold_native has no such setting"),
        ({"served_name": "--evil"}, "served_name: '--evil' does not match"),
        ({"memory_reserve_gib": 1}, "memory_reserve_gib: 1 is below 2"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    assert words in problems(PROFILE, given_input(0, settings))


def test_more_streams_allow_more_requests() -> None:
    assert "--parallel" in both({"parallel": 8, "streams": 8})[0]["container"]["argv"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"extra_env": {"TF_DS_IDX_SPLIT": "1"}}, "TF_DS_IDX_SPLIT: is the setting idx_split"),
        ({"extra_env": {"HF_TOKEN": "x"}}, "HF_TOKEN: is refused"),
        ({"extra_env": {"TENSORFOLD_API_KEY": "x"}}, "is refused: use ranks_api_key"),
        ({"extra_env": {"TF_CUDA_SEGMENTS": "2"}}, "must be 1"),
        ({"extra_env": {"A B": "1"}}, "is no variable name"),
        ({"extra_args": {"head": ["--port=1"]}}, "--port: is the setting port"),
        ({"extra_args": {"rank7": ["x"]}}, "all, head or workers"),
        ({"extra_env": {"X": "a\nb"}}, "environment X: holds"),
        ({"paths": {**PATHS, "model": "relative"}}, "paths.model: 'relative' is not absolute"),
        ({"paths": {**PATHS, "model": "/a:/b"}}, "has a colon"),
        ({"paths": {}}, "paths.model: is needed for /model"),
        ({"image": ""}, "image: is empty"),
        ({"members": MEMBERS[:1]}, "runs on 2 nodes, replica spark-a has 1"),
        ({"members": MEMBERS[::-1]}, "not in rank order"),
        ({"replica": "../x"}, "replica name"),
    ],
)
def test_wrong_input_is_refused_by_name(more: dict[str, Any], words: str) -> None:
    assert words in problems(PROFILE, given_input(0, **more))


@pytest.mark.field("T07")
def test_a_rail_that_nobody_knows_is_refused() -> None:
    lost = (
        L.Member("spark-1", 0, (L.Rail("10.77.0.1/30", "enp1s0f0np0", ""), MEMBERS[0].rails[1])),
        MEMBERS[1],
    )
    assert "no RDMA device known for rail 0" in problems(PROFILE, given_input(0, members=lost))
    one = (L.Member("spark-1", 0, MEMBERS[0].rails[:1]), MEMBERS[1])
    assert "spark-1: 1 rails, 2 are wanted" in problems(PROFILE, given_input(0, members=one))
    alone = L.build(PROFILE, given_input(0, {"nccl_rails": 1}, members=one))
    assert alone["container"]["env"]["NCCL_IB_HCA"] == "rocep1s0f0"


def test_braces_in_values_stay_braces() -> None:
    head = both(extra_env={"NOTE": "{rank} {{ x }}"})[0]
    assert head["container"]["env"]["NOTE"] == "{rank} {{ x }}"
    shown = L.render(head)
    assert "-e NOTE={rank} {{ x }}" in shown


@pytest.mark.field("B19")
def test_live_facts_and_gates_stay_out_of_the_hash() -> None:
    plain = [rank["hash"] for rank in both()]
    other = both(
        log_keep=3, log_dir="/logs", min_available_gib=100, peer_port=1234, stop_grace=5, install_id="x"
    )
    assert [rank["hash"] for rank in other] == plain
    assert [rank["hash"] for rank in both(image="other/name:tag")] == plain
    for change in (
        {"image_content": "d" * 64},
        {"model": {"lock": "other"}},
        {"rank_file": {"name": "other"}},
    ):
        assert [rank["hash"] for rank in both(**change)] != plain


def test_what_only_judges_a_start_restarts_nothing() -> None:
    """Another release of the collection may look for more lines in a log."""
    plain = L.build(PROFILE, given_input(0))
    for key, change in (("gates", {"errors": ["New"]}), ("health", {"path": "/h"}), ("title", "x")):
        profile = copy.deepcopy(PROFILE)
        profile[key] = {**profile[key], **change} if isinstance(change, dict) else change
        other = L.build(profile, given_input(0))
        assert (other["hash"], other["contract"]) == (plain["hash"], plain["contract"])
    profile = copy.deepcopy(PROFILE)
    profile["env"]["all"][0]["value"] = "0"
    assert L.build(profile, given_input(0))["hash"] != plain["hash"]


def test_a_secret_is_a_file_and_only_the_heads() -> None:
    secrets = {"api_key": ("/etc/sparkfleet/secrets/spark-a.api-key", "0" * 20)}
    head, worker = both(secrets=secrets)
    assert "--api-key-file" in head["container"]["argv"]
    assert head["api_key"] and not worker["api_key"]
    assert not any("secret" in mount["target"] for mount in worker["container"]["mounts"])
    renewed = both(secrets={"api_key": (secrets["api_key"][0], "1" * 20)})[0]
    assert renewed["hash"] != head["hash"]
    assert "1" * 20 not in json.dumps(renewed), "the digest itself is kept nowhere"


def test_a_read_only_mount_may_be_a_volume() -> None:
    rank = both(paths={**PATHS, "engram": "volume:sparkfleet-engram-0123"})[1]
    mounts = {one["Target"]: one for one in L.create_body(rank, 3, [])["HostConfig"]["Mounts"]}
    assert mounts["/engram"] == {
        "Type": "volume",
        "Source": "sparkfleet-engram-0123",
        "Target": "/engram",
        "ReadOnly": True,
        "VolumeOptions": {"NoCopy": True},
    }
    assert {one["Type"] for target, one in mounts.items() if target != "/engram"} == {"bind"}
    assert "-v sparkfleet-engram-0123:/engram:ro,nocopy" in L.render(rank)
    for name, source, text in (
        ("cache", "volume:a-name", "is not absolute"),
        ("engram", "a-name", "is not absolute"),
        ("engram", "volume:../x", "no name of a Docker volume"),
        ("engram", "volume:", "no name of a Docker volume"),
    ):
        with pytest.raises(L.LaunchError, match=text):
            both(paths={**PATHS, name: source})


@pytest.mark.field("B42", "B75", "B77", "B91", "B92")
def test_the_create_body_is_what_docker_needs() -> None:
    head = both()[0]
    body = L.create_body(head, 3, ["/dev/infiniband"])
    host = body["HostConfig"]
    assert host["RestartPolicy"] == {"Name": "no"}
    assert host["NetworkMode"] == host["IpcMode"] == "host"
    assert "ShmSize" not in host, "shared memory is carved from the unified pool"
    assert host["CapAdd"] == ["IPC_LOCK"]
    assert {"Name": "memlock", "Soft": -1, "Hard": -1} in host["Ulimits"]
    assert {"Name": "stack", "Soft": 67108864, "Hard": 67108864} in host["Ulimits"]
    assert host["DeviceRequests"] == [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}]
    assert body["Labels"]["sparkfleet.launch"] == head["hash"]
    assert all(mount["Type"] == "bind" for mount in host["Mounts"])
    writable = [mount["Target"] for mount in host["Mounts"] if not mount["ReadOnly"]]
    assert writable == ["/cache"]


def test_the_shown_command_names_what_is_resolved_at_start() -> None:
    head = both()[0]
    assert "NCCL_IB_GID_INDEX=<resolved at start (now 3)>" in L.render(head, 3)
    assert "NCCL_IB_GID_INDEX=<resolved at start (unknown yet)>" in L.render(head)


def test_waves_are_ranks() -> None:
    head = both()[0]
    assert head["waves"] == {"start": [[1], [0]], "stop": [[0], [1]]}


def single() -> dict[str, Any]:
    """A profile of another shape: one node, no fabric, everything by environment."""
    return {
        "schema": 1,
        "name": "solo",
        "title": "one node",
        "world": {"sizes": [1], "rails": False},
        "container": {
            "name": {"value": "solo", "source": "-"},
            "shm_bytes": {"value": 1 << 34, "source": "-"},
        },
        "mounts": [{"path": "model", "target": "/model", "read_only": True, "source": "-"}],
        "env": {},
        "argv": {},
        "settings": {
            "context": {
                "help": "window",
                "type": "int",
                "required": True,
                "min": 1,
                "max": 10,
                "all": [{"env": "MAX_MODEL_LEN", "source": "-"}],
            },
            "port": {"help": "p", "type": "int", "default": 8888, "all": [{"env": "PORT", "source": "-"}]},
        },
        "waves": {"start": [["head"]], "stop": [["head"]]},
        "gates": {"ready": {"path": "/v1/models", "timeout_s": 10, "interval_s": 1}},
        "memory": {"min_available_gib": {"value": 1, "source": "-"}},
    }


def test_an_engine_of_another_shape_is_only_data() -> None:
    alone = (L.Member("spark-1", 0, ()),)
    rank = L.build(single(), given_input(0, {"context": 5}, members=alone))
    assert rank["container"]["env"] == {"MAX_MODEL_LEN": "5", "PORT": "8888"}
    assert rank["container"]["argv"] == []
    assert rank["peers"] == []
    assert not rank["gid"]["wanted"]
    assert "IpcMode" not in L.create_body(rank, None, [])["HostConfig"]


def test_a_runtime_that_the_profile_asks_for_reaches_the_container() -> None:
    profile = copy.deepcopy(PROFILE)
    assert "runtime" not in both()[0]["container"], "the shipped engine asks for GPUs, not for a runtime"
    profile["container"]["runtime"] = {"value": "nvidia", "source": "-"}
    made = [L.build(profile, given_input(rank)) for rank in (0, 1)]
    for one in made:
        assert L.create_body(one, 3, [])["HostConfig"]["Runtime"] == "nvidia"
        assert "--runtime nvidia" in L.render(one)
    assert "--runtime nvidia" in L.annotated(profile, made)
