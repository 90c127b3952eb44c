"""The GPU by nvidia-smi, and what is known of its clocks. Each call has a time limit: a sick driver never
answers."""

from __future__ import annotations

import re
from typing import Any

from .reader import Reader

# Memory, power limit and fan are [N/A] on a GB10 and are not asked for.
FIELDS = (
    "name",
    "driver_version",
    "compute_cap",
    "vbios_version",
    "pstate",
    "temperature.gpu",
    "power.draw",
    "clocks.sm",
    "clocks.max.sm",
    "utilization.gpu",
    "persistence_mode",
)
MISSING = re.compile(r"^\[?(n/a|not supported|unknown error|insufficient permissions)\]?$", re.I)


def value(text: str) -> str | None:
    """A field of a csv row; [N/A] and its relatives are None."""
    text = text.strip()
    return None if not text or MISSING.match(text) else text


def number(text: str | None) -> float | None:
    match = re.match(r"^(-?\d+(?:\.\d+)?)", text or "")
    return float(match.group(1)) if match else None


def parse_query(text: str, fields: tuple[str, ...] = FIELDS) -> dict[str, str | None] | None:
    """The first row of `nvidia-smi --query-gpu=... --format=csv,noheader`, or None when it is no such row."""
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == len(fields):
            return {name: value(part) for name, part in zip(fields, parts)}
    return None


def parse_apps(text: str) -> list[dict[str, Any]]:
    """Compute processes of `--query-compute-apps=pid,process_name,used_memory --format=csv,noheader`."""
    rows = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= 3 and parts[0].isdigit():
            mib = number(value(parts[-1]))
            rows.append(
                {
                    "pid": int(parts[0]),
                    "name": ",".join(parts[1:-1]).strip(),
                    "used_bytes": int(mib * 1024**2) if mib is not None else None,
                }
            )
    return rows


def read(reader: Reader) -> dict[str, Any]:
    found: dict[str, Any] = {
        "present": False,
        "known": False,
        "reason": None,
        "name": None,
        "driver": None,
        "compute_cap": None,
        "vbios": None,
        "pstate": None,
        "temperature_c": None,
        "power_w": None,
        "sm_mhz": None,
        "max_sm_mhz": None,
        "utilization_pct": None,
        "persistence": None,
        "processes": [],
    }
    answer = reader.run(["nvidia-smi", "--query-gpu=" + ",".join(FIELDS), "--format=csv,noheader"])
    if answer.absent:
        found["known"], found["reason"] = True, "nvidia-smi is not installed"
        return found
    if answer.timed_out:
        found["reason"] = "nvidia-smi did not answer in time: the driver is sick"
        return found
    row = parse_query(answer.stdout) if answer.ok else None
    if row is None:
        # "No devices were found" comes with exit code 6 on one box and 0 on another: only a row counts.
        found["reason"] = (answer.stdout or answer.stderr).strip().splitlines()[:1]
        found["reason"] = (
            found["reason"][0] if found["reason"] else f"nvidia-smi ended with {answer.rc} and no row"
        )
        return found
    apps = reader.run(
        ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    )
    found.update(
        present=True,
        known=True,
        name=row["name"],
        driver=row["driver_version"],
        compute_cap=row["compute_cap"],
        vbios=row["vbios_version"],
        pstate=row["pstate"],
        temperature_c=number(row["temperature.gpu"]),
        power_w=number(row["power.draw"]),
        sm_mhz=number(row["clocks.sm"]),
        max_sm_mhz=number(row["clocks.max.sm"]),
        utilization_pct=number(row["utilization.gpu"]),
        persistence=row["persistence_mode"],
        processes=parse_apps(apps.stdout) if apps.ok else [],
    )
    return found


def parse_clock_unit(text: str) -> dict[str, Any] | None:
    """{min_mhz, max_mhz, exec} of a unit file that locks GPU clocks, or None."""
    for line in text.splitlines():
        match = re.match(r"^ExecStart=(.*(?:-lgc|--lock-gpu-clocks)[ =]\"?(\d+)(?:,(\d+))?.*)$", line.strip())
        if match:
            low, high = int(match.group(2)), int(match.group(3) or match.group(2))
            return {"min_mhz": low, "max_mhz": high, "exec": match.group(1)}
    return None


def read_clocks(reader: Reader) -> dict[str, Any]:
    """Units that lock clocks. A lock cannot be read back from the driver, so the unit, its state and its
    line in the
    journal of this boot are the evidence."""
    units = []
    for name in reader.names("/etc/systemd/system"):
        if not name.endswith(".service"):
            continue
        parsed = parse_clock_unit(reader.text(f"/etc/systemd/system/{name}") or "")
        if parsed is None:
            continue
        journal = reader.run(["journalctl", "-b", "-u", name, "-o", "cat", "-n", "20", "--no-pager"])
        confirmed = re.findall(r"gpuClkMin (\d+), gpuClkMax (\d+)", journal.stdout)
        parsed.update(
            unit=name,
            owned=name.startswith("sparkfleet-"),
            journal_max_mhz=int(confirmed[-1][1]) if confirmed else None,
        )
        units.append(parsed)
    return {"units": units}
