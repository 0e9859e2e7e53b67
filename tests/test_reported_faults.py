"""Faults that others reported of their trainers, each with its small input and the right value,
through the path a run takes. One test a fault; its source stands in its docstring.

Two have more of their own: keys, by whole rollouts under one and four workers, in
test_rollout_exact.py; checkpoints that other meshes wrote in test_checkpoint.py.
"""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_cases import VOCAB, tiny_decoder, trajectory
from grpo_reference import OPTIMIZER, assert_close, gradient, quick_jit
from loop_cases import FIELDS, tiny_config
from loss_reference import loss_of
from rollout_world import SUITE, SmallFormat, make_task

from rods_jax.grpo.advantage import AdvantageConfig, Spread, group_advantage
from rods_jax.grpo.batch import BatchShape, pack
from rods_jax.grpo.logprobs import predicted_mask, token_logprobs
from rods_jax.grpo.loss import Aggregation, LossConfig, RatioLevel, token_terms, token_weights
from rods_jax.grpo.update import UpdateConfig, init_state, make_update
from rods_jax.models.attention import attend, causal_mask
from rods_jax.rollout.draw import Filter, draw, row_keys
from rods_jax.rollout.engine import _Rollout, make_prompt
from rods_jax.types import Author

P, M, T = Author.PROMPT, Author.SAMPLED, Author.INSERTED
SHAPE = BatchShape(micro=2, rows=2, length=32, tasks=2, group=2)
LOSS = LossConfig(kl_coef=0.3, entropy_coef=0.05)
LEAVE = UpdateConfig(loss=LOSS, logit_chunk=32)
KEEP = dataclasses.replace(LEAVE, advantage=AdvantageConfig(dead_keep_kl=True))


@cache
def update_of(config):
    """Jitted, and a list that grows with every trace."""
    traces, inner = [], make_update(tiny_decoder()[0], config, OPTIMIZER)

    def update(state, batch):
        traces.append(1)
        return inner(state, batch)
    return quick_jit(update), traces


def start():
    """A policy that has moved away from its reference."""
    state = init_state(tiny_decoder()[1], OPTIMIZER, keep_reference=True)
    return state.replace(ref_params=jax.tree.map(lambda x: x * 0.9 + 0.02, state.params))


def packed(groups, rewards, drop_dead=False):
    rows = np.zeros((SHAPE.tasks, SHAPE.group), np.float32)
    rows[:len(rewards)] = rewards
    return pack(groups, rows, SHAPE, drop_dead)


def loss_mask(group, length):
    """bool [G, length]: rollouts alone in their rows, and the tokens that carry loss."""
    shape = BatchShape(micro=1, rows=len(group), length=length, tasks=1, group=len(group))
    batch = pack([group], np.arange(len(group), dtype=np.float32)[None], shape, True)
    return np.asarray(predicted_mask(batch.sampled_MxRxL, batch.segments_MxRxL))[0]


def rollout(author, seed=0, sample=0):
    rng = np.random.default_rng(seed + sample)
    author = np.asarray(author, np.int8)
    logprobs = np.where(author == M, -2.5 + 0.1 * rng.standard_normal(len(author)), 0)
    return trajectory(rng.integers(0, VOCAB, len(author)), author, logprobs, sample=sample)


@cache
def whole_rows():
    """Jitted (params, tokens [n, L]) -> log-prob and entropy of tokens 1 .. L - 1."""
    def f(params, tokens):
        decoder, length = tiny_decoder()[0], tokens.shape[1]
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        hidden, _ = decoder.apply({"params": params}, tokens, positions, causal_mask(length))
        logp = jax.nn.log_softmax(decoder.apply({"params": params}, hidden, method="logits"))
        entropy = -(jnp.exp(logp) * logp).sum(-1)[:, :-1]
        return jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], -1)[..., 0], entropy
    return quick_jit(f)


# ---------------------------------------------------------------- masks


