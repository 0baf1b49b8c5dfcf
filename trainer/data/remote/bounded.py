"""Answers of an S3 server up to the bytes that were asked for; botocore itself reads whatever comes."""

import re
from typing import Any

import aiohttp
from aiobotocore.httpsession import AIOHTTPSession

_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")
_OTHERS = 1 << 20  # bytes of an error, or of an empty object


class TooMuchError(aiohttp.ClientError):
    """More came than was asked for."""


class _Body:
    """Stands for the stream of an answer; reads at most so many bytes of it."""

    def __init__(self, stream: aiohttp.StreamReader, most: int) -> None:
        self._stream, self._left = stream, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def read(self, amount: int = -1) -> bytes:
        """See `StreamReader.read`.

        Raises:
            TooMuchError: If more comes.
        """
        parts = list[bytes]()
        while amount and (part := await self._stream.read(min(amount, 1 << 16) if amount > 0 else 1 << 16)):
            self._left -= len(part)
            if self._left < 0:
                raise TooMuchError
            parts.append(part)
            if amount > 0:  # a stream gives what it has
                break
        return b"".join(parts)


class BoundedSession(AIOHTTPSession):  # type: ignore[misc]  # without types
    """The connections of a client; given to aiobotocore as `http_session_cls`."""

    async def send(self, request: Any) -> Any:
        """See `AIOHTTPSession.send`."""
        answer = await super().send(request)
        asked = request.headers.get("Range", "")
        span = _RANGE.fullmatch(asked.decode() if isinstance(asked, bytes) else asked)
        good = span is not None and answer.status_code < 300
        most = int(span[2]) - int(span[1]) + 1 if span is not None and good else _OTHERS
        answer.raw.content = _Body(answer.raw.content, most)
        return answer
