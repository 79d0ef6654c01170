"""What passes between a loading process and the ranks of its node, over a socket of theirs.

A rank asks by a number, 8 bytes: of the batch. The answer is the length of a JSON document, 8 bytes with the
batch's descriptor beside them, and the document: the batch's fields, or why there is no such batch.
"""

from __future__ import annotations

import array
import json
import socket
import struct
from typing import Any

_NUMBER = struct.Struct("<q")


def ask(connection: socket.socket, number: int) -> None:
    """Ask for a batch."""
    connection.sendall(_NUMBER.pack(number))


def receive_request(connection: socket.socket) -> int | None:
    """The batch that is asked for; None: the other side has gone."""
    data = _exactly(connection, _NUMBER.size)
    return None if data is None else int(_NUMBER.unpack(data)[0])


def send_answer(connection: socket.socket, document: dict[str, Any], descriptor: int | None) -> None:
    """Answer with a document and a descriptor, which the other side gets a copy of."""
    data = json.dumps(document).encode()
    descriptors = [] if descriptor is None else [descriptor]
    socket.send_fds(connection, [_NUMBER.pack(len(data))], descriptors)
    connection.sendall(data)


def receive_answer(connection: socket.socket) -> tuple[dict[str, Any], int | None] | None:
    """The answer; None: the other side has gone."""
    size = array.array("i").itemsize
    head, ancillary, _, _ = connection.recvmsg(_NUMBER.size, socket.CMSG_LEN(size))
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data[: len(data) - len(data) % size])
    rest = _exactly(connection, _NUMBER.size - len(head)) if head else None
    text = None if rest is None else _exactly(connection, _NUMBER.unpack(head + rest)[0])
    if text is None:
        return None
    document: dict[str, Any] = json.loads(text)
    return document, descriptors[0] if descriptors else None


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    received = b""
    while len(received) < count:
        more = connection.recv(count - len(received))
        if not more:
            return None
        received += more
    return received
