"""SIGTERM and SIGINT for a process whose main thread trains. Used by `app`.

Python runs its signal handlers between two steps of the main thread, which may be inside a long call; asyncio's need a
loop there. So the signal's number is written to a socket, by the interpreter and at once, and read on the background's
event loop.
"""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.learner.background import Background

STOPPING = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def on_stop_signals(background: Background, stop: Callable[[], None]) -> Iterator[None]:
    """Calls `stop` on the background's loop at each of these signals. Use it in the main thread."""
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)

    def read() -> None:
        if set(reading.recv(4096)) & set(STOPPING):
            stop()

    loop = background.loop
    loop.call_soon_threadsafe(loop.add_reader, reading.fileno(), read)
    before = [signal.signal(number, lambda *_: None) for number in STOPPING]
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in zip(STOPPING, before, strict=True):
            signal.signal(number, handler)
        loop.call_soon_threadsafe(loop.remove_reader, reading.fileno())
