"""Operations by formula against a count token by token, and against the compiler's own."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rods_jax.grpo.logprobs import token_logprobs
from rods_jax.models import flops, lora
from rods_jax.models.attention import Segments
from rods_jax.models.config import Attention, LoraConfig, ModelConfig, Remat
from rods_jax.models.decoder import Decoder, init_params

MODEL = ModelConfig(512, d_model=96, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=320,
                    tie_embeddings=False)
ADAPTED = LoraConfig("q_proj|o_proj|up_proj|down_proj", rank=12)
ROWS, LENGTH = 4, 32  # attention of so few is one block of all rows and heads


def sizes(model):
    """Numbers in each of the decoder's matmul weights, all layers."""
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    flat = {**params["layers"], "head": params.get("head", params["embed"])}
    return {name: int(np.prod(x.shape)) for name, x in flat.items()}


@pytest.mark.parametrize("model", [MODEL, dataclasses.replace(MODEL, lora=ADAPTED)])
def test_parameters_are_those_of_the_decoder(model):
    found = sizes(model)
    assert flops.layer_parameters(model) == sum(
        found[name] for name in ("q", "k", "v", "o", "gate", "up", "down"))
    assert flops.head_parameters(model) == found["head"]
    assert flops.adapter_parameters(model) == sum(
        n for name, n in found.items() if name.endswith((lora.A, lora.B)))


@pytest.mark.parametrize("adapted", [None, ADAPTED])
def test_an_update_equals_a_count_token_by_token(adapted):
    model = dataclasses.replace(MODEL, lora=adapted)
    groups, rollouts, prompt, suffix = 3, 4, 7, 5
    found, forward, backward = sizes(model), 0, 0
    weights = sum(found[name] for name in ("q", "k", "v", "o", "gate", "up", "down"))
    adapters = sum(n for name, n in found.items() if "_lora_" in name)

    def token(position, scored):
        nonlocal forward, backward
        heads = model.n_layers * model.n_heads
        for _seen in range(position + 1):  # a score and a weighted value, then four gradients
            forward += heads * 2 * 2 * model.head_dim
            backward += heads * 4 * 2 * model.head_dim
        head = scored * found["head"]
        forward += 2 * (weights + adapters + head)
        backward += 2 * (2 * adapters + (1 if adapted else 2) * (weights + head))

    for _ in range(groups):
        for position in range(prompt):
            token(position, False)
        for _, position in itertools.product(range(rollouts), range(suffix)):
            token(prompt + position, True)
    work = flops.shared_work(groups, rollouts, prompt, suffix)
    got = flops.update_flops(model, work, Attention.XLA)
    assert (got.forward, got.backward, got.reference) == (forward, backward, 0)
    assert flops.update_flops(model, work, Attention.XLA, reference=True).reference == forward
    assert got.needed == forward + backward


def compilers_own(model, gradient=True):
    """FLOPs of a pass, as the compiler counts them. Layers are unrolled and the head runs one
    chunk, for of a loop it counts one turn."""
    model = dataclasses.replace(model, scan_unroll=model.n_layers)
    decoder, shape = Decoder(model), (ROWS, LENGTH)
    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    frozen, own = lora.split(params) if model.lora else ({}, params)

    def loss(own, frozen, tokens, scored):
        whole = {"params": lora.join(frozen, own)}
        hidden, _ = decoder.apply(whole, tokens, jnp.broadcast_to(jnp.arange(LENGTH), shape),
                                  Segments(jnp.ones(shape, jnp.int32)))
        return token_logprobs(lambda x: decoder.apply(whole, x, method="logits"), hidden, tokens,
                              scored, 1.0, LENGTH - 1, False)[0].sum()

    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    # It is not run, so its code need not be fast.
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    lowered = jax.jit(jax.value_and_grad(loss) if gradient else loss).lower(
        own, frozen, tokens, jax.ShapeDtypeStruct(shape, bool))
    return lowered.compile(compiler_options=quick).cost_analysis()["flops"]


def by_formula(model):
    work = flops.Work(ROWS * LENGTH, ROWS * LENGTH**2, ROWS * (LENGTH - 1))
    return flops.update_flops(model, work, Attention.XLA)


@pytest.mark.parametrize("remat", Remat)
def test_the_compiler_counts_as_many(remat):
    """A block of attention makes the product of every query with every key. What differs is what
    a formula leaves out: norms, softmax and the like; and of a single block the compiler makes
    the scores once for both passes."""
    model = dataclasses.replace(MODEL, n_layers=2, remat=remat)
    want = by_formula(model)
    assert compilers_own(model) == pytest.approx(want.computed - want.attention_again, rel=0.03)
    if remat is Remat.NONE:
        assert compilers_own(model, gradient=False) == pytest.approx(
            by_formula(model).forward, rel=0.03)


@pytest.mark.parametrize("remat", [Remat.DOTS, Remat.LAYER])
def test_the_compiler_counts_as_many_for_adapters(remat):
    """Below the first layer nobody needs a gradient where the embedding is frozen. A scan over
    layers makes it all the same, so the formula has it: what a layer more takes is compared."""
    few, many = (dataclasses.replace(MODEL, n_layers=n, remat=remat, lora=ADAPTED)
                 for n in (2, 3))
    assert compilers_own(many) - compilers_own(few) == pytest.approx(
        by_formula(many).computed - by_formula(few).computed, rel=0.03)


def test_kernels_take_scores_again():
    work = flops.shared_work(2, 4, 64, 32)
    xla, cudnn, splash = (flops.update_flops(MODEL, work, kind) for kind in (
        Attention.XLA, Attention.CUDNN, Attention.SPLASH))
    product = 2 * MODEL.n_layers * MODEL.n_heads * MODEL.head_dim * work.pairs
    assert [x.attention_again for x in (xla, cudnn, splash)] == [product, product, 3 * product]
    assert xla.needed == cudnn.needed == splash.needed
    assert splash.computed - xla.computed == 2 * product
    dots = dataclasses.replace(MODEL, remat=Remat.DOTS)  # which keeps what a kernel gives
    assert flops.update_flops(dots, work, Attention.SPLASH).layers_again == 0
