"""Whether the endpoint of the writer and the judge can be asked, told by what became of attempts."""

from __future__ import annotations

from collections.abc import Callable

from rods_jax.synthesis.endpoint import FailureKind
from rods_jax.synthesis.outcome import Outcome, Rejection, Stage
from rods_jax.synthesis.pipeline import OnOutage

STOP_AFTER = 3  # attempts in a row that found nobody there
_MEANWHILE = {
    OnOutage.FALL_BACK: "the template writer writes meanwhile",
    OnOutage.GO_ON: "its attempts are rejected, training goes on",
    OnOutage.STOP: "the run stops if that lasts",
}


def outage(outcome: Outcome) -> FailureKind | None:
    """Why nobody answered in an attempt; None where somebody did, or nobody was asked."""
    why = outcome.fell_back or outcome.unjudged
    if not why and isinstance(outcome, Rejection) and outcome.stage in (Stage.WRITE, Stage.JUDGE):
        why = outcome.reason
    kind = FailureKind(why) if why in _KINDS else None
    return kind if kind is not None and kind.outage else None


_KINDS = frozenset(kind.value for kind in FailureKind)


class OutageWatch:
    """Says once when an outage begins and once when it ends.

    outages: how many began. lasting: the one that goes on has taken so many attempts, or the
    endpoint counts as down, that a run that is to stop then should."""

    def __init__(self, on_outage: OnOutage, say: Callable[[str], None] = lambda line: None):
        self._on_outage, self._say = on_outage, say
        self._attempts = 0  # since it began
        self.outages, self.lasting = 0, False

    def see(self, outcome: Outcome) -> None:
        """The outcomes in order."""
        if (kind := outage(outcome)) is not None:
            if not self._attempts:
                self.outages += 1
                self._say(f"synthesis: the endpoint cannot be asked ({kind.value}): "
                          f"{_MEANWHILE[self._on_outage]}")
            self._attempts += 1
            self.lasting = self._attempts >= STOP_AFTER or kind is FailureKind.DOWN
        elif outcome.usage.requests:
            if self._attempts:
                self._say(f"synthesis: the endpoint answers again; attempts without it: "
                          f"{self._attempts}")
            self._attempts, self.lasting = 0, False
