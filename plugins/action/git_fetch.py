# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Controller side of git_fetch: shows its progress."""

from __future__ import annotations

from ansible_collections.sparkfleet.serving.plugins.plugin_utils.watch import WatchedAction


class ActionModule(WatchedAction):
    """Runs the module and prints how far it is."""

    MODULE = "git_fetch"
