"""What an update tells, as sums and the counts that divide them.

Sums of several updates or processes add up without loss; means do not. The means are read
from the sums, under their own names. Each update is a step of the optimizer of its own, so
loss, policy loss and gradient norm are means over updates, whatever each was made of; all
else is a mean over tokens or groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import flax.struct
import jax
import numpy as np

from rods_jax.types import Author

LOGGED = ("loss", "entropy", "kl", "clip_low_share", "clip_high_share", "importance_cut_share",
          "dead_share", "grad_norm")


@flax.struct.dataclass
class UpdateMetrics:
    """Of one update, or of several (`merge`). float32 or int32 scalars unless a shape is given.

    n_updates. n_applied: of these, steps that were taken; without any loss, or with a gradient
        that is not finite, parameters and optimizer stay.
    loss_sum, policy_sum, norm_sum: over updates, of the minimized number, of its policy part
        weighted alike, and of the gradient's norm before clipping.
    n_tokens, n_sequences: that carry loss.
    kl_sum, entropy_sum, gap_sum: over these tokens; KL to the reference, nats, and
        |trainer - sampler| log-prob.
    n_clip_low, n_clip_high, n_dual_clip, n_cut: of these tokens, those whose gradient that
        bound took away or cut.
    n_judged: groups with two or more valid members. n_dead: of these, without variance.
    tokens_A: int32 [Author], tokens in the batch by who wrote them.
    mean_T, var_T: float32 [T], of the rewards. live_T: bool [T]. n_valid_T: int32 [T], valid
        members. Merged, one stands after the other."""

    n_updates: jax.Array
    n_applied: jax.Array
    loss_sum: jax.Array
    policy_sum: jax.Array
    norm_sum: jax.Array
    n_tokens: jax.Array
    n_sequences: jax.Array
    kl_sum: jax.Array
    entropy_sum: jax.Array
    gap_sum: jax.Array
    n_clip_low: jax.Array
    n_clip_high: jax.Array
    n_dual_clip: jax.Array
    n_cut: jax.Array
    n_judged: jax.Array
    n_dead: jax.Array
    tokens_A: jax.Array
    mean_T: jax.Array
    var_T: jax.Array
    live_T: jax.Array
    n_valid_T: jax.Array

    loss = property(lambda self: _mean(self.loss_sum, self.n_updates))
    policy_loss = property(lambda self: _mean(self.policy_sum, self.n_updates))
    grad_norm = property(lambda self: _mean(self.norm_sum, self.n_updates))
    applied = property(lambda self: self.n_applied == self.n_updates)  # all of them
    kl = property(lambda self: _mean(self.kl_sum, self.n_tokens))
    entropy = property(lambda self: _mean(self.entropy_sum, self.n_tokens))
    logprob_gap = property(lambda self: _mean(self.gap_sum, self.n_tokens))
    clip_low_share = property(lambda self: _mean(self.n_clip_low, self.n_tokens))
    clip_high_share = property(lambda self: _mean(self.n_clip_high, self.n_tokens))
    dual_clip_share = property(lambda self: _mean(self.n_dual_clip, self.n_tokens))
    importance_cut_share = property(lambda self: _mean(self.n_cut, self.n_tokens))
    dead_share = property(lambda self: _mean(self.n_dead, self.n_judged))


def _mean(total, n):
    """0 where n is. Plain operators: arrays that lie on the host stay there."""
    return total / (n + (n == 0))


def merge(parts: Sequence[UpdateMetrics]) -> UpdateMetrics:
    """Of one or more, that lie on the host: sums in float64, what is a group's end to end."""
    def joined(name: str):
        values = [np.asarray(getattr(part, name)) for part in parts]
        if name.endswith("_T"):
            return np.concatenate(values)
        wide = np.int64 if values[0].dtype.kind == "i" else np.float64
        return np.sum(values, axis=0, dtype=wide)
    return UpdateMetrics(**{name: joined(name) for name in vars(parts[0])})


def logged(updates: Sequence[UpdateMetrics]) -> dict[str, float | int]:
    """What a run writes of the updates of one step. logprob_gap is the first update's: those
    after it score with a policy that has moved."""
    whole = merge(updates)
    return ({name: float(getattr(whole, name)) for name in LOGGED}
            | {"logprob_gap": float(updates[0].logprob_gap)}
            | {f"tokens_{author.name.lower()}": int(whole.tokens_A[author]) for author in Author})
