"""Kernel settings are raised, never lowered; packages are held, and only our own holds are lifted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.sparkfleet.serving.plugins.module_utils import host_tuning, package_holds
from ansible_collections.sparkfleet.serving.plugins.module_utils.host_io import Answer, Refusal

from tests.unit.fake_host import FakeHost

AIO = {"fs.aio-max-nr": 1048576}


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    host.write("/proc/sys/fs/aio-max-nr", "65536\n")
    return host


def tune(host: FakeHost, **options: Any) -> dict[str, Any]:
    defaults = {"present": True, "at_least": AIO, "equal": {}, "memlock": ["*"], "check": False}
    return host_tuning.ensure(host, **{**defaults, **options})


def test_raised_now_and_at_boot(host: FakeHost) -> None:
    predicted = tune(host, check=True)
    assert predicted["changed"] and host.read(host_tuning.SYSCTL_FILE) is None
    result = tune(host)
    assert result["tuning"]["sysctls"] == {"fs.aio-max-nr": "1048576"}
    assert "fs.aio-max-nr = 1048576" in (host.read(host_tuning.SYSCTL_FILE) or "")
    assert "* - memlock unlimited" in (host.read(host_tuning.LIMITS_FILE) or "")
    assert not tune(host)["changed"]
    assert [d["after_header"] for d in predicted["diff"]] == [d["after_header"] for d in result["diff"]]


def test_a_higher_value_of_somebody_else_stands(host: FakeHost) -> None:
    host.write("/etc/sysctl.d/20-database.conf", "fs.aio-max-nr=4194304\n")
    host.write("/proc/sys/fs/aio-max-nr", "4194304\n")
    tune(host)
    assert host.read("/proc/sys/fs/aio-max-nr") == "4194304\n"
    assert "4194304" in (host.read(host_tuning.SYSCTL_FILE) or ""), (
        "ours sorts later and would lower it at boot"
    )


@pytest.mark.parametrize("name", ["fs.no-such", "../../etc/passwd", "vm.drop_caches", "fs aio"])
def test_unknown_settings_are_refused(host: FakeHost, name: str) -> None:
    with pytest.raises(Refusal):
        tune(host, at_least={name: 1})


def test_absent(host: FakeHost) -> None:
    tune(host)
    assert tune(host, present=False)["changed"]
    assert not host.exists(host_tuning.SYSCTL_FILE) and not host.exists(host_tuning.LIMITS_FILE)
    assert not tune(host, present=False)["changed"]


class Dpkg:
    def __init__(self, host: FakeHost, want: dict[str, str]) -> None:
        self.want = want
        host.answers[("dpkg-query",)] = lambda _argv: Answer(
            0,
            "".join(f"{n}\t{w}\tinstalled\n" for n, w in self.want.items())
            + "gone\tdeinstall\tconfig-files\n",
            "",
        )
        self.host = host
        original = host.run

        def run(argv: Any, timeout: float = 20.0, stdin: str | None = None) -> Answer:
            if list(argv) == ["dpkg", "--set-selections"]:
                for row in (stdin or "").splitlines():
                    name, want_now = row.split()
                    self.want[name] = want_now
                return Answer(0, "", "")
            return original(argv, timeout, stdin)

        host.run = run  # type: ignore[method-assign]


@pytest.mark.field("B49", "B52")
def test_kernel_and_firmware_updaters_are_held_and_only_ours_are_lifted(host: FakeHost) -> None:
    dpkg = Dpkg(
        host,
        {
            "linux-image-6.17.0-1032-nvidia": "install",
            "mlnx-fw-updater": "install",
            "nvidia-driver-580-open": "hold",
            "vim": "install",
        },
    )
    hold = {"held": True, "patterns": list(package_holds.PATTERNS), "check": False}
    predicted = package_holds.ensure(host, **{**hold, "check": True})  # type: ignore[arg-type]
    assert dpkg.want["mlnx-fw-updater"] == "install" and predicted["changed"]
    result = package_holds.ensure(host, **hold)  # type: ignore[arg-type]
    assert dpkg.want == {
        "linux-image-6.17.0-1032-nvidia": "hold",
        "mlnx-fw-updater": "hold",
        "nvidia-driver-580-open": "hold",
        "vim": "install",
    }
    assert result["holds"]["others"] == ["nvidia-driver-580-open"]
    assert '"linux-image-6\\\\.17' in (host.read(package_holds.APT_FILE) or "")
    assert not package_holds.ensure(host, **hold)["changed"]  # type: ignore[arg-type]
    package_holds.ensure(host, held=False, patterns=[], check=False)
    assert dpkg.want["nvidia-driver-580-open"] == "hold" and dpkg.want["mlnx-fw-updater"] == "install"
    assert not host.exists(package_holds.RECORD) and not host.exists(package_holds.APT_FILE)


def test_the_role_holds_what_the_code_documents() -> None:
    import yaml

    defaults = yaml.safe_load(
        (Path(__file__).parents[3] / "roles/package_holds/defaults/main.yml").read_text()
    )
    assert defaults["package_holds_patterns"] == list(package_holds.PATTERNS)


def test_a_damaged_record_is_refused(host: FakeHost) -> None:
    Dpkg(host, {"vim": "install"})
    host.write(package_holds.RECORD, "{")
    with pytest.raises(Refusal):
        package_holds.ensure(host, held=True, patterns=["vim"], check=False)
    host.write(package_holds.RECORD, json.dumps(["vim"]))
    assert package_holds.ensure(host, held=True, patterns=["vim"], check=False)["changed"]
