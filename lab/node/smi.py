#!/usr/bin/python3
"""nvidia-smi of a GB10, as recorded: a stand-in with the driver's state, lost at each boot.

One file without imports from the lab, so that the OCI runtime can bind it into containers. Texts and layouts
are those of recorded sessions (drivers 580.126.09 to 580.178.04); the state is /run/lab/smi.json, the fault
switches are /var/lib/lab/faults/{smi-hang,smi-lost,low-power,gpu-load}.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

DRIVER = "580.173.02"
CUDA = "13.0"
BUS = "0000000F:01:00.0"
UUID = "GPU-00000000-0000-0000-0000-00000000004b"
STATE = Path("/run/lab/smi.json")
LEDGER = Path("/run/lab/memory")
FAULTS = Path("/var/lib/lab/faults")
DEFAULT_MHZ, MAX_MHZ, LOW_POWER_MHZ = 2418, 3003, 611
# Recorded while a dense model of 27B answered, nothing locked: power, temperature, clock, utilisation.
LOADED_MHZ, LOADED_W, LOADED_C, LOADED_PERCENT = 2496, "51.23", "71", "96"
STEP_MHZ = 26  # every recorded clock lies a multiple of this from 2418
SNAPPED = {2000: 1976}  # recorded: the driver confirms another number than it was asked for
CAP_SYS_ADMIN = 21

UNITS = {
    "memory.total": "MiB",
    "memory.used": "MiB",
    "memory.free": "MiB",
    "utilization.gpu": "%",
    "utilization.memory": "%",
    "power.draw": "W",
    "power.limit": "W",
    "power.max_limit": "W",
    "fan.speed": "%",
}
for _clock in (
    "sm",
    "gr",
    "mem",
    "video",
    "max.sm",
    "max.gr",
    "max.mem",
    "max.graphics",
    "current.sm",
    "current.graphics",
):
    UNITS[f"clocks.{_clock}"] = "MHz"
HEADERS = {
    "clocks.sm": "clocks.current.sm",
    "clocks.gr": "clocks.current.graphics",
    "clocks.mem": "clocks.current.memory",
}
HEADERS |= {"clocks.max.gr": "clocks.max.graphics"}


def is_on(name: str) -> bool:
    return (FAULTS / name).exists()


def load() -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(STATE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        state = {}
    return state


def save(state: dict[str, Any]) -> None:
    STATE.write_text(json.dumps(state), encoding="utf-8")
    STATE.chmod(0o644)


def may_administer() -> bool:
    """The driver asks for CAP_SYS_ADMIN: root in an ordinary container is refused."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff"))
    return bool(int(effective, 16) >> CAP_SYS_ADMIN & 1)


