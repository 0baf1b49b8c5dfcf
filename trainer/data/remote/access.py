"""Downloads from s3:// and https:// by fsspec, with retries of errors that may be temporary.

Each download has its own event loop, which ends with it: no thread is left that a fork wouldn't copy.
Credentials from a service (roles of an instance, a container, a login) are fetched once a process.
"""

import asyncio
import contextlib
import hashlib
import io
import os
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import quote

from trainer.data.formats.signatures import WEB_PAGE, what_it_is
from trainer.errors import BadInputError
from trainer.observe.console import warn

# Seconds between tries.
_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
# Seconds that a download waits at most where its server says how long (Retry-After); waits that are told of.
_PATIENCE, _LONG = 300.0, 10.0
_HEAD = 1024
# Seconds without a byte, after which a download has failed.
_SILENCE = 30.0
# S3 gives one connection some 80 MB/s: so several, and a part that fails is fetched again alone.
_PART, _PARTS_AT_ONCE = 8 << 20, 8
_CLOCKS = ("RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture")
_CREDENTIALS = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
# Answers of STS, which gives the credentials of roles: all with the status 400.
_BUSY = ("Throttling", "ThrottlingException", "RequestLimitExceeded", "IDPCommunicationError")
_STATUS = {401: "not signed in", 403: "access denied", 404: "not found"}

T = TypeVar("T")

# Credentials that a service gave this process or its parent, and their values; at most one entry.
given = list[tuple[Any, Any]]()


class DiskError(Exception):
    """Raised if fetched bytes can't be written; the cause is the OSError."""


class WrongContentError(Exception):
    """Raised if a server sends more bytes than expected."""


class NotThereError(BadInputError):
    """Raised if the server has no file of this name (404)."""


class _EndedError(BadInputError):
    """Raised if credentials have ended."""


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
        self.done, self._digest, self.head = 0, hashlib.sha256(), b""

    def write(self, data: Any) -> int:
        """Appends bytes.

        Raises:
            DiskError: If they can't be written.
            WrongContentError: If there are more than expected.
        """
        rest = memoryview(data)
        if len(self.head) < _HEAD:
            self.head += bytes(rest[: _HEAD - len(self.head)])
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


def fetch(url: str, sink: DownloadSink) -> None:
    """Downloads a file.

    Args:
        url: Address, s3:// or https://.
        sink: Receives the bytes.

    Raises:
        BadInputError: If the download fails; NotThereError if there is no such file.
        DiskError: If the file can't be written.
        WrongContentError: If more bytes come than the sink expects.
    """
    try:
        _run(_fetch(url, sink))
    except _EndedError:  # a download may take longer than its credentials last
        if not given:
            raise
        given.clear()
        _run(_fetch(url, sink))


def _run(work: Coroutine[Any, Any, None]) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:  # in a notebook, whose own event loop runs in this thread
        return thread.submit(asyncio.run, work).result()


async def _fetch(url: str, sink: DownloadSink) -> None:
    files = _file_system(url)
    own = url.startswith("s3:") and (files.anon or files.key or "aws_access_key_id" in files.client_kwargs)
    if url.startswith("s3:") and not own:
        await _sign(url, files.session)
    session = await _tried(url, files.set_session)
    try:
        if not url.startswith("s3:"):
            await _tried(url, lambda: _whole(files, url, sink))
        elif sink.size is None:
            sink.write(await _tried(url, lambda: _small(files, url, sink.most)))
        else:
            await _in_parts(files, url, sink, sink.size)
    finally:
        await session.close()


def _file_system(url: str) -> Any:
    """Returns a file system without the retries of botocore and s3fs."""
    import fsspec

    common: dict[str, Any] = {"asynchronous": True, "skip_instance_cache": True}
    if url.startswith("s3:"):
        retries = {"total_max_attempts": 1, "mode": "standard"}
        config_kwargs = {"connect_timeout": _SILENCE, "read_timeout": _SILENCE, "retries": retries}
        files = fsspec.filesystem("s3", **common, session=_session(), config_kwargs=config_kwargs)
        files.retries = files.max_concurrency = 1
        return files
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, connect=_SILENCE, sock_connect=_SILENCE, sock_read=_SILENCE)
    # trust_env: proxies and ~/.netrc.
    # A signed address is valid as it was signed: not with other quotes.
    kwargs = {"timeout": timeout, "trust_env": True, "requote_redirect_url": False}
    return fsspec.filesystem("http", **common, client_kwargs=kwargs)


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


async def _sign(url: str, session: Any) -> None:
    """Gives a session the credentials that a service gave before, or fetches and keeps them.

    A service that is asked for each download refuses soon (a role of an instance, of a container). Others are
    read anew, as somebody may write them anew: of the environment and of files. botocore says when they are
    renewed: a quarter of an hour before their end.
    """
    if not given or given[0][0].refresh_needed():
        valid = bool(given) and not given[0][0].refresh_needed(0)
        waits = () if valid else _WAITS if given else _WAITS[:2]
        try:
            found = await _tried(url, lambda: _found(session), waits=waits)
        except BadInputError:
            if not valid:
                raise
        else:
            if not hasattr(found[0], "refresh_needed"):
                return
            given[:] = [found]
    values = given[0][1]
    session.set_credentials(values.access_key, values.secret_key, values.token)


