"""A library behind the small HTTP server is asked as our own server is."""

from __future__ import annotations

import socket
import threading

from bench.peers.chat_server import Prompt, serve
from bench.peers.sides import Side


def start(asked: list[Prompt]) -> int:
    """A server that answers "yes" with two tokens, at the returned port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]

    def complete(prompt: Prompt, max_tokens: int) -> tuple[str, int]:
        asked.append(prompt)
        return "yes", 2

    threading.Thread(target=serve, args=(port, complete), daemon=True).start()
    return port


def test_chats_and_completions_are_asked_and_counted():
    asked: list[Prompt] = []
    chat = Side("chat", start(asked), is_chat=True, max_streams=64)
    while not chat.is_answering():
        pass
    asked.clear()
    speed, texts = chat.ask(["chat", "code"], 4, repeat=1)
    assert texts == ["yes"] * 4
    assert speed > 0.0
    contents = [prompt[0]["content"] for prompt in asked if isinstance(prompt, list)]
    about_code = {content[-5:] for content in contents if "Python" in content}
    assert {content[-5:] for content in contents} - about_code == {"(1.0)", "(1.2)"}
    assert about_code == {"(1.1)", "(1.3)"}

    asked.clear()
    assert chat.ask(["chat"], 64, repeat=3)[1] == ["yes"] * 64

    asked.clear()
    Side("text", chat.port, is_chat=False, max_streams=1).ask(["code"], 1, repeat=2)
    (prompt,) = asked
    assert isinstance(prompt, str)
    assert prompt.startswith("def ")


def test_a_server_that_is_not_there_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert not Side("gone", port, is_chat=True, max_streams=1).is_answering()
