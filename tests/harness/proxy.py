"""A TCP proxy that breaks: cuts connections, stops the bytes, refuses, or forwards to somewhere else.

async with Proxy(service.address) as proxy:
    client = Client(proxy.address)
    proxy.cut_after(100_000)       # once, after so many bytes from the server
    proxy.cut_each_after(100_000)  # every connection
    proxy.cut()                    # all connections, now
    proxy.stall()                  # connections stay open, no byte gets through (half-open)
    proxy.resume()
    proxy.target = other.address   # for connections from now on

`ProxyThread` is for tests that are not asynchronous: it runs a proxy beside them.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Literal, TypeVar

Direction = Literal["down", "up"]
"""down: from the server to the client; up: the other way."""

READ_BYTES = 16 * 1024

T = TypeVar("T")


class Proxy:
    """Forwards a port of its own to `target` (HOST:PORT)."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.connections = 0
        """Connections accepted so far."""
        self.bytes: dict[Direction, int] = {"down": 0, "up": 0}
        """Bytes forwarded so far."""
        self.cuts = 0
        """Connections that were cut so far."""
        self.refuse = False
        """New connections are closed at once."""
        self.delay_seconds = 0.0
        """Time that each piece of bytes is held back."""
        self._once: dict[Direction, int | None] = {"down": None, "up": None}
        self._each: dict[Direction, int | None] = {"down": None, "up": None}
        self._flip: dict[Direction, int | None] = {"down": None, "up": None}
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._open: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self._flowing.set()
        self.cut()
        while self._open:
            await asyncio.sleep(0.001)

    @property
    def address(self) -> str:
        """HOST:PORT to connect to."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    def cut_after(self, count: int, direction: Direction = "down") -> None:
        """Cuts the connection that carries the `count`-th byte from now on; once."""
        self._once[direction] = count

    def cut_each_after(self, count: int | None, direction: Direction = "down") -> None:
        """Cuts every connection after `count` bytes of its own; None: no more."""
        self._each[direction] = count

    def flip_at(self, position: int, direction: Direction = "down") -> None:
        """Flips all bits of the byte at `position` from now on; once."""
        self._flip[direction] = position

    def cut(self) -> None:
        """Resets all open connections."""
        for connection in list(self._open):
            self.cuts += 1
            connection.abort()

    def stall(self) -> None:
        """Lets no byte through, though the connections stay."""
        self._flowing.clear()

    def resume(self) -> None:
        """Ends `stall`."""
        self._flowing.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.refuse:
            writer.transport.abort()
            return
        host, _, port = self.target.rpartition(":")
        try:
            server_reader, server_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(writer, server_writer)
        self._open.add(connection)
        try:
            await asyncio.gather(
                self._pump("up", reader, server_writer, connection),
                self._pump("down", server_reader, writer, connection),
            )
        finally:
            connection.close()
            self._open.discard(connection)

    async def _pump(
        self,
        direction: Direction,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connection: "_Connection",
    ) -> None:
        """Forwards until the sender ends, an end is gone, or the connection is to be cut."""
        carried = 0
        try:
            while data := await reader.read(READ_BYTES):
                await self._flowing.wait()
                if self.delay_seconds:
                    await asyncio.sleep(self.delay_seconds)
                data = self._flipped(direction, data)
                allowed = self._allowance(direction, carried, len(data))
                writer.write(data[:allowed])
                self.bytes[direction] += allowed
                carried += allowed
                await writer.drain()
                if allowed < len(data):
                    self.cuts += 1
                    connection.abort()
                    return
            writer.write_eof()
        except OSError:
            # One end was reset; so is the other.
            connection.abort()

    def _flipped(self, direction: Direction, data: bytes) -> bytes:
        position = self._flip[direction]
        if position is None:
            return data
        if position >= len(data):
            self._flip[direction] = position - len(data)
            return data
        self._flip[direction] = None
        return data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :]

    def _allowance(self, direction: Direction, carried: int, count: int) -> int:
        """How many of the next `count` bytes get through before the connection is to be cut."""
        allowed = count
        each, once = self._each[direction], self._once[direction]
        if each is not None:
            allowed = min(allowed, each - carried)
        if once is not None:
            allowed = min(allowed, once)
            self._once[direction] = once - allowed if once > allowed or allowed == count else None
        return allowed


class _Connection:
    """Both ends of a forwarded connection."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self._ends = (client, server)

    def close(self) -> None:
        """Closes both; what is buffered is still sent."""
        for end in self._ends:
            end.close()

    def abort(self) -> None:
        """Resets both; what is buffered is lost."""
        for end in self._ends:
            end.transport.abort()


class ProxyThread:
    """A `Proxy` on an event loop and thread of its own.

    with ProxyThread(service.address) as proxy:
        proxy.do(lambda p: p.cut_after(100_000))
    """

    def __init__(self, target: str) -> None:
        self._proxy = Proxy(target)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> "ProxyThread":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._proxy.__aenter__(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._proxy.__aexit__(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def address(self) -> str:
        """HOST:PORT to connect to."""
        return self._proxy.address

    def do(self, action: Callable[[Proxy], T]) -> T:
        """Calls `action` with the proxy, where it runs; returns the result."""

        async def call() -> T:
            return action(self._proxy)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()