async def _found(session: Any) -> tuple[Any, Any]:
    """Returns credentials and their values, which an assumed role asks for only now."""
    from botocore.exceptions import NoCredentialsError

    if (credentials := await session.get_credentials()) is None:
        raise NoCredentialsError
    return credentials, await credentials.get_frozen_credentials()


async def _whole(files: Any, url: str, sink: DownloadSink) -> None:
    sink.restart()
    try:
        await files._get_file(url, sink)
    finally:
        if what_it_is(sink.head) == WEB_PAGE:
            raise BadInputError(
                f"{url}: its server sent {WEB_PAGE} in place of the file, as one to log in on; check the "
                "address and the credentials (~/.netrc)"
            )
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


async def _tried(url: str, attempt: Callable[[], Awaitable[T]], waits: Sequence[float] | None = None) -> T:
    import aiohttp
    from botocore.exceptions import BotoCoreError, ClientError

    failure: Exception
    rest, left, tries = deque(_WAITS if waits is None else waits), _PATIENCE, 0
    while True:
        tries += 1
        try:
            return await attempt()
        # Not "from error" below: its text may hold a signed address that the server led to.
        except (OSError, EOFError, asyncio.TimeoutError, aiohttp.ClientError) as error:
            failure = error
        except (BotoCoreError, ClientError, ValueError, LookupError) as error:
            failure = error  # the last two: a parser failed on a malformed answer
        status, code = _answer(failure)
        what, remedy = _what(failure, status, code), _remedy(failure, status, code)
        if not _is_temporary(failure, status, code):
            kind = NotThereError if status == 404 else _EndedError if code in _CREDENTIALS else BadInputError
            raise kind(f"{url}: {what}; {remedy}") from None
        asked = _asked_wait(failure)
        if asked > left:
            what += f", and its server asks to wait for {asked:,.0f} s"
        elif asked > _LONG:
            warn(f"{url}: {what}, and its server asks to wait for {asked:,.0f} s")
        if asked > left or (not asked and not rest):
            break
        wait = max(1.0, asked) if asked else rest.popleft()
        left -= wait
        await asyncio.sleep(wait)
    if isinstance(failure, EOFError):
        remedy = "put the whole file there, or make the index again"
    elif "Credentials" not in type(failure).__name__:
        remedy = "check the address, and that the server can be reached from here, then start again"
    raise BadInputError(f"{url}: {what}, after {tries} tr{'ies' if tries > 1 else 'y'}; {remedy}") from None


def _asked_wait(error: BaseException) -> float:
    """Returns the seconds that a server asks to wait by the header Retry-After; 0 if it doesn't."""
    for each in (error, error.__cause__):
        answer = getattr(each, "response", None)
        if isinstance(answer, dict):
            headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        else:
            headers = getattr(each, "headers", None) or {}
        if text := str(headers.get("retry-after", "")).strip():
            if re.fullmatch(r"[0-9]{1,9}", text):
                return float(text)
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                at = parsedate_to_datetime(text)
                at = at if at.tzinfo else at.replace(tzinfo=timezone.utc)
                return max(0.0, (at - datetime.now(timezone.utc)).total_seconds())
    return 0.0


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


def _is_temporary(error: BaseException, status: int | None, code: str) -> bool:
    import aiohttp
    from botocore import exceptions

    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return True
    if status is not None:
        return code in _BUSY or status in (408, 425, 429) or (status >= 500 and status != 501)
    if isinstance(error, exceptions.NoCredentialsError):
        # A service that fails once is as silent as one that isn't there.
        return bool(given) or os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true"
    if isinstance(error, ValueError | LookupError):
        return False
    redirects = aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError | aiohttp.TooManyRedirects
    if isinstance(error, redirects | aiohttp.ClientSSLError | exceptions.SSLError):
        return False
    passing = (
        exceptions.HTTPClientError | exceptions.FlexibleChecksumError | exceptions.CredentialRetrievalError
    )
    return isinstance(error, passing) or not isinstance(error, exceptions.BotoCoreError)


def _what(error: BaseException, status: int | None, code: str) -> str:
    """Describes an error, without an address that a server led to."""
    if isinstance(error, EOFError):
        return str(error)
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return "no answer in time"
    if status is None:
        kind = "its server's answer can't be read" if isinstance(error, ValueError) else "can't be reached"
        return f"{kind} ({type(error).__name__})"
    if status == 416:
        return "is shorter than its index says"
    named = code if code != str(status) else ""
    reason = named if named in _CLOCKS else _STATUS.get(status, named)
    if getattr(error, "history", ()) and (host := error.request_info.real_url.host):  # type: ignore[attr-defined]
        reason += f"{', ' if reason else ''}by {host}, where its server leads"
    return f"HTTP {status} ({reason})" if reason else f"HTTP {status}"


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