def test_tool_output_inside_a_response_carries_no_loss():
    """verl-project/verl#4412: a mask made of the response's length trains on tool output."""
    author = [P, P, M, M, M, T, T, T, M, M]
    group = [rollout(author, sample=i) for i in range(2)]
    assert loss_mask(group, 10)[:, 2:].tolist() == [[1, 1, 1, 0, 0, 0, 1, 1]] * 2
    state = start()
    _, metrics = update_of(LEAVE)[0](state, packed([group], [[0, 1]]))
    assert metrics.n_tokens == 10 and metrics.tokens_A.tolist() == [4, 10, 6]

    tokens = np.stack([r.tokens_L for r in group])
    logp, entropy = whole_rows()(state.params, tokens)
    ref, _ = whole_rows()(state.ref_params, tokens)
    sampler = np.stack([r.logprobs_L for r in group])[:, 1:]
    owner = np.repeat([0, 1], 9)
    terms, loss, *_ = loss_of(
        *(np.asarray(x, np.float64).reshape(-1) for x in (logp, sampler, 2.0 * owner - 1)),
        np.tile(np.asarray(author)[1:] == M, 2), np.asarray(entropy, np.float64).reshape(-1),
        np.asarray(ref, np.float64).reshape(-1), owner, owner, LOSS)
    assert metrics.loss == pytest.approx(loss, abs=1e-5)
    for name, found in (("policy", metrics.policy_loss), ("kl", metrics.kl),
                        ("entropy", metrics.entropy), ("gap", metrics.logprob_gap)):
        assert found == pytest.approx(terms[name].sum() / 10, abs=1e-5), name


def test_an_end_token_that_is_also_padding_is_told_by_length():
    """NVIDIA-NeMo/Megatron-Bridge#4660, bingreeky/MemGen#33: padding told by its id, which is
    that of the end token, takes the end's loss away, or makes all rows equally long."""
    group = [trajectory([7, 5, 6, 0], [P, M, M, M]), trajectory([7, 5, 0], [P, M, M], sample=1)]
    assert loss_mask(group, 6)[:, 1:].tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    _, metrics = update_of(LEAVE)[0](start(), packed([group], [[0, 1]]))
    assert metrics.n_tokens == 5 and metrics.n_sequences == 2 and metrics.grad_norm > 0


def test_the_first_token_of_a_response_has_a_loss():
    """verl-project/verl#3287: a mask shifted one place too far leaves it out."""
    group = [rollout([P, P, P, M, M], sample=i) for i in range(2)]
    assert loss_mask(group, 5)[:, 1:].tolist() == [[0, 0, 1, 1]] * 2
    group = [rollout([P, P, P, M], sample=i) for i in range(2)]
    new, metrics = update_of(LEAVE)[0](start(), packed([group], [[0, 1]]))
    assert metrics.n_tokens == 2 and metrics.grad_norm > 0 and bool(metrics.applied)

    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 3)), jnp.float32)

    def score(hidden):
        return token_logprobs(lambda x: x, hidden, jnp.ones((1, 4), jnp.int32),
                              jnp.asarray(loss_mask(group, 4)[:1]), 1.0, 4)[0].sum()
    moved = np.abs(jax.grad(score)(hidden)).sum(-1)[0] > 0
    assert moved.tolist() == [False, False, True, False]  # the third prompt token predicts it


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("ratio", list(RatioLevel))
def test_far_log_ratios_are_finite_and_masked_ones_add_nothing(ratio):
    """PrimeIntellect-ai/prime-rl#2972, yaof20/Flash-RL#19: exp(89) overflows, a masked token
    poisons the sum as 0 x inf, and a masked token filled with log-prob 1 has a ratio of 1 / e."""
    def total(logp, old, mask):
        c = dataclasses.replace(LOSS, ratio=ratio)
        return token_terms(logp, old, jnp.float32([-1, 1]), jnp.asarray(mask), 0 * logp, old, c,
                           jnp.zeros(2, jnp.int32)).loss.sum()
    f = jax.value_and_grad(total, (0, 1))
    near, new = jnp.float32([-1.0, -1.0]), jnp.float32([-1.0, -2.0])
    alone = f(near, jnp.float32([-1.2, -1.2]), [True, False])
    assert alone[0] != 0 and alone[1][0][0] != 0 and alone[1][0][1] == 0
    for old in (-91.0, 91.0, 1.0, 0.0, np.inf, -np.inf, np.nan):
        got = f(new, jnp.float32([-1.2, old]), [True, False])
        jax.tree.map(np.testing.assert_array_equal, got, alone)
    for old in (-91.0, 91.0):
        live = f(new, jnp.float32([-1.2, old]), [True, True])
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(live))

    group = [rollout([P, M, M], sample=i) for i in range(2)]
    group[0].logprobs_L[1] = -91.0
    new, metrics = update_of(LEAVE)[0](start(), packed([group], [[0, 1]]))
    assert bool(metrics.applied) and all(np.isfinite(x).all() for x in jax.tree.leaves(metrics))


