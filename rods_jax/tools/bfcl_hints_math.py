"""Hints for MathAPI."""

from __future__ import annotations

from rods_jax.tools.bfcl_hints_case import TELL, Failed
from rods_jax.tools.hints import closest

SI_UNITS = ("km", "m", "cm", "mm", "um", "nm")
PAIRS = (("cm", "in"), ("m", "ft"), ("m", "yd"), ("km", "miles"), ("kg", "lb"),
         ("celsius", "fahrenheit"))
_SPELLED = {
    "kilometer": "km", "kilometre": "km", "meter": "m", "metre": "m", "centimeter": "cm",
    "centimetre": "cm", "millimeter": "mm", "millimetre": "mm", "micrometer": "um",
    "micron": "um", "nanometer": "nm", "nanometre": "nm", "inch": "in", "inche": "in",
    "foot": "ft", "feet": "ft", "yard": "yd", "mile": "miles", "mi": "miles",
    "kilogram": "kg", "kilo": "kg", "pound": "lb", "c": "celsius", "f": "fahrenheit",
}


def math_hint(f: Failed) -> str:
    if f.says("Conversion from"):
        return _units(f)
    if f.says("Cannot divide by zero"):
        return "b must not be 0."
    if f.says("Whole value cannot be zero"):
        return "whole must not be 0."
    if f.says("Cannot calculate square root"):
        return f"number must be 0 or more: check its sign, or {TELL}."
    if f.says("Cannot calculate", "Cannot find"):
        return "Give at least one number, such as numbers=[1, 2]."
    if f.says("valid range for prec"):
        return "precision is the count of digits: 1 or more."
    if f.name == "logarithm" and f.args.get("base") == 1:
        return "base must not be 1."
    if f.name == "power" and f.args.get("base") == 0:
        return "0 takes no negative exponent."
    large = ("range" in f.error or "too large" in f.error or "too many digits" in f.error
             or "overflow" in f.error.lower())
    return f"The result is too large for this tool: check the values, or {TELL}." if large else ""


def _unit(given: str, known: tuple[str, ...]) -> str:
    """The unit as the tools write it, "" where it is none of these."""
    word = given.strip().casefold()
    unit = _SPELLED.get(word.removesuffix("s"), word)
    if unit in known:
        return unit
    return (closest(word, [k for k in known if len(k) > 2]) or [""])[0]


def _units(f: Failed) -> str:
    si = f.name == "si_unit_conversion"
    other = "imperial_si_conversion" if si else "si_unit_conversion"
    known = tuple(dict.fromkeys([*SI_UNITS, *(u for pair in PAIRS for u in pair)]))
    a, b = _unit(f.text("unit_in"), known), _unit(f.text("unit_out"), known)
    both_si = a in SI_UNITS and b in SI_UNITS
    in_pairs = (a, b) in PAIRS or (b, a) in PAIRS
    if both_si if si else in_pairs:
        return f"Write the units as {a!r} and {b!r}."
    if (in_pairs if si else both_si) and other in f.visible:
        return f"Use {other} from {a!r} to {b!r}."
    if si:
        return f"Units here are {', '.join(SI_UNITS)}."
    return f"Pairs of units here, both ways: {', '.join('-'.join(p) for p in PAIRS)}."
