"""A decoder in plain numpy float64, one sequence and one head at a time, for comparison.

Weights are a flat dict in the [out, in] layout of Hugging Face and llama.cpp:
embed, final_norm, head, and per layer i: (i, name) with name as in the checkpoint.
"""

import numpy as np


def normed(x, scale, eps):
    return x / np.sqrt((x ** 2).mean(-1, keepdims=True) + eps) * scale


def turned(x, positions, theta, divisors, neighbours):
    """x [L, HD]: pairs as complex numbers, turned by position * frequency. The pairs are
    components (i, i + HD / 2), or (2i, 2i + 1) when `neighbours`."""
    half = x.shape[-1] // 2
    freqs = 1.0 / theta ** (np.arange(half) * 2.0 / x.shape[-1]) / divisors
    first, second = (x[:, 0::2], x[:, 1::2]) if neighbours else (x[:, :half], x[:, half:])
    z = (first + 1j * second) * np.exp(1j * np.outer(positions, freqs))
    out = np.empty_like(x)
    if neighbours:
        out[:, 0::2], out[:, 1::2] = z.real, z.imag
    else:
        out[:, :half], out[:, half:] = z.real, z.imag
    return out


def attention(q, k, v, allowed):
    """q [Lq, HD], k, v [Lk, HD], allowed [Lq, Lk]: softmax over the allowed keys alone."""
    out = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        keys = np.flatnonzero(allowed[i])
        s = k[keys] @ q[i] / np.sqrt(q.shape[1])
        p = np.exp(s - s.max())
        out[i] = (p / p.sum()) @ v[keys]
    return out


def logits(weights, config, tokens, neighbours=False):
    """[L, V] of one sequence at positions 0 .. L - 1."""
    w = {key: np.asarray(value, np.float64) for key, value in weights.items()}
    c, length = config, len(tokens)
    divisors = np.asarray(c.rope_divisors or 1.0)
    positions, causal = np.arange(length), np.tril(np.ones((length, length), bool))
    x = w["embed"][tokens]
    for i in range(c.n_layers):
        y = normed(x, w[i, "attn_norm"], c.norm_eps)
        heads = []
        for name, count in (("q", c.n_heads), ("k", c.n_kv_heads), ("v", c.n_kv_heads)):
            z = y @ w[i, name].T + w.get((i, f"{name}_bias"), 0.0)
            for_heads = [z[:, h * c.head_dim:(h + 1) * c.head_dim] for h in range(count)]
            if (i, f"{name}_norm") in w:
                for_heads = [normed(z, w[i, f"{name}_norm"], c.norm_eps) for z in for_heads]
            if name != "v":
                for_heads = [turned(z, positions, c.rope_theta, divisors, neighbours)
                             for z in for_heads]
            heads.append(for_heads)
        q, k, v = heads
        share = c.n_heads // c.n_kv_heads
        mixed = [attention(q[h], k[h // share], v[h // share], causal) for h in range(c.n_heads)]
        x = x + np.concatenate(mixed, -1) @ w[i, "o"].T
        y = normed(x, w[i, "mlp_norm"], c.norm_eps)
        gate = y @ w[i, "gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w[i, "up"].T)) @ w[i, "down"].T
    return normed(x, w["final_norm"], c.norm_eps) @ w.get("head", w["embed"]).T


def from_params(params):
    """The decoder's parameter tree in this module's layout."""
    weights = {"embed": params["embed"], "final_norm": params["final_norm"]}
    if "head" in params:
        weights["head"] = np.asarray(params["head"]).T
    for name, stacked in params["layers"].items():
        for i, x in enumerate(np.asarray(stacked)):
            if name in ("q", "k", "v"):
                x = x.reshape(x.shape[0], -1).T
            elif name == "o":
                x = x.reshape(-1, x.shape[-1]).T
            elif name in ("gate", "up", "down"):
                x = x.T
            elif name.endswith("_bias"):
                x = x.reshape(-1)
            weights[i, name] = x
    return weights
