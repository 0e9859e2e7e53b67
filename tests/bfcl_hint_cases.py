"""Failed calls of the BFCL classes, each with the part of its hint that matters."""

from rods_jax.tools.bfcl_data import MODULES
from rods_jax.types import ToolCall

FILES, MATH, MESSAGE, TWITTER, TICKET, TRADING, TRAVEL, VEHICLE = MODULES


def call(tool, /, **arguments):
    return ToolCall(tool, arguments)


def file(content=""):
    return {"type": "file", "content": content}


def folder(**contents):
    return {"type": "directory", "contents": contents}


HOME = {FILES: {"root": {"home": folder(**{
    "report.txt": file("b\na"), "notes.md": file(), "docs": folder(
        old=folder(**{"plan.csv": file(), "report.txt": file()}), **{"draft.txt": file()}),
    "empty": folder()})}}}
IN_DOCS = (call("cd", folder="docs"),)

# (call, part of the hint, calls before, tools that are not visible)
FILE_CASES = [
    (call("cat", file_name="docs/draft.txt"),
     "first cd to 'docs', then cat with file_name='draft.txt'", (), ()),
    (call("cat", file_name="docs/draft.txt"), "no tool to go there is at hand", (), ("cd",)),
    (call("cat", file_name="/home/docs/draft.txt"), "first cd to 'docs'", (), ()),
    (call("tail", file_name="home/docs/old/plan.csv"), "'docs', then 'old', then tail", (), ()),
    (call("cat", file_name="/docs/draft.txt"), "first cd to '/', then 'docs'",
     (call("cd", folder="empty"),), ()),
    (call("cat", file_name="./report.txt"), "call cat with file_name='report.txt'", (), ()),
    (call("cat", file_name="docs/old"), "'docs' has no file 'old', it holds 'old', 'draft.txt'",
     (), ()),
    (call("cat", file_name="a?b"), "A name must not hold ?", (), ()),
    (call("cat", file_name="docs"), "'docs' is a directory, cat needs a file", (), ()),
    (call("wc", file_name="docs"), "'docs' is a directory, wc needs a file", (), ()),
    (call("cat", file_name="Report.TXT"), "The nearest name in the current directory is 'report",
     (), ()),
    (call("sort", file_name="draft.txt"), "first cd to 'docs', then call sort again", (), ()),
    (call("sort", file_name="notes.md"), "first cd to '..', then call sort again", IN_DOCS, ()),
    (call("grep", file_name="notes.md", pattern="x"), "first cd to '/', then call grep",
     (*IN_DOCS, call("cd", folder="old")), ()),
    (call("grep", file_name="zzz", pattern="x"), "The files here: 'report.txt', 'notes.md'", (),
     ()),
    (call("grep", file_name="report", pattern="x"), "no file 'report' in the current", (),
     ("ls", "find")),
    (call("cat", file_name="plan.csw"), "'plan.csv', is not in the current directory: first cd",
     (), ()),
    (call("tail", file_name="x"), "The current directory holds no files",
     (call("cd", folder="empty"),), ()),
    (call("wc", file_name="report.txt", mode="lines"), "l for lines, w for words", (), ()),
    (call("cd", folder="docs/old"), "cd goes one directory a call: 'docs', then 'old'", (), ()),
    (call("cd", folder="old"), "cd to 'docs', then 'old', one a call", (), ()),
    (call("cd", folder="report.txt"), "'report.txt' is a file, cd needs a directory", (), ()),
    (call("cd", folder="zzzz"), "The directories here: 'docs', 'empty'", (), ()),
    (call("cd", folder=".."), "This is the top directory; its directories: 'docs'", (), ()),
    (call("cd", folder="/home"), "This is the current directory already", (), ()),
    (call("mkdir", dir_name="docs"), "A directory 'docs' is already there", (), ()),
    (call("mkdir", dir_name="docs/new"), "first cd to 'docs', then mkdir with dir_name='new'",
     (), ()),
    (call("mkdir", dir_name="a|b"), "A name must not hold |.", (), ()),
    (call("touch", file_name="report.txt"), "A file 'report.txt' is already there", (), ()),
    (call("touch", file_name="nowhere/x"), "must not hold /. Give a bare name", (), ()),
    (call("echo", content="x", file_name="new.txt"), "touch(file_name='new.txt') first", (), ()),
    (call("echo", content="x", file_name="new.txt"), "only to a file that is there", (),
     ("touch",)),
    (call("echo", content="x", file_name="repot.txt"), "did you mean 'report.txt'", (), ()),
    (call("echo", content="x", file_name="docs/n.txt"),
     "first cd to 'docs', then touch(file_name='n.txt'), then echo with", (), ()),
    (call("echo", content="x", file_name="a:b"), "A name must not hold :", (), ()),
    (call("echo", content="x", file_name="docs"), "'docs' is a directory, echo needs a file",
     (), ()),
    (call("find", path="draft.txt"), "find(path='.', name='draft.txt') looks for that", (), ()),
    (call("diff", file_name1="report.txt", file_name2="x9"), "file_name2 is at fault. The files",
     (), ()),
    (call("diff", file_name1="docs", file_name2="report.txt"), "file_name1 is at fault. 'docs' is",
     (), ()),
    (call("diff", file_name1="report.txt", file_name2="docs/draft.txt"),
     "first cd to 'docs', then diff with file_name2='draft.txt'", (), ()),
    (call("mv", source="report.txt", destination="docs/draft.txt"),
     "'docs/draft.txt' is a file that is already there", (), ()),
    (call("mv", source="draft.txt", destination="x"), "first cd to 'docs', then call mv", (), ()),
    (call("cp", source="zz", destination="x"), "The files and directories here: 'report.txt'",
     (), ()),
    (call("mv", source="report.txt", destination="docs/"), "Only bare names are taken: mv to "
     "destination='docs'.", (), ()),
    (call("cp", source="report.txt", destination="docs/new.txt"), "cp to destination='docs', then "
     "cd to 'docs' and mv 'report.txt' to 'new.txt'", (), ()),
    (call("cp", source="report.txt", destination="/home/docs/old"), "destination='docs', then cd "
     "to 'docs' and go on", (), ()),
    (call("mv", source="draft.txt", destination="../empty"), "nothing into a directory above",
     IN_DOCS, ()),
    (call("mv", source="draft.txt", destination="/home/empty"), "directory above", IN_DOCS, ()),
    (call("mv", source="report.txt", destination="new/"), "mkdir(dir_name='new') makes it", (), ()),
    (call("mv", source="report.txt", destination="notes.md"), "file that is already there", (), ()),
    (call("cp", source="report.txt", destination="notes.md"), "remove it with rm first", (), ()),
    (call("cp", source="report.txt", destination="report.txt"), "the source itself", (), ()),
    (call("mv", source="docs", destination="docs"), "the source itself", (), ()),
    (call("mv", source="report.txt", destination="empty"), "'empty' already holds 'report.txt'",
     (call("cp", source="report.txt", destination="empty"),), ()),
    (call("cp", source="report.txt", destination="empty"), "'empty' already holds 'report.txt'",
     (call("cp", source="report.txt", destination="empty"),), ()),
    (call("cp", source="docs", destination="empty"), "'empty' already holds 'docs'",
     (call("cp", source="docs", destination="empty"),), ()),
    (call("rm", file_name="draft.txt"), "first cd to 'docs', then call rm again", (), ()),
    (call("rm", file_name="docs/"), "Only bare names are taken: call rm with file_name='docs'",
     (), ()),
    (call("rmdir", dir_name="docs"), "rm removes 'docs' with all that is in it. It holds 'old'",
     (), ()),
    (call("rmdir", dir_name="docs"), "must be emptied first", (), ("rm",)),
    (call("rmdir", dir_name="report.txt"), "rmdir needs a directory, rm removes it", (), ()),
    (call("rmdir", dir_name="doc"), "nearest name in the current directory is 'docs'", (), ()),
]

