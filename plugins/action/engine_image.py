# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Controller side of engine_image: reads the build context, and sends it only when something is built."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.sparkfleet.serving.plugins.module_utils.image_identity import (
    ImageError,
    Recipe,
    context_tar,
    make_recipe,
    reference,
)
from ansible_collections.sparkfleet.serving.plugins.plugin_utils.watch import WatchedAction

#: Processors of a build when the task names none, as in the module.
JOBS = 8


def with_jobs(recipe: Recipe, jobs: int) -> dict[str, str]:
    """Build arguments with the number of jobs, where the Dockerfile has such an argument and nobody set it.

    Added after the content hash was computed: how many jobs built an image is no part of what it is.
    """
    text = next(entry.data for entry in recipe.entries if entry.name == recipe.dockerfile)
    wanted = bool(jobs) and re.search(rb"^\s*ARG\s+JOBS\b", text, re.M | re.I)
    return {**({"JOBS": str(jobs)} if wanted else {}), **recipe.build_args}


class ActionModule(WatchedAction):
    """Computes content hash and reference from the context, transfers the context for a real build."""

    MODULE = "engine_image"
    TRANSFERS_FILES = True

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """One module call; a build that is needed adds one transfer and one call."""
        result: dict[str, Any] = ActionBase.run(self, tmp, task_vars)
        args = dict(self._task.args)
        context = str(args.pop("context", "") or "")
        patches = [str(item) for item in args.pop("patches", None) or []]
        allow_tag = str(args.pop("allow_base_tag", False)).lower() in ("true", "yes", "1")
        tar = b""
        if context:
            try:
                recipe = make_recipe(
                    Path(self._find(context)),
                    str(args.get("dockerfile") or "Dockerfile"),
                    args.get("build_args") or {},
                    str(args.get("base") or ""),
                    patches=[Path(item) for item in patches],
                    allow_tag=allow_tag,
                    target=str(args.get("target") or ""),
                )
                args["content"] = recipe.content
                args["reference"] = reference(str(args.get("name") or ""), recipe.content)
            except ImageError as exc:
                raise AnsibleActionFail(str(exc)) from exc
            tar = context_tar(recipe)
            args["build_args"] = with_jobs(recipe, int(args.get("jobs", JOBS)))
        building = args.get("state") == "built" and not self._task.check_mode
        if building and not tar:
            raise AnsibleActionFail("state built needs the build context on the controller (context)")
        if building:
            looked = self.watched(dict(args, state="inspected"), task_vars)
            if looked.get("failed") or looked.get("present"):
                return {**result, **looked}
            self._make_tmp_path()
            remote = self._connection._shell.join_path(self._connection._shell.tmpdir, "context.tar")
            self._transfer_data(remote, tar)
            self._fixup_perms2((self._connection._shell.tmpdir, remote))
            args["context_tar"] = remote
        return {**result, **self.watched(args, task_vars)}

    def _find(self, context: str) -> str:
        return str(self._loader.path_dwim(context))
