# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Options that the modules which move and prove large files share."""

from __future__ import annotations


class ModuleDocFragment:
    """``transfer``: what all of them take; ``transfer.proof``: what those take that prove trees."""

    DOCUMENTATION = r"""
options:
  data_dir:
    description: Data directory of sparkfleet on the node; lock files are below it.
    type: path
    default: /var/lib/sparkfleet
  progress_file:
    description: Where to write progress for a watcher. Empty writes none.
    type: path
    default: ""
"""

    PROOF = r"""
options:
  rehash:
    description: Read every byte again instead of trusting what was proven before by size, mtime and inode.
    type: bool
    default: false
  reserve_bytes:
    description: Bytes that must stay free on the filesystem that takes the files.
    type: int
    default: 5000000000
"""

    PARALLEL = r"""
options:
  parallel:
    description: Files moved or read at once.
    type: int
    default: 4
"""

    DOCKER = r"""
options:
  docker_socket:
    description: Socket of the Docker engine.
    type: path
    default: /var/run/docker.sock
"""
