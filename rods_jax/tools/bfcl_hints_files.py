"""Hints for GorillaFileSystem: nearly every tool takes bare names of the current directory."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

from rods_jax.tools.bfcl_hints_case import TELL, Failed, listed
from rods_jax.tools.hints import closest

_BAD = '|/\\?%*:"><'  # what mkdir, touch and cat refuse in a name
_MOST_ENTRIES = 2_000  # of a tree that are looked at
_MUCH_ALIKE = 0.75  # difflib's ratio of a name that lies elsewhere
_FILE, _FOLDER, _ENTRY = "file", "directory", "file or directory"

# The argument that names an existing entry of the current directory, and what it must be.
_NAMES = {
    "cd": ("folder", _FOLDER), "cat": ("file_name", _FILE), "wc": ("file_name", _FILE),
    "sort": ("file_name", _FILE), "grep": ("file_name", _FILE), "tail": ("file_name", _FILE),
    "echo": ("file_name", _FILE), "mv": ("source", _ENTRY), "cp": ("source", _ENTRY),
    "rm": ("file_name", _ENTRY), "rmdir": ("dir_name", _FOLDER),
}
_OTHER_TOOL = {  # for an entry of the other sort
    ("cd", _FILE): "cat", ("cat", _FOLDER): "cd", ("rmdir", _FILE): "rm",
}


def files_hint(f: Failed) -> str:
    if f.name in ("mkdir", "touch"):
        return _new_entry(f, f.text("dir_name" if f.name == "mkdir" else "file_name"))
    if f.name == "diff":
        return _diff(f)
    if f.name == "find":
        return _find(f)
    if f.name == "wc" and f.says("wc: invalid mode"):
        return "mode is l for lines, w for words or c for characters."
    if f.says("Current directory is already the root"):
        folders = f"; its directories: {listed(_names(f, _FOLDER))}" if _sees_here(f) else ""
        return f"This is the top directory{folders}."
    if f.name not in _NAMES:
        return ""
    argument, want = _NAMES[f.name]
    name = f.text(argument)
    if f.name in ("mv", "cp") and name in _here(f):
        return _destination(f, name, f.text("destination"))
    if f.name == "rmdir" and f.says("rmdir: cannot remove") and f.error.endswith("not empty"):
        inside = f" It holds {listed(_here(f)[name].contents)}." if _sees_below(f) else ""
        return f.by(("rm", f"rm removes {name!r} with all that is in it."),
                    otherwise=f"{name!r} must be emptied first.") + inside
    return _absent(f, name, want)


# ---------------------------------------------------------------------------- the state


def _is_folder(entry: Any) -> bool:
    return hasattr(entry, "contents")


def _fits(entry: Any, want: str) -> bool:
    return entry is not None and (want == _ENTRY or _is_folder(entry) == (want == _FOLDER))


def _here(f: Failed) -> dict[str, Any]:
    return f.state._current_dir.contents


def _sees_here(f: Failed) -> bool:
    """Whether tools at hand show the names of the current directory."""
    return not f.visible.isdisjoint(("ls", "find"))


def _sees_below(f: Failed) -> bool:
    return "find" in f.visible or {"ls", "cd"} <= f.visible


def _names(f: Failed, want: str) -> list[str]:
    return [n for n, e in _here(f).items() if _fits(e, want) and not n.startswith(".")]


def _tree(root: Any) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """(directories on the way, name, entry) of everything below, the shallowest first."""
    queue = collections.deque([((), root)])
    left = _MOST_ENTRIES
    while queue:
        path, folder = queue.popleft()
        for name, entry in folder.contents.items():
            left -= 1
            if left < 0:
                return
            yield path, name, entry
            if _is_folder(entry):
                queue.append(((*path, name), entry))


def _path_here(f: Failed) -> tuple[str, ...] | None:
    """The way from the root to the current directory; None where it is cut off."""
    if f.state._current_dir is f.state.root:
        return ()
    return next(((*path, name) for path, name, entry in _tree(f.state.root)
                 if entry is f.state._current_dir), None)


def _way(f: Failed, target: tuple[str, ...]) -> list[str]:
    """The folders to give to cd, one a call, from here to a path below the root."""
    here = _path_here(f)
    if here is not None and target[:len(here)] == here:
        return list(target[len(here):])
    if here and here[:-1] == target:
        return [".."]
    return ["/", *target]


def _walk(f: Failed, path: str) -> tuple[list[str], Any] | None:
    """The cd calls that follow a path of directories as it may be meant: from here, from
    above here, from the root; and the directory it leads to."""
    parts = [p for p in path.split("/") if p not in ("", ".")]
    here, root = f.state._current_dir, f.state.root
    starts = [] if path.startswith("/") else [(here, [], parts)]
    if parts[:1] == [here.name] and not path.startswith("/"):
        starts.append((here, [], parts[1:]))
    top = [] if here is root else ["/"]
    starts.append((root, top, parts))
    if parts[:1] == [root.name]:
        starts.append((root, top, parts[1:]))
    for place, steps, rest in starts:
        steps = [*steps, *rest]
        for part in rest:
            place = place.parent if part == ".." else place.contents.get(part)
            if not _is_folder(place):
                break
        else:
            return steps, place
    return None


# ------------------------------------------------------------------------- what is missing


def _steps(f: Failed, steps: Sequence[str], then: str) -> str:
    """"first cd to 'a', then 'b', then `then`"."""
    if "cd" not in f.visible:
        return f"no tool to go there is at hand now: {TELL}"
    return f"first cd to {', then '.join(map(repr, steps))}, then {then}"


def _absent(f: Failed, name: str, want: str) -> str:
    """What to do about a name that is not what the call needs in the current directory."""
    if f.name == "cd":
        name = name.rstrip("/") or "/"
    if "/" in name:
        return _path(f, name, want)
    if f.error.endswith("Invalid character"):
        return _bad_name(name)
    entry = _here(f).get(name)
    if entry is not None and not _fits(entry, want):
        return _other_sort(f, name, want)
    if f.name == "echo":
        near = closest(name, _names(f, _FILE)) if _sees_here(f) else []
        meant = f" Or did you mean {near[0]!r}?" if near else ""
        return f.by(("touch", f"echo writes to a file that is there: make it with "
                     f"touch(file_name={name!r}) first."),
                    otherwise="echo writes only to a file that is there.") + meant
    if _sees_below(f):
        place = next((p for p, n, e in _tree(f.state.root) if n == name and _fits(e, want)), None)
        if place is not None:
            return _elsewhere(f, name, place)
    if not _sees_here(f):
        return f"There is no {want} {name!r} in the current directory: {TELL}."
    near = closest(name, _names(f, want))
    if near:
        return f"The nearest name in the current directory is {near[0]!r}."
    return _what_is_here(f, name, want)


def _what_is_here(f: Failed, name: str, want: str) -> str:
    if _sees_below(f):
        below = {n: p for p, n, e in reversed(list(_tree(f.state.root)))
                 if _fits(e, want) and e is not f.state._current_dir}
        near = closest(name, below, alike=_MUCH_ALIKE)
        if near and below[near[0]] != _path_here(f):
            return _elsewhere(f, near[0], below[near[0]], "The nearest name, ")
    names = _names(f, want)
    kinds = {_FILE: "files", _FOLDER: "directories", _ENTRY: "files and directories"}[want]
    if not names:
        return f"The current directory holds no {kinds}."
    return f"The {kinds} here: {listed(names)}."


def _elsewhere(f: Failed, name: str, place: tuple[str, ...], what: str = "") -> str:
    what += repr(name) + "," * bool(what)
    if f.name == "cd":
        way = _way(f, (*place, name))
        return f"{what} is not here: cd to {', then '.join(map(repr, way))}, one a call."
    return (f"{what} is not in the current directory: "
            f"{_steps(f, _way(f, place), f'call {f.name} again')}.")


def _other_sort(f: Failed, name: str, want: str) -> str:
    is_a = _FOLDER if want == _FILE else _FILE
    tool = _OTHER_TOOL.get((f.name, is_a), "cd" if is_a == _FOLDER else "cat")
    uses = {"cat": "cat shows it", "rm": "rm removes it", "cd": "cd enters it"}[tool]
    extra = f.by((tool, f", {uses}"), otherwise="")
    return f"{name!r} is a {is_a}, {f.name} needs a {want}{extra}."


def _path(f: Failed, path: str, want: str) -> str:
    """A path where a bare name is needed, or for cd one level a call."""
    folder, _, base = path.rstrip("/").rpartition("/")
    if f.name == "cd":
        found = _walk(f, path)
        if not found:
            return _absent(f, base, want)
        if not found[0]:
            return "This is the current directory already."
        return f"cd goes one directory a call: {', then '.join(map(repr, found[0]))}."
    if not base:
        return f"Give the bare name of a {want} in the current directory."
    found = _walk(f, folder or ("/" if path.startswith("/") else "."))
    if found is None:
        return f"Only bare names are taken. {_absent(f, base, want)}"
    steps, place = found
    argument = next((a for a in f.args if f.text(a) == path), "file_name")
    call = f"{f.name} with {argument}={base!r}"
    if not _fits(place.contents.get(base), want):
        if f.name == "echo" and "touch" in f.visible and base not in place.contents:
            call = f"touch(file_name={base!r}), then {call}"
        elif steps and _sees_below(f):
            return (f"Only bare names are taken, and {folder!r} has no {want} {base!r}, it holds "
                    f"{listed(place.contents)}.")
        else:
            return f"Only bare names are taken. {_absent(f, base, want)}"
    if not steps:
        return f"Only bare names are taken: call {call}."
    return f"Only bare names are taken: {_steps(f, steps, call)}."


def _new_entry(f: Failed, name: str) -> str:
    if f.error.endswith("File exists") and name in _here(f):
        is_a = _FOLDER if _is_folder(_here(f)[name]) else _FILE
        return f"A {is_a} {name!r} is already there: use it, or choose another name."
    folder, _, base = name.rstrip("/").rpartition("/")
    found = _walk(f, folder) if folder else None
    if found and base and found[0]:
        argument = "dir_name" if f.name == "mkdir" else "file_name"
        return (f"Only bare names are taken: "
                f"{_steps(f, found[0], f'{f.name} with {argument}={base!r}')}.")
    return _bad_name(name)


def _bad_name(name: str) -> str:
    bad = "".join(c for c in _BAD if c in name)
    if not bad:
        return ""
    bare = " Give a bare name for the current directory." if "/" in bad else ""
    return f"A name must not hold {' '.join(bad)}.{bare}"


def _find(f: Failed) -> str:
    path = f.text("path")
    base = path.rstrip("/").rpartition("/")[2]
    near = closest(base, (n for _, n, e in _tree(f.state.root) if _is_folder(e)))
    meant = f" There is a directory {near[0]!r}." if near and near[0] != base else ""
    return (f"There is no directory {path!r} here: find(path='.', name={base!r}) looks for that "
            f"name below the current directory, path='/' everywhere.{meant}")


def _diff(f: Failed) -> str:
    for argument in ("file_name1", "file_name2"):
        name = f.text(argument)
        if not _fits(_here(f).get(name), _FILE):
            return f"{argument} is at fault. {_absent(f, name, _FILE)}"
    return ""


# ---------------------------------------------------------------------------- mv and cp


def _destination(f: Failed, source: str, destination: str) -> str:
    here = _here(f)
    if "/" in destination:
        return _far(f, source, destination)
    entry = here.get(destination)
    if entry is None:
        return ""
    if destination == source:
        return f"{destination!r} is the source itself: choose another destination."
    if _is_folder(entry):
        if source not in entry.contents:
            return ""
        return f"{destination!r} already holds {source!r}: choose another name or destination."
    return (f"{destination!r} is a file that is already there: choose another name"
            f"{f.by(('rm', ', or remove it with rm first'), otherwise='')}.")


def _far(f: Failed, source: str, destination: str) -> str:
    """A path as destination: reached one directory after the other, downwards only."""
    parts = [p for p in destination.split("/") if p not in ("", ".")]
    place, down = f.state._current_dir, []
    if destination.startswith("/"):
        here, root = _path_here(f) or (), f.state.root
        if parts[:1] == [root.name] and parts[0] not in root.contents:
            parts = parts[1:]
        parts = parts[len(here):] if tuple(parts[:len(here)]) == here else [".."]
    elif parts[:1] == [place.name] and parts[0] not in place.contents:
        parts = parts[1:]
    while parts and _is_folder(place.contents.get(parts[0])):
        place = place.contents[parts[0]]
        down.append(parts.pop(0))
    if ".." in parts or (not down and not parts):
        return (f"{f.name} works on names in the current directory: it puts nothing into a "
                "directory above it.")
    if not down:
        return (f"There is no directory {parts[0]!r} here"
                f"{f.by(('mkdir', f': mkdir(dir_name={parts[0]!r}) makes it'), otherwise='')}.")
    first = f"Only bare names are taken: {f.name} to destination={down[0]!r}"
    if (len(down) == 1 and not parts) or "cd" not in f.visible:
        return f"{first}."
    if parts and parts[0] in place.contents:
        return f"{'/'.join((*down, parts[0]))!r} is a file that is already there."
    if len(down) == 1 and len(parts) == 1 and "mv" in f.visible:
        return f"{first}, then cd to {down[0]!r} and mv {source!r} to {parts[0]!r}."
    return f"{first}, then cd to {down[0]!r} and go on from there."
