"""Promise: a server that is slow, fails or lies costs time or gives one line, and no secret is shown."""

import asyncio
import datetime
import itertools
import json
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import closing
from email.utils import format_datetime

import pytest

from tests.helpers.refusals import refused
from tests.helpers.remote import S3, Web, wait_until_answered
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override, read_recipe
from trainer.config.section import validated
from trainer.data.remote import access
from trainer.data.remote.access import DownloadSink, WrongContentError, fetch, join
from trainer.data.shared import anonymous_file

Server = Web | S3
DATA = os.urandom(100_000)
NAME = "some #ä%20.bin"


@pytest.fixture(scope="module", params=[Web, S3], ids=["https", "s3"])
def started(request: pytest.FixtureRequest) -> Iterator[Server]:
    with closing(request.param({f"at/{NAME}": DATA, "at/empty": b""})) as server:
        yield server


@pytest.fixture
def server(started: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for kept in (started.app.asked, started.app.faults, started.app.going):
        kept.clear()
    monkeypatch.setattr(access, "_PART", 30_000)
    yield started
    started.app.going.set()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that would have been waited."""
    waited, sleep = list[float](), asyncio.sleep

    async def note(seconds: float) -> None:
        waited.extend([seconds] * (seconds > 0))  # 0 is a library's way to let others run
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    return waited


def got(server: Server, name: str = NAME, size: int | None = len(DATA)) -> bytes:
    with os.fdopen(anonymous_file()) as file:
        sink = DownloadSink(file.fileno(), size)
        fetch(join(f"{server.url}/at/", name), sink)
        return os.pread(file.fileno(), sink.done + 1, 0)


@pytest.mark.parametrize("size", [len(DATA), None])
def test_a_file_comes_whole_whatever_its_name(server: Server, size: int | None) -> None:
    assert got(server, size=size) == DATA
    assert server.app.asked.total() == (4 if isinstance(server, S3) and size else 1)
    assert got(server, "empty", size and 0) == b""


def test_errors_that_may_pass_are_waited_for(server: Server, waits: list[float]) -> None:
    server.app.faults[NAME] = iter(["503", "500", "truncate", "429", "408"])
    assert got(server) == DATA
    if isinstance(server, Web):
        assert waits == [0.5, 1, 2, 4, 8]
    # Of four parts at once only those that failed again.
    assert server.app.asked.total() == (1 if isinstance(server, Web) else 4) + 5
    server.app.faults[NAME] = iter(["503", "truncate"])
    assert got(server, size=None) == DATA


def test_one_that_always_fails_is_named_with_what_to_check(server: Server, waits: list[float]) -> None:
    server.app.faults[NAME] = itertools.repeat("503")
    with refused(join(f"{server.url}/at", NAME), "503, 6"):
        got(server, size=20_000)
    assert (waits, server.app.asked.total()) == ([0.5, 1, 2, 4, 8], 6)
    for fault, names in (("403", ""), ("401", "AWS_ACCESS_KEY_ID"), ("400", "")):  # at once
        waits.clear()
        server.app.asked.clear()
        server.app.faults[NAME] = iter([fault])
        with refused(f"HTTP {fault}", names):
            got(server, size=20_000)
        assert (waits, server.app.asked.total()) == ([], 1), fault


def test_a_length_that_differs_from_the_index_is_found(server: Server, waits: list[float]) -> None:
    for more in (50_000, 10_000):  # for S3 a part that isn't there, and one that is cut off
        with refused(NAME if isinstance(server, S3) else "100,000"):
            got(server, size=len(DATA) + more)
    if isinstance(server, Web):
        with pytest.raises(WrongContentError):
            got(server, size=len(DATA) - 1)
    assert set(waits) <= {0.5, 1, 2, 4, 8}


def test_a_silent_server_holds_nobody_for_ever(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_WAITS", (0.0,))
    monkeypatch.setattr(access, "_SILENCE", 0.2)
    server.app.faults[NAME] = itertools.repeat("hang")
    with refused(NAME if isinstance(server, S3) else "", "2"):
        got(server, size=20_000)  # on a busy machine before the server has read the question


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("size", [1000, None])
@pytest.mark.parametrize(
    ("fault", "names"),
    [("code RequestTimeTooSkewed", "RequestTimeTooSkewed UTC"), ("checksum", "FlexibleChecksumError")],
)
def test_an_odd_endpoint_is_one_line(bucket: S3, fault: str, names: str, size: int | None) -> None:
    bucket.app.faults[NAME] = itertools.repeat(fault)
    with refused(names):
        got(bucket, size=size)
    bucket.app.faults.clear()


@pytest.mark.parametrize("size", [1000, None])
def test_more_than_was_asked_for_is_not_taken(bucket: S3, size: int | None) -> None:
    bucket.app.faults[NAME] = iter(["more"])
    sink = DownloadSink(anonymous_file(), size, most=2000)
    with pytest.raises(WrongContentError):
        fetch(join(f"{bucket.url}/at", NAME), sink)
    assert sink.done == 0


@pytest.fixture
def web() -> Iterator[Web]:
    with closing(Web({f"at/{NAME}": DATA, "gone": DATA})) as server:
        yield server


@pytest.mark.usefixtures("waits")
def test_where_a_server_leads_to_is_not_shown(web: Web) -> None:
    web.app.faults |= {NAME: itertools.repeat("lead s=secret"), "gone": iter(["403", *["503"] * 6])}
    for names in ("403 127.0.0.1", "503 6"):
        with refused(names) as caught:
            got(web)
        assert "secret" not in str(caught.value)
        assert caught.value.__cause__ is None and caught.value.__suppress_context__
    web.app.asked.clear()
    web.app.faults[NAME] = iter(["away"])  # a file of this machine: not tried again
    with refused(join(f"{web.url}/at", NAME)):
        got(web)
    assert web.app.asked.total() == 1


SIGNED = "X-Amz-Credential=AKIA%2F2026&n=%27%27&Signature=ab%2Bcd%2Fef%3D+%20~"


def test_a_signed_address_comes_as_it_was_signed(web: Web) -> None:
    web.app.faults[NAME] = iter(["", f"lead {SIGNED}"])
    assert got(web) == got(web) == DATA
    address = "/at/some%20%23%C3%A4%2520.bin"
    assert web.app.wire == [address, address, f"/gone?{SIGNED}"]


def test_a_wait_on_request(server: Server, waits: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    server.app.faults[NAME] = iter(["429 25", "503 60", "429 7"])
    assert got(server, size=20_000 if isinstance(server, S3) else len(DATA))[:20_000] == DATA[:20_000]
    assert waits == [25, 60, 7]
    said = capsys.readouterr().err.splitlines()
    assert [each.count(" 25 ") + each.count(" 60 ") for each in said] == [1, 1]
    at = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=100)
    server.app.faults[NAME] = iter([f"503 {format_datetime(at, usegmt=True)}", "503 no date", "503 -5"])
    assert got(server, size=None) == DATA
    assert waits[3] == pytest.approx(100, abs=60)
    assert waits[4:] == [0.5, 1]


@pytest.mark.parametrize("size", [7, 100_000, None])
def test_a_page_to_log_in_on_is_called_so(web: Web, size: int | None, waits: list[float]) -> None:
    web.files[f"at/{NAME}"] = b"<!DOCTYPE html><title>Log in</title>" + b" " * 5000
    with refused("HTML ~/.netrc", join(f"{web.url}/at", NAME)):
        got(web, size=size)
    assert (waits, web.app.asked.total()) == ([], 1)


ROLE = "latest/meta-data/iam/security-credentials/role"


@pytest.fixture
def role(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """An instance's role, whose credentials last for an hour, in place of the environment's."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setattr(access, "given", [])
    with closing(Web({"latest/api/token": b"token", ROLE.removesuffix("role"): b"role"})) as web:
        lasting(web, 60)
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", web.url)
        yield web


def lasting(role: Web, minutes: int) -> None:
    end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(minutes=minutes)
    values = {"Code": "Success", "AccessKeyId": "A", "SecretAccessKey": "S", "Token": "T"}
    role.files[ROLE] = json.dumps({**values, "Expiration": end.strftime("%Y-%m-%dT%H:%M:%SZ")}).encode()


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3]:
    with closing(S3({f"at/{NAME}": DATA})) as server:
        yield server


