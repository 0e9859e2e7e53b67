"""Payments: one wallet, bills, transfers. The wallet must be unlocked first."""

from __future__ import annotations

import dataclasses

from rods_jax.tools.toolbox.domain import UPCOMING, Domain, take
from rods_jax.tools.toolbox.signature import CURRENCIES, Param, Tool, ToolError

_USER = Param("user", "user")
_AMOUNT = Param("amount", "amount")


@dataclasses.dataclass
class Payments(Domain):
    """bills: {id: [user, amount]}; payments: {id: [receiver, amount]}; requests: {id: [user,
    amount]}; receipts: {id: [booking, amount]}; rates: {currency: whole factor};
    clutter: listed bills."""

    NAME = "payments"
    DOOR = "unlock_wallet"
    TOOLS = (
        Tool("unlock_wallet", "payments", "Unlock the wallet.", (Param("pin", "pin"),),
             needs_door=False, lists=True),
        Tool("check_balance", "payments", "Show how much money the wallet holds.", (),
             (("balance", "amount"),)),
        Tool("find_bill", "payments", "Find the open bill that a user sent.", (_USER,),
             (("bill", "bill"), ("amount", "amount")), lists=True),
        Tool("pay_bill", "payments", "Pay a bill.", (Param("bill", "bill"),),
             (("payment", "payment"),)),
        Tool("send_money", "payments", "Send money to a user.", (_USER, _AMOUNT),
             (("payment", "payment"),)),
        Tool("request_money", "payments", "Ask a user for money.", (_USER, _AMOUNT),
             (("request", "request"),)),
        Tool("refund_payment", "payments", "Take a payment back.",
             (Param("payment", "payment"),), (("credit", "amount"),)),
        Tool("convert_money", "payments", "Say what an amount is in another currency.",
             (_AMOUNT, Param("currency", "currency")), (("sum", "amount"),)),
        Tool("pay_booking", "payments", "Pay an amount for a booking.",
             (Param("booking", "booking"), _AMOUNT), (("receipt", "receipt"),)),
    )

    pin: str
    unlocked: bool
    balance: int
    bills: dict
    payments: dict
    requests: dict
    receipts: dict
    rates: dict
    next_payments: list
    next_requests: list
    next_receipts: list
    clutter: list

    def _door(self) -> None:
        if not self.unlocked:
            raise ToolError("wallet locked")

    def _spend(self, amount: int) -> None:
        self._door()
        if amount <= 0:
            raise ToolError("wrong amount")
        if amount > self.balance:
            raise ToolError("low balance")

    def unlock_wallet(self, pin: str) -> dict:
        if pin != self.pin:
            raise ToolError("wrong pin")
        self.unlocked = True
        return {"wallet": "open"}

    def check_balance(self) -> dict:
        self._door()
        return {"balance": self.balance}

    def find_bill(self, user: str) -> dict:
        self._door()
        for bill, (sender, amount) in self.bills.items():
            if sender == user:
                return {"bill": bill, "amount": amount}
        raise ToolError("no such bill")

    def pay_bill(self, bill: str) -> dict:
        self._door()
        if bill not in self.bills:
            raise ToolError("no such bill")
        user, amount = self.bills[bill]
        payment = self._pay(user, amount)
        del self.bills[bill]
        return payment

    def send_money(self, user: str, amount: int) -> dict:
        return self._pay(user, amount)

    def _pay(self, user: str, amount: int) -> dict:
        self._spend(amount)
        payment = take(self.next_payments)
        self.payments[payment] = [user, amount]
        self.balance -= amount
        return {"payment": payment}

    def request_money(self, user: str, amount: int) -> dict:
        self._door()
        if amount <= 0:
            raise ToolError("wrong amount")
        request = take(self.next_requests)
        self.requests[request] = [user, amount]
        return {"request": request}

    def refund_payment(self, payment: str) -> dict:
        self._door()
        if payment not in self.payments:
            raise ToolError("no such payment")
        _, amount = self.payments.pop(payment)
        self.balance += amount
        return {"credit": amount}

    def convert_money(self, amount: int, currency: str) -> dict:
        self._door()
        return {"sum": amount * self.rates[currency]}

    def pay_booking(self, booking: str, amount: int) -> dict:
        self._spend(amount)
        receipt = take(self.next_receipts)
        self.receipts[receipt] = [booking, amount]
        self.balance -= amount
        return {"receipt": receipt}

    # ------------------------------------------------------------ planning

    @classmethod
    def blank(cls, maker):
        roll = maker.rng.random
        rates = {currency: 2 + int(roll() * 98) for currency in CURRENCIES}
        return cls(maker.new("pin"), False, 100_000 + int(roll() * 800_000), {}, {}, {}, {},
                   rates, maker.several("payment", UPCOMING),
                   maker.several("request", UPCOMING), maker.several("receipt", UPCOMING), [])

    def is_open(self):
        return self.unlocked

    def open_door(self, initial, maker):
        del maker
        initial.unlocked = self.unlocked = True

    def prepare(self, tool, args, initial, maker):
        if tool == "unlock_wallet":
            initial.pin = self.pin = args["pin"]
        elif tool == "find_bill":
            if any(sender == args["user"] for sender, _ in self.bills.values()):
                return False
            return self._prepare_bill(maker.new("bill"), args["user"], initial, maker)
        elif tool == "pay_bill":
            bill = args["bill"]
            if bill not in self.bills and not self._prepare_bill(
                    bill, maker.new("user"), initial, maker):
                return False
            self._afford(self.bills[bill][1], initial)
        elif tool == "refund_payment":
            return self._prepare_payment(args["payment"], initial, maker)
        elif tool == "convert_money":
            return args["amount"] < 100_000
        elif tool in ("send_money", "pay_booking"):
            self._afford(args["amount"], initial)
        return True

    def _afford(self, amount, initial):
        lacking = max(0, amount - self.balance)
        initial.balance += lacking
        self.balance += lacking

    def _prepare_bill(self, bill, user, initial, maker):
        if bill in initial.bills:
            return False  # paid in this dialogue
        amount = maker.new("amount")
        for state in (initial, self):
            state.bills[bill] = [user, amount]
        return True

    def _prepare_payment(self, payment, initial, maker):
        if payment in self.payments:
            return True
        if payment in initial.payments:
            return False  # refunded in this dialogue
        record = [maker.new("user"), maker.new("amount")]
        for state in (initial, self):
            state.payments[payment] = list(record)
        return True

    def clutter_up(self, surfaces):
        for bill in surfaces:
            self.bills.setdefault(bill, ["", 1])
        self.clutter = list(surfaces)

    def has(self, kind, value):
        owned = {"bill": self.bills, "payment": self.payments}
        return kind not in owned or value in owned[kind]
