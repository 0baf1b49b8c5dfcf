"""Promise: an S3 endpoint that misbehaves is one line, in bounded memory."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from trainer.data.remote import access
from trainer.data.remote.access import DownloadSink, fetch
from trainer.data.shared import anonymous_file
from trainer.errors import BadInputError
from trainer.host.files import read_at

_MANY = 8 << 20  # bytes that an "endless" answer has at most, so that a test ends


def head(status: str, *headers: str) -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *headers, "", "")).encode()


def error(status: str, code: str, *headers: str) -> bytes:
    body = f"<Error><Code>{code}</Code></Error>".encode()
    return head(status, f"Content-Length: {len(body)}", *headers) + body


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes, bytes], None]]:
    """Makes an endpoint that gives one answer, and then a block again and again."""
    listening = socket.create_server(("127.0.0.1", 0))
    said = list[bytes]()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            asked = b""
            while b"\r\n\r\n" not in asked and (part := connection.recv(1 << 16)):
                asked += part
            connection.sendall(said[0])
            for _ in range(_MANY // len(said[1]) if said[1] else 0):
                connection.sendall(said[1])

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

    def begin(first: bytes, block: bytes) -> None:
        said.extend((first, block))

    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{listening.getsockname()[1]}",
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "something",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(access, "_WAITS", (0.0,))
    threading.Thread(target=accept, daemon=True).start()
    yield begin
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


BLOCK = b"a" * (1 << 16)
CHUNK = b"10000\r\n" + BLOCK + b"\r\n"
TOO_MUCH = "sends more than it was asked for"


ANSWERS: dict[str, tuple[bytes, bytes, str]] = {
    "no end": (head("206 P", "Content-Range: bytes 0-999/1000"), BLOCK, TOO_MUCH),
    "no end in chunks": (head("200 OK", "Transfer-Encoding: chunked"), CHUNK, TOO_MUCH),
    "an error without an end": (head("503 X"), BLOCK, TOO_MUCH),
    "a refusal without an end": (head("403 X", "Transfer-Encoding: chunked"), CHUNK, TOO_MUCH),
    "another time": (error("403 X", "RequestTimeTooSkewed"), b"", r"Skewed\); .*set the clock .* UTC"),
    "expired": (error("400 X", "ExpiredToken"), b"", r"HTTP 400 \(ExpiredToken\); .*credentials"),
    "a long word": (error("400 X", "&#10;[31m&#10;" + "x" * 5000), b"", r"HTTP 400 \(31mx{57}\); check"),
    "a region": (error("301 M", "M", "x-amz-bucket-region: evil.example/#"), b"", "can't be|HTTP 301"),
    "a redirect": (error("307 M", "T", "Location: file:///etc/passwd"), b"", "HTTP 307|can't be"),
    "a date": (
        head("206 P", "Content-Length: 1000", "Last-Modified: x") + BLOCK[:1000],
        b"",
        "can't be read",
    ),
    "a checksum": (
        head("206 P", "Content-Length: 1000", "x-amz-checksum-crc32: AAAAAA==") + BLOCK[:1000],
        b"",
        "Checksum",
    ),
    "no HTTP": (b"SSH-2.0-x\r\n", b"", "can't be reached"),
}


@pytest.mark.parametrize("size", [1000, None])
@pytest.mark.parametrize("answer", ANSWERS)
def test_an_endpoint_that_misbehaves_is_one_line(
    serve: Callable[[bytes, bytes], None], answer: str, size: int | None
) -> None:
    first, block, message = ANSWERS[answer]
    serve(first, block)
    file = anonymous_file()
    with pytest.raises(BadInputError, match=message) as refused:
        fetch("s3://bucket/x", DownloadSink(file, size, most=2000))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500
    assert "\x1b" not in str(refused.value)


def test_what_was_asked_for_is_taken(serve: Callable[[bytes, bytes], None]) -> None:
    serve(head("206 P", "Content-Length: 1000") + BLOCK[:1000], b"")
    file = anonymous_file()
    fetch("s3://bucket/x", DownloadSink(file, 1000))
    assert read_at(file, 0, 1001) == BLOCK[:1000]
