"""A machine made of a directory and a small systemd, for the logic of the host modules.

It refuses what the real tools refuse as far as the modules meet it. The real tools are met in the lab.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Answer, Host

FIXTURES = Path(__file__).parents[1] / "fixtures" / "host"


def fixture(name: str) -> str:
    return (FIXTURES / name).read_text()


class FakeHost(Host):
    """`calls` holds every command; `answers` overrides the answer to commands that begin with a prefix."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.calls: list[list[str]] = []
        self.answers: dict[tuple[str, ...], Callable[[Sequence[str]], Answer] | Answer] = {}
        self.units: dict[str, dict[str, str]] = {}
        self.journal: list[dict[str, str]] = []
        self.default = "graphical.target"
        self.tools = {
            "nvidia-smi": "/usr/bin/nvidia-smi",
            "nvidia-container-runtime": "/usr/bin/nvidia-container-runtime",
        }
        # The GPU: confirmed pair, reading, and what the driver makes of a request.
        self.lock: tuple[int, int] | None = None
        self.snap = 0
        self.refuse = ""
        self.sm_idle = 2418
        self.load = 0
        self.power = 12.6
        self.apps = ""
        self.sm_override: int | None = None
        self.runs = 0
        for folder in ("etc/systemd/system", "etc/docker", "etc/sysctl.d", "proc/sys/fs", "var/lib"):
            (root / folder).mkdir(parents=True)

    # -- tools --------------------------------------------------------------------------------------------

    def which(self, name: str) -> str | None:
        return self.tools.get(name, name if name.startswith("/") else None)

    def run(self, argv: Sequence[str], timeout: float = 20.0, stdin: str | None = None) -> Answer:
        del timeout  # nothing here takes time
        words = list(argv)
        self.calls.append(words)
        for prefix, answer in self.answers.items():
            if tuple(words[: len(prefix)]) == prefix:
                return answer if isinstance(answer, Answer) else answer(words)
        name = words[0].rsplit("/", 1)[-1].replace("-", "_")
        handler: Callable[[list[str], str | None], Answer] = getattr(self, f"_{name}")
        return handler(words[1:], stdin)

    def locked(self) -> tuple[int, int] | None:
        """The pair that the GPU is locked to now."""
        return self.lock

    def changing_calls(self) -> list[list[str]]:
        """Commands that are not reads."""
        reads = ("show", "get-default", "list-units", "list-dependencies", "is-active")
        return [
            call
            for call in self.calls
            if not (call[0] == "systemctl" and call[1] in reads)
            and call[0] not in {"journalctl", "dpkg-query"}
            and not any(word.startswith("--query-") for word in call)
        ]

    # -- GPU ----------------------------------------------------------------------------------------------

    def _nvidia_smi(self, args: list[str], _stdin: str | None) -> Answer:
        if args[0] in {"-lgc", "-rgc"}:
            if self.refuse:
                return Answer(4, self.refuse, "")
            if args[0] == "-rgc":
                self.lock = None
                return Answer(0, "All done.\n", "")
            low, high = (int(part) for part in args[1].split(","))
            self.lock = (low, high - self.snap)
            text = fixture("smi-lgc-success-then-done.txt")
            return Answer(
                0, re.sub(r"\(.*?\)", f"(gpuClkMin {low}, gpuClkMax {high - self.snap})", text, count=1), ""
            )
        if args[0].startswith("--query-gpu="):
            clock = self.sm_override or min(self.sm_idle, self.lock[1] if self.lock else self.sm_idle)
            values = {
                "clocks.sm": f"{clock} MHz",
                "utilization.gpu": f"{self.load} %",
                "power.draw": f"{self.power} W",
                "temperature.gpu": "43",
                "pstate": "P0",
                "driver_version": "580.173.02",
            }
            names = args[0].split("=", 1)[1].split(",")
            return Answer(0, ", ".join(values.get(name, "[N/A]") for name in names) + "\n", "")
        if args[0].startswith("--query-compute-apps="):
            return Answer(0, self.apps, "")
        raise AssertionError(f"a GB10 does not do {args}")

    # -- systemd ------------------------------------------------------------------------------------------

    def unit(self, name: str, **values: str) -> None:
        """A unit that exists."""
        self.units[name] = {
            "Id": name,
            "LoadState": "loaded",
            "ActiveState": "inactive",
            "SubState": "dead",
            "UnitFileState": "disabled",
            "InvocationID": "",
            "MainPID": "0",
            **values,
        }

    def _systemctl(self, args: list[str], _stdin: str | None) -> Answer:
        verb, names = args[0], [word for word in args[1:] if not word.startswith("-")]
        if verb == "show":
            wanted = args[args.index("-p") + 1].split(",")
            names = args[1 : args.index("-p")]
            blocks = []
            for name in names:
                values = self.units.get(
                    name, {"Id": name, "LoadState": "not-found", "ActiveState": "inactive"}
                )
                blocks.append("\n".join(f"{key}={values.get(key, '')}" for key in wanted))
            return Answer(0, "\n\n".join(blocks) + "\n", "")
        if verb == "get-default":
            return Answer(0, self.default + "\n", "")
        if verb == "set-default":
            self.default = names[0]
            return Answer(0, "", "")
        if verb == "daemon-reload":
            for name in self.listdir("/etc/systemd/system"):
                if name not in self.units and name.endswith(".service"):
                    self.unit(name)
            for name in list(self.units):
                if name.startswith("sparkfleet-gpu") and not self.exists(f"/etc/systemd/system/{name}"):
                    del self.units[name]
            return Answer(0, "", "")
        if verb == "list-dependencies":
            stays = [n for n, v in self.units.items() if "multi-user.target" in v.get("WantedBy", "")]
            return Answer(0, "\n".join(["multi-user.target", *stays]) + "\n", "")
        if verb == "list-units":
            rows = [
                f"{n} loaded active running {n}"
                for n, v in self.units.items()
                if v["ActiveState"] == "active" and n.endswith(".service")
            ]
            return Answer(0, "\n".join(rows) + "\n", "")
        if verb == "isolate":
            for name, values in self.units.items():
                if name in {"graphical.target", "display-manager.service"} or (
                    name.endswith(".service") and "multi-user.target" not in values.get("WantedBy", "")
                ):
                    values["ActiveState"] = "inactive"
            return Answer(0, "", "")
        if any(name not in self.units for name in names):
            return Answer(5, "", f"Failed: Unit {names} not found.")
        return self._unit_verb(verb, names, now="--now" in args)

    def _unit_verb(self, verb: str, names: list[str], now: bool) -> Answer:
        for name in names:
            values = self.units[name]
            if verb in {"enable", "disable"}:
                values["UnitFileState"] = f"{verb}d"
            if verb in {"start", "restart"} or (verb == "enable" and now):
                answer = self._start(name)
                if not answer.ok:
                    return answer
            if verb == "stop" or (verb == "disable" and now):
                values["ActiveState"] = "inactive"
        return Answer(0, "", "")

    def _start(self, name: str) -> Answer:
        values = self.units[name]
        self.runs += 1
        values["InvocationID"] = f"{self.runs:032x}"
        match = re.search(r"^ExecStart=(.+)$", self.read(f"/etc/systemd/system/{name}") or "", re.M)
        answer = self.run(match.group(1).split()) if match else Answer(0, "", "")
        for line in answer.out.splitlines():
            self.log(name, values["InvocationID"], line)
        values["ActiveState"] = "active" if answer.ok else "failed"
        return Answer(0 if answer.ok else 1, "", "" if answer.ok else "Job failed.")

    def log(self, unit: str, invocation: str, message: str) -> None:
        self.journal.append({"_SYSTEMD_UNIT": unit, "_SYSTEMD_INVOCATION_ID": invocation, "MESSAGE": message})

    def _journalctl(self, args: list[str], _stdin: str | None) -> Answer:
        matches = dict(word.split("=", 1) for word in args if word.startswith("_"))
        rows = [row for row in self.journal if all(row.get(key) == value for key, value in matches.items())]
        return Answer(0, "\n".join(json.dumps(row) for row in rows) + "\n", "")

    def reboot(self) -> None:
        """Volatile state is gone; enabled units run again."""
        self.lock = None
        for values in self.units.values():
            values.update(ActiveState="inactive", InvocationID="")
        for name, values in self.units.items():
            if values["UnitFileState"] == "enabled" and self.exists(f"/etc/systemd/system/{name}"):
                self._start(name)
