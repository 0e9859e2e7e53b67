"""Whether the endpoint of the writer and the judge answers, told by what became of attempts."""

from __future__ import annotations

from collections.abc import Callable

from rods_jax.synthesis.endpoint import FailureKind
from rods_jax.synthesis.outcome import Outcome, Rejection, Stage
from rods_jax.synthesis.pipeline import OnOutage

_KINDS = {kind.value: kind for kind in FailureKind}
_MEANWHILE = {
    OnOutage.FALL_BACK: "what works offline stands in",
    OnOutage.GO_ON: "its attempts are rejected, training goes on",
    OnOutage.STOP: "the run stops",
}


def outage(outcome: Outcome) -> FailureKind | None:
    """Why nobody answered in an attempt; None where somebody did, or nobody was asked."""
    why = outcome.fell_back or outcome.unjudged
    if not why and isinstance(outcome, Rejection) and outcome.stage in (Stage.WRITE, Stage.JUDGE):
        why = outcome.reason
    kind = _KINDS.get(why)
    return kind if kind is not None and kind.outage else None


class OutageWatch:
    """Says once when an outage begins and once when it ends. `outages`: how many began."""

    def __init__(self, on_outage: OnOutage, say: Callable[[str], None]):
        self._on_outage, self._say = on_outage, say
        self._attempts = 0  # since it began
        self.outages = 0

    def see(self, outcome: Outcome) -> None:
        """The outcomes in order."""
        if (kind := outage(outcome)) is not None:
            if not self._attempts:
                self.outages += 1
                self._say(f"synthesis: the endpoint does not answer ({kind.value}): "
                          f"{_MEANWHILE[self._on_outage]}")
            self._attempts += 1
        elif outcome.usage.requests and self._attempts:
            self._say(f"synthesis: the endpoint answers again; attempts without it: "
                      f"{self._attempts}")
            self._attempts = 0
