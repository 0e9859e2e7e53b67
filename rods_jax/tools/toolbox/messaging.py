"""Messaging: contacts and short messages. Every tool needs a sign-in first."""

from __future__ import annotations

import dataclasses

from rods_jax.tools.toolbox.domain import UPCOMING, Domain, take
from rods_jax.tools.toolbox.signature import Param, Tool, ToolError

_MESSAGE = Param("message", "message")
_USER = Param("user", "user")
_TEXT = Param("text", "text")
_NEW = (("message", "message"),)


@dataclasses.dataclass
class Messaging(Domain):
    """users: known users; contacts: {name: user}; messages: {id: [sender, receiver, text]}
    with "me" for the account's own side; clutter: listed messages."""

    NAME = "messaging"
    DOOR = "sign_in"
    TOOLS = (
        Tool("sign_in", "messaging", "Sign in to the message account.",
             (Param("pin", "pin"),), needs_door=False, lists=True),
        Tool("find_contact", "messaging", "Find the user name of a person.",
             (Param("name", "name"),), (("user", "user"),)),
        Tool("last_message", "messaging", "Find the last message that a user sent.",
             (_USER,), _NEW, lists=True),
        Tool("read_message", "messaging", "Read a message.", (_MESSAGE,),
             (("text", "content"),)),
        Tool("send_message", "messaging", "Send a text to a user.", (_USER, _TEXT), _NEW),
        Tool("reply_message", "messaging", "Answer a message.", (_MESSAGE, _TEXT)),
        Tool("forward_message", "messaging", "Forward a message to a user.",
             (_MESSAGE, _USER)),
        Tool("delete_message", "messaging", "Delete a message.", (_MESSAGE,)),
    )

    pin: str
    signed_in: bool
    users: list
    contacts: dict
    messages: dict
    next_messages: list
    clutter: list

    def _door(self) -> None:
        if not self.signed_in:
            raise ToolError("not signed in")

    def _user(self, user: str) -> None:
        if user not in self.users:
            raise ToolError("no such person")

    def _message(self, message: str) -> list:
        self._door()
        if message not in self.messages:
            raise ToolError("no such message")
        return self.messages[message]

    def _post(self, receiver: str, text: str) -> str:
        message = take(self.next_messages)
        self.messages[message] = ["me", receiver, text]
        return message

    def sign_in(self, pin: str) -> dict:
        if pin != self.pin:
            raise ToolError("wrong pin")
        self.signed_in = True
        return {"signed": "in"}

    def find_contact(self, name: str) -> dict:
        self._door()
        if name not in self.contacts:
            raise ToolError("no such person")
        return {"user": self.contacts[name]}

    def last_message(self, user: str) -> dict:
        self._door()
        sent = [m for m, (sender, _, _) in self.messages.items() if sender == user]
        if not sent:
            raise ToolError("no such message")
        return {"message": sent[-1]}

    def read_message(self, message: str) -> dict:
        return {"text": self._message(message)[2]}

    def send_message(self, user: str, text: str) -> dict:
        self._door()
        self._user(user)
        return {"message": self._post(user, text)}

    def reply_message(self, message: str, text: str) -> dict:
        sender, receiver, _ = self._message(message)
        other = receiver if sender == "me" else sender
        return {"replied": self._post(other, text)}

    def forward_message(self, message: str, user: str) -> dict:
        text = self._message(message)[2]
        self._user(user)
        return {"forwarded": self._post(user, text)}

    def delete_message(self, message: str) -> dict:
        self._message(message)
        del self.messages[message]
        return {"deleted": message}

    # ------------------------------------------------------------ planning

    @classmethod
    def blank(cls, maker):
        return cls(maker.new("pin"), False, [], {}, {}, maker.several("message", UPCOMING), [])

    def is_open(self):
        return self.signed_in

    def open_door(self, initial, maker):
        del maker
        initial.signed_in = self.signed_in = True

    def prepare(self, tool, args, initial, maker):
        if tool == "sign_in":
            initial.pin = self.pin = args["pin"]
            return True
        if "user" in args:
            self._know(args["user"], initial)
        if tool == "find_contact":
            return self._prepare_contact(args["name"], initial, maker)
        if tool == "last_message":
            if any(sender == args["user"] for sender, _, _ in self.messages.values()):
                return False
            return self._prepare_message(maker.new("message"), args["user"], initial, maker)
        message = args.get("message")
        if message is None:
            return True
        if message not in self.messages:
            if message in initial.messages:
                return False  # deleted in this dialogue
            sender = maker.new("user")
            self._know(sender, initial)
            self._prepare_message(message, sender, initial, maker)
        if tool == "read_message":
            if message not in initial.messages or message in maker.read:
                return False  # written or read in this dialogue: its text is no news
            maker.read.add(message)
            initial.messages[message][2] = text = str(maker.new(maker.content))
            self.messages[message][2] = text
        return True

    def _know(self, user, initial):
        for state in (initial, self):
            if user not in state.users:
                state.users.append(user)

    def _prepare_contact(self, name, initial, maker):
        if name in self.contacts:
            return False
        user = maker.new("user")
        self._know(user, initial)
        initial.contacts[name] = self.contacts[name] = user
        return True

    def _prepare_message(self, message, sender, initial, maker):
        text = maker.new("note")
        for state in (initial, self):
            state.messages[message] = [sender, "me", text]
        return True

    def clutter_up(self, surfaces):
        # First in the order, so that they are nobody's last message.
        for message in surfaces:
            self.messages.setdefault(message, ["", "me", message])
        self.clutter = list(surfaces)

    def has(self, kind, value):
        return kind != "message" or value in self.messages
