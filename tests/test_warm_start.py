"""Gold traces and the policy that is trained on them."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from loop_cases import CHAT, SUITE, messages, replay, tiny_config

from rods_jax import checkpoint, rewards
from rods_jax.policy import build
from rods_jax.types import Author, EndReason
from rods_jax.warm_start import gold_trajectory, hide, warm_start

TASKS = SUITE.split("train")[:60]


def test_gold_scores_one_and_follows_its_replay():
    for task in TASKS:
        gold = gold_trajectory(task, SUITE, CHAT)
        assert rewards.progress(gold) == 1.0 and rewards.binary(gold) == 1.0
        assert rewards.format_reward(dataclasses.replace(
            gold, n_steps=len(messages(gold))), task) == 1.0
        again = replay(task, messages(gold), max_len=1000, max_steps=99)
        assert gold.tokens_L.tolist() == again.tokens
        assert gold.author_L.tolist() == again.author
        assert list(gold.outcomes) == again.outcomes and again.end is gold.end is EndReason.DONE
        assert gold.author_L[-1] == Author.SAMPLED and not gold.logprobs_L.any()


class Silent:
    """The toolbox with an expert who has nothing to say."""

    def __getattr__(self, name):
        return getattr(SUITE, name)

    def gold_reply(self, task, turn):
        return ""


def test_gold_that_does_not_score_is_refused():
    task = next(task for task in TASKS if not all(turn.gold for turn in task.turns))
    with pytest.raises(ValueError, match=f"gold of task {task.uid} does not score 1.0"):
        gold_trajectory(task, Silent(), CHAT)


def test_hidden_are_only_words_that_the_policy_reads():
    hidden = n_read = 0
    for seed, task in enumerate(TASKS):
        gold = gold_trajectory(task, SUITE, CHAT)
        assert (hide(gold, CHAT, 0.0, np.random.default_rng(seed)).tokens_L == gold.tokens_L).all()
        holey = hide(gold, CHAT, 0.3, np.random.default_rng(seed))
        read_L = (gold.tokens_L < CHAT.first_slot) & (gold.author_L != Author.SAMPLED)
        changed_L = holey.tokens_L != gold.tokens_L
        assert not (changed_L & ~read_L).any()
        assert (holey.tokens_L[changed_L] == CHAT.unk_id).all()
        hidden += changed_L.sum()
        n_read += read_L.sum()
    assert 0.15 < hidden / n_read < 0.35


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    config = tiny_config()
    parts, root, losses = build(config), tmp_path_factory.mktemp("warm"), []
    before = jax.tree.map(np.array, parts.params)
    params, path = warm_start(config, parts, root,
                              lambda done, passes, loss: losses.append((done, passes, loss)))
    for left, right in zip(jax.tree.leaves(before), jax.tree.leaves(parts.params)):
        np.testing.assert_array_equal(left, right)  # the parts are not used up
    return config, parts, root, params, path, losses


def test_loss_falls(trained):
    config, *_, losses = trained
    passes = config.warm_start.passes
    assert [(done, of) for done, of, _ in losses] == [(i + 1, passes) for i in range(passes)]
    values = [loss for _, _, loss in losses]
    assert values[-1] < 0.6 * values[0] and np.isfinite(values).all()


def test_the_cached_file_is_read_and_not_made_again(trained):
    config, parts, root, params, path, losses = trained
    assert path.parent == root and checkpoint.latest(path) is not None
    before = len(losses)
    again, same = warm_start(config, parts, root, lambda *_: losses.append("trained again"))
    assert same == path and len(losses) == before
    for left, right in zip(jax.tree.leaves(params), jax.tree.leaves(again)):
        np.testing.assert_array_equal(left, right)
    assert json.loads((checkpoint.latest(path) / "host.json").read_text()) == {
        "passes": config.warm_start.passes}


@pytest.mark.parametrize("what", ["setting", "weights", "traces", "wordings"])
def test_another_start_has_another_file(trained, what, monkeypatch):
    config, parts, root, _, path, _ = trained
    if what == "setting":
        config = dataclasses.replace(config, warm_start=dataclasses.replace(
            config.warm_start, lr=0.02))
    elif what == "weights":
        parts = dataclasses.replace(parts, params=parts.params | {"embed": parts.params["embed"] + 1})
    elif what == "wordings":
        config = dataclasses.replace(config, warm_start=dataclasses.replace(
            config.warm_start, wordings=3))
    else:
        config = dataclasses.replace(config, warm_start=dataclasses.replace(
            config.warm_start, traces=15, batches=2))
    made = []
    monkeypatch.setattr("rods_jax.warm_start._train",
                        lambda *_: made.append(1) or parts.params)
    _, other = warm_start(config, parts, root, lambda *_: None)
    assert made and other != path and other.parent == root
