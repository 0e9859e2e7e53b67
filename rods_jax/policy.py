"""From a run's config to the suite, the text format, the decoder and its first weights."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rods_jax import checkpoint
from rods_jax.config import UserError
from rods_jax.learner import RULES, trained
from rods_jax.models import lora
from rods_jax.models.config import CHOICES, ModelConfig
from rods_jax.models.decoder import Decoder, init_params
from rods_jax.run_config import Chat, PolicyConfig, PolicySource, RunConfig
from rods_jax.text.compact import CompactFormat
from rods_jax.text.formats import ChatFormat
from rods_jax.text.hermes import HermesFormat
from rods_jax.text.shots import shots_of
from rods_jax.text.tokenizer import TextTokenizer
from rods_jax.tools.env import Suite
from rods_jax.tools.suites import SuiteName, SuiteSpec, make_suite
from rods_jax.types import Task


# Files of a model's folder that decide how it is spoken to.
_SPEECH = ("tokenizer.json", "tokenizer_config.json", "generation_config.json",
           "chat_template.*")


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run is made of. `params`: fresh or pretrained, before any warm start; adapters
    included."""

    suite: Suite
    chat: ChatFormat
    decoder: Decoder
    params: Any


def split(suite: Suite, name: str, count: int) -> list[Task]:
    """The first `count` tasks of a split, categories interleaved."""
    tasks = suite.split(name)
    if count > len(tasks):
        raise UserError(f"{suite.name} has {len(tasks)} tasks in split {name!r}, "
                         f"{count} were asked for: ask for fewer")
    return list(tasks[:count])


def build(config: RunConfig, mesh: Mesh | None = None) -> Parts:
    """mesh: the trainer's, over which large weights are read; None: on one device."""
    suite, spec = make_suite(config.tasks.spec()), config.tasks.spec()
    if config.policy.source is PolicySource.SMOLLM2:
        return _adapted(_smollm2(config.policy, spec, suite), config)
    if config.policy.source is PolicySource.HF:
        return _adapted(_hf(config.policy, spec, suite, mesh), config)
    # Runs of any seed may share one warm start, so its first weights are its own.
    seed = config.seed if config.warm_start is None else config.warm_start.seed
    return _compact(config.policy, suite, jax.random.key(seed))


def restored(parts: Parts, policy: PolicyConfig, path: pathlib.Path) -> Any:
    """All weights as a run's checkpoint has them. Raises CheckpointError, and UserError where
    the run's model is not the one that `policy` names."""
    frozen, own = trained(parts.decoder, parts.params)
    check_model(policy, parts.decoder.config, frozen, checkpoint.read_host(path)[1], path)
    found = checkpoint.restore(path, {"train": {"params": own}}, partial=True)
    own = found.arrays["train"]["params"]
    return own if frozen is None else lora.join(frozen, own)


def model_files(policy: PolicyConfig) -> dict[str, str]:
    """A checksum of each file at policy.path that decides what ids a text has and when a
    message ends. Empty for a policy of another source."""
    if not policy.path:
        return {}
    found = (path for name in _SPEECH for path in pathlib.Path(policy.path).glob(name))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            for path in sorted(found)}


def model_shape(model: ModelConfig) -> dict[str, Any]:
    """Of a model's config what decides its numbers, as JSON; how they are computed is left
    out."""
    return {name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(model).items() if name not in CHOICES}


def check_model(policy: PolicyConfig, model: ModelConfig, frozen: Any,
                host: Mapping[str, Any], path: pathlib.Path) -> None:
    """Raises UserError where a checkpoint was trained with another tokenizer, template or
    config.json than policy.path now holds, or over other frozen weights."""
    now, then = model_files(policy), host.get("model_files", {})
    for name in sorted(now.keys() | then.keys()):
        if now.get(name) != then.get(name):
            raise UserError(f"{pathlib.Path(policy.path) / name}: is not what it was when "
                            f"{path} was trained; bring back the model that the run began with")
    shape = model_shape(model)
    for name, value in host.get("model", {}).items():
        if value != shape[name]:
            raise UserError(f"{path}: was trained with a model whose {name} is {value}, now it is "
                            f"{shape[name]}; bring back the one that the run began with")
    if frozen is not None and host.get("frozen") != checkpoint.fingerprint(frozen):
        raise UserError(f"{path}: its adapters were trained over other weights than "
                        "policy.path now holds; bring back the model that the run began with")


def model_of(config: RunConfig) -> tuple[ModelConfig, str]:
    """What `build` makes the decoder of, and the dtype of weights that stay frozen. Neither
    weights nor tokenizer are read: of an HF policy a folder with its config.json will do."""
    policy = config.policy
    if policy.source is PolicySource.COMPACT:
        return _compact_model(policy, make_suite(config.tasks.spec()))[1], "float32"
    if policy.source is PolicySource.SMOLLM2:
        from rods_jax.models.gguf import read_gguf_config, smollm2_path
        return _computed(read_gguf_config(smollm2_path()), policy), "float32"
    from rods_jax.models.hf.config import read_config
    _check_folder(pathlib.Path(policy.path))
    found = read_config(policy.path)
    dtype = found.raw.get("dtype", found.raw.get("torch_dtype"))
    return (_computed(found.model, policy),
            dtype if dtype in ("bfloat16", "float16") else "float32")


