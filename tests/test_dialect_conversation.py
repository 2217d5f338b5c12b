"""Conversations put together from a dialect's blocks or items."""

from __future__ import annotations

import time

from forerun.serve.dialects.conversation import Conversation
from forerun.serve.sent_media import SentMedia, place

PICTURE = SentMedia("image", "AAAA", "input", bare=True)


def test_what_one_side_says_in_a_row_is_one_message() -> None:
    talk = Conversation()
    talk.system("one")
    talk.system("two")
    talk.user("")
    talk.user("three")
    talk.shows(PICTURE)
    talk.user("four")
    talk.user("five")
    talk.thinks("six")
    talk.says("seven")
    talk.thinks("eight")
    talk.says("nine")
    talk.calls("c", "look", {})
    talk.result("c", "ten", [PICTURE])
    talk.user("eleven")
    talk.end()
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant", "tool", "user"]
    system, user, assistant, tool, last = talk.messages
    assert system["content"] == "one\n\ntwo"
    assert user["content"] == [text("three"), place(PICTURE), text("four\n\nfive")]
    assert (assistant["reasoning_content"], assistant["content"]) == ("six\n\neight", "seven\n\nnine")
    assert (tool["content"], tool["name"]) == ("ten", "look")
    assert last["content"] == [place(PICTURE), text("eleven")] and talk.media == [PICTURE, PICTURE]
    assert not talk.ends_with_text


def test_thousands_of_parts_hold_up_nobody() -> None:
    """Each joined to all before it took more than a minute, on the event loop."""
    began = time.perf_counter()
    for shown in (False, True):
        talk = Conversation()
        if shown:
            talk.shows(PICTURE)
        for _ in range(5000):
            talk.user("a" * 5000)
        for _ in range(2500):
            talk.thinks("b" * 5000)
            talk.says("c" * 5000)
        talk.end()
        assert len(talk.messages) == 2 and talk.ends_with_text
    assert time.perf_counter() - began < 5.0


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}
