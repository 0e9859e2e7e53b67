"""Bookings: trips, seats on hold, bookings. A seat is held first and confirmed then."""

from __future__ import annotations

import dataclasses

from rods_jax.tools.toolbox.domain import UPCOMING, Domain, take
from rods_jax.tools.toolbox.signature import Param, Tool, ToolError

_BOOKING = Param("booking", "booking")
_DATE = Param("date", "date")


@dataclasses.dataclass
class Bookings(Domain):
    """trips: {id: [city, date, price]}; holds: {id: trip};
    bookings: {id: [name, city, date, price]}; clutter: listed trips."""

    NAME = "bookings"
    TOOLS = (
        Tool("search_trips", "bookings", "Find a trip to a city on a date.",
             (Param("city", "city"), _DATE), (("trip", "trip"), ("price", "amount")),
             lists=True),
        Tool("hold_seat", "bookings", "Hold a seat on a trip.", (Param("trip", "trip"),),
             (("hold", "hold"),)),
        Tool("confirm_hold", "bookings", "Turn a held seat into a booking.",
             (Param("hold", "hold"),), (("booking", "booking"),)),
        Tool("release_hold", "bookings", "Give a held seat back.", (Param("hold", "hold"),)),
        Tool("find_booking", "bookings", "Find the booking made under a name.",
             (Param("name", "name"),), (("booking", "booking"),), lists=True),
        Tool("show_booking", "bookings", "Show city and date of a booking.", (_BOOKING,),
             (("city", "city"), ("date", "date"))),
        Tool("change_date", "bookings", "Move a booking to another date, for a fee.",
             (_BOOKING, _DATE), (("fee", "amount"),)),
        Tool("cancel_booking", "bookings", "Cancel a booking and get its price back.",
             (_BOOKING,), (("refund", "amount"),)),
    )

    trips: dict
    holds: dict
    bookings: dict
    next_holds: list
    next_bookings: list
    next_fees: list
    clutter: list

    def _booking(self, booking: str) -> list:
        if booking not in self.bookings:
            raise ToolError("no such booking")
        return self.bookings[booking]

    def search_trips(self, city: str, date: str) -> dict:
        for trip, (to, day, price) in self.trips.items():
            if to == city and day == date:
                return {"trip": trip, "price": price}
        raise ToolError("no such trip")

    def hold_seat(self, trip: str) -> dict:
        if trip not in self.trips:
            raise ToolError("no such trip")
        hold = take(self.next_holds)
        self.holds[hold] = trip
        return {"hold": hold}

    def confirm_hold(self, hold: str) -> dict:
        if hold not in self.holds:
            raise ToolError("no such hold")
        booking = take(self.next_bookings)
        self.bookings[booking] = ["", *self.trips[self.holds.pop(hold)]]
        return {"booking": booking}

    def release_hold(self, hold: str) -> dict:
        if hold not in self.holds:
            raise ToolError("no such hold")
        del self.holds[hold]
        return {"released": hold}

    def find_booking(self, name: str) -> dict:
        for booking, (owner, _, _, _) in self.bookings.items():
            if owner == name:
                return {"booking": booking}
        raise ToolError("no such booking")

    def show_booking(self, booking: str) -> dict:
        _, city, date, _ = self._booking(booking)
        return {"city": city, "date": date}

    def change_date(self, booking: str, date: str) -> dict:
        record = self._booking(booking)
        if record[2] == date:
            raise ToolError("same date")
        fee = take(self.next_fees)
        record[2] = date
        return {"fee": fee}

    def cancel_booking(self, booking: str) -> dict:
        price = self._booking(booking)[3]
        del self.bookings[booking]
        return {"refund": price}

    # ------------------------------------------------------------ planning

    @classmethod
    def blank(cls, maker):
        return cls({}, {}, {}, maker.several("hold", UPCOMING),
                   maker.several("booking", UPCOMING), maker.several("fee", UPCOMING), [])

    def prepare(self, tool, args, initial, maker):
        if tool == "search_trips":
            if any(t[:2] == [args["city"], args["date"]] for t in self.trips.values()):
                return False
            return self._prepare_trip(maker.new("trip"), args["city"], args["date"], initial,
                                      maker)
        if tool == "hold_seat":
            return args["trip"] in self.trips or self._prepare_trip(
                args["trip"], maker.new("city"), maker.new("date"), initial, maker)
        if tool in ("confirm_hold", "release_hold"):
            return self._prepare_hold(args["hold"], initial, maker)
        if tool == "find_booking":
            if any(b[0] == args["name"] for b in self.bookings.values()):
                return False
            return self._prepare_booking(maker.new("booking"), args["name"], initial, maker)
        booking = args["booking"]
        if booking not in self.bookings and not self._prepare_booking(
                booking, maker.new("name"), initial, maker):
            return False
        if tool == "show_booking":
            # Only what the agent has not seen yet is worth showing.
            return self.bookings[booking] == initial.bookings.get(booking)
        return tool != "change_date" or self.bookings[booking][2] != args["date"]

    def _prepare_trip(self, trip, city, date, initial, maker):
        if trip in self.trips:
            return False
        price = maker.new("amount")
        for state in (initial, self):
            state.trips[trip] = [city, date, price]
        return True

    def _prepare_hold(self, hold, initial, maker):
        if hold in self.holds:
            return True
        if hold in initial.holds:
            return False  # used up in this dialogue
        trip = maker.new("trip")
        self._prepare_trip(trip, maker.new("city"), maker.new("date"), initial, maker)
        initial.holds[hold] = self.holds[hold] = trip
        return True

    def _prepare_booking(self, booking, name, initial, maker):
        if booking in initial.bookings:
            return False  # cancelled in this dialogue
        record = [name, maker.new("city"), maker.new("date"), maker.new("amount")]
        for state in (initial, self):
            state.bookings[booking] = list(record)
        return True

    def clutter_up(self, surfaces):
        for trip in surfaces:
            self.trips.setdefault(trip, ["", "", 1])
        self.clutter = list(surfaces)

    def has(self, kind, value):
        owned = {"trip": self.trips, "hold": self.holds, "booking": self.bookings}
        return kind not in owned or value in owned[kind]
