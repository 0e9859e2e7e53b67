"""bfcl-eval itself as the reference: result texts of its executor, verdicts of its checker.

The package starts every question on a clean slate (experiments.bench.tools.Package.clean); within
one question it behaves as it does.
"""

import dataclasses
import functools

from experiments.bench.tools import Entry, Package, entries
from rods_jax.types import Task, ToolCall


def call_text(call: ToolCall) -> str:
    """The call as the package wants it: Python with keyword arguments."""
    return f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})"


@dataclasses.dataclass(frozen=True)
class Reference:
    package: Package
    entries: dict[str, Entry]

    def texts(self, task: Task, turns: list[list[str]]) -> list[str]:
        """Result texts of the executor by flat index of the calls; `turns` of call texts."""
        entry, found = self.entries[task.uid], []
        try:
            for calls in turns:
                texts, _ = self.package.utils.execute_multi_turn_func_call(
                    calls, entry.row["initial_config"], entry.row["involved_classes"], "parity",
                    entry.row["id"], long_context="long_context" in entry.row["id"])
                found += texts
        finally:
            self.package.clean()
        return found

    def gold_texts(self, task: Task) -> list[str]:
        return self.texts(task, self.entries[task.uid].gold)

    def valid(self, task: Task, turns: list[list[ToolCall]]) -> bool:
        """The official verdict. Its runner fails another number of turns before it checks."""
        entry = self.entries[task.uid]
        if len(turns) != len(entry.gold):
            return False
        try:
            return self.package.check(
                entry, [[[call_text(call)] for call in calls] for calls in turns])
        finally:
            self.package.clean()


@functools.cache
def reference() -> Reference:
    """One load a process. Set BFCL_PROJECT_ROOT first: some of the package's modules make
    folders where it points, or beside themselves."""
    return Reference(Package(), entries())
