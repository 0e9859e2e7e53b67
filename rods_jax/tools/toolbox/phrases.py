"""The words of the user: clauses for calls and noun phrases for values.

A reader that cannot see what kind of entity a word is must still know the tool, so no two
tools share a clause and every phrase that hides a look-up carries words of its own.
"""

from __future__ import annotations

CLAUSES: dict[str, tuple[str, ...]] = {
    "find_file": ("find the file about {topic}", "look for my file about {topic}",
                  "locate the file about {topic}"),
    "open_folder": ("open {folder}", "go to {folder}", "enter {folder}"),
    "read_file": ("read {file}", "print {file}", "tell me what {file} says"),
    "write_file": ("write {text} to {file}", "save {text} as {file}",
                   "create {file} with {text}"),
    "copy_file": ("copy {file} to {copy}", "duplicate {file} as {copy}",
                  "make a copy of {file} called {copy}"),
    "move_file": ("move {file} to {folder}", "shift {file} over to {folder}",
                  "relocate {file} to {folder}"),
    "delete_file": ("delete {file}", "remove {file}", "erase {file}"),
    "share_file": ("share {file} with {user}", "give {user} access to {file}",
                   "invite {user} to {file}"),
    "sign_in": ("sign in with {pin}", "log in using {pin}", "sign me in using {pin}"),
    "find_contact": ("find the contact named {name}", "look up the contact named {name}",
                     "who is {name} in my contacts"),
    "last_message": ("find the last message from {user}", "get the latest message from {user}",
                     "what did {user} send last"),
    "read_message": ("read {message} to me", "open up {message}", "view {message}"),
    "send_message": ("send {text} to {user}", "text {user} {text}", "let {user} know {text}"),
    "reply_message": ("reply to {message} with {text}", "answer {message} with {text}",
                      "respond {text} to {message}"),
    "forward_message": ("forward {message} to {user}", "pass {message} on to {user}",
                        "relay {message} to {user}"),
    "delete_message": ("trash {message}", "discard {message}", "throw {message} away"),
    "search_trips": ("find a trip to {city} on {date}", "look up trips to {city} on {date}",
                     "search trips to {city} for {date}"),
    "hold_seat": ("hold a seat on {trip}", "reserve a seat on {trip}",
                  "keep a seat on {trip} for me"),
    "confirm_hold": ("confirm {hold}", "book {hold}", "complete {hold}"),
    "release_hold": ("release {hold}", "give up {hold}", "let go of {hold}"),
    "find_booking": ("find the booking under {name}", "look up the booking under {name}",
                     "search bookings under {name}"),
    "show_booking": ("show {booking}", "give me details of {booking}",
                     "when and where is {booking}"),
    "change_date": ("reschedule {booking} to {date}", "change {booking} to {date}",
                    "postpone {booking} to {date}"),
    "cancel_booking": ("cancel {booking}", "call off {booking}", "undo {booking}"),
    "unlock_wallet": ("unlock my wallet with {pin}", "unlock the wallet using {pin}",
                      "open my wallet with {pin}"),
    "check_balance": ("check my balance", "how much money is left", "what is my balance"),
    "find_bill": ("find the bill from {user}", "look up the bill from {user}",
                  "what do i owe {user}"),
    "pay_bill": ("pay {bill}", "settle {bill}", "clear {bill}"),
    "send_money": ("transfer {amount} to {user}", "wire {amount} to {user}",
                   "pay {amount} over to {user}"),
    "request_money": ("request {amount} from {user}", "ask {user} for {amount}",
                      "charge {user} {amount}"),
    "refund_payment": ("refund {payment}", "reverse {payment}", "take back {payment}"),
    "convert_money": ("convert {amount} to {currency}", "how much is {amount} in {currency}",
                      "exchange {amount} for {currency}"),
    "pay_booking": ("put {amount} toward {booking}", "pay {amount} for {booking}",
                    "cover {booking} with {amount}"),
}

# What a look-up is called inside another request, by its output. {noun} is what a text holds.
INNER: dict[tuple[str, str], tuple[str, ...]] = {
    ("find_file", "file"): ("the file about {topic}", "my file about {topic}"),
    ("find_contact", "user"): ("the contact named {name}", "my contact {name}"),
    ("last_message", "message"): ("the last message from {user}",
                                  "the latest message from {user}"),
    ("search_trips", "trip"): ("the trip to {city} on {date}", "a trip to {city} on {date}"),
    ("search_trips", "price"): ("the price of a trip to {city} on {date}",
                                "what a trip to {city} costs on {date}"),
    ("hold_seat", "hold"): ("a seat on {trip}",),
    ("find_booking", "booking"): ("the booking under {name}",),
    ("find_bill", "bill"): ("the bill from {user}", "my bill from {user}"),
    ("find_bill", "amount"): ("the amount of the bill from {user}", "what i owe {user}"),
    ("check_balance", "balance"): ("my balance", "all my money"),
    ("show_booking", "city"): ("the city of {booking}",),
    ("show_booking", "date"): ("the date of {booking}",),
    ("read_file", "text"): ("the {noun} in {file}", "the {noun} from {file}"),
    ("read_message", "text"): ("the {noun} in {message}", "the {noun} from {message}"),
    ("convert_money", "sum"): ("{amount} in {currency}",),
}

# A value the user names. Kinds that are not here are said bare.
NAMED: dict[str, tuple[str, ...]] = {
    "message": ("message {0}",), "trip": ("trip {0}",), "hold": ("hold {0}",),
    "booking": ("booking {0}",), "bill": ("bill {0}",), "payment": ("payment {0}",),
    "file": ("{0}", "file {0}"), "folder": ("{0}", "folder {0}"),
}

# Look-ups that make sense inside some requests only: "book a seat on ...".
INNER_ONLY: dict[str, tuple[str, ...]] = {"hold_seat": ("confirm_hold",)}

LAST = ("that {noun}", "the {noun}")
SAME = ("that {noun}", "the same {noun}")
FIRST = ("the first {noun}",)
MENTIONS = ("the {noun} it mentions", "the {noun} it contains")
IN_FOLDER = ("{0} in {1}", "{0} from {1}")

JOINTS = (", then {0}", " and {0}", ". {0}", ", and then {0}")
OPENINGS = ("{0}", "{0}", "{0}", "please {0}", "now {0}", "next {0}")
# What variants of a task may begin and end with besides: no word that the splits do not hold,
# so that a reader of these knows them all.
MORE_OPENINGS = ("please now {0}", "now please {0}", "next please {0}", "and now {0}",
                 "and then {0}", "then {0}", "and please {0}", "please then {0}")
MORE_JOINTS = (", next {0}", " and then {0}", ". now {0}", ". then {0}", ". please {0}",
               ", and next {0}", ". and then {0}", ". next {0}")
CLOSINGS = ("", "", "", " please", " now", " for me", " now please", " for me please")
QUESTIONS = ("who", "what", "how", "when")  # clauses that start so get no opening

# What stands for a value that the user leaves out, and how it is given later.
VAGUE: dict[str, str] = {
    "user": "someone", "name": "someone", "text": "something", "topic": "something",
    "file": "some file", "folder": "some folder", "city": "some city", "date": "some day",
    "amount": "some money", "pin": "some pin", "message": "some message",
    "trip": "some trip", "hold": "some hold", "booking": "some booking", "bill": "some bill",
    "payment": "some payment",
}
SUPPLIES = ("it is {0}", "i mean {0}", "use {0}", "make it {0}", "{0} please")

DONE, CLARIFY, UNAVAILABLE = "done", "clarify", "unavailable"