AWAY = {MESSAGE: {}}
HERE = {MESSAGE: {"current_user": "USR001"}}
PEOPLE = {"current_user": "U1", "user_count": 1, "user_map": {"Ann": "USR002", "Bo": "U1"},
          "inbox": []}
TWEETS = {"username": "me", "password": "hush-hush-1", "authenticated": True}
TICKETS = {"current_user": "me", "ticket_queue": [
    {"id": 1, "status": "Closed", "created_by": "me"},
    {"id": 2, "status": "Resolved", "created_by": "you"}]}
ACCOUNT_CASES = [
    (AWAY, call("view_messages_sent"), "Log in first: message_login with the id", ()),
    (AWAY, call("send_message", receiver_id="USR002", message="x"), "Log in first", ()),
    (AWAY, call("delete_message", receiver_id="USR002"), "No tool to log in is at hand",
     ("message_login",)),
    (HERE, call("send_message", receiver_id="Bob", message="x"), "'Bob' is a name, receiver_id is",
     ()),
    (HERE, call("send_message", receiver_id="USR999", message="x"), "get_user_id gives it", ()),
    (HERE, call("delete_message", receiver_id="USR999"), "view_messages_sent shows who", ()),
    (HERE, call("get_user_id", user="bob"), "The nearest name is 'Bob'", ()),
    (HERE, call("get_user_id", user="USR002"), "is a user id already", ()),
    (HERE, call("get_user_id", user="Zacharias"), "The users are 'Alice', 'Bob'", ()),
    (HERE, call("get_user_id", user="bob"), "There is no user of this name", ("list_users",)),
    (HERE, call("add_contact", user_name="Bob"), "exists already: get_user_id gives its id", ()),
    ({MESSAGE: PEOPLE}, call("add_contact", user_name="Cy"), "call add_contact again", ()),
    *[({TWITTER: {}}, made, "authenticate_twitter with the user's", ()) for made in (
        call("post_tweet", content="x"), call("list_all_following"), call("retweet", tweet_id=1),
        call("comment", tweet_id=1, comment_content="x"),
        call("follow_user", username_to_follow="x"),
        call("unfollow_user", username_to_unfollow="x"))],
    ({TWITTER: {}}, call("list_all_following"), "No tool to log in", ("authenticate_twitter",)),
    ({TWITTER: TWEETS}, call("retweet", tweet_id=9), "get_user_tweets shows the tweets", ()),
    ({TWITTER: TWEETS}, call("get_tweet", tweet_id=9), "search_tweets finds", ("get_user_tweets",)),
    ({TWITTER: TWEETS}, call("mention", tweet_id=9, mentioned_usernames=["@a"]), "No tweet", ()),
    ({TICKET: {}}, call("create_ticket", title="x"), "Log in first: ticket_login", ()),
    ({TICKET: {}}, call("get_user_tickets"), "Log in first: ticket_login", ()),
    ({TICKET: TICKETS}, call("create_ticket", title="x", priority=9), "from 1 to 5", ()),
    ({TICKET: TICKETS}, call("get_ticket", ticket_id=7), "own tickets: '1'.", ()),
    ({TICKET: TICKETS}, call("close_ticket", ticket_id="1"), "written without quotes", ()),
    ({TICKET: {}}, call("get_ticket", ticket_id=7), "after a login get_user_tickets", ()),
    ({TICKET: TICKETS}, call("close_ticket", ticket_id=1), "Nothing is left to do", ()),
    ({TICKET: TICKETS}, call("resolve_ticket", ticket_id=2, resolution="x"), "Nothing is left", ()),
    ({TICKET: TICKETS}, call("edit_ticket", ticket_id=1, updates={"state": "Open"}),
     "updates takes title, description, status, priority, 'state' may be 'status'", ()),
    ({TICKET: TICKETS}, call("edit_ticket", ticket_id=1, updates={"resolution": "x"}),
     "resolve_ticket takes a resolution", ()),
    ({TICKET: {"ticket_queue": [{"priority": 1}]}}, call("get_ticket", ticket_id=1),
     "A stored ticket has no id", ()),
    *[({TRADING: {}}, made, "Log in first: trading_login", ()) for made in (
        call("get_account_info"), call("get_order_history"), call("get_transaction_history"),
        call("fund_account", amount=1), call("withdraw_funds", amount=1),
        call("remove_stock_from_watchlist", symbol="NVDA"),
        call("place_order", order_type="Buy", symbol="NVDA", price=1, amount=1))],
    ({TRADING: {}}, call("get_stock_info", symbol="Apple"), "get_symbol_by_name gives it", ()),
    ({TRADING: {}}, call("get_stock_info", symbol="TSL"), "nearest symbol is 'TSLA'", ()),
    ({TRADING: {}}, call("get_stock_info", symbol="zzzz"), "No stock has this symbol", ()),
    ({TRADING: {}}, call("get_order_details", order_id=1), "get_order_history shows the ids", ()),
    ({TRADING: {}}, call("cancel_order", order_id=1), "place_order returns the id",
     ("get_order_history",)),
    ({TRADING: {}}, call("cancel_order", order_id=12345), "A completed order stays", ()),
]
TRADER = {TRADING: {"authenticated": True, "market_status": "Open"}}
TRADER_CLOSED = {TRADING: {"authenticated": True}}
MONEY_CASES = [
    (TRADER, call("place_order", order_type="Buy", symbol="X", price=1, amount=1),
     "No stock has this symbol", ()),
    (TRADER, call("place_order", order_type="Buy", symbol="APL", price=1, amount=1),
     "The nearest symbol is 'AAPL'", ()),
    (TRADER, call("place_order", order_type="Buy", symbol="APL", price=1, amount=1),
     "No stock has this symbol", ("get_available_stocks", "get_stock_info")),
    (TRADER, call("place_order", order_type="Buy", symbol="AAPL", price=0, amount=1),
     "Give price above 0", ()),
    (TRADER, call("place_order", order_type="Buy", symbol="AAPL", price=3000.5, amount=9),
     "At most 3 shares can be paid for, or fund_account", ()),
    (TRADER, call("withdraw_funds", amount=10**6), "the balance of $10000.00", ()),
    (TRADER, call("withdraw_funds", amount=10**6), "exceed the balance, or", ("get_account_info",)),
    (TRADER, call("withdraw_funds", amount=-1), "Give amount above 0", ()),
    (TRADER, call("fund_account", amount=0), "Give amount above 0", ()),
    (TRADER_CLOSED, call("withdraw_funds", amount=5), "only while the market is open", ()),
    (TRADER, call("remove_stock_from_watchlist", symbol="TSLA"), "can be removed: 'NVDA'", ()),
    (TRADER, call("get_transaction_history", start_date="May 1"), "YYYY-MM-DD", ()),
    ({MATH: {}}, call("divide", a=1, b=0), "b must not be 0", ()),
    ({MATH: {}}, call("percentage", part=1, whole=0), "whole must not be 0", ()),
    ({MATH: {}}, call("square_root", number=-4, precision=5), "number must be 0 or more", ()),
    ({MATH: {}}, call("square_root", number=4, precision=0), "precision is the count", ()),
    ({MATH: {}}, call("logarithm", value=5, base=1, precision=5), "base must not be 1", ()),
    ({MATH: {}}, call("power", base=0, exponent=-1), "0 takes no negative exponent", ()),
    ({MATH: {}}, call("power", base=10.5, exponent=1e9), "too large for this tool", ()),
    ({MATH: {}}, call("power", base=2, exponent=10**9), "too large for this tool", ()),
    *[({MATH: {}}, call(name, numbers=[]), "Give at least one number", ())
      for name in ("mean", "standard_deviation", "min_value", "max_value", "sum_values")],
    ({MATH: {}}, call("si_unit_conversion", value=1, unit_in="kilometers", unit_out="m"),
     "Write the units as 'km' and 'm'", ()),
    ({MATH: {}}, call("si_unit_conversion", value=1, unit_in="km", unit_out="mile"),
     "Use imperial_si_conversion from 'km' to 'miles'", ()),
    ({MATH: {}}, call("si_unit_conversion", value=1, unit_in="ly", unit_out="m"), "km, m, cm", ()),
    ({MATH: {}}, call("imperial_si_conversion", value=1, unit_in="C", unit_out="Fahrenheit"),
     "as 'celsius' and 'fahrenheit'", ()),
    ({MATH: {}}, call("imperial_si_conversion", value=1, unit_in="mm", unit_out="km"),
     "Use si_unit_conversion from 'mm' to 'km'", ()),
    ({MATH: {}}, call("imperial_si_conversion", value=1, unit_in="cup", unit_out="kg"),
     "cm-in, m-ft", ()),
]

