"""The operations of matmuls that a program executes, counted while it is run: an interpreter of
jaxprs that takes every turn of every loop. For small programs, since each step is dispatched
alone."""

import math

import jax
import numpy as np
from jax._src import core
from jax._src.interpreters import partial_eval


def executed_flops(function, *args) -> int:
    """2 for each multiply and add of all dot_generals in function(*args). What no result needs
    is left out, as a compiler leaves it out."""
    closed = jax.make_jaxpr(function)(*args)
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    leaves = [x for x, keep in zip(jax.tree.leaves(args), used) if keep]
    return _run(jaxpr, closed.consts, leaves)[1]


def _run(jaxpr, consts, args):
    """(outputs, operations)."""
    values, total = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args)), 0
    read = lambda v: v.val if isinstance(v, core.Literal) else values[v]  # noqa: E731
    for eqn in jaxpr.eqns:
        given = [read(v) for v in eqn.invars]
        name, params = eqn.primitive.name, eqn.params
        if name == "dot_general":
            total += _dot_flops(eqn)
        if name == "scan":
            out, n = _scan(params, given)
        elif name == "while":
            out, n = _while(params, given)
        elif name == "cond":
            index = int(given[0])
            out, n = _closed(params["branches"][index], given[1:])
        elif inner := next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr")
                            if key in params), None):
            out, n = _closed(inner, given)
        else:
            out, n = eqn.primitive.bind(*given, **params), 0
            out = out if eqn.primitive.multiple_results else [out]
        total += n
        values.update(zip(eqn.outvars, out))
    return [read(v) for v in jaxpr.outvars], total


def _closed(jaxpr, args):
    consts = getattr(jaxpr, "consts", ())
    return _run(getattr(jaxpr, "jaxpr", jaxpr), consts, args)


def _dot_flops(eqn) -> int:
    (contracting, _), _ = eqn.params["dimension_numbers"]
    inner = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracting)
    return 2 * inner * math.prod(eqn.outvars[0].aval.shape)


def _while(params, args):
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond, body, carry = args[:n_cond], args[n_cond:n_cond + n_body], args[n_cond + n_body:]
    total = 0
    while bool(_closed(params["cond_jaxpr"], [*cond, *carry])[0][0]):
        carry, n = _closed(params["body_jaxpr"], [*body, *carry])
        total += n
    return carry, total


def _scan(params, args):
    n_consts, n_carry = params["num_consts"], params["num_carry"]
    consts, carry, xs = args[:n_consts], args[n_consts:n_consts + n_carry], args[
        n_consts + n_carry:]
    steps, total, order = [], 0, range(params["length"])
    for i in reversed(order) if params["reverse"] else order:
        out, n = _closed(params["jaxpr"], [*consts, *carry, *(x[i] for x in xs)])
        carry, total = out[:n_carry], total + n
        steps.append(out[n_carry:])
    steps = steps[::-1] if params["reverse"] else steps
    return [*carry, *(np.stack(ys) for ys in zip(*steps))], total