def _compact_model(policy: PolicyConfig, suite: Suite) -> tuple[CompactFormat, ModelConfig]:
    if suite.name != SuiteName.TOOLBOX.value:
        raise UserError(f"policy.source compact has no vocabulary for suite {suite.name}: "
                        "use tasks.suite toolbox or another policy.source")
    from rods_jax.tools.toolbox import KINDS, lexicon
    chat = CompactFormat(suite.tools(suite.domains), lexicon(), policy.slots, KINDS)
    return chat, ModelConfig(
        vocab_size=chat.vocab_size, d_model=policy.d_model, n_layers=policy.n_layers,
        n_heads=policy.n_heads, n_kv_heads=policy.n_kv_heads,
        head_dim=policy.d_model // policy.n_heads, d_ff=policy.d_ff,
        compute_dtype=policy.compute_dtype, remat=policy.remat, attention=policy.attention,
        scan_unroll=policy.n_layers)


def _compact(policy: PolicyConfig, suite: Suite, key: jax.Array) -> Parts:
    chat, model = _compact_model(policy, suite)
    params = copying(init_params(model, key), key)
    return Parts(suite, chat, Decoder(model), params | {"embed": spelled(params["embed"], chat)})


def spelled(embed_VxD: jax.Array, chat: CompactFormat) -> jax.Array:
    """First embeddings that show what the spelling shows, each row keeping its length: a
    name such as cancel_booking begins as the mean of its words (the usual start of a token
    whose pieces are known), and the slots of a kind share a direction."""
    embed = np.array(embed_VxD)
    length_V = np.linalg.norm(embed, axis=1)
    id_of = {word: i for i, word in enumerate(chat.vocabulary)}
    rows = {row: [id_of[part] for part in name.split("_") if part in id_of]
            for name, row in id_of.items() if "_" in name}
    means = {row: embed[parts].mean(0) for row, parts in rows.items() if parts}
    for start in range(chat.first_slot, chat.vocab_size, chat.n_slots):
        shared = embed[start].copy()
        for row in range(start + 1, start + chat.n_slots):
            means[row] = embed[row] + shared
    for row, mean in means.items():
        embed[row] = mean * length_V[row] / np.linalg.norm(mean)
    return jnp.asarray(embed)


def copying(params: Any, key: jax.Array) -> Any:
    """The same tree with value projections orthonormal and output projections their
    transposes: a head that looks at a token then writes that token's own embedding, which
    is what copying an entity slot takes. Left to random weights, a small policy learns this
    far later than it memorizes its traces."""
    layers = params["layers"]
    n, d, kv_heads, width = layers["v"].shape
    basis = jax.nn.initializers.orthogonal()(key, (n, d, kv_heads * width))
    value = basis.reshape(n, d, kv_heads, width)
    sharing = layers["o"].shape[1] // kv_heads  # query heads that read the same values
    out = jnp.repeat(value.transpose(0, 2, 3, 1), sharing, axis=1) / sharing
    return params | {"layers": layers | {"v": value, "o": out}}


def _smollm2(policy: PolicyConfig, spec: SuiteSpec, suite: Suite) -> Parts:
    from rods_jax.models.gguf import load_gguf, smollm2_path
    from rods_jax.text.tokenizer import tokenizer_from_gguf
    path = smollm2_path()
    model, params = load_gguf(path)
    chat = _hermes(tokenizer_from_gguf(path), policy, spec)
    return Parts(suite, chat, Decoder(_computed(model, policy)), params)


def _hf(policy: PolicyConfig, spec: SuiteSpec, suite: Suite, mesh: Mesh | None) -> Parts:
    from rods_jax.models.hf.load import load
    from rods_jax.text.chat import chat_format
    from rods_jax.text.tokenizer import tokenizer_from_json
    _check_folder(pathlib.Path(policy.path))
    if policy.chat is Chat.HERMES:
        chat = _hermes(tokenizer_from_json(policy.path), policy, spec)
    else:
        chat = chat_format(policy.path, wire=policy.wire, thinking=policy.thinking,
                           system=policy.system)
    # Frozen weights stay in the file's dtype, trained ones are float32 masters.
    found, params = load(policy.path, None if policy.lora else "float32", mesh, RULES)
    if chat.vocab_size > found.model.vocab_size:
        raise UserError(f"{policy.path}: its tokenizer has {chat.vocab_size} tokens, its model "
                        f"only {found.model.vocab_size}; they are not of one model")
    return Parts(suite, chat, Decoder(_computed(found.model, policy)), params)


def _check_folder(folder: pathlib.Path) -> None:
    """UserError for what is no model's folder."""
    if not folder.is_dir():
        raise UserError(f"policy.path {folder} is no folder: give one with a model's files; one of "
                        "the hub is fetched by `hf download NAME --local-dir FOLDER`")
    if not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        raise UserError(f"policy.path {folder} holds "
                        + ("an adapter, not a model: give the folder of the model it belongs to"
                           if adapter else "no config.json: give the folder of a whole model"))


def _computed(model: ModelConfig, policy: PolicyConfig) -> ModelConfig:
    """A pretrained model, computed and adapted as the run asks."""
    return dataclasses.replace(model, compute_dtype=policy.compute_dtype, remat=policy.remat,
                               attention=policy.attention, lora=policy.lora)


def _adapted(parts: Parts, config: RunConfig) -> Parts:
    if config.policy.lora is None:
        return parts
    adapters = lora.init_adapters(parts.decoder.config, jax.random.key(config.seed))
    return dataclasses.replace(parts, params=lora.join(parts.params, adapters))


def _hermes(tokenizer: TextTokenizer, policy: PolicyConfig, spec: SuiteSpec) -> ChatFormat:
    # Examples may come from tasks that the run itself leaves out.
    whole = dataclasses.replace(spec, domains=())
    shots = shots_of(make_suite(whole).split("train")) if policy.shots else ()
    return HermesFormat(tokenizer, policy.schemas, shots=shots, n_shots=policy.shots)
