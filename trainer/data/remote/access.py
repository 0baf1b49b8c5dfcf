"""Downloads from s3:// and https:// by fsspec, with retries of errors that may be temporary.

Each download has its own event loop, which ends with it: no thread is left that a fork wouldn't copy, and
there is no state to send to loader workers.
"""

import asyncio
import hashlib
import io
import os
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import quote

from trainer.errors import BadInputError

# Seconds between tries.
_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
# Seconds without a byte, after which a download has failed.
_SILENCE = 30.0
# Seconds for a connection when the caller doesn't retry.
_CONNECT = 5.0
# S3 gives one connection some 80 MB/s: so several, and a part that fails is fetched again alone.
_PART, _PARTS_AT_ONCE = 8 << 20, 8
_CLOCKS = ("RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture")
_CREDENTIALS = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
_STATUS = {401: "not signed in", 403: "access denied", 404: "not found"}

T = TypeVar("T")


class DiskError(Exception):
    """Raised if fetched bytes can't be written; the cause is the OSError."""


class WrongContentError(Exception):
    """Raised if a server sends more bytes than expected."""


class NotThereError(BadInputError):
    """Raised if the server has no file of this name (404)."""


class DownloadSink(io.RawIOBase):
    """Writes a download to a file and hashes it.

    Args:
        file: Descriptor of a file, which is overwritten from the start.
        size: Expected bytes; None if unknown.
        most: Upper bound of the bytes, if `size` is unknown.
    """

    def __init__(self, file: int, size: int | None = None, most: int | None = None) -> None:
        self._file, self.size = file, size
        self.most = most if size is None else size
        self.restart()

    def restart(self) -> None:
        """Starts again at the first byte."""
        self.done, self._digest = 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        """Appends bytes.

        Raises:
            DiskError: If they can't be written.
            WrongContentError: If there are more than expected.
        """
        rest = memoryview(data)
        if self.most is not None and self.done + len(rest) > self.most:
            raise WrongContentError
        self._digest.update(rest)
        while rest:
            try:
                count = os.pwrite(self._file, rest, self.done)
            except OSError as error:
                raise DiskError(str(error)) from error
            rest, self.done = rest[count:], self.done + count
        return len(data)

    def sha256(self) -> str:
        """Returns the SHA-256 of the bytes written so far, hexadecimal."""
        return self._digest.hexdigest()


def join(url: str, name: str) -> str:
    """Returns the URL of a file in a folder."""
    return f"{url.rstrip('/')}/{name if url.startswith('s3:') else quote(name)}"


def fetch(url: str, sink: DownloadSink, at_once: bool = False) -> None:
    """Downloads a file.

    Args:
        url: Address, s3:// or https://.
        sink: Receives the bytes.
        at_once: True to fail without retries if the server can't be connected to.

    Raises:
        BadInputError: If the download fails; NotThereError if there is no such file.
        DiskError: If the file can't be written.
        WrongContentError: If more bytes come than the sink expects.
    """
    _run(_fetch(url, sink, at_once))


def _run(work: Coroutine[Any, Any, None]) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:  # in a notebook, whose own event loop runs in this thread
        return thread.submit(asyncio.run, work).result()


async def _fetch(url: str, sink: DownloadSink, at_once: bool = False) -> None:
    files = _file_system(url, _CONNECT if at_once else _SILENCE)
    session = await _tried(url, files.set_session)
    try:
        if not url.startswith("s3:"):
            await _tried(url, lambda: _whole(files, url, sink), at_once)
        elif sink.size is None:
            sink.write(await _tried(url, lambda: _small(files, url, sink.most), at_once))
        else:
            await _in_parts(files, url, sink, sink.size)
    finally:
        await session.close()


def _file_system(url: str, connect: float) -> Any:
    """Returns a file system without the retries of botocore and s3fs."""
    import fsspec

    common: dict[str, Any] = {"asynchronous": True, "skip_instance_cache": True}
    if url.startswith("s3:"):
        retries = {"total_max_attempts": 1, "mode": "standard"}
        config_kwargs = {"connect_timeout": connect, "read_timeout": _SILENCE, "retries": retries}
        files = fsspec.filesystem("s3", **common, session=_session(), config_kwargs=config_kwargs)
        files.retries = files.max_concurrency = 1
        return files
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, connect=connect, sock_connect=connect, sock_read=_SILENCE)
    # trust_env: proxies and ~/.netrc.
    return fsspec.filesystem("http", **common, client_kwargs={"timeout": timeout, "trust_env": True})


def _session() -> Any:
    from aiobotocore.session import AioSession

    session = AioSession()
    session.register_component("data_loader", _descriptions(session.get_config_variable("data_path")))
    return session


@lru_cache(maxsize=1)
def _descriptions(path: str | None) -> Any:
    """Returns botocore's service descriptions; parsing them takes longer than fetching a shard."""
    from botocore.loaders import create_loader

    return create_loader(path)


async def _whole(files: Any, url: str, sink: DownloadSink) -> None:
    sink.restart()
    await files._get_file(url, sink)
    if sink.size is not None and sink.done < sink.size:
        raise EOFError(f"ended after {sink.done:,} of {sink.size:,} bytes")