def ranks() -> list[tuple[int, str, int]]:
    """Compute processes: (pid, name, MiB), from the memory ledger's live claims."""
    holders: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()
            if len(fields) >= 6 and fields[1] == "FLOCK":
                holders[int(fields[5].rpartition(":")[2])] = int(fields[4])
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(LEDGER.iterdir()):
            amount, _, name = path.read_text(encoding="utf-8").strip().partition(" ")
            pid = holders.get(path.stat().st_ino)
            if pid is not None and amount.isdigit():
                found.append((pid, name or path.name, int(amount) // 1024))
    return found


def desktop() -> list[tuple[int, str, int]]:
    return (
        [(2747, "/usr/lib/xorg/Xorg", 18), (2911, "/usr/bin/gnome-shell", 6)]
        if Path("/run/gdm").exists()
        else []
    )


def work() -> tuple[str, str] | None:
    """Forced readings (MHz, W) of a GPU under load, either empty when not forced; None when it is idle."""
    try:
        megahertz, _, watts = (FAULTS / "gpu-load").read_text(encoding="ascii").strip().partition(",")
    except FileNotFoundError:
        return None
    return megahertz, watts


def clock() -> int:
    if is_on("low-power"):
        return LOW_POWER_MHZ
    loaded = work()
    if loaded is not None and loaded[0]:
        return int(loaded[0])
    free = DEFAULT_MHZ if loaded is None else LOADED_MHZ
    cap = load().get("lgc", [0, MAX_MHZ])[1]
    return int(min(free, free - -(-(free - cap) // STEP_MHZ) * STEP_MHZ))


def values() -> dict[str, str]:
    loaded, low, works = bool(ranks()), is_on("low-power"), work()
    megahertz = str(clock())
    watts = "10.57" if loaded else "4.12"
    if works is not None:
        watts = works[1] or LOADED_W
    table = {
        "index": "0",
        "count": "1",
        "name": "NVIDIA GB10",
        "gpu_name": "NVIDIA GB10",
        "driver_version": DRIVER,
        "vbios_version": "9A.0B.2D.00.00",
        "compute_cap": "12.1",
        "uuid": UUID,
        "gpu_uuid": UUID,
        "pci.bus_id": BUS,
        "gpu_bus_id": BUS,
        "persistence_mode": "Enabled",
        "pstate": "P0" if loaded or low or works else "P8",
        "temperature.gpu": "50" if low else LOADED_C if works else "46" if loaded else "38",
        "temperature.gpu.tlimit": "45",
        "power.draw": "13.02" if low else watts,
        "utilization.gpu": LOADED_PERCENT if works else "0",
        "utilization.memory": "0",
        "clocks_event_reasons.active": "0x0000000000000000",
        "clocks_throttle_reasons.active": "0x0000000000000000",
        "display_active": "Disabled",
        "clocks.max.sm": str(MAX_MHZ),
        "clocks.max.gr": str(MAX_MHZ),
        "clocks.max.graphics": str(MAX_MHZ),
    }
    table |= dict.fromkeys(
        ("clocks.sm", "clocks.gr", "clocks.current.sm", "clocks.current.graphics"), megahertz
    )
    absent: tuple[str, ...] = (
        "memory.total",
        "memory.used",
        "memory.free",
        "power.limit",
        "power.max_limit",
        "fan.speed",
    )
    absent += ("clocks.mem", "clocks.max.mem", "ecc.mode.current", "mig.mode.current", "serial")
    return table | dict.fromkeys(absent, "[N/A]")


def print_csv(fields: list[str], rows: list[dict[str, str]], style: list[str], units: dict[str, str]) -> None:
    if "noheader" not in style:
        names = [
            HEADERS.get(field, field) + (f" [{units[field]}]" if field in units else "") for field in fields
        ]
        print(", ".join(names))
    for row in rows:
        cells = []
        for field in fields:
            value = row[field]
            unit = units.get(field, "")
            cells.append(
                value if not unit or "nounits" in style or value.startswith("[") else f"{value} {unit}"
            )
        print(", ".join(cells))


def query_gpu(fields: list[str], style: list[str]) -> int:
    table = values()
    for field in fields:
        if field not in table:
            print(f'Field "{field}" is not a valid field to query.\n')
            return 2
    print_csv(fields, [table], style, UNITS)
    return 0


def query_apps(fields: list[str], style: list[str]) -> int:
    names = {"used_memory": "used_gpu_memory"}
    rows = [
        {
            "pid": str(pid),
            "process_name": name,
            "name": name,
            "used_gpu_memory": str(mib),
            "gpu_uuid": UUID,
            "gpu_name": "NVIDIA GB10",
        }
        for pid, name, mib in ranks()
    ]
    wanted = [names.get(field, field) for field in fields]
    known = {"pid", "process_name", "name", "used_gpu_memory", "gpu_uuid", "gpu_name"}
    for field in wanted:
        if field not in known:
            print(f'Field "{field}" is not a valid field to query.\n')
            return 2
    print_csv(wanted, rows, style, {"used_gpu_memory": "MiB"})
    return 0


def print_table() -> int:
    table = values()
    rule = "+-----------------------------------------------------------------------------------------+"
    split = "+-----------------------------------------+------------------------+----------------------+"
    watts = round(float(table["power.draw"]))
    print(time.strftime("%a %b %e %H:%M:%S %Y"))
    print(rule)
    print(f"| NVIDIA-SMI {DRIVER:<22} Driver Version: {DRIVER:<14} CUDA Version: {CUDA:<8} |")
    print(split)
    print("| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |")
    print("| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |")
    print("|                                         |                        |               MIG M. |")
    print("|=========================================+========================+======================|")
    print(f"|   0  NVIDIA GB10                    On  |   {BUS} Off |                  N/A |")
    left = f"| N/A   {table['temperature.gpu']}C    {table['pstate']}           {watts:>4}W /  N/A  "
    print(f"{left}| Not Supported          |    {table['utilization.gpu']:>3}%      Default |")
    print("|                                         |                        |                  N/A |")
    print(split)
    print()
    print(rule)
    print("| Processes:                                                                              |")
    print("|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |")
    print("|        ID   ID                                                               Usage      |")
    print("|=========================================================================================|")
    rows = [(*row, "G") for row in desktop()] + [(*row, "C") for row in ranks()]
    for pid, name, mib, kind in rows:
        print(f"|    0   N/A  N/A          {pid:>6}      {kind}   {name[:36]:<36}{str(mib) + 'MiB':>10} |")
    if not rows:
        print("|  No running processes found                                                             |")
    print(rule)
    return 0


def print_clock_report() -> int:
    """``-q -d CLOCK``: the same text locked or not, so it proves nothing (recorded on 580.178.04)."""
    print("\n==============NVSMI LOG==============\n")
    print(f"{'Timestamp':<55}: {time.strftime('%a %b %e %H:%M:%S %Y')}")
    print(f"{'Driver Version':<55}: {DRIVER}")
    print(f"{'CUDA Version':<55}: {CUDA}\n")
    print(f"{'Attached GPUs':<55}: 1")
    print(f"GPU {BUS}")
    sections = {
        "Clocks": {"Graphics": f"{clock()} MHz", "SM": f"{clock()} MHz", "Memory": "N/A", "Video": "N/A"},
        "Applications Clocks": {"Graphics": f"{DEFAULT_MHZ} MHz", "Memory": "N/A"},
        "Default Applications Clocks": {"Graphics": f"{DEFAULT_MHZ} MHz", "Memory": "N/A"},
        "Max Clocks": {"Graphics": f"{MAX_MHZ} MHz", "SM": f"{MAX_MHZ} MHz", "Memory": "N/A", "Video": "N/A"},
    }
    for title, rows in sections.items():
        print(f"    {title}")
        for name, value in rows.items():
            print(f"        {name:<47}: {value}")
    print(f"    {'Supported Clocks':<51}: N/A\n")
    return 0


def set_clocks(text: str) -> int:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        print(f"Invalid clock value {text}.")
        return 2
    low, high = (numbers[0], numbers[-1])
    high = SNAPPED.get(high, high)
    state = load()
    state["lgc"] = [low, high]
    save(state)
    print(f'GPU clocks set to "(gpuClkMin {low}, gpuClkMax {high})" for GPU {BUS}\nAll done.')
    return 0


def administer(option: str, value: str) -> int:
    """The options that change the driver's state."""
    if not may_administer():
        print(f"The current user does not have permission to change clocks for GPU {BUS}.")
        return 4
    if option in ("-lgc", "--lock-gpu-clocks"):
        return set_clocks(value)
    if option in ("-rgc", "--reset-gpu-clocks"):
        save({})
        print("All done.")
        return 0
    if option in ("-lmc", "--lock-memory-clocks", "-rmc", "--reset-memory-clocks"):
        print(f"Setting locked memory clocks is not supported for GPU {BUS}.")
        return 3
    if option in ("-pl", "--power-limit"):
        print(f"Changing power management limit is not supported for GPU: {BUS}.")
        print("Treating as warning and moving on.\nAll done.")
        return 0
    print(f"Persistence mode is already Enabled for GPU {BUS}.\nAll done.")
    return 0


ADMINISTER = {
    *("-lgc", "--lock-gpu-clocks", "-rgc", "--reset-gpu-clocks", "-lmc", "--lock-memory-clocks"),
    *("-rmc", "--reset-memory-clocks", "-pl", "--power-limit", "-pm", "--persistence-mode"),
}


def main(arguments: list[str]) -> int:
    if is_on("smi-hang"):
        signal.pause()
    if is_on("smi-lost"):
        print("No devices were found")
        return 6
    words: list[str] = []
    for argument in arguments:
        words += argument.split("=", 1) if argument.startswith("--") and "=" in argument else [argument]
    options = {word: words[index + 1] if index + 1 < len(words) else "" for index, word in enumerate(words)}
    style = options.get("--format", "csv").split(",")
    for word in words:
        if word in ADMINISTER:
            return administer(word, options[word])
    if "-L" in options or "--list-gpus" in options:
        print(f"GPU 0: NVIDIA GB10 (UUID: {UUID})")
        return 0
    if "--query-gpu" in options:
        return query_gpu([field.strip() for field in options["--query-gpu"].split(",")], style)
    if "--query-compute-apps" in options:
        return query_apps([field.strip() for field in options["--query-compute-apps"].split(",")], style)
    if "-q" in options:
        return print_clock_report()
    if not words:
        return print_table()
    print("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
