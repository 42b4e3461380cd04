"""The rooms (folders) of the package: few modules in each, unique names, and all of them in docs/structure.md."""

from __future__ import annotations

import collections
import re
from pathlib import Path

import tfdistkit

PACKAGE = Path(tfdistkit.__file__).parent
STRUCTURE = PACKAGE.parent / "docs" / "structure.md"
MOST_MODULES = 14
ROOMS = sorted({file.parent for file in PACKAGE.rglob("*.py")})


def name(room: Path) -> str:
    return room.relative_to(PACKAGE).as_posix().replace(".", "tfdistkit", room == PACKAGE)


def modules(room: Path) -> list[str]:
    return sorted(file.stem for file in room.glob("*.py") if file.stem not in ("__init__", "__main__"))


def test_no_room_has_too_many_modules() -> None:
    full = {name(room): len(modules(room)) for room in ROOMS if len(modules(room)) > MOST_MODULES}
    assert not full, "split them"


def test_a_module_is_unique_by_its_room_and_its_name() -> None:
    times = collections.Counter((room.name, module) for room in ROOMS for module in modules(room))
    times.update((room.name, one.name) for room in ROOMS for one in room.iterdir() if one in ROOMS)
    assert not [one for one, number in times.items() if number > 1]


def test_the_page_lists_the_rooms_and_existing_modules() -> None:
    table = re.findall(r"^\| (`.+?`) \|.*\| (.*) \|$", STRUCTURE.read_text().partition("## Rooms")[2], re.MULTILINE)
    listed = {room: begin for rooms, begin in table for room in re.findall(r"`(.+?)`", rooms)}
    assert sorted(listed) == sorted(map(name, ROOMS))
    for rooms, begin in table:
        folders = [PACKAGE / one.replace("tfdistkit", "") for one in re.findall(r"`(.+?)`", rooms)]
        missing = [
            one for one in re.findall(r"`(.+?)`", begin) if not any((f / f"{one}.py").is_file() for f in folders)
        ]
        assert not missing, rooms