async def _in_parts(files: Any, url: str, sink: DownloadSink, size: int) -> None:
    """Downloads several parts at once and writes them in order."""
    sink.restart()
    starts, under_way = deque(range(0, size, _PART)), deque[asyncio.Task[bytes]]()
    try:
        while starts or under_way:
            while starts and len(under_way) < _PARTS_AT_ONCE:
                start = starts.popleft()
                under_way.append(asyncio.create_task(_part(files, url, start, min(start + _PART, size))))
            sink.write(await under_way[0])
            under_way.popleft()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


async def _small(files: Any, url: str, most: int | None) -> bytes:
    """Downloads an object up to one byte beyond its upper bound."""
    try:
        data: bytes = await files._cat_file(url, **({} if most is None else {"start": 0, "end": most + 1}))
    except Exception as error:
        if _answer(error)[0] != 416:
            raise
        data = await files._cat_file(url)  # an empty object has no ranges
    return data


async def _part(files: Any, url: str, start: int, end: int) -> bytes:
    async def attempt() -> bytes:
        data: bytes = await files._cat_file(url, start=start, end=end)
        if len(data) > end - start:
            raise WrongContentError
        if len(data) < end - start:
            raise EOFError(f"ended after {start + len(data):,} bytes")
        return data

    return await _tried(url, attempt)


async def _tried(url: str, attempt: Callable[[], Awaitable[T]], at_once: bool = False) -> T:
    import aiohttp
    from botocore.exceptions import BotoCoreError, ClientError

    failure: Exception
    for wait in (*_WAITS, None):
        try:
            return await attempt()
        # Not "from error" below: its text may hold a signed address that the server led to.
        except (OSError, EOFError, asyncio.TimeoutError, aiohttp.ClientError) as error:
            failure = error
        except (BotoCoreError, ClientError, ValueError, LookupError) as error:
            failure = error  # the last two: a parser failed on a malformed answer
        status, code = _answer(failure)
        if at_once and _is_unconnected(failure):
            raise BadInputError(
                f"{url}: {_what(failure, status, code)}; check the address, and that the server can be "
                "reached from here"
            ) from None
        if not _is_temporary(failure, status):
            kind = NotThereError if status == 404 else BadInputError
            raise kind(f"{url}: {_what(failure, status, code)}; {_remedy(failure, status, code)}") from None
        if wait is None:
            break
        await asyncio.sleep(wait)
    remedy = "check the address, and that the server can be reached from here, then start again"
    if isinstance(failure, EOFError):
        remedy = "put the whole file there, or make the index again"
    raise BadInputError(
        f"{url}: {_what(failure, status, code)}, after {len(_WAITS) + 1} tries; {remedy}"
    ) from None


def _answer(error: BaseException) -> tuple[int | None, str]:
    """Returns the HTTP status, if a server answered, and S3's error code."""
    for each in (error, error.__cause__):
        answer = getattr(each, "response", None)
        if isinstance(answer, dict):
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status, re.sub(r"\W", "", str(answer.get("Error", {}).get("Code", "")))[:60]
        if isinstance(status := getattr(each, "status", None), int) and status >= 300:
            return status, ""
    return (404, "") if isinstance(error, FileNotFoundError) else (None, "")


def _is_unconnected(error: BaseException) -> bool:
    import aiohttp
    from botocore import exceptions

    kinds = aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError
    return isinstance(error, kinds | exceptions.EndpointConnectionError | exceptions.ConnectTimeoutError)


def _refused_redirects() -> Any:
    """Returns the exceptions for redirects that are invalid, circular or not to http."""
    import aiohttp

    return aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError | aiohttp.TooManyRedirects


def _is_temporary(error: BaseException, status: int | None) -> bool:
    import aiohttp
    from botocore import exceptions

    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return True
    if status is not None:
        return status in (408, 425, 429) or (status >= 500 and status != 501)
    if isinstance(error, ValueError | LookupError):
        return False
    if isinstance(error, _refused_redirects() | aiohttp.ClientSSLError | exceptions.SSLError):
        return False
    passing = exceptions.HTTPClientError | exceptions.FlexibleChecksumError
    return isinstance(error, passing) or not isinstance(error, exceptions.BotoCoreError)


def _what(error: BaseException, status: int | None, code: str) -> str:
    if isinstance(error, EOFError):
        return str(error)
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return "no answer in time"
    if status == 416:
        return "is shorter than its index says"
    if status is not None:
        named = code if code != str(status) else ""
        reason = named if named in _CLOCKS else _STATUS.get(status, named)
        return f"HTTP {status} ({reason})" if reason else f"HTTP {status}"
    return _what_without_status(error)


def _what_without_status(error: BaseException) -> str:
    """Describes an error without an HTTP status."""
    if isinstance(error, _refused_redirects()):
        return f"its server leads elsewhere, where nothing is fetched ({type(error).__name__})"
    if isinstance(error, ValueError | LookupError):
        return f"its server's answer can't be read ({type(error).__name__})"
    return f"can't be reached ({type(error).__name__})"


def _remedy(error: BaseException, status: int | None, code: str) -> str:
    if code in _CLOCKS:
        here = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        return f"by its clock the request comes at another time: set the clock of this machine ({here})"
    if status == 404:
        return (
            "check the address: data.path holds train/ and val/, each made by `trainer data pack` or "
            "`trainer data index`"
        )
    if status in (401, 403) or code in _CREDENTIALS or "Credentials" in type(error).__name__:
        return (
            "check the address and the credentials (AWS_ACCESS_KEY_ID or AWS_PROFILE; FSSPEC_S3_ANON=true "
            "for a bucket that is open to all; ~/.netrc for https)"
        )
    return "check the address and the server"
