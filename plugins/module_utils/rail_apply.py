# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Bring the rails of one node to their addresses, with a way back that needs nobody.

Order of a change: render, validate in a temporary root, save what is there, arm a timer that restores it,
write, apply, read again. `keep` disarms the timer, after all peers have answered full-size packets on every rail
(`ask`) and every member has said so; until then a lost peer or controller means that the old network comes back
by itself.

Only the rails are reconfigured (`networkctl reconfigure`), never the whole machine: `netplan apply` would
also put into
effect what somebody left unapplied for the management interface. NetworkManager has no such choice.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import rails as rail
from .probe import docker as probe_docker
from .probe import net as probe_net
from .probe import netplan as probe_netplan
from .probe.reader import Reader

NETPLAN = "/etc/netplan"
OWN_PATH = f"{NETPLAN}/{probe_netplan.OWN_FILE}"
#: Suffix of a foreign file that was taken over; netplan reads *.yaml only.
DISABLED = ".sparkfleet-disabled"
PROFILES = "/etc/NetworkManager/system-connections"
UNITS = "/etc/systemd/network"
TIMER = "sparkfleet-fabric-rollback"


def disabled_name(path: str) -> str:
    """What a file that was taken over is called then. NetworkManager reads files of any ending in its directory
    but for backups that end in a tilde."""
    return path + DISABLED + ("~" if path.startswith(PROFILES) else "")


STATE_DIR = "/var/lib/sparkfleet/fabric"


