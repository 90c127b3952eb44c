"""What runs inside the lab containers: the boot shim, the hardware stand-ins, the cable.

These files are copied into the node image as the package ``lab.node``. They use the standard library only,
except for ``hardware.py``, which uses Debian's ``python3-fusepy``.
"""
