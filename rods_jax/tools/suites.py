"""Which tools and tasks a run uses, as plain data: a worker process makes the same suite."""

from __future__ import annotations

import dataclasses
import enum
import importlib
from collections.abc import Mapping

from rods_jax.tools.env import Suite
from rods_jax.tools.scoring import EmptyTurn, Mode, Scoring
from rods_jax.types import Json


class SuiteName(str, enum.Enum):
    TOOLBOX = "toolbox"  # embedded, small
    BFCL = "bfcl"  # BFCL V3 multi-turn, package bfcl-eval
    CUSTOM = "custom"  # the user's own, see docs/new_domain.md


class SplitRule(str, enum.Enum):
    GROUPED = "grouped"  # by scenario: no held-in task has a sibling in training
    PAPER = "paper"  # each category on its own, as in the paper; siblings cross


@dataclasses.dataclass(frozen=True)
class SuiteSpec:
    """`factory`: "module:function" of a CUSTOM suite, called without arguments, or with
    `scoring` where one is given. `domains`: only tasks that need no other (BFCL alone); ()
    takes all. `scoring`: None is the suite's own. `split`, `split_seed`: of BFCL alone."""

    name: SuiteName = SuiteName.TOOLBOX
    factory: str = ""
    domains: tuple[str, ...] = ()
    scoring: Scoring | None = None
    split: SplitRule = SplitRule.GROUPED
    split_seed: int = 0

    def __post_init__(self):
        if self.domains and self.name is not SuiteName.BFCL:
            raise ValueError(f"domains can be chosen of suite bfcl only, suite is "
                             f"{self.name.value}: leave domains out")
        if self.split_seed and self.name is not SuiteName.BFCL:
            raise ValueError(f"split_seed is of suite bfcl only, suite is {self.name.value}: leave "
                             "split_seed out")
        if self.split is not SplitRule.GROUPED and self.name is not SuiteName.BFCL:
            raise ValueError(f"split {self.split.value} is of suite bfcl only, suite is "
                             f"{self.name.value}: leave split out")
        if bool(self.factory) != (self.name is SuiteName.CUSTOM):
            raise ValueError("factory names the function that makes a suite custom, as in "
                             "'my_tools:make_suite': give both or neither")

    def to_json(self) -> dict[str, Json]:
        return {"name": self.name.value, "factory": self.factory, "domains": list(self.domains),
                "scoring": None if self.scoring is None else {
                    "mode": self.scoring.mode.value,
                    "empty_turn": self.scoring.empty_turn.value,
                    "needs_call": self.scoring.needs_call},
                "split": self.split.value, "split_seed": self.split_seed}

    @classmethod
    def from_json(cls, row: Mapping[str, Json]) -> SuiteSpec:
        scoring = row["scoring"] and Scoring(
            Mode(row["scoring"]["mode"]), EmptyTurn(row["scoring"]["empty_turn"]),
            row["scoring"]["needs_call"])
        return cls(SuiteName(row["name"]), row["factory"], tuple(row["domains"]), scoring,
                   SplitRule(row["split"]), row["split_seed"])


def make_suite(spec: SuiteSpec) -> Suite:
    """ValueError, one line, where a package is missing or the factory does not work."""
    given = {} if spec.scoring is None else {"scoring": spec.scoring}
    if spec.name is SuiteName.BFCL:
        from rods_jax.tools.bfcl import BFCLSuite
        return BFCLSuite(domains=spec.domains, split_rule=spec.split, split_seed=spec.split_seed,
                         **given)
    if spec.name is SuiteName.TOOLBOX:
        from rods_jax.tools.toolbox import ToolboxSuite
        return ToolboxSuite(**given)
    module, colon, function = spec.factory.partition(":")
    if not (module and colon and function):
        raise ValueError(f"suite factory {spec.factory!r} is not 'module:function': write for "
                         "instance my_tools:make_suite")
    # Whatever the user's module does wrong, it may even exit, is its author's to mend.
    try:
        factory = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:
        raise ValueError(f"suite factory {spec.factory!r} cannot be imported "
                         f"({type(error).__name__}: {error}): write 'module:function' of a module "
                         "on PYTHONPATH") from error
    try:
        suite = factory(**given)
    except ValueError:  # says itself what is wrong
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"suite factory {spec.factory!r} raised {type(error).__name__}: {error}; "
                         "mend it, it is called with nothing, or with scoring=") from error
    if isinstance(suite, type) or not callable(getattr(suite, "make_env", None)):
        raise ValueError(f"suite factory {spec.factory!r} returned a {type(suite).__name__}: return "
                         "a suite, such as rods_jax.tools.classes.ClassSuite")
    return suite
