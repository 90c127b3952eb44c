"""The ceiling of the graphics clock: what is wanted, what can be known of it, and what has to be done.

The driver of a GB10 has no read-back for a locked clock (580.178.04: `nvidia-smi -q -d CLOCK` is the same
with and without a lock, NVML has no getter), and a lock is lost at each reboot and driver start. So the state
is made of things that can be read: the unit's text, that it is enabled, and the line with the confirmed pair
that this very run of the unit left in the journal. A clock read above the ceiling proves that the lock is
gone; a clock below proves it only under load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from .host_io import READ_TIMEOUT, Host, Refusal, Unit, text_diff, unit_state

UNIT = "sparkfleet-gpu-clocks.service"
UNIT_PATH = f"/etc/systemd/system/{UNIT}"

#: Over the ceiling by more than this, a clock was not capped: readings under a 2200 lock were 2177 to 2210
#: MHz.
OVER_MHZ = 50
#: The driver rounds to steps it likes: 2000 was confirmed as 1976 (driver 580.173.02).
SNAP_MHZ = 50
#: Readings of two nodes under the same load are within about 30 MHz of each other when both are locked alike.
PARITY_MHZ = 30
#: GPU utilisation in percent from which a reading counts as "under load".
LOAD_PERCENT = 80
#: A GB10 under load runs at 1900 MHz or more, at any sensible ceiling; 500 to 850 MHz is the stuck low-power
#: state.
LOW_CLOCK_MHZ = 1900
#: ... and draws more than about 35 W; stuck machines drew 13 to 30 W.
LOW_POWER_W = 35.0

LOW_POWER_REMEDY = (
    "no clock setting and no reboot ends this state: shut the machine down, pull the power brick and every "
    "USB-C cable, wait five minutes, connect again"
)

#: Names under which other recipes keep a clock lock.
KNOWN_FOREIGN = ("gpu-clock-lock.service", "spark-gpu-clock-lock.service", "nvidia-gpu-clocks.service")

_CONFIRMED = re.compile(r'GPU clocks set to "\(gpuClkMin (\d+), gpuClkMax (\d+)\)" for GPU')
_LOCK_CALL = re.compile(r"(?:-lgc|--lock-gpu-clocks)[=\s]+(\d+)(?:,(\d+))?")
_QUERY = ("clocks.sm", "utilization.gpu", "power.draw", "temperature.gpu", "pstate", "driver_version")


class Reading(NamedTuple):
    """One look at the GPU. A field that the driver does not give (`[N/A]`) is None, never a number."""

    sm_mhz: int | None
    load_percent: int | None
    power_w: float | None
    temperature_c: int | None
    pstate: str | None
    driver: str | None


class Foreign(NamedTuple):
    """A unit that is not ours and sets a GPU clock."""

    name: str
    enabled: bool
    active: bool
    pair: tuple[int, int] | None


class State(NamedTuple):
    """What can be known of the lock on one node."""

    text: str | None
    unit: Unit
    confirmed: tuple[int, int] | None
    lines: tuple[str, ...]
    reading: Reading | None


def unit_text(minimum: int, maximum: int, nvidia_smi: str) -> str:
    """The unit that sets the ceiling now and at every boot. Nothing else in it calls the driver: `-lmc` and
    `-pl` fail on a GB10, which has neither a memory clock domain nor a power limit control."""
    return (
        "# Written by sparkfleet.serving (gpu_clocks); removed with gpu_clocks_state: absent.\n"
        "[Unit]\n"
        f"Description=Ceiling of the graphics clock, {maximum} MHz (sparkfleet)\n"
        "Wants=nvidia-persistenced.service\n"
        "After=nvidia-persistenced.service\n"
        "\n"
        "[Service]\n"
        "Type=oneshot\n"
        "RemainAfterExit=yes\n"
        "Environment=LC_ALL=C\n"
        "TimeoutStartSec=60\n"
        f"ExecStart={nvidia_smi} -lgc {minimum},{maximum}\n"
        "\n"
        "[Install]\n"
        "WantedBy=multi-user.target\n"
    )


def parse_confirmed(text: str) -> tuple[int, int] | None:
    """The last pair that the driver confirmed in `text`, as (min, max) in MHz."""
    found = _CONFIRMED.findall(text)
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def _number(field: str) -> float | None:
    match = re.match(r"\s*(-?\d+(?:\.\d+)?)", field)
    return float(match.group(1)) if match else None


def parse_reading(text: str) -> Reading | None:
    """A row of `nvidia-smi --query-gpu` (`--format=csv,noheader`) for the fields in `_QUERY`; None without a
    row.

    "No devices were found" comes with exit code 0 or 6 and is no row.
    """
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(_QUERY):
            continue
        numbers = [_number(field) for field in fields[:4]]
        texts = [None if field.startswith("[") or not field else field for field in fields[4:]]
        return Reading(
            sm_mhz=None if numbers[0] is None else int(numbers[0]),
            load_percent=None if numbers[1] is None else int(numbers[1]),
            power_w=numbers[2],
            temperature_c=None if numbers[3] is None else int(numbers[3]),
            pstate=texts[0],
            driver=texts[1],
        )
    return None


def verdict(reading: Reading | None, ceiling: int) -> str:
    """What one reading says about a ceiling: `unknown`, `lost`, `low_power`, `in_force` or `unproven`
    (idle)."""
    if reading is None or reading.sm_mhz is None:
        return "unknown"
    if reading.sm_mhz > ceiling + OVER_MHZ:
        return "lost"
    if reading.load_percent is None or reading.load_percent < LOAD_PERCENT:
        return "unproven"
    # The desktop alone can show 96 % utilisation at a low clock, so a low clock needs the low power beside
    # it.
    if reading.sm_mhz < min(LOW_CLOCK_MHZ, int(ceiling * 0.85)) and (reading.power_w or 0.0) < LOW_POWER_W:
        return "low_power"
    return "in_force"


def parity(nodes: Sequence[tuple[str, tuple[int, int] | None, Reading | None]]) -> list[str]:
    """Sentences about what differs between the nodes of one replica; none when they agree.

    A pair at 1800 and 2200 MHz loses about 6 %: every layer waits for the slower rank. `nodes` holds name,
    confirmed pair and reading in rank order.
    """
    problems: list[str] = []
    ceilings = {name: pair[1] for name, pair, _reading in nodes if pair is not None}
    if len(set(ceilings.values())) > 1:
        problems.append(
            "ceilings differ: " + ", ".join(f"{name} {value} MHz" for name, value in ceilings.items())
        )
    missing = [name for name, pair, _reading in nodes if pair is None]
    if missing and ceilings:
        problems.append("no confirmed ceiling on " + ", ".join(missing))
    loaded = {
        name: reading.sm_mhz
        for name, _pair, reading in nodes
        if reading is not None and reading.sm_mhz is not None and (reading.load_percent or 0) >= LOAD_PERCENT
    }
    if len(loaded) > 1 and max(loaded.values()) - min(loaded.values()) > PARITY_MHZ:
        problems.append(
            "clocks under load differ by more than "
            f"{PARITY_MHZ} MHz: " + ", ".join(f"{name} {value} MHz" for name, value in loaded.items())
        )
    drivers = {reading.driver for _name, _pair, reading in nodes if reading is not None and reading.driver}
    if len(drivers) > 1:
        problems.append("drivers differ: " + ", ".join(sorted(drivers)))
    return problems


def reasons(wanted_text: str, maximum: int, state: State) -> list[str]:
    """Why the lock has to be applied (again); none when it stands as far as anyone can know."""
    found: list[str] = []
    if state.text is None:
        found.append("the unit does not exist")
    elif state.text != wanted_text:
        found.append("the unit's text differs")
    if state.unit.enabled != "enabled":
        found.append("the unit is not enabled, so the next boot is unlocked")
    if state.unit.active != "active":
        found.append(f"the unit is {state.unit.active}")
    elif state.confirmed is None:
        found.append("the journal holds no confirmation of this run of the unit")
    elif abs(state.confirmed[1] - maximum) > SNAP_MHZ:
        found.append(f"the driver confirmed {state.confirmed[1]} MHz instead of {maximum}")
    if verdict(state.reading, maximum) == "lost" and state.reading is not None:
        found.append(
            f"the clock reads {state.reading.sm_mhz} MHz, above the ceiling of {maximum}: the lock is gone"
        )
    return found


def journal_lines(host: Host, unit: str, invocation: str) -> tuple[str, ...]:
    """What this run of the unit printed. The fields that begin with an underscore are set by journald itself,
    so a line written by anything else under the unit's name, or left by an earlier boot, is not among
    them."""
    if not invocation:
        return ()
    answer = host.run(
        [
            "journalctl",
            "-b",
            "--no-pager",
            "-o",
            "json",
            f"_SYSTEMD_INVOCATION_ID={invocation}",
            f"_SYSTEMD_UNIT={unit}",
        ]
    )
    lines: list[str] = []
    for raw in answer.out.splitlines():
        try:
            entry = json.loads(raw)
        except ValueError:
            continue
        if entry.get("_SYSTEMD_UNIT") == unit and entry.get("_SYSTEMD_INVOCATION_ID") == invocation:
            message = entry.get("MESSAGE")
            if isinstance(message, list):  # journald gives bytes as a list when a line is not UTF-8
                message = bytes(message).decode("utf-8", "replace")
            lines.append(str(message))
    return tuple(lines)


def take_reading(host: Host, nvidia_smi: str) -> Reading | None:
    """Ask the driver once; a driver that hangs or has no device gives None."""
    answer = host.run(
        [nvidia_smi, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"], timeout=READ_TIMEOUT
    )
    return parse_reading(answer.out)


def read_state(host: Host, nvidia_smi: str, unit: str = UNIT) -> State:
    """Everything that can be known of our lock. Changes nothing."""
    known = unit_state(host, unit)
    lines = journal_lines(host, unit, known.invocation)
    return State(
        text=host.read(f"/etc/systemd/system/{unit}"),
        unit=known,
        # systemd remembers the last run of a unit that was stopped; what that run confirmed is over.
        confirmed=parse_confirmed("\n".join(lines)) if known.active == "active" else None,
        lines=lines,
        reading=take_reading(host, nvidia_smi),
    )


def find_foreign(host: Host) -> list[Foreign]:
    """Units of others that set a GPU clock, by their text or by a name that is known for it."""
    found: dict[str, tuple[int, int] | None] = {}
    for folder in ("/etc/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system"):
        for name in host.listdir(folder):
            if not name.endswith(".service") or name == UNIT or name in found:
                continue
            text = host.read(f"{folder}/{name}") or ""
            match = _LOCK_CALL.search(text)
            if match and "nvidia-smi" in text:
                low, high = match.group(1), match.group(2)
                found[name] = (0, int(low)) if high is None else (int(low), int(high))
            elif name in KNOWN_FOREIGN:
                found[name] = None
    units = []
    for name, pair in sorted(found.items()):
        state = unit_state(host, name)
        units.append(Foreign(name, state.enabled == "enabled", state.active == "active", pair))
    return units


def _explain_failure(lines: Sequence[str], answer_text: str) -> Refusal:
    text = "\n".join(lines)
    if "does not have permission to change clocks" in text:
        return Refusal(
            "the driver refused to change the clocks (exit code 4)",
            lines[-1] if lines else answer_text,
            "root with CAP_SYS_ADMIN on the machine itself",
            "run on the host, not in a container; check that sudo gives full root",
        )
    if "No devices were found" in text:
        return Refusal(
            "the driver sees no GPU",
            text,
            "one NVIDIA GB10",
            "look at `journalctl -k | grep -i nvrm`, then reboot",
        )
    return Refusal(
        f"{UNIT} did not start",
        text or answer_text,
        "a line with the confirmed pair",
        f"`journalctl -b -u {UNIT}`; a driver that hangs needs a reboot",
    )


def _summary(
    state: State, minimum: int, maximum: int, foreign: Sequence[Foreign], why: Sequence[str]
) -> dict[str, Any]:
    return {
        "requested": [minimum, maximum],
        "confirmed": list(state.confirmed) if state.confirmed else None,
        "enabled": state.unit.enabled == "enabled",
        "active": state.unit.active == "active",
        "verdict": verdict(state.reading, maximum),
        "reading": state.reading._asdict() if state.reading else None,
        "reasons": list(why),
        "foreign": [
            {
                "name": f.name,
                "enabled": f.enabled,
                "active": f.active,
                "pair": list(f.pair) if f.pair else None,
            }
            for f in foreign
        ],
    }


def _command(host: Host, argv: Sequence[str], wanted: str, timeout: float = 90.0) -> None:
    answer = host.run(argv, timeout=timeout)
    if not answer.ok:
        raise Refusal(f"`{' '.join(argv)}` failed", answer.text, wanted, f"`systemctl status {UNIT}`")


def ensure_present(
    host: Host, minimum: int, maximum: int, *, nvidia_smi: str, foreign_policy: str, check: bool
) -> dict[str, Any]:
    """Make the ceiling hold now and at every boot. Returns changed, diff, warnings and the summary."""
    tool = host.which(nvidia_smi)
    if tool is None:
        raise Refusal(
            "nvidia-smi is missing", "no such tool", nvidia_smi, "install the NVIDIA driver that DGX OS ships"
        )
    warnings: list[str] = []
    foreign = find_foreign(host)
    disputed = [f for f in foreign if f.enabled or f.active]
    other = [f for f in disputed if f.pair is None or abs(f.pair[1] - maximum) > SNAP_MHZ]
    if foreign_policy == "report":
        if other:
            raise Refusal(
                "another unit sets the GPU clock too, and the later one of the two wins at boot",
                ", ".join(f"{f.name} ({f.pair[0]},{f.pair[1]})" if f.pair else f.name for f in other),
                f"a ceiling of {maximum} MHz set by one unit",
                "set gpu_clocks_foreign: take_over (disables the other unit, keeps its file), or remove it",
            )
        warnings += [f"{f.name} sets the same ceiling; it is left as it is" for f in disputed]

    wanted = unit_text(minimum, maximum, tool)
    before = read_state(host, tool)
    why = reasons(wanted, maximum, before)
    take = [f for f in disputed if foreign_policy == "take_over"]
    diff: list[dict[str, str]] = []
    if before.text != wanted:
        diff.append(text_diff(UNIT_PATH, before.text, wanted))
    if why:
        enabled_text = "\n".join(["enabled", f"confirmed {minimum},{maximum}", ""])
        was = "\n".join(
            [before.unit.enabled or "absent", f"confirmed {before.confirmed or 'nothing'}", *why, ""]
        )
        diff.append(text_diff(f"unit {UNIT}", was, enabled_text))
    diff += [
        text_diff(f"unit {f.name}", "enabled\n" if f.enabled else "active\n", "disabled\n") for f in take
    ]

    state = before
    if (why or take) and not check:
        for f in take:
            _command(host, ["systemctl", "disable", "--now", f.name], "the other unit disabled")
        if before.text != wanted:
            host.write(UNIT_PATH, wanted)
        _command(host, ["systemctl", "daemon-reload"], "the unit known to systemd")
        _command(host, ["systemctl", "enable", UNIT], "the unit enabled")
        started = host.run(["systemctl", "restart", UNIT], timeout=90.0)
        state = read_state(host, tool)
        if not started.ok or state.confirmed is None:
            raise _explain_failure(state.lines, started.text)
        left = reasons(wanted, maximum, state)
        if left:
            raise Refusal(
                "the ceiling was set and does not hold",
                "; ".join(left),
                f"{minimum},{maximum} MHz confirmed, and no clock above {maximum + OVER_MHZ} MHz",
                "choose a ceiling that the driver takes as it is; if the clock stays above it, reboot",
            )
    if verdict(state.reading, maximum) == "low_power":
        warnings.append(f"low-power state: {state.reading}; {LOW_POWER_REMEDY}")
    return {
        "changed": bool(why or take),
        "diff": diff,
        "warnings": warnings,
        "clocks": _summary(state, minimum, maximum, foreign, why),
    }


def ensure_absent(host: Host, nvidia_smi: str, check: bool) -> dict[str, Any]:
    """Remove our unit and let the clock go free. A node that never had the unit is left alone."""
    text = host.read(UNIT_PATH)
    unit = unit_state(host, UNIT)
    foreign = find_foreign(host)
    changed = text is not None or unit.active == "active"
    tool = host.which(nvidia_smi)
    diff = []
    if changed:
        diff = [text_diff(UNIT_PATH, text, None), text_diff(f"unit {UNIT}", unit.enabled + "\n", "absent\n")]
    if changed and not check:
        if tool is not None:
            answer = host.run([tool, "-rgc"], timeout=60.0)
            if not answer.ok:
                raise _explain_failure(answer.out.splitlines(), answer.text)
        _command(host, ["systemctl", "disable", "--now", UNIT], "the unit stopped and disabled")
        host.remove(UNIT_PATH)
        _command(host, ["systemctl", "daemon-reload"], "the unit forgotten by systemd")
    reading = take_reading(host, tool) if tool else None
    after = State(None if changed and not check else text, unit, None, (), reading)
    return {"changed": changed, "diff": diff, "warnings": [], "clocks": _summary(after, 0, 0, foreign, ())}
