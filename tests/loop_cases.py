"""What the tests of the loop share: a tiny policy, and a replay that is not the engine's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from rods_jax.config import typed
from rods_jax.models.config import ModelConfig
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.run_config import RunConfig
from rods_jax.text.compact import CompactFormat
from rods_jax.tools.toolbox import KINDS, ToolboxSuite, lexicon
from rods_jax.types import Author, EndReason

SUITE = ToolboxSuite()
CHAT = CompactFormat(SUITE.tools(SUITE.domains), lexicon(), 8, KINDS)


def babbler(seed: int = 0):
    """A policy without training that often ends its messages and now and then makes a call:
    the tokens of short calls share a direction in which every hidden state points."""
    model = ModelConfig(vocab_size=CHAT.vocab_size, d_model=16, n_layers=1, n_heads=2,
                        n_kv_heads=2, head_dim=8, d_ff=32)
    params = init_params(model, jax.random.key(seed))
    embed = np.array(jax.random.normal(jax.random.key(seed + 1), params["embed"].shape)) * 0.3
    embed[:, 0] = 1.0
    embed[CHAT.first_slot:, 0] = 1.5
    for name in ("find_file", "read_file", "last_message", "done"):
        embed[CHAT.vocabulary.index(name), 0] = 3.0
    # Likely everywhere, and none makes itself likelier: check_balance takes no argument.
    balance = CHAT.vocabulary.index("check_balance")
    embed[[balance, *CHAT.stop_ids]] = 0.0
    embed[list(CHAT.stop_ids), 0] = 4.5
    embed[balance, 0] = 4.8
    return Decoder(model), params | {"embed": jnp.asarray(embed, jnp.float32)}


class Forgetful:
    """The compact dialogue, but a new turn shows the first prompt and that turn alone."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def clone(self):
        other = Forgetful(self._inner.clone())
        other.first = self.first
        return other

    def prompt(self, turn):
        self.first = self._inner.prompt(turn)
        return self.first

    def user(self, turn):
        return [*self.first, *self._inner.user(turn)]


class ForgetfulFormat:
    rewrites = True

    def __getattr__(self, name):
        return getattr(CHAT, name)

    def start(self, task, tools):
        return Forgetful(CHAT.start(task, tools))


FORGETFUL = ForgetfulFormat()


@dataclasses.dataclass
class Replay:
    """A dialogue played again from its messages alone."""

    tokens: list[int]
    author: list[int]
    outcomes: list
    end: EndReason | None
    n_steps: int = 0
    n_malformed: int = 0


def messages(trajectory) -> list[list[int]]:
    """The sampled tokens, cut after every stop token."""
    found, open_ = [], []
    for token, author in zip(trajectory.tokens_L.tolist(), trajectory.author_L.tolist()):
        if author == Author.SAMPLED:
            open_.append(token)
            if token in CHAT.stop_ids:
                found.append(open_)
                open_ = []
    return [*found, open_] if open_ else found


def replay(task, said: list[list[int]], max_len: int, max_steps: int = 8,
           stop_on_failed_turn: bool = True) -> Replay:
    """Feeds the messages to a fresh environment and a fresh dialogue."""
    env, dialogue = SUITE.make_env(task), CHAT.start(task, SUITE.tools(task.domains))
    prompt = dialogue.prompt(env.begin_turn())
    run = Replay(list(prompt), [int(Author.PROMPT)] * len(prompt), [], None)
    steps = 0
    for ids in said:
        assert run.end is None, "a message after the end"
        run.tokens += ids
        run.author += [int(Author.SAMPLED)] * len(ids)
        if ids[-1] not in CHAT.stop_ids:
            run.end = EndReason.TOKEN_LIMIT
            continue
        step = dialogue.parse(ids)
        steps, run.n_steps = steps + 1, run.n_steps + 1
        run.n_malformed += bool(step.errors)
        if step.errors or step.calls:
            answer = dialogue.errors(step.errors) if step.errors else dialogue.results(
                step.calls, env.execute(step.calls))
            if steps == max_steps:
                run.end = EndReason.STEP_LIMIT
        else:
            run.outcomes.append(env.end_turn(step.text))
            steps, turn = 0, env.begin_turn()
            if turn is None:
                run.end = EndReason.DONE
            elif stop_on_failed_turn and not run.outcomes[-1].passed:
                run.end = EndReason.FAILED_TURN
            else:
                answer = dialogue.user(turn)
        if run.end is None and len(run.tokens) + len(answer) >= max_len:
            run.end = EndReason.TOKEN_LIMIT
        if run.end is None:
            run.tokens += answer
            run.author += [int(Author.INSERTED)] * len(answer)
    return run


def assert_follows_its_replay(trajectory, task, **limits):
    again = replay(task, messages(trajectory), **limits)
    assert trajectory.tokens_L.tolist() == again.tokens
    assert trajectory.author_L.tolist() == again.author
    assert list(trajectory.outcomes) == again.outcomes and trajectory.end is again.end
    assert (trajectory.n_steps, trajectory.n_malformed) == (again.n_steps, again.n_malformed)
    assert trajectory.n_turns == len(task.turns) and trajectory.task_uid == task.uid
    assert not trajectory.logprobs_L[trajectory.author_L != Author.SAMPLED].any()


FIELDS = dict(
    seed=0, steps=4, tasks_per_step=4, group_size=4, minibatches=2, batch=dict(rows=4, prompts=2),
    tasks=dict(seeds=8, held_in=8),
    policy=dict(d_model=32, n_layers=1, n_heads=2, n_kv_heads=2, d_ff=64, slots=8),
    warm_start=dict(traces=16, passes=20, batches=2, rows=4, lr=1e-2),
    sampler=dict(slots=16, max_len=128, prompt_len=48, max_new=12, sharers=4, prompts=6,
                 extend=((8, 16),)),
    optimizer=dict(lr=1e-3), pool=dict(capacity=32, p_max=16, beta=0.5),
    boundary=dict(alpha_minus=0.02),
    curriculum=dict(stages=(dict(steps=None, reward="progress", synthesis=True),)),
    admit_every=1)


def tiny_config(**changes) -> RunConfig:
    """A run of seconds: 8 seeds, 1 layer, groups of 4. `changes` are fields of RunConfig."""
    return typed(RunConfig, {**FIELDS, **changes}, "tests")


def write_config(path, **changes):
    """The same as a config file."""
    path.write_text(f"def get_config():\n    return {({**FIELDS, **changes})!r}\n")
    return path
