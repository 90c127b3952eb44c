"""Two small virtual machines on one cable: what needs a kernel of its own, NFS and RDMA over Ethernet.

The container lab shares this machine's kernel, which has no NFS server, no NFS client and no RDMA. So these run
under QEMU with Debian's kernel, on their own: ``python -m lab.vm up``. They run single roles, never the whole job:
emulated, a remote task takes around ten seconds.
"""
