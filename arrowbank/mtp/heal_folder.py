"""OUT.heal, the folder beside a healed checkpoint: the plan, the training's state until it is done, then its trace and the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arrowbank.bank.files import publish_bytes, publish_json, refuse_address
from arrowbank.bank.folder_writer import FolderWriter, plan_mismatch
from arrowbank.bank.manifest import JOURNAL, plan_digest, readable_json
from arrowbank.bank.manifest import STATE as COMMIT
from arrowbank.bank.names import refuse_links
from arrowbank.bank.places import beside, in_words, is_bare_journal, visible
from arrowbank.drawing.frame import svg_file
from arrowbank.errors import InputError, PlanMismatch
from arrowbank.mtp.draft_files import is_of_plan, remove_of_plan
from arrowbank.mtp.trace import TRACE, TRACE_PLOT, read_trace, trace_plots
from arrowbank.mtp.trainer import FED, STATE, plan_of

PLAN, REPORT = "plan.json", "report.json"
OWN_NAMES = {PLAN, REPORT, STATE, FED, TRACE, TRACE_PLOT, JOURNAL}
KIND = "heal"


class HealFolder(FolderWriter):
    """The one writer of OUT.heal. `recipe` is everything that decides what is written; `copies` are the checkpoints to be written,
    which `restart` removes together with the state, where an earlier run of the folder's own plan has written them.

    Raises InputError where the folder holds anything else, PlanMismatch where it holds another healing (unless `restart`).
    """

    def __init__(self, out: Path, recipe: Mapping[str, Any], *, copies: Sequence[Path] = (), restart: bool = False) -> None:
        self.recipe = json.loads(json.dumps(recipe))
        self.plan = plan_digest(KIND, self.recipe)
        super().__init__(beside(out, ".heal"), self.plan)
        self._copies, self._restart = copies, restart
        self._replaceable: set[str | None] = set()  # the plans whose copies may be replaced

    @property
    def found_plan(self) -> str | None:
        """The digest of the plan whose work the folder holds; None where nothing says which."""
        found, report = readable_json(self.folder / PLAN), readable_json(self.folder / REPORT)
        if _is_plan(found):
            return str(found["digest"])
        return plan_of(self.folder) or (report.get("plan") if isinstance(report, dict) else None)

    def check(self) -> None:
        refuse_address(self.folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder}: is a file, expected the folder of a healing. Give another --out.")
        names, found = visible(self.folder), readable_json(self.folder / PLAN)
        damaged = found is None and (self.folder / PLAN).exists()  # as a power cut leaves it
        strange = names - (OWN_NAMES if damaged else {JOURNAL}) or not (damaged or is_bare_journal(self.folder))
        if strange and not _is_plan(found):
            raise InputError(
                f"{self.folder}: holds {in_words(self.folder)}, expected the work of a healing or nothing. Give another --out; this "
                "folder was left as it is."
            )
        refuse_links(self.folder.resolve())  # what is written in place (what later steps are fed) would go elsewhere
        self._replaceable = {self.found_plan, *({self.plan} if damaged else ())}
        if self._restart or not names or self.found_plan == self.plan:
            return
        if _is_plan(found):
            raise plan_mismatch(self.folder, found["recipe"], self.recipe, what="the work of another healing")
        if self.found_plan is not None or {STATE, REPORT} & names:
            raise PlanMismatch(
                f"{self.folder / PLAN}: is damaged, and what else is in the folder is not of this healing. Give --restart to throw "
                "that work away, or another --out to keep it."
            )

    def may_replace(self, copy: Path) -> bool:
        """Whether the checkpoint `copy` was written by the healing whose work the folder holds."""
        return is_of_plan(copy, self._replaceable)

    def earlier_copies(self) -> list[Path]:
        """Where the healing in the folder has written copies of the checkpoint, as its report says: those beside it. A report that
        came from elsewhere could name any folder."""
        report = readable_json(self.folder / REPORT)
        files = report.get("files") if isinstance(report, dict) else None
        named = [one.get("folder") for one in files if isinstance(one, dict)] if isinstance(files, list) else []
        return [self.folder.with_name(name) for copy in named if isinstance(copy, str) and (name := Path(copy).name)]

    def finished(self, dump: str | Path | None) -> dict[str, Any] | None:
        """The report of a run of this very plan whose files are all there; None where there is something to do."""
        if self._restart or self.found_plan != self.plan:
            return None
        found: dict[str, Any] | None = readable_json(self.folder / REPORT)
        if found is None or not all(Path(one["folder"]).exists() for one in found["files"]):
            return None
        if dump is not None and not (Path(dump) / COMMIT).exists():
            raise InputError(
                f"{dump}: the healing is complete, and kept no rows of its drafts. Give --restart to do it again with --dump."
            )
        return {"failed": [], **found}

    def finish(self, report: Mapping[str, Any], *, traced: bool) -> None:
        """Publish the report, and before it the plot of the trace, if there is one."""
        if traced:
            publish_bytes(self.folder / TRACE_PLOT, svg_file(*trace_plots(read_trace(self.folder / TRACE))))
        publish_json(self.folder / REPORT, report)
        self.drop_state()

    def _open(self) -> None:
        self.check()
        self._journal.sweep()
        if self._restart:
            for copy in (*self._copies, *self.earlier_copies()):
                remove_of_plan(copy, self._replaceable)
            for name in (STATE, TRACE, FED, REPORT, PLAN):  # the plan last: what is left is never taken for another's
                (self.folder / name).unlink(missing_ok=True)
        if readable_json(self.folder / PLAN) is None:
            publish_json(self.folder / PLAN, {"digest": self.plan, "recipe": self.recipe})

    def _is_over(self) -> bool:
        return True  # the state is a file of the folder itself

    def drop_state(self) -> None:
        """Remove what only an unfinished training needs."""
        for name in (STATE, FED):
            (self.folder / name).unlink(missing_ok=True)


def _is_plan(found: object) -> bool:
    return isinstance(found, dict) and isinstance(found.get("digest"), str) and isinstance(found.get("recipe"), dict)