def test_masked_micro_batches_and_rows_change_nothing():
    """NVIDIA-NeMo/RL#158, huggingface/trl#5343: a mean over no token is NaN, in the loss or in
    the metrics."""
    update = update_of(LEAVE)[0]
    # The longer rollouts come first: the whole first micro-batch belongs to the dead group.
    live = [rollout([P] + [M] * 17, sample=i) for i in range(2)]
    dead = [rollout([P] + [M] * 20, seed=5, sample=i) for i in range(2)]
    masked = packed([dead], [[0.5, 0.5]])
    new, metrics = update(start(), masked)
    assert masked.n_micro == 1 and metrics.n_tokens == 0 and not metrics.applied
    assert metrics.loss == metrics.grad_norm == metrics.kl == metrics.entropy == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(metrics))
    assert not any(np.any(g) for g in jax.tree.leaves(gradient(new)))

    both, alone = packed([live, dead], [[0, 1], [0.5, 0.5]]), packed([live], [[0, 1]])
    assert (both.n_micro, alone.n_micro) == (2, 1)
    (state, got), (other, want) = (update(start(), batch) for batch in (both, alone))
    assert want.loss != 0 and got.loss == pytest.approx(float(want.loss), rel=1e-6)
    assert_close(gradient(state), gradient(other), atol=1e-7)
    for aggregation in Aggregation:
        c = LossConfig(aggregation=aggregation)
        weights, n = token_weights(jnp.zeros(4, bool), jnp.zeros(4, jnp.int32), 2, c)
        assert n == 0 and not weights.any()


def test_sampler_and_trainer_score_one_distribution():
    """huggingface/trl#4159, #3029, #6789, NVIDIA-NeMo/RL#316: a temperature on one side only, or
    what is left of the distribution renormalized on one side only."""
    logits = jnp.float32([[2.0, 0.0]])

    @quick_jit
    def trained(temperature):
        return token_logprobs(lambda x: x, jnp.stack([logits, logits], 1), jnp.zeros((1, 2), int),
                              jnp.asarray([[False, True]]), temperature, 2)[0][0, 1]

    def sampled(logits, temperature, keep):
        n, by_draw = 50, quick_jit(draw, static_argnums=4)
        token, logp = by_draw(jnp.tile(logits, (n, 1)), jax.random.split(jax.random.key(0), n),
                              jnp.arange(n), temperature, keep)
        return float(logp[np.flatnonzero(token == 0)[0]])
    assert trained(0.5) == pytest.approx(-0.01815, abs=1e-5)
    assert trained(1.0) == pytest.approx(-0.12693, abs=1e-5)
    assert sampled(logits, 0.5, Filter()) == pytest.approx(float(trained(0.5)), abs=1e-6)

    logits = jnp.log(jnp.float32([[0.6, 0.3, 0.1]]))
    left, whole = (sampled(logits, 1.0, keep) for keep in (Filter(top_p=0.9), Filter()))
    assert left == pytest.approx(-0.40547, abs=1e-5) and left - whole == pytest.approx(
        0.10536, abs=1e-5)
    config = tiny_config(sampler={**FIELDS["sampler"], "top_p": 0.9})
    with pytest.raises(ValueError, match="training scores under the whole distribution"):
        config.check_training()


