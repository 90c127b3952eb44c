# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""From an engine profile and the facts of one replica to what each rank runs.

Pure: no Ansible, no network, no files. A profile is data (``roles/ranks/vars/engines/*.yml``); nothing here
tests an engine's name. ``build`` gives a plain JSON-able dictionary, the *launch*, one a rank; it is what the
node agent reads from ``/etc/sparkfleet/replicas/<replica>/launch.json``.

Rules that the code enforces:

* An empty value drops its key or flag. ``NCCL_IB_GID_INDEX=""`` would be read as index 0.
* A shared setting is spelled for every rank and read back from what was rendered; ranks whose logical
switches differ are refused, because such a pair hangs without an error.
* What is only known on the node at start (the GID index) is written as ``{gid_index}`` and stays out of the
  launch hash, as do log settings, gates and secrets (a keyed digest stands in for a secret).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

Json = dict[str, Any]
Value = Union[bool, int, float, str, None]

SCHEMA = 1
LAUNCH_SCHEMA = 1
#: json-file whatever the daemon's default is: the agent reads the log back to save it.
LOG_DRIVER = "json-file"
LOG_OPTIONS = {"max-size": "100m", "max-file": "3"}
#: Parts of a profile that judge a start instead of deciding what runs; changing them restarts nothing.
AROUND = ("title", "gates", "health", "memory", "refused")
#: The template that stays in the launch until the agent replaces it.
GID_TEMPLATE = "{gid_index}"
#: Default port of the peer service, next to the rendezvous port on the rail addresses.
PEER_PORT = 29630

_SPELLING: Json = {
    "type": "object",
    "additionalProperties": False,
    "required": ["source"],
    "properties": {
        "env": {"type": "string", "pattern": "[A-Z][A-Z0-9_]*"},
        "flag": {"type": "string", "pattern": "--[a-z][a-z0-9-]*"},
        "value": {"type": "string"},
        "on": {"type": "string"},
        "off": {"type": "string"},
        "when": {"type": "boolean"},
        "map": {"type": "object", "values": {"type": "string"}},
        "unless": {"type": "string"},
        "source": {"type": "string"},
    },
}
_SPELLINGS: Json = {"type": "array", "items": _SPELLING}
_SOURCED: Json = {
    "type": "object",
    "additionalProperties": False,
    "required": ["value", "source"],
    "properties": {"value": {}, "source": {"type": "string"}},
}
_ENV: Json = {
    "type": "array",
    "items": {
        "type": "object",
        "additionalProperties": False,
        "required": ["name", "value", "source"],
        "properties": {
            "name": {"type": "string", "pattern": "[A-Z][A-Z0-9_]*"},
            "value": {"type": "string"},
            "source": {"type": "string"},
        },
    },
}
_ARGV: Json = {
    "type": "array",
    "items": {
        "type": "object",
        "additionalProperties": False,
        "required": ["value", "source"],
        "properties": {
            "value": {"type": "array", "items": {"type": "string"}},
            "source": {"type": "string"},
        },
    },
}
#: How the engine's own argument parser ends: exit codes, and texts in its output (module_utils/argv_check.py).
_PARSER: Json = {
    "type": "object",
    "additionalProperties": False,
    "required": ["refused", "source"],
    "properties": {
        "refused": {"type": "integer"},
        "refusal": {"type": "string"},
        "accepted": {"type": "integer"},
        "says": {"type": "string"},
        "source": {"type": "string"},
    },
}
_WAVES: Json = {
    "type": "array",
    "items": {"type": "array", "items": {"type": "string", "enum": ["head", "workers"]}},
}

#: Engine profile schema 1. ``roles/ranks/vars/engines/schema-1.json`` is this dictionary, written out.
PROFILE_SCHEMA: Json = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Engine profile, schema 1",
    "type": "object",
    "additionalProperties": False,
    "required": [
        "schema",
        "name",
        "title",
        "world",
        "container",
        "mounts",
        "env",
        "argv",
        "settings",
        "waves",
        "gates",
        "memory",
    ],
    "properties": {
        "schema": {"type": "integer", "enum": [SCHEMA]},
        "name": {"type": "string", "pattern": "[a-z][a-z0-9_]*"},
        "title": {"type": "string"},
        "world": {
            "type": "object",
            "additionalProperties": False,
            "required": ["sizes", "rails"],
            "properties": {
                "sizes": {"type": "array", "items": {"type": "integer", "minimum": 1}},
                "rails": {"type": "boolean"},
            },
        },
        "image": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "binaries": {"type": "array", "items": {"type": "string"}},
                "entrypoint": {"type": "array", "items": {"type": "string"}},
                "parser": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"head": _PARSER, "workers": _PARSER},
                },
            },
        },
        "container": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name"],
            "properties": {
                "name": _SOURCED,
                "gpus": _SOURCED,
                "runtime": _SOURCED,
                "network": _SOURCED,
                "ipc": _SOURCED,
                "shm_bytes": _SOURCED,
                "init": _SOURCED,
                "oom_score_adj": _SOURCED,
                "stop_grace": _SOURCED,
                "ulimits": {"type": "object", "values": _SOURCED},
                "capabilities": {"type": "array", "items": _SOURCED},
                "devices": {"type": "array", "items": _SOURCED},
            },
        },
        "mounts": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["path", "target", "read_only", "source"],
                "properties": {
                    "path": {"type": "string", "pattern": "[a-z][a-z0-9_]*"},
                    "target": {"type": "string", "pattern": "/.+"},
                    "read_only": {"type": "boolean"},
                    "on": {"type": "string", "enum": ["head", "workers"]},
                    "source": {"type": "string"},
                },
            },
        },
        "env": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"all": _ENV, "head": _ENV, "workers": _ENV},
        },
        "argv": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"all": _ARGV, "head": _ARGV, "workers": _ARGV},
        },
        "secrets": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "target", "source"],
                "properties": {
                    "name": {"type": "string"},
                    "on": {"type": "string", "enum": ["head", "workers"]},
                    "target": {"type": "string", "pattern": "/.+"},
                    "flag": {"type": "string", "pattern": "--[a-z][a-z0-9-]*"},
                    "env": {"type": "string"},
                    "source": {"type": "string"},
                },
            },
        },
        "gid": {
            "type": "object",
            "additionalProperties": False,
            "required": ["setting"],
            "properties": {
                "setting": {"type": "string"},
                "ring_setting": {"type": "string"},
                "fixed_setting": {"type": "string"},
                "rails_setting": {"type": "string"},
            },
        },
        "settings": {
            "type": "object",
            "values": {
                "type": "object",
                "additionalProperties": False,
                "required": ["help", "type"],
                "properties": {
                    "help": {"type": "string"},
                    "type": {"type": "string", "enum": ["bool", "int", "float", "str"]},
                    "default": {},
                    "required": {"type": "boolean"},
                    "min": {"type": "number"},
                    "max": {"type": "number"},
                    "choices": {"type": "array"},
                    "pattern": {"type": "string"},
                    "shared": {"type": "boolean"},
                    "template": {"type": "boolean"},
                    "differs_from": {"type": "string"},
                    "at_most": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["setting", "unset"],
                        "properties": {"setting": {"type": "string"}, "unset": {"type": "integer"}},
                    },
                    "unspelled": {"type": "string"},
                    "all": _SPELLINGS,
                    "head": _SPELLINGS,
                    "workers": _SPELLINGS,
                },
            },
        },
        "refused": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "why"],
                "properties": {"name": {"type": "string"}, "why": {"type": "string"}},
            },
        },
        "waves": {
            "type": "object",
            "additionalProperties": False,
            "required": ["start", "stop"],
            "properties": {"start": _WAVES, "stop": _WAVES, "source": {"type": "string"}},
        },
        "gates": {
            "type": "object",
            "additionalProperties": False,
            "required": ["ready"],
            "properties": {
                "wave": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"stable_s": {"type": "number", "minimum": 0}},
                },
                "ready": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["path", "timeout_s", "interval_s"],
                    "properties": {
                        "path": {"type": "string", "pattern": "/.*"},
                        "timeout_s": {"type": "number", "minimum": 1},
                        "interval_s": {"type": "number", "minimum": 0.1},
                        "source": {"type": "string"},
                    },
                },
                "smoke": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "max_tokens": {"type": "integer", "minimum": 1},
                        "timeout_s": {"type": "number", "minimum": 1},
                        "source": {"type": "string"},
                    },
                },
                "log": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["match", "verdict", "why"],
                        "properties": {
                            "match": {"type": "string"},
                            "verdict": {"type": "string", "enum": ["fail", "warn", "evidence"]},
                            "why": {"type": "string"},
                            "source": {"type": "string"},
                        },
                    },
                },
                "granted": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["on", "what", "match", "source"],
                        "properties": {
                            "on": {"type": "string", "enum": ["head", "workers"]},
                            "what": {"type": "string"},
                            "match": {"type": "string"},
                            "source": {"type": "string"},
                        },
                    },
                },
                "loaded": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["on", "match", "more_gib", "source"],
                        "properties": {
                            "on": {"type": "string", "enum": ["head", "workers"]},
                            "match": {"type": "string"},
                            "more_gib": {"type": "number", "minimum": 0},
                            "source": {"type": "string"},
                        },
                    },
                },
                "nccl": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["label", "match", "minimum", "why", "source"],
                    "properties": {
                        "label": {"type": "string"},
                        "match": {"type": "string"},
                        "minimum": {"type": "string", "pattern": r"\d+(\.\d+)*"},
                        "why": {"type": "string"},
                        "source": {"type": "string"},
                    },
                },
                "errors": {"type": "array", "items": {"type": "string"}},
            },
        },
        "health": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "path": {"type": "string"},
                "running": {"type": "string"},
                "prefilling": {"type": "string"},
                "progress": {"type": "array", "items": {"type": "string"}},
                "metrics": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["path", "running", "progress"],
                    "properties": {
                        "path": {"type": "string"},
                        "running": {"type": "string"},
                        "progress": {"type": "array", "items": {"type": "string"}},
                    },
                },
            },
        },
        "memory": {
            "type": "object",
            "additionalProperties": False,
            "required": ["min_available_gib"],
            "properties": {"min_available_gib": _SOURCED, "reserve_setting": {"type": "string"}},
        },
    },
}

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}


class LaunchError(ValueError):
    """A launch that must not happen; ``problems`` has one sentence each, with the path of what is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


def schema_problems(value: object, schema: Mapping[str, Any], path: str = "") -> list[str]:
    """Where ``value`` breaks ``schema`` (the few JSON schema words used above); each names its path.

    ``values`` is ``additionalProperties`` with a schema; patterns match the whole string.
    """
    here = path or "the profile"
    kind = schema.get("type")
    if kind is not None:
        allowed = _TYPES[kind]
        wrong_bool = isinstance(value, bool) and kind in ("integer", "number")
        if wrong_bool or not isinstance(value, allowed):
            return [f"{here}: must be {kind}, is {type(value).__name__}"]
    problems: list[str] = []
    if "enum" in schema and value not in schema["enum"]:
        problems.append(f"{here}: {value!r} is none of {', '.join(map(repr, schema['enum']))}")
    if isinstance(value, str) and "pattern" in schema and not re.fullmatch(schema["pattern"], value):
        problems.append(f"{here}: {value!r} does not match {schema['pattern']}")
    if isinstance(value, (int, float)) and "minimum" in schema and value < schema["minimum"]:
        problems.append(f"{here}: {value!r} is below {schema['minimum']}")
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            problems += schema_problems(item, schema["items"], f"{path}[{index}]")
    if isinstance(value, dict):
        known = schema.get("properties", {})
        for name in schema.get("required", []):
            if name not in value:
                problems.append(f"{f'{path}.{name}' if path else name}: is missing")
        for name, item in value.items():
            inner = f"{path}.{name}" if path else str(name)
            if name in known:
                problems += schema_problems(item, known[name], inner)
            elif "values" in schema:
                problems += schema_problems(item, schema["values"], inner)
            elif schema.get("additionalProperties") is False:
                problems.append(f"{inner}: is not a key of schema {SCHEMA}")
    return problems


def profile_problems(profile: object) -> list[str]:
    """Everything wrong with a profile: its shape, then what the shape cannot say."""
    problems = schema_problems(profile, PROFILE_SCHEMA)
    if problems or not isinstance(profile, dict):
        return problems
    settings = profile["settings"]
    for name, setting in settings.items():
        path = f"settings.{name}"
        spelled = {who: bool(setting.get("all") or setting.get(who)) for who in ("head", "workers")}
        if "unspelled" in setting:
            if any(spelled.values()):
                problems.append(f"{path}: is spelled and says that it is not")
        elif setting.get("shared") and not all(spelled.values()) and max(profile["world"]["sizes"]) > 1:
            lacking = " and ".join(who for who, done in spelled.items() if not done)
            problems.append(f"{path}: is shared by all ranks but not spelled for {lacking}")
        elif not any(spelled.values()):
            problems.append(f"{path}: reaches no rank")
        if setting.get("required") and "default" in setting:
            problems.append(f"{path}: is required and has a default")
        if "default" in setting:
            problems += [f"{path}.default: {text}" for text in _value_problems(setting, setting["default"])]
        for who in ("all", "head", "workers"):
            for index, spelling in enumerate(setting.get(who, [])):
                if ("env" in spelling) == ("flag" in spelling):
                    problems.append(f"{path}.{who}[{index}]: needs either env or flag")
        for key in ("differs_from",):
            if key in setting and setting[key] not in settings:
                problems.append(f"{path}.{key}: {setting[key]} is no setting")
        if "at_most" in setting and setting["at_most"]["setting"] not in settings:
            problems.append(f"{path}.at_most.setting: {setting['at_most']['setting']} is no setting")
    for key, name in (profile.get("gid") or {}).items():
        if name not in settings:
            problems.append(f"gid.{key}: {name} is no setting")
    for order in ("start", "stop"):
        named = [who for wave in profile["waves"][order] for who in wave]
        expected = {"head"} if max(profile["world"]["sizes"]) == 1 else {"head", "workers"}
        if set(named) != expected or len(named) != len(set(named)):
            problems.append(f"waves.{order}: must name {' and '.join(sorted(expected))} once")
    return problems


def _value_problems(setting: Mapping[str, Any], value: Value) -> list[str]:
    kind = setting["type"]
    if value is None:
        return []
    good = {
        "bool": isinstance(value, bool),
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, (int, float)) and not isinstance(value, bool),
        "str": isinstance(value, str),
    }[kind]
    if not good:
        return [f"{value!r} is not of type {kind}"]
    problems = []
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if "min" in setting and value < setting["min"]:
            problems.append(f"{value} is below {setting['min']}")
        if "max" in setting and value > setting["max"]:
            problems.append(f"{value} is above {setting['max']}")
    if "choices" in setting and value not in setting["choices"]:
        problems.append(f"{value!r} is none of {', '.join(map(str, setting['choices']))}")
    if "pattern" in setting and isinstance(value, str) and not re.fullmatch(setting["pattern"], value):
        problems.append(f"{value!r} does not match {setting['pattern']}")
    return problems


def effective_settings(profile: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Value]:
    """Defaults overlaid with ``given``; None means unset. Raises ``LaunchError`` naming every wrong one."""
    settings: Mapping[str, Any] = profile["settings"]
    problems = [
        f"{name}: the engine {profile['name']} has no such setting" for name in given if name not in settings
    ]
    values: dict[str, Value] = {}
    for name, setting in settings.items():
        value = given.get(name)
        if value is None or value == "":
            value = setting.get("default")
        if setting["type"] == "float" and isinstance(value, (int, float)) and not isinstance(value, bool):
            # One spelling of one number, so that 10 and 10.0 are one launch; documented as 1.0 stays 1.0.
            keeps_point = isinstance(setting.get("default"), float)
            value = float(value) if keeps_point or value != int(value) else int(value)
        if value is None and setting.get("required"):
            problems.append(f"{name}: has no default; set it ({setting['help']})")
        problems += [f"{name}: {text}" for text in _value_problems(setting, value)]
        values[name] = value
    for name, setting in settings.items():
        other = setting.get("differs_from")
        if other and values[name] is not None and values[name] == values[other]:
            problems.append(f"{name}: must differ from {other}, both are {values[name]}")
        bound = setting.get("at_most")
        value = values[name]
        if bound and isinstance(value, int):
            limit = values[bound["setting"]]
            top = limit if isinstance(limit, int) else bound["unset"]
            if value > top:
                problems.append(f"{name}: {value} is more than {bound['setting']} ({top})")
    if problems:
        raise LaunchError(problems)
    return values


@dataclass(frozen=True)
class Rail:
    """One rail of one node. ``address`` may carry a prefix length (``10.77.0.1/30``)."""

    address: str
    netdev: str = ""
    rdma: str = ""

    @property
    def ip(self) -> str:
        return self.address.partition("/")[0]


@dataclass(frozen=True)
class Member:
    """One node of the replica: its inventory name, its rank and its rails in rail order."""

    name: str
    rank: int
    rails: tuple[Rail, ...] = ()


@dataclass(frozen=True)
class LaunchInput:
    """Everything that decides the launch of one rank.

    ``paths`` maps the profile's mount names to host paths; a read-only one may be ``volume:NAME``.
    ``image_content`` is the content hash of the image (it stands for the image in the launch hash, so that another
    name of equal content restarts nothing).
    ``secrets`` maps secret names to ``(path on the host, keyed digest of the content)``.
    """

    replica: str
    rank: int
    members: tuple[Member, ...]
    image: str
    image_content: str = ""
    model: Mapping[str, str] = field(default_factory=dict)
    rank_file: Mapping[str, Any] = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    extra_env: Mapping[str, str] = field(default_factory=dict)
    extra_args: Mapping[str, Sequence[str]] = field(default_factory=dict)
    secrets: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    container_name: str = ""
    stop_grace: int | None = None
    install_id: str = ""
    min_available_gib: float | None = None
    log_dir: str = "/var/lib/sparkfleet/logs"
    log_keep: int = 10
    peer_port: int = PEER_PORT
    release_dir: str = "/var/lib/sparkfleet/releases"

    @property
    def world(self) -> int:
        return len(self.members)


def canonical(value: object) -> str:
    """One spelling of a JSON value: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(value: object) -> str:
    """sha256 (hex) of the canonical JSON of a value."""
    return hashlib.sha256(canonical(value).encode("ascii")).hexdigest()


def role_of(rank: int) -> str:
    """The selector of a rank: ``head`` is rank 0."""
    return "head" if rank == 0 else "workers"


def ranks_in_order(waves: Iterable[Sequence[str]], world: int) -> list[list[int]]:
    """Waves of selectors → waves of ranks."""
    return [[rank for rank in range(world) if role_of(rank) in wave] for wave in waves]


def _text(value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float):
        return repr(value) if value != int(value) else f"{value:.1f}"
    return str(value)


def _fill(template: str, names: Mapping[str, str]) -> str:
    def one(match: re.Match[str]) -> str:
        name = match.group(1)
        if name == "gid_index":
            return match.group(0)
        if name not in names:
            raise LaunchError([f"unknown template {{{name}}} in {template!r}"])
        return names[name]

    return re.sub(r"\{([a-z_]+)\}", one, template)


def _spell(spelling: Mapping[str, Any], value: Value, names: Mapping[str, str]) -> str | None:
    """The text of one spelled value; None drops it; "" is a flag without a value (``when``)."""
    if value is None:
        return None
    if "when" in spelling:
        return "" if value is spelling["when"] else None
    if "map" in spelling:
        template = spelling["map"].get(_text(value), "")
    elif isinstance(value, bool) and ("on" in spelling or "off" in spelling):
        template = spelling.get("on", "1") if value else spelling.get("off", "0")
    elif "value" in spelling:
        template = spelling["value"]
    else:
        # A plain value is not a template: a brace in it stays a brace.
        return _text(value) or None
    return _fill(template, {**names, "value": _text(value)}) or None


def _entries(section: Mapping[str, Any], role: str) -> list[Any]:
    return list(section.get("all") or []) + list(section.get(role) or [])


def _shell_safe(text: str, where: str) -> list[str]:
    bad = [repr(char) for char in text if char in "\0\n\r"]
    return [f"{where}: holds {', '.join(sorted(set(bad)))}"] if bad else []


#: How a path says that it is the name of a Docker volume, for example ``volume:sparkfleet-engram``.
VOLUME_PREFIX = "volume:"
#: What Docker takes as the name of a volume.
_VOLUME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+\Z")


def is_volume(source: str) -> bool:
    """Whether the source of a launch's mount is a Docker volume: mounted while a container uses it, such as NFS."""
    return not source.startswith("/")


def _mount(mount: Mapping[str, Any]) -> Json:
    """One mount of Docker's create request. A volume never gets what the image has at its target."""
    body = {
        "Type": "bind",
        "Source": mount["source"],
        "Target": mount["target"],
        "ReadOnly": mount["read_only"],
    }
    return (
        {**body, "Type": "volume", "VolumeOptions": {"NoCopy": True}} if is_volume(mount["source"]) else body
    )


def _path_problems(name: str, path: str) -> list[str]:
    if not path.startswith("/"):
        return [f"paths.{name}: {path!r} is not absolute"]
    if any(char in path for char in ":\0\n\r,") or ".." in path.split("/"):
        return [f"paths.{name}: {path!r} has a colon, a comma, a line break or a .. in it"]
    return []


def build(profile: Mapping[str, Any], given: LaunchInput) -> Json:
    """The launch of one rank.

    :raises LaunchError: with every problem found; nothing may be started then.
    """
    problems = profile_problems(dict(profile))
    if problems:
        raise LaunchError([f"engine profile: {text}" for text in problems])
    world, rank, role = given.world, given.rank, role_of(given.rank)
    if world not in profile["world"]["sizes"]:
        sizes = ", ".join(map(str, profile["world"]["sizes"]))
        raise LaunchError([f"{profile['name']} runs on {sizes} nodes, replica {given.replica} has {world}"])
    if [member.rank for member in given.members] != list(range(world)):
        raise LaunchError([f"members are not in rank order: {[member.rank for member in given.members]}"])
    if not 0 <= rank < world:
        raise LaunchError([f"rank {rank} is not in a world of {world}"])
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", given.replica):
        raise LaunchError([f"replica name {given.replica!r}: letters, digits, dot, dash and underscore only"])
    values = effective_settings(profile, given.settings)

    me = given.members[rank]
    uses = profile.get("gid") or {}
    wanted = values.get(uses.get("rails_setting", ""), None)
    rails = list(me.rails)
    if profile["world"]["rails"]:
        count = wanted if isinstance(wanted, int) else max((len(m.rails) for m in given.members), default=0)
        for member in given.members:
            if len(member.rails) < max(count, 1):
                problems.append(f"{member.name}: {len(member.rails)} rails, {max(count, 1)} are wanted")
        rails = rails[: max(count, 1)]
        for number, rail in enumerate(rails):
            if not re.fullmatch(r"\d{1,3}(\.\d{1,3}){3}", rail.ip):
                problems.append(f"{me.name}: rail {number} address {rail.ip!r} is not a numeric IPv4 address")
            if not rail.netdev or not rail.rdma:
                problems.append(
                    f"{me.name}: no {'RDMA device' if rail.netdev else 'interface'} known for rail {number} "
                    f"({rail.ip}): the rail is not up and no plan names it (ranks_rails)"
                )
    if not given.image:
        problems.append("image: is empty")
    if problems:
        raise LaunchError(problems)

    head = given.members[0]
    names = {
        "rank": str(rank),
        "world": str(world),
        "replica": given.replica,
        "head_address": head.rails[0].ip if head.rails else "",
        "host_address": rails[0].ip if rails else "",
        "netdev": rails[0].netdev if rails else "",
        "hcas": ",".join(rail.rdma for rail in rails if rail.rdma),
    }
    for name, setting in profile["settings"].items():
        if setting.get("template"):
            names[name] = _text(values[name])

    env: dict[str, str] = {}
    sources: Json = {"env": {}, "argv": []}
    argv: list[str] = []

    def put(name: str, text: str, source: str) -> None:
        env[name] = text
        sources["env"][name] = source

    def add(words: Sequence[str], source: str) -> None:
        argv.extend(words)
        sources["argv"].append({"words": list(words), "source": source})

    for entry in _entries(profile["argv"], role):
        add([_fill(word, names) for word in entry["value"]], entry["source"])
    for entry in _entries(profile["env"], role):
        text = _fill(entry["value"], names)
        if text:
            put(entry["name"], text, entry["source"])
    for name, setting in profile["settings"].items():
        for spelling in _entries(setting, role):
            if spelling.get("unless") and values.get(spelling["unless"]) is not None:
                continue
            spelled = _spell(spelling, values[name], names)
            if spelled is None:
                continue
            if "env" in spelling:
                put(spelling["env"], spelled, spelling["source"])
            else:
                add([spelling["flag"], spelled] if spelled else [spelling["flag"]], spelling["source"])

    mounts: list[Json] = []
    for mount in profile["mounts"]:
        if mount.get("on", role) != role:
            continue
        path = given.paths.get(mount["path"], "")
        if not path:
            problems.append(f"paths.{mount['path']}: is needed for {mount['target']}")
            continue
        if path.startswith(VOLUME_PREFIX) and mount["read_only"]:
            path = path[len(VOLUME_PREFIX) :]
            if not _VOLUME.match(path):
                problems.append(f"paths.{mount['path']}: {path!r} is no name of a Docker volume")
        else:
            problems += _path_problems(mount["path"], path)
        mounts.append({"source": path, "target": mount["target"], "read_only": mount["read_only"]})
    secret_digests: dict[str, str] = {}
    secret_names: list[str] = []
    for secret in profile.get("secrets", []):
        if secret.get("on", role) != role or secret["name"] not in given.secrets:
            continue
        path, secret_digest = given.secrets[secret["name"]]
        problems += _path_problems(secret["name"], path)
        mounts.append({"source": path, "target": secret["target"], "read_only": True})
        secret_digests[secret["name"]] = secret_digest
        secret_names.append(secret["name"])
        if "flag" in secret:
            add([secret["flag"], secret["target"]], secret["source"])
        if "env" in secret:
            put(secret["env"], secret["target"], secret["source"])

    problems += _extra_problems(profile, given)
    for name, text in given.extra_env.items():
        if text != "":
            put(name, str(text), "variable ranks_extra_env")
    extra = list(given.extra_args.get("all", [])) + list(given.extra_args.get(role, []))
    if extra:
        add([str(word) for word in extra], "variable ranks_extra_args")
    for name, text in env.items():
        problems += _shell_safe(text, f"environment {name}")
    for word in argv:
        problems += _shell_safe(word, f"argument {word!r}")
    if problems:
        raise LaunchError(problems)

    body = profile["container"]
    plain = {
        key: value["value"] for key, value in body.items() if isinstance(value, dict) and "value" in value
    }
    container: Json = {
        "name": given.container_name or plain["name"],
        "image": given.image,
        "entrypoint": list((profile.get("image") or {}).get("entrypoint", [])),
        "argv": argv,
        "env": env,
        "mounts": mounts,
        "gpus": plain.get("gpus", ""),
        **({"runtime": plain["runtime"]} if plain.get("runtime") else {}),
        "network": plain.get("network", ""),
        "ipc": plain.get("ipc", ""),
        "shm_bytes": plain.get("shm_bytes", 0),
        "init": bool(plain.get("init", False)),
        "oom_score_adj": plain.get("oom_score_adj", 0),
        "ulimits": {name: value["value"] for name, value in (body.get("ulimits") or {}).items()},
        "capabilities": [entry["value"] for entry in body.get("capabilities", [])],
        "devices": [entry["value"] for entry in body.get("devices", [])],
        "restart": "no",
        "stop_grace": plain.get("stop_grace", 10) if given.stop_grace is None else given.stop_grace,
    }
    switches = logical(profile, role, env, argv)
    for name, setting in profile["settings"].items():
        if setting.get("shared") and "unspelled" in setting:
            switches[name] = _text(values[name])
    contract: Json = {
        "engine": profile["name"],
        "profile": digest({key: value for key, value in profile.items() if key not in AROUND}),
        "world": world,
        "image": given.image_content or given.image,
        "model": dict(given.model),
        "rank_files": str(given.rank_file.get("index", "")),
        "rendezvous": f"{names['head_address']}:{names.get('master_port', '')}",
        "rails": len(rails),
        "switches": switches,
    }
    hashed: Json = {
        "container": {key: value for key, value in container.items() if key not in ("image", "stop_grace")},
        "image": given.image_content or given.image,
        "model": dict(given.model),
        "rank_file": str(given.rank_file.get("name", "")),
        "secrets": secret_digests,
        "rails": [{"ip": rail.ip, "netdev": rail.netdev, "rdma": rail.rdma} for rail in rails],
        "contract": contract,
    }
    launch_hash = digest(hashed)[:20]
    container["labels"] = {
        "sparkfleet.install": given.install_id,
        "sparkfleet.replica": given.replica,
        "sparkfleet.rank": str(rank),
        "sparkfleet.launch": launch_hash,
    }
    fixed = values.get(uses.get("fixed_setting", ""), None)
    ring = values.get(uses.get("ring_setting", ""), None)
    reserve = values.get((profile.get("memory") or {}).get("reserve_setting", ""), None)
    ports = {key: values[key] for key in ("port", "master_port") if isinstance(values.get(key), int)}
    return {
        "schema": LAUNCH_SCHEMA,
        "replica": given.replica,
        "rank": rank,
        "world": world,
        "node": me.name,
        "engine": profile["name"],
        "hash": launch_hash,
        "contract": {**contract, "digest": digest(contract)[:20]},
        "container": container,
        "rails": [{"address": rail.address, "netdev": rail.netdev, "rdma": rail.rdma} for rail in rails],
        "gid": {
            "wanted": any(GID_TEMPLATE in text for text in env.values()),
            "fixed": fixed if ring is not False else None,
            "wait_s": 60,
        },
        "peers": [
            {"name": m.name, "rank": m.rank, "addresses": [rail.ip for rail in m.rails]}
            for m in given.members
            if m.rank != rank
        ],
        "peer_port": given.peer_port,
        "waves": {
            "start": ranks_in_order(profile["waves"]["start"], world),
            "stop": ranks_in_order(profile["waves"]["stop"], world),
        },
        "ports": {
            "api": ports.get("port") if rank == 0 else None,
            "api_host": values.get("host") if rank == 0 else None,
            "rendezvous": ports.get("master_port") if rank == 0 and world > 1 else None,
        },
        "gates": dict(profile["gates"]),
        "health": dict(profile.get("health") or {}),
        "memory": {
            "min_available_gib": (
                profile["memory"]["min_available_gib"]["value"]
                if given.min_available_gib is None
                else given.min_available_gib
            ),
            "rank_file_bytes": int(given.rank_file.get("bytes", 0) or 0),
            "reserve_gib": reserve,
            "wait_s": 120,
        },
        "model": dict(given.model),
        "rank_file": dict(given.rank_file),
        "served_name": values.get("served_name") or "",
        "context": values.get("context"),
        "parallel": values.get("parallel"),
        "api_key": "api_key" in secret_names,
        "secrets": sorted(secret_names),
        "install_id": given.install_id,
        "logs": {"dir": given.log_dir, "keep": given.log_keep},
        "release_dir": given.release_dir,
        "sources": sources,
    }


def _extra_problems(profile: Mapping[str, Any], given: LaunchInput) -> list[str]:
    """Extra environment and arguments may add, never replace what the profile manages."""
    managed: dict[str, str] = {}
    for name, setting in profile["settings"].items():
        for who in ("all", "head", "workers"):
            for spelling in setting.get(who, []):
                managed[spelling.get("env") or spelling.get("flag")] = f"is the setting {name}"
    for who in ("all", "head", "workers"):
        for entry in profile["env"].get(who, []):
            managed.setdefault(entry["name"], "is set by the engine profile")
        for entry in profile["argv"].get(who, []):
            for word in entry["value"]:
                if word.startswith("--"):
                    managed.setdefault(word, "is set by the engine profile")
    for secret in profile.get("secrets", []):
        for key in ("flag", "env"):
            if key in secret:
                managed[secret[key]] = f"is the secret {secret['name']}"
    for refused in profile.get("refused", []):
        managed[refused["name"]] = f"is refused: {refused['why']}"
    problems = []
    for name in given.extra_env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            problems.append(f"extra environment {name!r}: is no variable name")
        elif name in managed:
            problems.append(f"extra environment {name}: {managed[name]}")
    for who, words in given.extra_args.items():
        if who not in ("all", "head", "workers"):
            problems.append(f"extra arguments {who!r}: all, head or workers")
        for word in words:
            flag = str(word).partition("=")[0]
            if flag in managed:
                problems.append(f"extra argument {flag}: {managed[flag]}")
    return problems


def logical(
    profile: Mapping[str, Any], role: str, env: Mapping[str, str], argv: Sequence[str]
) -> dict[str, str]:
    """The shared settings as a rendered rank spells them: logical name → text, absent when dropped.

    Reading back what was rendered, not what was asked for, is what makes two ranks comparable although one
    takes a switch as an environment variable and the other as a flag. Values that hold node facts (device
    names, the GID index) are reduced to whether they are given.
    """
    found: dict[str, str] = {}
    for name, setting in profile["settings"].items():
        if not setting.get("shared"):
            continue
        for spelling in _entries(setting, role):
            if "env" in spelling:
                text = env.get(spelling["env"])
            else:
                places = [index for index, word in enumerate(argv) if word == spelling["flag"]]
                if not places:
                    text = None
                elif "when" in spelling:
                    text = "1" if spelling["when"] else "0"
                else:
                    text = argv[places[-1] + 1] if places[-1] + 1 < len(argv) else ""
            if text is None and "when" in spelling:
                text = "0" if spelling["when"] else "1"
            if text is None:
                continue
            if "on" in spelling or "map" in spelling or "value" in spelling:
                text = "given"
            if text is not None:
                found[name] = text
    return found


def older(version: str, minimum: str) -> bool:
    """Whether a dotted version (what follows its numbers does not count) is below another."""

    def numbers(text: str) -> list[int]:
        found = re.match(r"\d+(\.\d+)*", text.strip())
        return [int(part) for part in found.group(0).split(".")] if found else []

    return numbers(version) < numbers(minimum)


def nccl_warning(rule: Mapping[str, Any], image: str, labels: Mapping[str, Any]) -> str:
    """What is to be said of an image whose label does not state the NCCL that the profile wants; else empty.

    A label is the statement of whoever built the image. Nothing is refused: images of others carry none.
    """
    stated = str(labels.get(rule["label"]) or "")
    if stated and not older(stated, rule["minimum"]):
        return ""
    found = f"states NCCL {stated}" if stated else f"has no label {rule['label']}, so its NCCL is not known"
    return f"image {image} {found}; wanted: {rule['minimum']} or newer, because {rule['why']}"


def contract_differences(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What two ranks disagree about, one sentence each; empty when they may form a replica."""
    differences = []
    for key in sorted((set(mine) | set(other)) - {"digest", "switches"}):
        if mine.get(key) != other.get(key):
            differences.append(f"{key}: {mine.get(key)!r} here, {other.get(key)!r} there")
    ours, theirs = mine.get("switches", {}), other.get("switches", {})
    for key in sorted(set(ours) | set(theirs)):
        if ours.get(key) != theirs.get(key):
            differences.append(f"switch {key}: {ours.get(key)!r} here, {theirs.get(key)!r} there")
    return differences


def resolve(text: str, gid_index: int | None) -> str | None:
    """A value of the launch with the index filled in; None drops it (no index was resolved)."""
    if GID_TEMPLATE not in text:
        return text
    return None if gid_index is None else text.replace(GID_TEMPLATE, str(gid_index))


def create_body(launch: Mapping[str, Any], gid_index: int | None, devices: Sequence[str]) -> Json:
    """The Docker create request of a launch.

    :param gid_index: what the agent found on this node now; None drops the variables that want it.
    :param devices: those of the launch's devices that exist on this node.
    """
    spec = launch["container"]
    env = []
    for name, text in sorted(spec["env"].items()):
        value = resolve(text, gid_index)
        if value:
            env.append(f"{name}={value}")
    host: Json = {
        "NetworkMode": spec["network"] or "default",
        "RestartPolicy": {"Name": spec["restart"]},
        "Mounts": [_mount(mount) for mount in spec["mounts"]],
        "Ulimits": [
            {"Name": name, "Soft": value, "Hard": value} for name, value in sorted(spec["ulimits"].items())
        ],
        "CapAdd": list(spec["capabilities"]),
        "Devices": [
            {"PathOnHost": path, "PathInContainer": path, "CgroupPermissions": "rwm"} for path in devices
        ],
        "LogConfig": {"Type": LOG_DRIVER, "Config": dict(LOG_OPTIONS)},
    }
    if spec.get("runtime"):
        host["Runtime"] = spec["runtime"]
    if spec["ipc"]:
        host["IpcMode"] = spec["ipc"]
    if spec["shm_bytes"]:
        host["ShmSize"] = spec["shm_bytes"]
    if spec["init"]:
        host["Init"] = True
    if spec["oom_score_adj"]:
        host["OomScoreAdj"] = spec["oom_score_adj"]
    if spec["gpus"]:
        count = -1 if spec["gpus"] == "all" else int(spec["gpus"])
        host["DeviceRequests"] = [{"Driver": "", "Count": count, "Capabilities": [["gpu"]]}]
    body: Json = {
        "Image": spec["image"],
        "Cmd": list(spec["argv"]),
        "Env": env,
        "Labels": dict(spec["labels"]),
        "HostConfig": host,
    }
    if spec["entrypoint"]:
        body["Entrypoint"] = list(spec["entrypoint"])
    return body


def render(
    launch: Mapping[str, Any], gid_index: int | None = None, devices: Sequence[str] | None = None
) -> str:
    """The launch as the ``docker run`` that it amounts to, one option a line, for diffs and ``--print``.

    What the agent resolves at start is shown as ``<resolved at start (now 3)>``; secrets appear as the path
    of their file only.
    """
    spec = launch["container"]
    now = "unknown yet" if gid_index is None else f"now {gid_index}"
    lines = [f"docker run -d --name {spec['name']}"]
    for name, value in sorted(spec["labels"].items()):
        lines.append(f"--label {name}={value}")
    if spec["gpus"]:
        lines.append(f"--gpus {spec['gpus']}")
    if spec.get("runtime"):
        lines.append(f"--runtime {spec['runtime']}")
    if spec["network"]:
        lines.append(f"--network {spec['network']}")
    if spec["ipc"]:
        lines.append(f"--ipc {spec['ipc']}")
    if spec["shm_bytes"]:
        lines.append(f"--shm-size {spec['shm_bytes']}")
    if spec["init"]:
        lines.append("--init")
    if spec["oom_score_adj"]:
        lines.append(f"--oom-score-adj {spec['oom_score_adj']}")
    for name, value in sorted(spec["ulimits"].items()):
        lines.append(f"--ulimit {name}={value}")
    for name in spec["capabilities"]:
        lines.append(f"--cap-add {name}")
    for path in spec["devices"] if devices is None else devices:
        lines.append(f"--device {path}")
    lines.append(f"--restart {spec['restart']}")
    lines.append(f"--log-driver {LOG_DRIVER}")
    lines += [f"--log-opt {name}={value}" for name, value in LOG_OPTIONS.items()]
    for mount in spec["mounts"]:
        options = [
            *(["ro"] if mount["read_only"] else []),
            *(["nocopy"] if is_volume(mount["source"]) else []),
        ]
        lines.append(
            f"-v {':'.join([mount['source'], mount['target'], *([','.join(options)] if options else [])])}"
        )
    for name, text in sorted(spec["env"].items()):
        lines.append(f"-e {name}={text.replace(GID_TEMPLATE, f'<resolved at start ({now})>')}")
    if spec["entrypoint"]:
        lines.append(f"--entrypoint {json.dumps(spec['entrypoint'])}")
    lines.append(spec["image"])
    words = list(spec["argv"])
    current: list[str] = []
    for word in words:
        if word.startswith("--") and current:
            lines.append(" ".join(map(_quoted, current)))
            current = []
        current.append(word)
    if current:
        lines.append(" ".join(map(_quoted, current)))
    return " \\\n  ".join(lines) + "\n"


def annotated(profile: Mapping[str, Any], launches: Sequence[Mapping[str, Any]]) -> str:
    """Every line of every rank's launch with its source, for the golden file and for reading.

    A source ``-`` is shown as ``unsourced``: chosen by this project.
    """

    def line(text: str, source: str) -> str:
        return f"{text:<100} # {'unsourced' if source == '-' else source}"

    lines = []
    body = profile["container"]
    for launch in launches:
        spec, sources = launch["container"], launch["sources"]
        lines.append(f"-- {launch['node']}: rank {launch['rank']} of {launch['world']}")
        lines.append(line(f"--name {spec['name']}", body["name"]["source"]))
        lines += [line(f"--label {name}={value}", "-") for name, value in sorted(spec["labels"].items())]
        flags = {"gpus": "--gpus", "runtime": "--runtime", "network": "--network", "ipc": "--ipc"}
        flags.update({"shm_bytes": "--shm-size", "oom_score_adj": "--oom-score-adj"})
        for key, flag in flags.items():
            if spec.get(key):
                lines.append(line(f"{flag} {spec[key]}", body[key]["source"]))
        if spec["init"]:
            lines.append(line("--init", body["init"]["source"]))
        for name, value in sorted((body.get("ulimits") or {}).items()):
            lines.append(line(f"--ulimit {name}={value['value']}", value["source"]))
        for value in body.get("capabilities", []):
            lines.append(line(f"--cap-add {value['value']}", value["source"]))
        for value in body.get("devices", []):
            lines.append(line(f"--device {value['value']}", value["source"]))
        # The seed author's launcher and its relatives set no restart policy.
        lines.append(line(f"--restart {spec['restart']}", "M2"))
        lines.append(line(f"--log-driver {LOG_DRIVER}", "-"))
        lines += [line(f"--log-opt {name}={value}", "-") for name, value in LOG_OPTIONS.items()]
        by_target = {mount["target"]: mount["source"] for mount in profile["mounts"]}
        by_target.update({secret["target"]: secret["source"] for secret in profile.get("secrets", [])})
        for mount in spec["mounts"]:
            mode = ":ro" if mount["read_only"] else ""
            lines.append(line(f"-v {mount['source']}:{mount['target']}{mode}", by_target[mount["target"]]))
        for name, text in sorted(spec["env"].items()):
            lines.append(line(f"-e {name}={text}", sources["env"][name]))
        if spec["entrypoint"]:
            lines.append(line(f"--entrypoint {json.dumps(spec['entrypoint'])}", "-"))
        lines.append(line(spec["image"], "-"))
        for entry in sources["argv"]:
            lines.append(line(" ".join(map(_quoted, entry["words"])), entry["source"]))
    return "\n".join(lines) + "\n"


def published_schema() -> Json:
    """``PROFILE_SCHEMA`` in the words of JSON Schema: ``values`` becomes ``additionalProperties``,
    patterns are anchored."""

    def plain(node: Any) -> Any:
        if isinstance(node, list):
            return [plain(item) for item in node]
        if not isinstance(node, dict):
            return node
        result: Json = {}
        for key, value in node.items():
            if key == "values":
                result["additionalProperties"] = plain(value)
            elif key == "pattern" and isinstance(value, str):
                result[key] = f"^(?:{value})$"
            elif key == "properties":
                result[key] = {name: plain(item) for name, item in value.items()}
            else:
                result[key] = plain(value)
        return result

    published: Json = plain(PROFILE_SCHEMA)
    return published


def _quoted(word: str) -> str:
    return word if re.fullmatch(r"[A-Za-z0-9_@%+=:,./{}-]+", word) else "'" + word.replace("'", "'\\''") + "'"