def asked_for_role(role: Web) -> int:
    return role.app.asked[f"/{ROLE}"]


def test_a_role_is_asked_for_once_a_process_and_not_again_in_its_forks(bucket: S3, role: Web) -> None:
    assert [got(bucket) for _ in range(3)] == [DATA] * 3
    wait_until_answered()
    fork = multiprocessing.get_context("fork").Process(target=lambda: os._exit(got(bucket) != DATA))
    fork.start()
    fork.join(300)
    assert fork.exitcode == 0
    assert asked_for_role(role) == 1


def test_a_role_that_is_refused_once_is_asked_for_again(bucket: S3, role: Web, waits: list[float]) -> None:
    role.app.faults["role"] = iter(["429"])
    assert got(bucket) == DATA
    assert (waits, asked_for_role(role)) == ([0.5], 2)


def test_a_role_renewed(bucket: S3, role: Web, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("botocore.utils.ContainerMetadataFetcher.SLEEP_TIME", 0)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{role.url}/{ROLE}")
    lasting(role, 10)
    asked = [0]
    for _ in range(2):
        assert got(bucket) == DATA
        asked.append(asked_for_role(role))
    assert asked[0] < asked[1] < asked[2]
    role.app.faults["role"] = itertools.repeat("503")
    assert got(bucket) == DATA
    assert waits == []
    lasting(role, 60)
    role.app.faults.clear()
    before = asked_for_role(role)
    assert [got(bucket) for _ in range(2)] == [DATA] * 2
    assert asked_for_role(role) == before + 1


def test_a_role_that_has_ended_is_fetched_once_more(bucket: S3, role: Web) -> None:
    assert got(bucket) == DATA
    bucket.app.faults[NAME] = iter(["code ExpiredToken"])
    assert got(bucket) == DATA
    assert asked_for_role(role) == 2
    bucket.app.faults[NAME] = itertools.repeat("code ExpiredToken")
    with refused("ExpiredToken AWS_PROFILE"):
        got(bucket)
    bucket.app.faults.clear()


SECRET = "s3cr3t"
URLS = [
    (["data.path=s3://bucket/x"], "data.cache"),
    (["data.path=s3://bucket/x", "data.cache=c", "data.name=folder"], "data.name=folder"),
    (["data.path=/data", "data.cache=c"], "data.path URL"),
    ([f"data.path=s3://me:{SECRET}@bucket/x", "data.cache=c"], "AWS_SECRET_ACCESS_KEY ~/.aws"),
    ([f"data.path=https://me:{SECRET}/y@host/x", "data.cache=c"], "URL"),
    ([f"data.path=https://host/x?X-Amz-Signature={SECRET}", "data.cache=c"], "? #"),
    (["data.path=gs://bucket/x", "data.cache=c"], "s3://BUCKET/PATH"),
    (["data.path=s3://bucket/x", "data.cache=c", "data.cache_limit=200"], "data.cache_limit=200:"),
]


@pytest.mark.parametrize(("settings", "message"), URLS)
def test_what_does_not_go_together_is_one_line_without_secrets(settings: list[str], message: str) -> None:
    with refused(message) as caught:
        validated(Recipe, override(read_recipe("digits"), ["data.name=pack", *settings]), "digits")
    assert SECRET not in str(caught.value)
