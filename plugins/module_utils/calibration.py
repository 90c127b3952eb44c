# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a replica's own first start measured, kept on its head and used by every plan of the same replica after.

One JSON file a replica holds the constants of all ranks (`budget.calibrate`), the readings that they follow from, and
what they belong to: the digest of the plan (model lock, engine, world, context, slots, drafts, chunk, cuts), the
variables that build the engine's image, and the content of the image that ran. Constants of anything else are not
used. They are stored once, when the first start of such a plan was verified, so that a second run changes nothing;
they are renewed when one of the three differs, or when somebody asks for it after a representative load.

A first start knows the memory before it and when idle. Its low-water mark has seen no load worth the name, so it
only counts where it is worse than the transferred dip; on request, after real load, it counts as measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .budget import GIB, calibrate
from .host_io import Host, text_diff
from .release import marker_path
from .safetensors import PlanError

FORMAT = "sparkfleet-calibration/1"
#: Constants of one rank.
KEYS = ("overhead", "dip")
#: No real overhead lies beyond these (GiB): the exact terms are exact, and a runtime of 32 GiB is other software.
#: Less than the lower bound means that memory was freed by others while the model loaded.
LEAST_OVERHEAD_GIB, MOST_OVERHEAD_GIB = -0.25, 32.0
_DIGITS = 3


class CalibrationError(PlanError):
    """Readings from which no constants follow, or a file that is not a calibration."""


def _constants(rows: object, label: str) -> dict[str, dict[str, float]]:
    """Constants by rank number, checked. Raises CalibrationError."""
    if not isinstance(rows, Mapping):
        raise CalibrationError(
            "bad-calibration", "holds no constants by rank", file=label, found=type(rows).__name__
        )
    found: dict[str, dict[str, float]] = {}
    for rank, values in rows.items():
        own = values if isinstance(values, Mapping) else {}
        good = all(
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            for value in own.values()
        )
        if not (good and own and str(rank).isdigit() and set(own) <= set(KEYS)):
            raise CalibrationError(
                "bad-calibration",
                "is no set of constants",
                file=label,
                tensor=f"rank {rank}",
                found=str(values)[:80],
                wanted=f"numbers of GiB: {', '.join(KEYS)}",
            )
        found[str(rank)] = {str(name): float(value) for name, value in own.items()}
    return found


