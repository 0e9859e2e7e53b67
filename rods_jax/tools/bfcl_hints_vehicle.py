"""Hints for VehicleControlAPI."""

from __future__ import annotations

from collections.abc import Callable

from rods_jax.tools.bfcl_hints_case import TELL, Failed, listed
from rods_jax.tools.hints import closest

CAPACITY = 50  # gallons
TOP_SPEED = 120
OPTIONS = ("fuel", "battery", "doors", "climate", "headlights", "parkingBrake", "brakePedal",
           "engine")


def vehicle_hint(f: Failed) -> str:
    return next((rule(f) for starts, rule in _RULES if f.says(*starts)), "")


def _engine(f: Failed) -> str:
    """Everything that startEngine still lacks, in the order of the calls."""
    if f.args.get("ignitionMode") == "STOP":
        return "The engine is stopped now: no further call is needed for that."
    lacks = []
    unlocked = [d for d, status in f.state.doorStatus.items() if status == "unlocked"]
    if unlocked:
        doors = ", ".join(repr(d) for d in unlocked)
        lacks.append(("lockDoors", f"lockDoors(unlock=false, door=[{doors}])",
                      "The doors must be locked"))
    if f.state.brakePedalStatus != "pressed" or f.state._brakePedalForce != 1000.0:
        lacks.append(("pressBrakePedal", "pressBrakePedal(pedalPosition=1.0)",
                      "The brake pedal must be pressed"))
    if f.name != "startEngine":
        lacks.append(("startEngine", "startEngine(ignitionMode='START')",
                      "The engine must be started"))
    withheld = next((what for tool, _, what in lacks if tool not in f.visible), None)
    if withheld:
        return f"{withheld} first, and no tool for that is at hand now: {TELL}."
    steps = [call for _, call, _ in lacks]
    return f"First {', then '.join(steps)}, then {f.name} again." if steps else ""


def _ignition(f: Failed) -> str:
    return ("The engine is stopped now: no further call is needed for that."
            if f.args.get("ignitionMode") == "STOP" else "ignitionMode is 'START' or 'STOP'.")


def _empty(f: Failed) -> str:
    return "Fill the tank first: " + f.by(("fillFuelTank", "fillFuelTank takes gallons."),
                                          otherwise=f"{TELL}.")


def _fuel(f: Failed) -> str:
    litres = f.by(("liter_to_gallon", " liter_to_gallon converts litres."), otherwise="")
    if f.says("Fuel amount cannot be negative"):
        return f"fuelAmount is what to add, in gallons, 0 or more.{litres}"
    level = f.state.fuelLevel
    room = (f" and has {level:g} in it: add at most {CAPACITY - level:g}"
            if "displayCarStatus" in f.visible and isinstance(level, (int, float)) else
            ": fuelAmount is what to add to what is in it")
    return f"The tank holds {CAPACITY} gallons{room}.{litres}"


def _door(f: Failed) -> str:
    """A KeyError of lockDoors. Doors before the unknown one were switched already."""
    doors = list(f.state.doorStatus)
    given = f.args.get("door")
    wrong = [d for d in given if d not in doors] if isinstance(given, (list, tuple)) else []
    near = closest(str(wrong[0]), doors) if wrong else []
    meant = f" {str(wrong[0])[:40]!r} may be {near[0]!r}." if near else ""
    return f"The doors are {listed(doors)}.{meant}" if f.name == "lockDoors" else ""


def _speed(f: Failed) -> str:
    speed = f.args.get("speed")
    near = ""
    if isinstance(speed, (int, float)):
        near = f", for example {min(max(5 * round(speed / 5), 0), TOP_SPEED)}"
    return f"speed must be a multiple of 5 from 0 to {TOP_SPEED}{near}."


def _choice(argument: str, *choices: str) -> Callable[[Failed], str]:
    def hint(f: Failed) -> str:
        near = closest(f.text(argument), choices)
        meant = f", here perhaps {near[0]!r}" if near else ""
        return f"{argument} is one of {', '.join(choices)}{meant}."
    return hint


def _distance(f: Failed) -> str:
    zipcode = f.by(("get_zipcode_based_on_city", "get_zipcode_based_on_city gives it"),
                   otherwise="ask the user for it")
    for argument in ("cityA", "cityB"):
        given = f.text(argument)
        if len(given) != 5 or not given.isdigit():
            return f"{argument} must be a zipcode, not {given!r}: {zipcode}."
        if given == "00000":
            return f"00000 in {argument} stands for an unknown city: check its name or {TELL}."
    if f.args["cityA"] == f.args["cityB"]:
        return "Both zipcodes are the same: give those of two cities."
    return ("No distance is known between these two zipcodes: "
            + f.by(("get_zipcode_based_on_city", "check both with get_zipcode_based_on_city, or "),
                   otherwise="") + f"{TELL}.")


def _weather(f: Failed) -> str:
    return "weather.com does not answer: " + f.by(
        ("get_outside_temperature_from_google", "use get_outside_temperature_from_google."),
        otherwise=f"{TELL}.")


def _fan(f: Failed) -> str:
    return "fanSpeed is a whole number from 0 to 100."


def _pedal(f: Failed) -> str:
    return "pedalPosition is from 0 (released) to 1 (fully pressed)."


_RULES: tuple[tuple[tuple[str, ...], Callable[[Failed], str]], ...] = (
    (("All doors must be locked", "Brake pedal needs", "Must press the brake",
      "Start the engine before"), _engine),
    (("Invalid ignition mode",), _ignition),
    (("Fuel tank is empty.",), _empty),
    (("Fuel amount cannot", "Cannot fill gas"), _fuel),
    (("Fan speed must",), _fan),
    (("Pedal position must",), _pedal),
    (("Invalid speed",), _speed),
    (("Invalid headlight mode",), _choice("mode", "on", "off", "auto")),
    (("Invalid mode",), _choice("mode", "engage", "release")),
    (("Invalid option",), _choice("option", *OPTIONS)),
    (("distance not found",), _distance),
    (("404",), _weather),
    (("'",), _door),
)
