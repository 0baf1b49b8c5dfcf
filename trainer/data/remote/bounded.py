"""Bound on the bytes of an S3 server's answer; botocore reads whatever is sent."""

import re
from typing import Any

import aiohttp
from aiobotocore.httpsession import AIOHTTPSession

_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")
_OTHERS = 1 << 20  # bytes of an error, or of an empty object


class TooMuchError(aiohttp.ClientError):
    """Raised if a server sends more bytes than requested."""


class _Body:
    """Wrapper of an answer's stream that reads at most `most` bytes."""

    def __init__(self, stream: aiohttp.StreamReader, most: int) -> None:
        self._stream, self._left = stream, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def read(self, amount: int = -1) -> bytes:
        """See `StreamReader.read`.

        Raises:
            TooMuchError: If the stream has more.
        """
        parts = list[bytes]()
        while amount and (part := await self._stream.read(min(amount, 1 << 16) if amount > 0 else 1 << 16)):
            self._left -= len(part)
            if self._left < 0:
                raise TooMuchError
            parts.append(part)
            if amount > 0:  # a stream returns what it has
                break
        return b"".join(parts)


class BoundedSession(AIOHTTPSession):  # type: ignore[misc]  # without types
    """HTTP session with bounded answers, for aiobotocore's `http_session_cls`."""

    async def send(self, request: Any) -> Any:
        """See `AIOHTTPSession.send`."""
        answer = await super().send(request)
        asked = request.headers.get("Range", "")
        span = _RANGE.fullmatch(asked.decode() if isinstance(asked, bytes) else asked)
        good = span is not None and answer.status_code < 300
        most = int(span[2]) - int(span[1]) + 1 if span is not None and good else _OTHERS
        answer.raw.content = _Body(answer.raw.content, most)
        return answer