def test_a_dead_group_is_told_by_its_own_variance_and_keeps_kl_only_when_asked():
    """huggingface/trl#6365, #7068: the spread of the batch hides a dead group, and its KL term
    still moves the weights."""
    rewards, valid = jnp.float32([[1, 1], [0, 1]]), jnp.ones((2, 2), bool)
    for spread in Spread:
        for scale in (True, False):
            stats = group_advantage(rewards, valid, AdvantageConfig(spread=spread,
                                                                    scale_by_std=scale))
            assert stats.live_T.tolist() == [False, True]
            assert not stats.advantage_TxG[0].any() and stats.advantage_TxG[1].all()

    groups = [[rollout([P, M, M], seed=t, sample=i) for i in range(2)] for t in range(2)]
    batch = packed(groups, [[0.5, 0.5], [1, 1]])
    for config, moves in ((LEAVE, False), (KEEP, True)):
        new, metrics = update_of(config)[0](start(), batch)
        assert (metrics.grad_norm > 0) == (metrics.kl > 0) == bool(metrics.applied) == moves
        assert metrics.policy_loss == 0 and metrics.dead_share == 1
        same = jax.tree.map(np.array_equal, new.params, start().params)
        assert all(jax.tree.leaves(same)) != moves


def test_statistics_are_a_groups_own_and_their_divisor_is_documented():
    """XU-YIJIE/grpo-flat#2, NVIDIA-NeMo/labs-molt#8, thinking-machines-lab/tinker-cookbook#579:
    mean and std of the whole batch, a ddof nobody stated, NaN for a group of one."""
    def of(rewards, **options):
        rewards = jnp.asarray(rewards, jnp.float32)
        return group_advantage(rewards, jnp.ones(rewards.shape, bool),
                               AdvantageConfig(eps=0.0, **options)).advantage_TxG
    assert AdvantageConfig().ddof == 0
    np.testing.assert_allclose(of([[0, 0, 0, 1]], ddof=0), [[-0.5774] * 3 + [1.7321]], atol=1e-4)
    np.testing.assert_allclose(of([[0, 0, 0, 1]], ddof=1), [[-0.5] * 3 + [1.5]], atol=1e-6)
    for ddof in (0, 1):
        assert of([[0.7]], ddof=ddof).tolist() == [[0.0]]
        two = of([[0.0, 0.2, 0.1], [0.9, 0.8, 1.0]], ddof=ddof)
        np.testing.assert_allclose(two.sum(1), [0, 0], atol=1e-5)
        assert np.abs(two).max(1).min() > 0.9


# ---------------------------------------------------------------- the compiler


@pytest.mark.parametrize("scores, weights", [([0, 100], [1, 0]), ([1, 1, 100], [0.5, 0.5, 0])])
def test_a_large_masked_score_has_a_finite_gradient(scores, weights):
    """jax-ml/jax#23842, #17117, #17070: a softmax masked after its exponential is right forward
    and NaN backward. Here the last key is masked."""
    n = len(scores)
    ones, keys = jnp.ones((1, n, 1, 1)), jnp.float32(scores).reshape(1, 1, n, 1)
    mask = (jnp.arange(n) < n - 1).reshape(1, 1, n)

    def first(q, k, v):
        return attend(q, k, v, mask)[0, 0, 0, 0]
    d_q, d_k, d_v = jax.grad(first, (0, 1, 2))(ones, keys, jnp.arange(n, dtype=jnp.float32
                                                                      ).reshape(1, 1, n, 1))
    np.testing.assert_allclose(d_v.reshape(-1), weights, atol=1e-6)
    assert np.isfinite(d_k).all() and d_k[0, 0, -1, 0] == 0 and np.isfinite(d_q).all()