def parse(text: str, label: str = "calibration") -> dict[str, Any]:
    """A kept document, or plain constants by rank. Raises CalibrationError."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise CalibrationError("bad-calibration", f"is not JSON: {error}", file=label) from None
    if not isinstance(document, dict):
        raise CalibrationError(
            "bad-calibration", "is no JSON object", file=label, found=type(document).__name__
        )
    _constants(document.get("ranks") if "format" in document else document, label)
    if "format" in document and document["format"] != FORMAT:
        raise CalibrationError(
            "bad-calibration", "has another format", file=label, found=document["format"], wanted=FORMAT
        )
    return document


def choose(
    given: Mapping[str, Any], plan_digest: str, build: str = ""
) -> tuple[dict[str, dict[str, float]], str]:
    """(constants by rank for a plan, why a kept document does not count). Raises CalibrationError.

    ``build``: what builds the engine's image; empty where nobody knows, as in a plan without a replica.
    """
    if not given:
        return {}, ""
    if "format" not in given:
        return _constants(given, "calibration"), ""
    if given["format"] != FORMAT:
        return {}, f"the kept calibration is not used: its format is {given['format']!r}, wanted {FORMAT}"
    if given.get("plan") != plan_digest:
        return {}, "the kept calibration is not used: it belongs to another model, engine or settings"
    if build and given.get("build") != build:
        return {}, "the kept calibration is not used: it belongs to another build of the engine"
    return _constants(given.get("ranks"), "calibration"), ""


def _readings(rank: int, reading: Mapping[str, Any] | None) -> dict[str, float]:
    """before, idle and lowest in GiB from what a node told in bytes."""
    found = {}
    for name in ("before", "idle", "lowest"):
        value = (reading or {}).get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            found[name] = value / GIB
    lacking = sorted({"before", "idle"} - set(found))
    if lacking:
        raise CalibrationError(
            "no-reading",
            "was not measured: the rank was started by something else, or before this collection measured it",
            tensor=f"rank {rank}, memory {' and '.join(lacking)}",
            remedy="it is measured with the next start (playbook restart)",
        )
    return found


def measure(
    terms: Sequence[Mapping[str, float]],
    readings: Sequence[Mapping[str, Any] | None],
    *,
    under_load: bool = False,
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """(constants, readings in GiB) by rank number.

    ``terms``: the plan's, in rank order. ``readings``: {before, idle, lowest} in bytes of MemAvailable, in rank order.
    Raises CalibrationError (or BudgetError) where they cannot be of this replica alone.
    """
    constants, seen = {}, {}
    for rank, (term, reading) in enumerate(zip(terms, readings)):
        read = _readings(rank, reading)
        own = calibrate(
            dict(term), before_gib=read["before"], idle_gib=read["idle"], lowest_gib=read.get("lowest")
        )
        if not LEAST_OVERHEAD_GIB <= own["overhead"] <= MOST_OVERHEAD_GIB:
            raise CalibrationError(
                "odd-reading",
                f"{read['before']:.2f} GiB before the start and {read['idle']:.2f} idle cannot be of this rank alone",
                tensor=f"rank {rank}",
                found=f"{own['overhead']:.2f} GiB beside weights and caches",
                wanted=f"{LEAST_OVERHEAD_GIB:g} to {MOST_OVERHEAD_GIB:g}",
                remedy="start the replica again while nothing else starts or ends on the node",
            )
        if "dip" in own and not under_load and own["dip"] <= term["dip"] + term["chunk"]:
            del own["dip"]
        constants[str(rank)] = {name: round(value, _DIGITS) for name, value in own.items()}
        seen[str(rank)] = {name: round(value, _DIGITS) for name, value in read.items()}
    if len(constants) != len(terms) or len(readings) != len(terms):
        raise CalibrationError(
            "no-reading", "wants a reading of every rank", found=len(readings), wanted=len(terms)
        )
    return constants, seen


def current(kept: Mapping[str, Any] | None, plan_digest: str, build: str, image: str) -> bool:
    """Whether what is kept belongs to what runs. ``image`` empty: not known yet, as in check mode."""
    if not kept or kept.get("format") != FORMAT:
        return False
    wanted = {"plan": plan_digest, "build": build, **({"image": image} if image else {})}
    return all(kept.get(name) == value for name, value in wanted.items())


def document(
    replica: str,
    plan_digest: str,
    build: str,
    image: str,
    *,
    constants: Mapping[str, Any],
    readings: Mapping[str, Any],
    under_load: bool,
    now: str,
) -> str:
    """The text of the file."""
    body = {
        "format": FORMAT,
        "replica": replica,
        "plan": plan_digest,
        "build": build,
        "image": image,
        "ranks": constants,
        "readings_gib": readings,
        "under_load": under_load,
        "at": now,
    }
    return json.dumps(body, indent=1, sort_keys=True) + "\n"


def ensure(host: Host, params: Mapping[str, Any], *, now: str, check: bool) -> dict[str, Any]:
    """Keep the constants of what runs, where that is due. ``params`` are those of the module `calibration`.

    Raises PlanError where readings were asked for (``renew``) and are impossible; Refusal for a replica's name.
    """
    path = marker_path(params["directory"], params["replica"])
    before = host.read(path)
    try:
        kept: dict[str, Any] = parse(before, path) if before else {}
    except PlanError:
        kept = {}
    plan, build, image = params["plan"], params["engine_build"], params["image_content"]
    result: dict[str, Any] = {"changed": False, "path": path, "why_not": "", "ranks": kept.get("ranks", {})}
    if current(kept, plan, build, image) and not params["renew"]:
        return result
    if check and params["starting"]:
        # What the start will measure is not known, that it will be is.
        return {**result, "changed": True, "diff": [text_diff(path, before, None)]}
    try:
        if params["busy"]:
            raise CalibrationError(
                "busy",
                f"{params['busy']} requests run, so memory is not idle",
                remedy="measure when none runs",
            )
        constants, seen = measure(params["terms"], params["readings"], under_load=params["renew"])
    except PlanError as error:
        if params["renew"]:
            raise
        return {**result, "ranks": {}, "why_not": str(error)}
    after = document(
        params["replica"], plan, build, image,
        constants=constants, readings=seen, under_load=params["renew"], now=now,
    )  # fmt: skip
    if not check:
        host.write(path, after)
    return {**result, "changed": True, "ranks": constants, "diff": [text_diff(path, before, after)]}
