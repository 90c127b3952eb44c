#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
---
module: spark_probe
short_description: Read everything that matters about a DGX Spark, in one round trip
version_added: 1.0.0
description:
  - Reads network, RDMA, memory, kernel, GPU, Docker, disks, units, listeners and more, and changes nothing.
  - A thing that is absent is a value, never an error. What could not be read for lack of privilege, and
    which command
    did not answer within its limit, is listed in the result.
author:
  - The sparkfleet founders (@sparkfleet)
options:
  gather_subset:
    description:
      - What to read. V(all), V(min) (os, kernel, privilege), or any of os, kernel, kernel_log, memory, net,
        rdma, netplan, firewall, docker, gpu, clocks, disk, systemd (alias services), listeners, packages,
        privilege. V(!name) leaves one out.
    type: list
    elements: str
    default: [all]
  paths:
    description: Paths for which the filesystem below them, its free space and the bytes that lie there already
      are reported, beside the usual ones (of those the bytes are not counted).
    type: list
    elements: str
    default: []
  timeout:
    description: Limit of each command and each Docker answer, in seconds.
    type: float
    default: 20.0
  root:
    description:
      - Read below this directory instead of V(/). No command of the host is run then; answers come from
        C(.sparkfleet-commands.json) in it. For recorded trees.
    type: str
    default: /
attributes:
  check_mode:
    description: Reads only, so check mode and a real run are the same.
    support: full
  diff_mode:
    description: Nothing is changed, so there is no difference to show.
    support: none
"""

EXAMPLES = r"""
- name: Read the whole node
  sparkfleet.serving.spark_probe:
  register: node

- name: Read the rails only
  sparkfleet.serving.spark_probe:
    gather_subset: [net, rdma]
  register: node
"""

RETURN = r"""
probe:
  description:
    - What was found. A subset that was not asked for has no key.
  returned: always
  type: dict
  contains:
    schema: {description: "Version of this layout.", type: int, returned: always}
    subsets: {description: "What was read.", type: list, elements: str, returned: always}
    missing_privileges: {description: "Rows of what and need.", type: list, elements: dict, returned: always}
    timeouts: {description: "Commands that did not answer in time.", type: list, elements: str, returned:
      always}
    seconds: {description: "Time that the reading took.", type: float, returned: always}
    net:
      description: "By netdev: carrier (true, false, none when administratively down), operstate, admin_up,
        mtu, speed, mac,
        phys_port_name, port_from, pci, pci_from, driver, master, hca, addresses (cidr, address, prefix,
        family, scope, dynamic)."
      type: dict
      returned: subset net, rdma or netplan
    rdma:
      description: "By RDMA device: netdev, pci, fw_ver, state, phys_state, rate_gbps, active_mtu,
        active_mtu_from, counters,
        gids (index, gid, type, ipv4, ndev; holes are left out)."
      type: dict
      returned: subset net, rdma or netplan
    routes: {description: "IPv4 routes: destination, gateway, netdev, metric, linkdown.", type: list,
      elements: dict, returned: subset net}
    hotplug: {description: "Whether the ConnectX-7 hot-plug power-off is installed and its marker set.",
      type: dict, returned: subset net}
    netplan:
      description: "files (path, readable, netdevs, owned, renderer), networkmanager, networkd, generated,
        renderer."
      type: dict
      returned: subset netplan
    memory:
      description: "total_bytes, available_bytes, free_bytes, cma_total_bytes, cma_free_bytes,
        swap_total_bytes, swap_free_bytes,
        unaccounted_bytes (held by nobody the kernel can name: the pool of the GPU driver), swaps, buddyinfo."
      type: dict
      returned: subset memory
    kernel:
      description: "release, cmdline, boot_id, installed, next_boot (release, cmdline), reboot_required,
        page_size, kexec_crash_size."
      type: dict
      returned: subset kernel
    kernel_log:
      description: "Of this boot: known, fatal and uncorrected (numbers of lines about PCIe and ConnectX-7), lines
        (the first few of the worst)."
      type: dict
      returned: subset kernel_log
    firewall:
      description: "ufw: installed, enabled, active, default_input, rules (to, action, source; none without root)."
      type: dict
      returned: subset firewall
    os: {description: "arch, id, version_id, dgx_release, dgx, vendor, product, bios_version, hostname.",
      type: dict, returned: subset os}
    docker:
      description: "present, denied, known, reason, server_version, storage_driver, runtimes,
        default_runtime, root_dir, networks,
        containers (id, name, image, state, labels, owned), daemon_json (whether it exists). containers is
        the truth only when
        known. image_bytes is the largest image of this collection, 0 without one, none when not known."
      type: dict
      returned: subset docker
    gpu:
      description: "present, known, reason, name, driver, pstate, temperature_c, power_w, sm_mhz, processes."
      type: dict
      returned: subset gpu
    clocks: {description: "units that lock clocks, with what the journal of this boot confirms.", type: dict,
      returned: subset clocks}
    disk: {description: "filesystems, paths (where each lies, exists, held_bytes, and of a file size_bytes and mode),
      disks.", type: dict, returned: subset disk}
    systemd: {description: "known, default_target, units, memory_killers.", type: dict, returned: subset
      systemd}
    listeners: {description: "protocol, address, port, pid, process.", type: list, elements: dict, returned:
      subset listeners}
    packages: {description: "By package: version, installed, held.", type: dict, returned: subset packages}
    privilege: {description: "euid, sudo (root, nopasswd, password or refused).", type: dict, returned:
      subset privilege}
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.probe.gather import gather, resolve
from ..module_utils.probe.reader import Reader


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "gather_subset": {"type": "list", "elements": "str", "default": ["all"]},
            "paths": {"type": "list", "elements": "str", "default": []},
            "timeout": {"type": "float", "default": 20.0},
            "root": {"type": "str", "default": "/"},
        },
        supports_check_mode=True,
    )
    try:
        resolve(module.params["gather_subset"])
    except ValueError as error:
        module.fail_json(msg=str(error))
    reader = Reader(root=module.params["root"], timeout=module.params["timeout"])
    module.exit_json(
        changed=False, probe=gather(reader, module.params["gather_subset"], module.params["paths"])
    )


if __name__ == "__main__":
    main()