def test_a_run_compiles_its_update_once():
    """jax-ml/jax#3163, #4274, google/jaxopt#451: a number of weak type, or a batch a token
    longer, is another program."""
    update, traces = update_of(LEAVE)
    kinds = lambda state: [(x.shape, x.dtype, x.aval.weak_type)  # noqa: E731
                           for x in jax.tree.leaves(state)]
    state = start()
    first = kinds(state)
    for length in (17, 18, 19):
        group = [rollout([P] + [M] * (length - 1), sample=i) for i in range(2)]
        state, metrics = update(state, packed([group], [[0, 1]]))
        assert metrics.n_tokens == 2 * (length - 1) and kinds(state) == first
    assert len(traces) == 1 and not any(weak for *_, weak in first)


def test_no_array_holds_the_logits_of_all_positions():
    """AI-Hypercomputer/maxtext#4409, THUDM/slime#2253: chunks of the reduction alone leave
    float32 logits of a whole row alive."""
    rows, length, vocab, width = 2, 64, 512, 6
    rng = np.random.default_rng(0)
    w, hidden = (jnp.asarray(rng.standard_normal(s), jnp.float32)
                 for s in ((width, vocab), (rows, length, width)))
    tokens = jnp.asarray(rng.integers(0, vocab, (rows, length)), jnp.int32)
    mask = jnp.asarray(rng.random((rows, length)) < 0.6).at[:, 0].set(False)

    def chunked(w, hidden):
        logp = token_logprobs(lambda x: x @ w, hidden, tokens, mask, 1.0, 16)[0]
        return logp.sum() / 8, logp

    def plain(w, hidden):
        logp = jax.nn.log_softmax(hidden @ w)[:, :-1]
        logp = jnp.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]
        logp = jnp.where(mask, jnp.pad(logp, ((0, 0), (1, 0))), 0)
        return logp.sum() / 8, logp
    programs = [jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True)).lower(w, hidden).compile()
                for f in (chunked, plain)]
    held = [any(f"f32[2,{n},512]" in p.as_text() for n in (63, 64)) for p in programs]
    assert held == [False, True]
    got, want = (p(w, hidden) for p in programs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)
    unscored = ~jnp.roll(mask, -1, 1).at[:, -1].set(False)
    spoilt = programs[0](w, jnp.where(unscored[..., None], jnp.nan, hidden))
    jax.tree.map(np.testing.assert_array_equal, spoilt, got)


def test_each_rollout_has_a_key_of_its_own_however_the_work_is_split():
    """verl-project/verl-omni#561, areal-project/AReaL#1524,
    google-deepmind/mujoco_playground#349: seeds from the index inside a chunk repeat across
    workers, a fixed seed makes the members of a group equal, one key serves two draws."""
    chat, key = SmallFormat(), jax.random.key(3)
    prompts = [make_prompt(make_task(f"task {i}"), SUITE, chat) for i in range(48)]

    def who(chunks):  # `group` counts within the chunk, as it does in each call of an engine
        return [_Rollout(prompts[i], group, sample, 0, None).who
                for part in np.array_split(np.arange(48), chunks)
                for group, i in enumerate(part) for sample in range(16)]
    assert who(1) == who(4)
    with jax.debug_key_reuse(True):
        keys = row_keys(key, jnp.asarray(who(4), jnp.uint32))
        data = np.asarray(jax.random.key_data(keys))
        token, _ = draw(jnp.zeros((768, 9)), keys, jnp.zeros(768, jnp.int32), 1.0, Filter())
    assert len({tuple(row) for row in data.tolist()}) == 768
    for row, (task, sample) in list(zip(data, who(1)))[::100]:
        want = jax.random.fold_in(jax.random.fold_in(key, task), sample)
        np.testing.assert_array_equal(row, jax.random.key_data(want))
    assert (np.ptp(np.asarray(token).reshape(48, 16), 1) > 0).all()  # members draw differently
