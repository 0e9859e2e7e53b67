import dataclasses

import numpy as np
import pytest

from rods_jax.models.config import ModelConfig, llama3_rope_divisors

TOY = ModelConfig(vocab_size=48, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32,
                  d_ff=40)


@pytest.mark.parametrize("change, words", [
    ({"d_model": 0}, "d_model is 0"),
    ({"n_layers": 2.0}, "n_layers is 2.0"),
    ({"vocab_size": True}, "vocab_size is True"),
    ({"n_kv_heads": 3}, "n_heads 4 is not a multiple of n_kv_heads 3"),
    ({"head_dim": 31}, "head_dim 31 is odd"),
    ({"rope_theta": -1.0}, "rope_theta is -1.0"),
    ({"norm_eps": float("nan")}, "norm_eps is nan"),
    ({"compute_dtype": "float16"}, "compute_dtype 'float16'"),
    ({"rope_divisors": [1.0] * 16}, "rope_divisors is not a tuple"),
    ({"rope_divisors": (1.0, 2.0)}, "head_dim 32 needs 16"),
    ({"rope_divisors": (0.0,) * 16}, "not positive"),
])
def test_values_that_do_not_fit_are_named(change, words):
    with pytest.raises(ValueError, match=words) as error:
        dataclasses.replace(TOY, **change)
    assert "\n" not in str(error.value)


def test_configs_can_key_a_jit_cache():
    assert hash(dataclasses.replace(TOY, scan_unroll=2)) != hash(TOY) == hash(
        dataclasses.replace(TOY))


def divided_as_published(head_dim, theta, factor, low, high, length):
    """The scaling written the other way round: new frequency from old, by cases."""
    divisors = []
    for i in range(0, head_dim, 2):
        freq = theta ** (-i / head_dim)
        wavelength = 2 * np.pi / freq
        if wavelength < length / high:
            new = freq
        elif wavelength > length / low:
            new = freq / factor
        else:
            smooth = (length / wavelength - low) / (high - low)
            new = (1 - smooth) * freq / factor + smooth * freq
        divisors.append(freq / new)
    return divisors


@pytest.mark.parametrize("head_dim, factor, kept, between, divided", [
    (128, 8.0, 29, [1.2075, 1.5534, 2.0263, 2.6945, 3.6843, 5.2573], 29),
    (64, 32.0, 15, [1.6513, 3.2923, 9.6667], 14),
])
def test_llama3_divisors_of_the_released_settings(head_dim, factor, kept, between, divided):
    settings = (head_dim, 5e5, factor, 1.0, 4.0, 8192)
    got = llama3_rope_divisors(*settings)
    np.testing.assert_allclose(got, divided_as_published(*settings), rtol=1e-12)
    np.testing.assert_allclose(got, [1.0] * kept + between + [factor] * divided, rtol=3e-5)


def test_llama3_needs_low_below_high():
    with pytest.raises(ValueError, match="low_freq_factor 4.0 is not below"):
        llama3_rope_divisors(64, 1e4, 8.0, 4.0, 4.0, 8192)
