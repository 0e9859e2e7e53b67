"""Files: folders of small text files. A folder must be open before its files are used."""

from __future__ import annotations

import dataclasses

from rods_jax.tools.toolbox.domain import UPCOMING, Domain, take
from rods_jax.tools.toolbox.signature import Param, Tool, ToolError

_FILE = Param("file", "file")


@dataclasses.dataclass
class Files(Domain):
    """folders: {folder: {file: {"text", "topic"}}}; open: the open folder or "";
    links: {link: [folder, file, user]}; next_links: ids to come; clutter: listed files."""

    NAME = "files"
    DOOR = "open_folder"
    TOOLS = (
        Tool("find_file", "files", "Find the file about a topic, in any folder.",
             (Param("topic", "topic"),), (("file", "file"), ("folder", "folder")),
             needs_door=False, lists=True),
        Tool("open_folder", "files", "Open a folder; its files can then be used.",
             (Param("folder", "folder"),), needs_door=False, lists=True),
        Tool("read_file", "files", "Read a file of the open folder.", (_FILE,),
             (("text", "content"),)),
        Tool("write_file", "files", "Write a text to a file of the open folder.",
             (Param("file", "file", fresh=True), Param("text", "text"))),
        Tool("copy_file", "files", "Copy a file within the open folder.",
             (_FILE, Param("copy", "file", fresh=True))),
        Tool("move_file", "files", "Move a file from the open folder to another one.",
             (_FILE, Param("folder", "folder"))),
        Tool("delete_file", "files", "Delete a file of the open folder.", (_FILE,)),
        Tool("share_file", "files", "Share a file of the open folder with a user.",
             (_FILE, Param("user", "user")), (("link", "link"),)),
    )

    folders: dict
    open: str
    links: dict
    next_links: list
    clutter: list

    def _here(self) -> dict:
        if not self.open:
            raise ToolError("no folder open")
        return self.folders[self.open]

    def _record(self, file: str) -> dict:
        here = self._here()
        if file not in here:
            raise ToolError("no such file")
        return here[file]

    def find_file(self, topic: str) -> dict:
        for folder, files in self.folders.items():
            for file, record in files.items():
                if record["topic"] == topic:
                    return {"file": file, "folder": folder}
        raise ToolError("no such file")

    def open_folder(self, folder: str) -> dict:
        if folder not in self.folders:
            raise ToolError("no such folder")
        self.open = folder
        return {"opened": folder}

    def read_file(self, file: str) -> dict:
        return {"text": self._record(file)["text"]}

    def write_file(self, file: str, text: str) -> dict:
        self._here()[file] = {"text": text, "topic": ""}
        return {"written": file}

    def copy_file(self, file: str, copy: str) -> dict:
        text = self._record(file)["text"]
        if copy in self._here():
            raise ToolError("file exists")
        self._here()[copy] = {"text": text, "topic": ""}
        return {"copied": copy}

    def move_file(self, file: str, folder: str) -> dict:
        record = self._record(file)
        if folder not in self.folders:
            raise ToolError("no such folder")
        if file in self.folders[folder]:
            raise ToolError("file exists")
        self.folders[folder][file] = record
        del self._here()[file]
        return {"moved": file}

    def delete_file(self, file: str) -> dict:
        self._record(file)
        del self._here()[file]
        return {"deleted": file}

    def share_file(self, file: str, user: str) -> dict:
        self._record(file)
        link = take(self.next_links)
        self.links[link] = [self.open, file, user]
        return {"link": link}

    # ------------------------------------------------------------ planning

    @classmethod
    def blank(cls, maker):
        return cls({}, "", {}, maker.several("link", UPCOMING), [])

    def is_open(self):
        return bool(self.open)

    def open_door(self, initial, maker):
        folder = maker.new("folder")
        for state in (initial, self):
            state.folders[folder] = {}
            state.open = folder

    def prepare(self, tool, args, initial, maker):
        if tool == "find_file":
            return self._prepare_topic(args["topic"], initial, maker)
        if tool == "open_folder":
            return args["folder"] != self.open and self._prepare_folder(args["folder"], initial)
        file = args["file"]
        if tool in ("read_file", "copy_file", "move_file", "delete_file", "share_file"):
            if not self.open:
                return False
            if file not in self.folders[self.open] and not self._prepare_file(
                    file, initial, maker):
                return False
        if tool == "move_file":
            return args["folder"] != self.open and self._prepare_folder(args["folder"], initial)
        if tool == "read_file":
            return self._prepare_text(file, initial, maker)
        return True

    def _prepare_topic(self, topic, initial, maker):
        if any(r["topic"] == topic for files in self.folders.values() for r in files.values()):
            return False
        folder, file = maker.new("folder"), maker.new("file")
        text = maker.new("note")
        for state in (initial, self):
            state.folders[folder] = {file: {"text": text, "topic": topic}}
        return True

    def _prepare_folder(self, folder, initial):
        for state in (initial, self):
            state.folders.setdefault(folder, {})
        return True

    def _prepare_file(self, file, initial, maker):
        if any(file in files for files in self.folders.values()):
            return False  # it exists, but in a folder that is not open
        text = maker.new("note")
        if self.open not in initial.folders:
            return False
        for state in (initial, self):
            state.folders[self.open][file] = {"text": text, "topic": ""}
        return True

    def _prepare_text(self, file, initial, maker):
        if file not in initial.folders.get(self.open, {}) or file in maker.read:
            return False  # written or read in this dialogue: its text is no news
        maker.read.add(file)
        text = str(maker.new(maker.content))
        for state in (initial, self):
            state.folders[self.open][file]["text"] = text
        return True

    def clutter_up(self, surfaces):
        for files in self.folders.values():
            for file in surfaces:
                files[file] = {"text": file.replace(".", "-"), "topic": ""}
        self.clutter = list(surfaces)

    def has(self, kind, value):
        if kind == "file":
            return bool(self.open) and value in self.folders[self.open]
        return kind != "folder" or value != self.open