class ApplyError(Exception):
    """The change cannot be made, or was made and did not hold. `details` go into the result."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class Wanted:
    """One rail as asked for. `netdev` may be empty: then the cable decides."""

    address: str
    netdev: str = ""
    peers: tuple[str, ...] = ()


@dataclass
class Plan:
    """What a run would do on this node."""

    halves: tuple[rail.Half, ...]
    wanted: tuple[Wanted, ...]
    mtu: int
    renderer: str
    text: str
    before_text: str | None
    live_before: dict[str, dict[str, Any]]
    foreign: list[str] = field(default_factory=list)
    adopted: list[str] = field(default_factory=list)
    write: bool = False
    disable: list[str] = field(default_factory=list)
    live_differs: bool = False
    #: Interfaces that our file names and that are no rails any more (the cable sits in the other cage), as they are.
    left: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        return self.write or bool(self.disable) or self.live_differs

    @property
    def netdevs(self) -> list[str]:
        return [half.netdev for half in self.halves]

    def live_after(self) -> dict[str, dict[str, Any]]:
        return {
            half.netdev: {"addresses": [one.address], "mtu": self.mtu}
            for half, one in zip(self.halves, self.wanted)
        }

    @staticmethod
    def _line(name: str, row: Mapping[str, Any]) -> str:
        return f"{name}: {', '.join(row['addresses']) or 'no IPv4'}, mtu {row['mtu']}\n"

    def diff(self) -> list[dict[str, str]]:
        """Rows for --diff; the headers name each object that a run would change."""
        rows = []
        if self.write:
            rows.append(
                {
                    "before_header": OWN_PATH,
                    "after_header": OWN_PATH,
                    "before": self.before_text or "",
                    "after": self.text,
                }
            )
        rows += [
            {
                "before_header": path,
                "after_header": disabled_name(path),
                "before": f"{path}\n",
                "after": f"{disabled_name(path)}\n",
            }
            for path in self.disable
        ]
        after = {**self.live_after(), **{name: {**row, "addresses": []} for name, row in self.left.items()}}
        before = {**(self.live_before if self.live_differs else {}), **self.left}
        for name, row in before.items():
            if row != after[name]:
                header = f"rail {name}"
                rows.append(
                    {
                        "before_header": header,
                        "after_header": header,
                        "before": self._line(name, row),
                        "after": self._line(name, after[name]),
                    }
                )
        if rows:
            header = f"tree {STATE_DIR}"
            rows.append(
                {
                    "before_header": header,
                    "after_header": header,
                    "before": "",
                    "after": "copies of the above as it was, and the script that restores it\n",
                }
            )
        return rows


def ssh_server_address(reader: Reader) -> str | None:
    """The address of this node that Ansible came to, from SSH_CONNECTION of this process or one of its
    parents:
    sudo removes it from the environment, so the parents are asked."""
    pid = os.getpid()
    for _step in range(32):
        environ = reader.text(f"/proc/{pid}/environ") or ""
        for entry in environ.split("\0"):
            if entry.startswith("SSH_CONNECTION="):
                parts = entry.split("=", 1)[1].split()
                if len(parts) == 4:
                    return parts[2]
        status = re.search(r"^PPid:\s+(\d+)", reader.text(f"/proc/{pid}/status") or "", re.M)
        if not status or status.group(1) in ("0", str(pid)):
            return None
        pid = int(status.group(1))
    return None


class RailNode:
    """The rails of the node that this process runs on."""

    def __init__(self, reader: Reader, state_dir: str = STATE_DIR, tmp: str | None = None) -> None:
        self.reader = reader
        self.state_dir = Path(state_dir)
        self.tmp = tmp
        self.raised: list[str] = []

    # -- reading

    def probe(self) -> dict[str, Any]:
        found = probe_net.read(self.reader)
        found["netplan"] = probe_netplan.read(self.reader, found["net"])
        return found

    def run(self, *argv: str, timeout: float = 30.0) -> str:
        answer = self.reader.run(list(argv), timeout)
        if not answer.ok:
            why = "is not installed" if answer.absent else "did not end in time" if answer.timed_out else ""
            raise ApplyError(
                f"{' '.join(argv)} {why or 'failed'}: {(answer.stderr or answer.stdout).strip()}"
            )
        return answer.stdout

    def live(self, netdevs: Sequence[str]) -> dict[str, dict[str, Any]]:
        net = probe_net.read_net(self.reader)
        return {
            name: {
                "addresses": [
                    row["cidr"] for row in net.get(name, {}).get("addresses", []) if row["family"] == "inet"
                ],
                "mtu": net.get(name, {}).get("mtu"),
            }
            for name in netdevs
        }

    def choose(
        self, probe: Mapping[str, Any], wanted: Sequence[Wanted], raise_links: bool
    ) -> tuple[rail.Half, ...]:
        named = [one.netdev for one in wanted if one.netdev]
        addresses = [one.address for one in wanted]
        cables = 2 if len(wanted) == rail.RING_RAILS else 1
        halves = rail.choose_halves(probe, named, addresses, cables=cables)
        if raise_links and any(half.state == "admin_down" for half in halves):
            # No carrier can be read on a link that is administratively down: bring the halves up, then look.
            chosen = {half.netdev for half in halves}
            for half in rail.halves_of(probe):
                if half.admin_up is False and (half.netdev in chosen or not named):
                    self.run("ip", "link", "set", "dev", half.netdev, "up")
                    self.raised.append(half.netdev)
            for _attempt in range(25):
                probe = probe_net.read(self.reader)
                halves = rail.choose_halves(probe, named, addresses, strict=False, cables=cables)
                if halves and all(half.state == "up" for half in halves):
                    break
                time.sleep(0.2)
            halves = rail.choose_halves(probe, named, addresses, cables=cables)
        dark = [half.netdev for half in halves if half.state == "no_cable"]
        if dark:
            raise ApplyError(
                f"no carrier on {', '.join(dark)}",
                wanted="a cable that is seen by both halves of the cage",
                remedy="seat the QSFP cable on both nodes, then restart both",
            )
        return halves

    def lower_again(self, keep: Sequence[str] = ()) -> None:
        """Links that were only brought up to look for a carrier go back."""
        for name in self.raised:
            if name not in keep:
                self.reader.run(["ip", "link", "set", "dev", name, "down"])
        self.raised = []

    def renderer(self, probe: Mapping[str, Any], netdevs: Sequence[str]) -> str:
        """Who manages the rails: what netplan generated for them, else networkd's own view, else the global
        renderer
        of the netplan files, else whichever service runs."""
        netplan = probe["netplan"]
        for name in netdevs:
            if name in netplan["generated"]:
                return str(netplan["generated"][name]["renderer"])
        if netplan["renderer"] in ("networkd", "NetworkManager"):
            return str(netplan["renderer"])
        active = self.reader.run(
            ["systemctl", "is-active", "systemd-networkd.service", "NetworkManager.service"]
        )
        states = active.stdout.split()
        return (
            "NetworkManager"
            if states[:2] and states[0] != "active" and states[-1] == "active"
            else "networkd"
        )

    def protected(self, probe: Mapping[str, Any]) -> dict[str, str]:
        """{netdev: why} of interfaces that must not be touched: the one of this connection and of the
        default route."""
        found: dict[str, str] = {}
        server = ssh_server_address(self.reader)
        for name, row in probe["net"].items():
            for item in row["addresses"]:
                if server and ipaddress.ip_address(item["address"]) == ipaddress.ip_address(
                    server.split("%")[0]
                ):
                    found[name] = f"Ansible came through it ({server})"
        for route in probe["routes"]:
            if route["destination"] == "default" and route["netdev"]:
                found.setdefault(route["netdev"], "it carries the default route")
        return found

    # -- deciding

    def plan(
        self,
        wanted: Sequence[Wanted],
        mtu: int,
        renderer: str = "auto",
        takeover: bool = False,
        raise_links: bool = True,
    ) -> Plan:
        """What to do. Raises ApplyError or rails.RailError with everything that speaks against it."""
        probe = self.probe()
        denied = [row["path"] for row in probe["netplan"]["files"] if not row["readable"]]
        if denied:
            raise ApplyError(f"{', '.join(denied)} cannot be read: run with become")
        halves = self.choose(probe, wanted, raise_links)[: len(wanted)]
        if len(halves) != len(wanted):
            raise ApplyError(f"{len(wanted)} rails wanted, the cage has {len(halves)} halves")
        netdevs = [half.netdev for half in halves]
        for name, why in self.protected(probe).items():
            if name in netdevs:
                raise ApplyError(
                    f"{name} is a rail by plan, but {why}",
                    wanted="a rail that carries neither the controller nor the default route",
                    remedy="connect over the management network, or correct sparkfleet_rails",
                )
        for name in netdevs:
            master = probe["net"][name].get("master")
            if master:
                raise ApplyError(
                    f"{name} is part of {master}",
                    wanted="two separate rails: RDMA goes past a bond, which gains nothing",
                    remedy=f"remove {master} from the network configuration of the node",
                )
        if renderer == "auto":
            renderer = self.renderer(probe, netdevs)
        text = rail.render_netplan([(name, one.address) for name, one in zip(netdevs, wanted)], mtu, renderer)
        before = self.reader.text(OWN_PATH)
        foreign = [
            row["path"]
            for kind in ("files", "networkmanager", "networkd")
            for row in probe["netplan"][kind]
            if not row.get("owned") and set(row["netdevs"] or []) & set(netdevs)
        ]
        plan = Plan(halves, tuple(wanted), mtu, renderer, text, before, self.live(netdevs), foreign)
        plan.live_differs = plan.live_before != plan.live_after()
        ours = before is not None and probe_netplan.OWN_MARK in before
        if ours:
            named = re.findall(r"^    (\S+):$", before or "", re.M)
            plan.left = self.live([name for name in named if name in probe["net"] and name not in netdevs])
        if (
            foreign
            and not ours
            and not plan.live_differs
            and self.validate(plan, keep_foreign=True, own=False) is None
        ):
            # What is there says the same, and says it for the next boot too: leave it alone.
            plan.adopted = foreign
            return plan
        if foreign and not takeover:
            raise ApplyError(
                f"other files configure a rail: {', '.join(foreign)}",
                wanted=f"{OWN_PATH} alone, or files that give exactly the planned addresses and MTU",
                remedy="remove the rails from these files, or set fabric_takeover: true to rename them "
                f"to *{DISABLED}",
                foreign=foreign,
            )
        plan.disable = [path for path in foreign if path != OWN_PATH]
        plan.write = before != text
        if plan.write or plan.disable:
            problem = self.validate(plan, keep_foreign=False, own=True)
            if problem:
                raise ApplyError(problem, wanted=text)
        return plan

    def validate(self, plan: Plan, keep_foreign: bool, own: bool) -> str | None:
        """Let netplan itself read the files in a temporary root. None when it then gives exactly what is
        wanted."""
        with tempfile.TemporaryDirectory(dir=self.tmp, prefix="sparkfleet-netplan-") as root:
            target = Path(root) / "etc/netplan"
            target.mkdir(parents=True)
            for directory in ("/lib/netplan", "/run/netplan", NETPLAN):
                for name in self.reader.names(directory):
                    path = f"{directory}/{name}"
                    if not name.endswith(".yaml") or (path in plan.disable and not keep_foreign):
                        continue
                    text = self.reader.text(path)
                    if text is not None:
                        (target / name).write_text(text, encoding="utf-8")
            if own:
                (target / probe_netplan.OWN_FILE).write_text(plan.text, encoding="utf-8")
            for copy in target.iterdir():
                copy.chmod(0o600)
            answer = self.reader.run(["netplan", "generate", "--root-dir", root])
            if answer.absent:
                return "netplan is not installed: install the package netplan.io"
            if not answer.ok:
                return f"netplan refuses the files: {answer.stderr.strip() or answer.stdout.strip()}"
            inside = Reader(root=root)
            for half, one in zip(plan.halves, plan.wanted):
                made = probe_netplan.generated(inside, half.netdev)
                found = (made["addresses"], made["mtu"], made["dhcp"]) if made else None
                if (
                    made is None
                    or made["addresses"] != [one.address]
                    or made["mtu"] != plan.mtu
                    or made["dhcp"] != "no"
                ):
                    return (
                        f"netplan gives {half.netdev} {found}, wanted {one.address}, mtu {plan.mtu}, no DHCP"
                    )
        return None

    def owned_ranks(self) -> list[str]:
        """Names of our containers that run; raises when Docker is there and does not say."""
        state = probe_docker.read(self.reader)
        if state["present"] and not state["known"]:
            raise ApplyError(f"Docker does not say what runs ({state['reason']})")
        return [str(row["name"]) for row in state["containers"] if row["owned"] and row["state"] == "running"]

    # -- changing

    @property
    def marker(self) -> Path:
        return self.state_dir / "pending.json"

    def pending(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self.marker.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def apply(self, plan: Plan, seconds: int, settle: float) -> None:
        """Save, arm, write, apply, read again. Raises ApplyError after having restored the old state."""
        saved = self.save(plan)
        self.arm(saved, seconds)
        try:
            for path in plan.disable:
                Path(path).rename(disabled_name(path))
            if plan.write:
                self.write_own(plan.text)
            self.forget_profiles(plan.disable)
            self.activate(plan.netdevs, plan.renderer)
            for name in plan.left:
                self.run("ip", "-4", "address", "flush", "dev", name)
            self.settle(plan, settle)
        except (ApplyError, OSError) as error:
            self.rollback()
            details = error.details if isinstance(error, ApplyError) else {}
            raise ApplyError(f"{error}; the old network was restored", **details) from error

    def write_own(self, text: str) -> None:
        Path(NETPLAN).mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=NETPLAN, prefix=".40-cx7.")  # mkstemp makes it 0600
        with os.fdopen(fd, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).replace(OWN_PATH)

    def networkmanager_holds(self, netdevs: Sequence[str]) -> bool:
        """Whether netplan last gave one of the interfaces to NetworkManager. Only `netplan apply` tells it that
        this has changed."""
        base = "/run/NetworkManager/system-connections"
        return any(self.reader.exists(f"{base}/netplan-{name}.nmconnection") for name in netdevs)

    def forget_profiles(self, paths: Sequence[str]) -> None:
        """Let NetworkManager read its profiles again when one of them was renamed: it keeps a connection whose
        file is gone."""
        if any(path.startswith(PROFILES) for path in paths):
            self.reader.run(["nmcli", "connection", "reload"])

    def activate(self, netdevs: Sequence[str], renderer: str) -> None:
        active = (
            self.reader.run(["systemctl", "is-active", "systemd-networkd.service"]).stdout.strip() == "active"
        )
        if renderer != "networkd" or not active or self.networkmanager_holds(netdevs):
            self.run("netplan", "apply", timeout=90.0)
            return
        self.run("netplan", "generate")
        # As netplan apply does it, for the rails only: udev hands the links to networkd (one that came by
        # hot-plug or
        # from elsewhere is "pending" until then) and applies the .link files. Like netplan, go on when there
        # is no
        # udev to ask (containers); what counts is read again in settle().
        self.reader.run(["udevadm", "control", "--reload"])
        devices = [f"/sys/class/net/{name}" for name in netdevs]
        self.reader.run(["udevadm", "trigger", "--action=move", "--settle", *devices])
        self.run("networkctl", "reload")
        for name in netdevs:
            self.run("networkctl", "reconfigure", name)

    def settle(self, plan: Plan, seconds: float) -> None:
        """Wait for the addresses, then remove what does not belong: an old address stays on the interface
        when its
        file goes (linux-system-roles/network#689), and a second IPv4 moves the GID index."""
        end = time.monotonic() + seconds
        wanted = plan.live_after()
        while True:
            now = self.live(plan.netdevs)
            for name, row in wanted.items():
                here = now[name]["addresses"]
                if row["addresses"][0] in here:
                    for extra in here:
                        if extra != row["addresses"][0]:
                            self.run("ip", "address", "del", extra, "dev", name)
                    if now[name]["mtu"] != row["mtu"]:
                        self.run("ip", "link", "set", "dev", name, "mtu", str(row["mtu"]))
            now = self.live(plan.netdevs)
            if now == wanted:
                return
            if time.monotonic() > end:
                raise ApplyError(f"after {seconds:.0f} s the rails are {now}", wanted=wanted)
            time.sleep(0.3)

    def save(self, plan: Plan) -> Path:
        """Copies of every file that will change, and a script that restores them and the live addresses."""
        self.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        saved = self.state_dir / "before"
        shutil.rmtree(saved, ignore_errors=True)
        saved.mkdir(mode=0o700)
        lines = [
            "#!/bin/sh",
            "# Brings back the network from before the last change of the rails. Written by "
            "sparkfleet.serving,",
            "# run by a timer unless the change was confirmed by all peers.",
            "export LC_ALL=C PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        ]
        for number, path in enumerate([OWN_PATH, *plan.disable]):
            if Path(path).exists():
                copy = saved / f"{number}.yaml"
                shutil.copy2(path, copy)
                copy.chmod(0o600)
                lines.append(f"cp -p -- {shlex.quote(str(copy))} {shlex.quote(path)}")
            else:
                lines.append(f"rm -f -- {shlex.quote(path)}")
            if path in plan.disable:
                lines.append(f"rm -f -- {shlex.quote(disabled_name(path))}")
        if any(path.startswith(PROFILES) for path in plan.disable):
            lines.append("nmcli connection reload")
        # Only names that passed rails.NETDEV or came from the kernel stand here, quoted all the same.
        names = [shlex.quote(name) for name in plan.netdevs]
        lines += [f"ip -4 address flush dev {name}" for name in names]
        if plan.renderer == "networkd" and not self.networkmanager_holds(plan.netdevs):
            lines += [
                "netplan generate",
                "networkctl reload",
                *(f"networkctl reconfigure {name}" for name in names),
            ]
        else:
            lines.append("netplan apply")
        for name, row in {**plan.live_before, **plan.left}.items():
            quoted = shlex.quote(name)
            if row["mtu"]:
                lines.append(f"ip link set dev {quoted} mtu {int(row['mtu'])}")
            lines += [f"ip address replace {shlex.quote(cidr)} dev {quoted}" for cidr in row["addresses"]]
        lines += [f"ip link set dev {shlex.quote(name)} down" for name in self.raised]
        lines.append(
            f"mv -f -- {shlex.quote(str(self.marker))} "
            f"{shlex.quote(str(self.marker.with_name('rolled-back.json')))}"
        )
        script = saved / "rollback.sh"
        script.write_text("\n".join(lines) + "\n", encoding="utf-8")
        script.chmod(0o700)
        return script

    def arm(self, script: Path, seconds: int) -> None:
        self.disarm_timer()
        self.marker.write_text(
            json.dumps({"script": str(script), "seconds": seconds}) + "\n", encoding="utf-8"
        )
        self.run(
            "systemd-run",
            f"--unit={TIMER}",
            f"--on-active={int(seconds)}s",
            "--timer-property=AccuracySec=1s",
            "--collect",
            "--description=Bring back the network before the last change of the rails",
            "/bin/sh",
            str(script),
        )

    def disarm_timer(self) -> None:
        self.reader.run(["systemctl", "stop", f"{TIMER}.timer"])
        self.reader.run(["systemctl", "reset-failed", f"{TIMER}.service"])

    def rollback(self) -> None:
        """Restore now, without waiting for the timer."""
        found = self.pending()
        self.disarm_timer()
        if found is not None:
            self.run("/bin/sh", str(found["script"]), timeout=120.0)
        with contextlib.suppress(OSError):
            self.marker.unlink()

    def ping(self, netdev: str, peer: str, size: int) -> bool:
        answer = self.reader.run(
            [
                "ping",
                "-n",
                "-q",
                "-c",
                "2",
                "-i",
                "0.2",
                "-W",
                "1",
                "-M",
                "do",
                "-s",
                str(size),
                "-I",
                netdev,
                peer,
            ],
            10.0,
        )
        return answer.ok and " 0% packet loss" in answer.stdout

    def ask(self, plan: Plan, seconds: float) -> list[dict[str, Any]]:
        """Ask every peer on every rail with packets that fill the MTU and may not be cut.

        Returns [{netdev, peer, bytes, ok}]. Raises ApplyError naming what did not answer, and whether the
        old network
        will come back.
        """
        size = plan.mtu - 28  # IPv4 header 20, ICMP header 8
        rows = [
            {"netdev": half.netdev, "peer": peer, "bytes": plan.mtu, "ok": False}
            for half, one in zip(plan.halves, plan.wanted)
            for peer in one.peers
        ]
        end = time.monotonic() + seconds
        while True:
            for row in rows:
                if not row["ok"]:
                    row["ok"] = self.ping(str(row["netdev"]), str(row["peer"]), size)
            if all(row["ok"] for row in rows):
                break
            if time.monotonic() > end:
                raise ApplyError(self.silence(rows), links=rows, rollback_armed=self.pending() is not None)
            time.sleep(0.5)
        return rows

    def keep(self) -> None:
        """The change stays: disarm the timer."""
        self.disarm_timer()
        with contextlib.suppress(OSError):
            self.marker.unlink()

    def silence(self, rows: Sequence[Mapping[str, Any]]) -> str:
        parts = []
        for row in rows:
            if row["ok"]:
                continue
            small = self.ping(str(row["netdev"]), str(row["peer"]), 56)
            why = "answers small packets only: the MTU differs at one end" if small else "does not answer"
            parts.append(f"{row['peer']} on {row['netdev']} {why}")
        return "; ".join(parts)

    # -- undoing

    def undo_plan(self) -> tuple[bool, list[str]]:
        """(own file is there, files that were taken over)."""
        text = self.reader.text(OWN_PATH)
        disabled = [
            f"{directory}/{name}"
            for directory, ending in ((NETPLAN, ".yaml"), (PROFILES, ".nmconnection"), (UNITS, ".network"))
            for name in self.reader.names(directory)
            if name.endswith(disabled_name(f"{directory}/x{ending}").rpartition("/x")[2])
        ]
        return text is not None and probe_netplan.OWN_MARK in text, disabled

    def undo(self) -> None:
        """Remove our file, bring taken-over files back, drop our addresses."""
        ours, disabled = self.undo_plan()
        text = self.reader.text(OWN_PATH) or ""
        netdevs = re.findall(r"^    (\S+):$", text, re.M) if ours else []
        renderer = "NetworkManager" if "renderer: NetworkManager" in text else "networkd"
        self.disarm_timer()
        if ours:
            Path(OWN_PATH).unlink()
        for path in disabled:
            Path(path).rename(path[: path.rindex(DISABLED)])
        self.forget_profiles(disabled)
        for name in netdevs:
            self.reader.run(["ip", "-4", "address", "flush", "dev", name])
        if netdevs or disabled:
            self.activate(netdevs, renderer)
        with contextlib.suppress(OSError):
            self.marker.unlink()
        shutil.rmtree(self.state_dir / "before", ignore_errors=True)
