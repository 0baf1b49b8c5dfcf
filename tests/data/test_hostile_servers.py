"""Promise: an S3 endpoint that misbehaves is one line."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from trainer.data.remote import access
from trainer.data.remote.access import DownloadSink, WrongContentError, fetch
from trainer.data.shared import anonymous_file
from trainer.errors import BadInputError


def head(status: str, *headers: str) -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *headers, "", "")).encode()


def error(status: str, code: str, *headers: str) -> bytes:
    body = f"<Error><Code>{code}</Code></Error>".encode()
    return head(status, f"Content-Length: {len(body)}", *headers) + body


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], None]]:
    """Makes an endpoint that gives one answer."""
    listening = socket.create_server(("127.0.0.1", 0))
    said = list[bytes]()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            asked = b""
            while b"\r\n\r\n" not in asked and (part := connection.recv(1 << 16)):
                asked += part
            connection.sendall(said[0])

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{listening.getsockname()[1]}",
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "something",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(access, "_WAITS", (0.0,))
    threading.Thread(target=accept, daemon=True).start()
    yield said.append
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


BLOCK = b"a" * (1 << 16)


ANSWERS: dict[str, tuple[bytes, str]] = {
    "another time": (error("403 X", "RequestTimeTooSkewed"), r"Skewed\); .*set the clock .* UTC"),
    "a checksum": (
        head("206 P", "Content-Length: 1000", "x-amz-checksum-crc32: AAAAAA==") + BLOCK[:1000],
        "Checksum",
    ),
}


@pytest.mark.parametrize("size", [1000, None])
@pytest.mark.parametrize("answer", ANSWERS)
def test_an_endpoint_that_misbehaves_is_one_line(
    serve: Callable[[bytes], None], answer: str, size: int | None
) -> None:
    said, message = ANSWERS[answer]
    serve(said)
    file = anonymous_file()
    with pytest.raises(BadInputError, match=message) as refused:
        fetch("s3://bucket/x", DownloadSink(file, size, most=2000))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500
    assert "\x1b" not in str(refused.value)


@pytest.mark.parametrize("size", [1000, None])
def test_more_than_was_asked_for_is_not_taken(serve: Callable[[bytes], None], size: int | None) -> None:
    serve(head("200 OK", "Content-Length: 3000") + BLOCK[:3000])
    sink = DownloadSink(anonymous_file(), size, most=2000)
    with pytest.raises(WrongContentError):
        fetch("s3://bucket/x", sink)
    assert sink.done == 0
