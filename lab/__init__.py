"""The lab: two simulated DGX Sparks on one machine, to prove the collection without the hardware.

``python -m lab up`` brings up two Debian containers that boot systemd, each with its own Docker engine,
joined by two rails. ``docs/lab.md`` says what is real in it and what stands in. Nothing here imports from
``plugins/``: two readers of one format that agree prove more than one.
"""
