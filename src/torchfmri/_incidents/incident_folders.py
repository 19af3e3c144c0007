"""The folders of incidents: their names, and which one is meant.

`stored_incident` reads and writes inside these folders; `aftermath` asks for a free one. The names
(`step-000012-2`, `rank-0`) are those of folders on people's disks: they stay. Links are not
followed, because a folder may come from elsewhere. If parts are missing, it raises: another
incident must not be shown in the place of the one that was named.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path

from torchfmri._files import list_names
from torchfmri.exceptions import FileFormatError, InspectionError

SUMMARY = "incident.json"
_RANK = re.compile(r"rank-([0-9]{1,6})")
_STEP = re.compile(r"step-([0-9]{1,18})(?:-([0-9]{1,9}))?")


def part_folder(incident: Path, rank: int) -> Path:
    """Return where the part of a process is."""
    return incident / f"rank-{rank}"


def find_incident(folder: Path) -> Path:
    """Return the folder of one incident: the given one, or that of the highest step inside it.

    Raises:
        FileFormatError: Its parts are missing.
        InspectionError: There is no incident in this folder.
    """
    if not folder.is_dir():
        raise InspectionError(f"There is no folder {str(folder)!r}.")
    if ranks_of(folder):
        return folder
    _refuse_without_parts(folder)
    inside = [name for name in list_names(folder) if _is_folder(folder / name)]
    incidents = [name for name in inside if _is_incident(folder / name)]
    if not incidents:
        raise InspectionError(
            f"{str(folder)!r} holds no incident. A Monitor writes them with "
            "Monitor(model, optimizer, incidents='folder')."
        )
    newest = folder / max(incidents, key=_order)
    _refuse_without_parts(newest)
    return newest


def _is_incident(folder: Path) -> bool:
    """Whether an incident was written here; an interrupted one has neither summary nor parts."""
    return any(name == SUMMARY or _RANK.fullmatch(name) for name in list_names(folder))


def _refuse_without_parts(folder: Path) -> None:
    """Raise for an incident whose parts are gone: another one must not be shown in its place."""
    if _is_incident(folder) and not ranks_of(folder):
        raise FileFormatError(
            folder.name,
            "it is an incident without the part of any process: its folders rank-0, ... are "
            "missing, or are links. Name the folder of another incident to replay that one",
        )


def _order(name: str) -> tuple[int, int, str]:
    """Return step and number of an incident, to sort by; another name comes before all of them."""
    matched = _STEP.fullmatch(name)
    return (int(matched[1]), int(matched[2] or 1), name) if matched else (-1, 0, name)


def ranks_of(folder: Path) -> list[int]:
    """Return the processes of which an incident has a part."""
    names = (name for name in list_names(folder) if _is_folder(folder / name))
    return sorted(int(matched[1]) for matched in map(_RANK.fullmatch, names) if matched)


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder itself, no link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def free_folder(parent: Path, step: int) -> Path:
    """Return a folder for an incident at this step that is not there yet."""
    for attempt in range(10_000):
        folder = parent / (f"step-{step:06d}" + (f"-{attempt + 1}" if attempt else ""))
        if not folder.exists():
            return folder
    raise InspectionError(f"{str(parent)!r} is full of incidents at step {step}.")


def others_in(folder: Path) -> list[str]:
    """Return the names in the folder of an incident that torchfmri did not write."""
    parts = {f"rank-{rank}" for rank in ranks_of(folder)}
    return [name for name in list_names(folder) if name != SUMMARY and name not in parts]