CARD = {"card_number": "4000-1111", "cvv": 911, "balance": 150.0}
TRIP = {TRAVEL: {
    "access_token": "tok-secret", "token_expires_in": 100, "budget_limit": 100.0,
    "credit_card_list": {"c1": CARD, "poor": CARD | {"balance": 90.0}, "bare": {}},
    "booking_record": {"b1": {"transaction_id": "t77", "travel_cost": 5.0, "card_id": "gone"},
                       "b2": {"transaction_id": "t78", "travel_cost": 5.0}}}}
NO_TOKEN = {TRAVEL: {}}
EXPIRED = {TRAVEL: TRIP[TRAVEL] | {"token_expires_in": 0}}


def fly(config=TRIP, key="", hidden=(), **change):
    trip = {"access_token": "tok-secret", "card_id": "c1", "travel_date": "2024-05-06",
            "travel_from": "SFO", "travel_to": "LAX", "travel_class": "economy"}
    return config, ToolCall("book_flight", trip | change), key, hidden


def cost(a, b, kind="economy"):
    return call("get_flight_cost", travel_from=a, travel_to=b, travel_date="2024-05-06",
                travel_class=kind)


TOKEN = {"access_token": "tok-secret"}
TRAVEL_CASES = [
    fly(EXPIRED, "authenticate_travel gives one"),
    fly(EXPIRED, "no tool to get one", ("authenticate_travel",)),
    fly(key="what authenticate_travel returned last", access_token="tok"),
    (NO_TOKEN, call("register_credit_card", access_token="x", card_number="1",
                    expiration_date="1/30", cardholder_name="A", card_verification_number=1),
     "There is no valid token", ()),
    (TRIP, call("register_credit_card", card_number="c1", expiration_date="1/30",
                cardholder_name="A", card_verification_number=1, **TOKEN),
     "get_all_credit_cards shows its id", ()),
    fly(key="number of a card, card_id is the id", card_id="4000-1111"),
    fly(key="not registered: get_all_credit_cards", card_id="c9"),
    fly(key="register_credit_card gives", card_id="c9", hidden=("get_all_credit_cards",)),
    (TRIP, call("get_credit_card_balance", card_id="c9", **TOKEN), "get_all_credit_cards", ()),
    fly(key="no balance on record", card_id="bare"),
    fly(key="'Rivermist' is a city, an airport code is needed: get_nearest_airport_by_city("
        "location='Rivermist')", travel_from="Rivermist"),
    fly(key="is a city, an airport code is needed: list_all", travel_from="Rivermist",
        hidden=("get_nearest_airport_by_city",)),
    fly(key="'lax' is no airport code, LAX is one. Known codes: RMS", travel_to="lax"),
    fly(key="'lax' is no airport code. get_nearest_airport_by_city", travel_to="lax",
        hidden=("list_all_airports",)),
    fly(key="Write travel_date as YYYY-MM-DD", travel_date="May 6"),
    fly(key="economy, business or first, here perhaps 'first'", travel_class="First Class"),
    fly(key="No flight goes from OKD to SFO, only from SFO to OKD", travel_from="OKD",
        travel_to="SFO"),
    fly(key="LAX and LAX to HND do", travel_from="RMS", travel_to="HND"),
    fly(key="from LHR flights go to CDG", travel_from="LHR", travel_to="LAX"),
    fly(key="No flight goes from LHR to LAX: tell the user", travel_from="LHR", travel_to="LAX",
        hidden=("get_flight_cost",)),
    fly(key="are the same airport", travel_to="SFO"),
    (TRIP, cost("Tokyo", "LAX"), "'Tokyo' is a city", ()),
    (TRIP, cost("SFO", "LAX", "eco"), "here perhaps 'economy'", ()),
    fly(key="balance of $150.00 is below the price of $400.00", travel_class="business"),
    fly(key="balance is below the price:", travel_class="business",
        hidden=("get_all_credit_cards", "get_credit_card_balance", "get_flight_cost")),
    fly({TRAVEL: TRIP[TRAVEL] | {"budget_limit": 1000.0, "credit_card_list": {
        "c1": CARD | {"balance": 900.0}}}}, "balance of $900.00 must not be below the budget"),
    (TRIP, call("purchase_insurance", insurance_type="x", booking_id="b1", insurance_cost=101,
                card_id="c1", **TOKEN), "set_budget_limit can raise it", ()),
    (TRIP, call("purchase_insurance", insurance_type="x", booking_id="b1", insurance_cost=1,
                card_id="c7", **TOKEN), "not registered", ()),
    (TRIP, call("retrieve_invoice", **TOKEN), "A booking_id is needed", ()),
    (TRIP, call("retrieve_invoice", booking_id="t77", **TOKEN), "That is a transaction_id", ()),
    (TRIP, call("retrieve_invoice", booking_id="b1", **TOKEN), "record has no travel_date", ()),
    (TRIP, call("cancel_booking", booking_id="b9", **TOKEN), "get_booking_history shows", ()),
    (TRIP, call("cancel_booking", booking_id="b1", **TOKEN), "card of this booking is not", ()),
    (TRIP, call("cancel_booking", booking_id="b2", **TOKEN), "contact_customer_support may", ()),
    (TRIP, call("contact_customer_support", booking_id="b9", message="x"), "no booking of this",
     ()),
    (TRIP, call("compute_exchange_rate", base_currency="usd", target_currency="EUR", value=1),
     "'usd' may be USD", ()),
    (TRIP, call("compute_exchange_rate", base_currency="GBP", target_currency="EUR", value=1),
     "convert GBP to USD, then USD to EUR", ()),
    (TRIP, call("compute_exchange_rate", base_currency="USD", target_currency="USD", value=1),
     "Both currencies are the same", ()),
]

