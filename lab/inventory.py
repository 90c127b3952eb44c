"""The inventory of a lab instance, as text: two nodes that form one replica.

What a replica serves stands in ``group_vars`` (shared by all instances); what only the lab knows stands here.
"""

from __future__ import annotations

from .config import NODES, REPOSITORY, USER, Instance

# Half 0 and half 1 of the cable: two subnets of their own, rank 0 first. Private to an instance.
RAILS = (("10.77.0.1/30", "10.77.0.2/30"), ("10.77.0.5/30", "10.77.0.6/30"))

HEADER = """\
# Two simulated DGX Sparks on this machine (see docs/lab.md): the replica `lab`, rank 0 on spark-1.
# Written by `python -m lab`; the values of the default lab are fixed, so this file can be kept.
"""


def inventory_text(lab: Instance, ssh: str) -> str:
    """YAML inventory; ``ssh`` leads to the instance's keys.

    From the inventory's own directory for the committed one, which must work in any clone. Absolute for the one that
    stands beside the keys: other tools (molecule, testinfra) read it too, and they do not resolve templates.
    """
    absolute = ssh.startswith("/")
    keys = ssh if absolute else f"{{{{ inventory_dir }}}}/{ssh}"
    lines = [
        HEADER + "all:",
        "  children:",
        "    sparks:",
        "      vars:",
        f"        ansible_user: {USER}",
        f'        ansible_ssh_private_key_file: "{keys}/id_ed25519"',
        f'        ansible_ssh_common_args: "-o UserKnownHostsFile={keys}/known_hosts"',
        "        ansible_python_interpreter: /usr/bin/python3",
        "        sparkfleet_replica: lab",
        f"        sparkfleet_world: {len(NODES)}",
        # It is there only while the lab is, so it needs to look for nothing.
        *(
            (
                f"        image_context: {REPOSITORY}/lab/engine/context",
                "        sparkfleet_inventory_ready: true",
            )
            if absolute
            else ()
        ),
        "      hosts:",
    ]
    for rank, node in enumerate(NODES):
        lines += [
            f"        {node}:",
            f"          ansible_host: {lab.address(node)}",
            f"          sparkfleet_rank: {rank}",
            "          sparkfleet_rails:",
            *(f"            - address: {rail[rank]}" for rail in RAILS),
        ]
    return "\n".join(lines) + "\n"