OPEN = {VEHICLE: {"fuelLevel": 30.0}}
READY = {VEHICLE: {"fuelLevel": 30.0, "engineState": "running"}}
SHUT = {VEHICLE: {"fuelLevel": -1.0, "doorStatus": dict.fromkeys(
    ("driver", "passenger", "rear_left", "rear_right"), "locked")}}
START = call("startEngine", ignitionMode="START")
BRAKE = call("pressBrakePedal", pedalPosition=1.0)
CRUISE = call("setCruiseControl", speed=30, activate=True, distanceToNextVehicle=5)
LOCK = "lockDoors(unlock=false, door=['driver', 'passenger', 'rear_left', 'rear_right'])"
VEHICLE_CASES = [
    (OPEN, START, f"First {LOCK}, then pressBrakePedal(pedalPosition=1.0), then startEngine again",
     ()),
    (OPEN, START, "The doors must be locked first, and no tool for that", ("lockDoors",)),
    (OPEN, call("startEngine", ignitionMode="STOP"), "The engine is stopped now", ()),
    (SHUT, START, "First pressBrakePedal(pedalPosition=1.0), then startEngine", ()),
    (OPEN, CRUISE, "startEngine(ignitionMode='START'), then setCruiseControl again", ()),
    (OPEN, CRUISE, "The engine must be started first", ("startEngine",)),
    (READY, call("setCruiseControl", speed=63, activate=True, distanceToNextVehicle=5),
     "a multiple of 5 from 0 to 120, for example 65", ()),
    (OPEN, call("fillFuelTank", fuelAmount=21), "has 30 in it: add at most 20. liter_to", ()),
    (OPEN, call("fillFuelTank", fuelAmount=21), "holds 50 gallons: fuelAmount is what to add",
     ("displayCarStatus",)),
    (OPEN, call("fillFuelTank", fuelAmount=-1), "in gallons, 0 or more", ()),
    (OPEN, call("adjustClimateControl", temperature=20, fanSpeed=101), "from 0 to 100", ()),
    (OPEN, call("pressBrakePedal", pedalPosition=2), "from 0 (released) to 1", ()),
    (OPEN, call("setHeadlights", mode="On!"), "one of on, off, auto, here perhaps 'on'", ()),
    (OPEN, call("activateParkingBrake", mode="engaged"), "here perhaps 'engage'", ()),
    (OPEN, call("displayCarStatus", option="door"), "here perhaps 'doors'", ()),
    (OPEN, call("lockDoors", unlock=False, door=["rear left"]), "'rear left' may be 'rear_left'",
     ()),
    (OPEN, call("get_outside_temperature_from_weather_com"), "use get_outside_temperature_from_g",
     ()),
    (OPEN, call("get_outside_temperature_from_weather_com"), "tell the user",
     ("get_outside_temperature_from_google",)),
    (OPEN, call("estimate_distance", cityA="Rivermist", cityB="74532"),
     "cityA must be a zipcode, not 'Rivermist': get_zipcode_based_on_city", ()),
    (OPEN, call("estimate_distance", cityA="83214", cityB="00000"), "an unknown city", ()),
    (OPEN, call("estimate_distance", cityA="83214", cityB="83214"), "are the same", ()),
    (OPEN, call("estimate_distance", cityA="83214", cityB="52013"), "No distance is known", ()),
]
LOCKED = call("lockDoors", unlock=False, door=["driver", "passenger", "rear_left", "rear_right"])
AFTER_OTHERS = [
    (OPEN, START, "First pressBrakePedal(pedalPosition=1.0), then startEngine again", (),
     (LOCKED, call("pressBrakePedal", pedalPosition=0.5))),
    (OPEN, call("startEngine", ignitionMode="ON"), "ignitionMode is 'START' or 'STOP'", (),
     (LOCKED, BRAKE)),
    (OPEN, call("startEngine", ignitionMode="STOP"), "The engine is stopped now", (),
     (LOCKED, BRAKE)),
    (SHUT, START, "Fill the tank first: fillFuelTank", (), (BRAKE,)),
    (SHUT, call("fillFuelTank", fuelAmount=0.5), "Fill the tank first", (), ()),
]
CASES = [
    *((HOME, made, key, hidden, before) for made, key, before, hidden in FILE_CASES),
    *((*case, ()) for case in ACCOUNT_CASES + MONEY_CASES + TRAVEL_CASES + VEHICLE_CASES),
    *AFTER_OTHERS,
]
