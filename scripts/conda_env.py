#!/usr/bin/env python3
"""Makes a conda environment from an explicit lock: every package by its hash, the same tree each time.

conda checks no hash over file:// and asks channels for notices even for an explicit lock. So this fetches the
packages and checks them itself; conda gets local files and no network. The standard library is enough.
"""

import argparse
import concurrent.futures
import hashlib
import http.client
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from explicit_lock import LockError, Package, parse_lock

TRIES, TIMEOUT, PARALLEL = 5, 60.0, 4  # attempts; seconds without a byte; downloads at once
# With plugins, Miniconda's terms-of-service check asks the channel, conda's --offline or not.
NO_NETWORK = {"CONDA_NO_PLUGINS": "true", "CONDA_OFFLINE": "true"}
NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}  # of conda itself, which stays in the dev image
# Of a record: where it lay in this build.
LOCAL = (
    "extracted_package_dir",
    "package_tarball_full_path",
    "link",
    "requested_spec",
    "requested_specs",
    "auth",
)
CONDARC = {
    "channels": ["conda-forge"],
    "default_channels": [],
    "number_channel_notices": 0,
    "notify_outdated_conda": False,
    "offline": True,
    "register_envs": False,
    "report_errors": False,
}


class MakeError(RuntimeError):
    """Fetching or making failed (exit code 1)."""


def say(line: str) -> None:
    """Reports progress, in order with what conda prints."""
    print(f"conda_env: {line}", flush=True)


def hash_of(file: Path, algorithm: str) -> str:
    """Returns the hash of a file's content."""
    found = hashlib.new(algorithm, usedforsecurity=False)
    with file.open("rb") as source:
        while block := source.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def intact(file: Path, package: Package) -> bool:
    """True if the file exists with the package's hash."""
    return file.is_file() and hash_of(file, package.algorithm) == package.digest


def copy_body(url: str, target: Path) -> None:
    """Writes what an http(s) URL answers to a file.

    Raises:
        MakeError: an answer that a retry cannot change.
        OSError: one that it can, such as a body cut short.
    """
    # A user agent of its own: some hosts refuse Python's.
    request = urllib.request.Request(url, headers={"User-Agent": "conda_env"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer, target.open("wb") as sink:
            shutil.copyfileobj(answer, sink)
            expected = answer.headers.get("Content-Length")
    except urllib.error.HTTPError as error:
        if error.code >= 500 or error.code in (408, 425, 429):
            raise
        raise MakeError(f"{url}: HTTP {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            why = error.reason.verify_message
            raise MakeError(f"{url}: {why}; set SSL_CERT_FILE to the file of your CA") from None
        raise
    if expected is not None and target.stat().st_size != int(expected):
        raise ConnectionError(f"cut short: {target.stat().st_size} of {expected} bytes")


def download(url: str, target: Path, backoff: float) -> None:
    """Fetches a URL to a file; after a failure that may pass again, waiting twice as long each time."""
    for attempt in range(1, TRIES + 1):
        try:
            return copy_body(url, target)
        except (OSError, http.client.HTTPException) as error:
            if error.__class__ is OSError and error.errno:  # the disk, not the network
                raise
            if attempt == TRIES:
                raise MakeError(f"{url}: {error} ({TRIES} attempts)") from None
            wait = backoff * 2 ** (attempt - 1)
            say(f"{url}: {error}; again in {wait:g} s")
            time.sleep(wait)
    return None


def fetch(package: Package, cache: Path, mirror: str, backoff: float) -> bool:
    """Puts a package into the cache, its hash checked; returns True if the cache had it.

    Args:
        package: Of the lock.
        cache: Where packages are kept.
        mirror: A URL or a folder that stands for the host of the lock's URLs; or "".
        backoff: Seconds before the first retry.

    Raises:
        MakeError: missing, or another file than the lock's.
    """
    target = cache / package.path
    if intact(target, package):
        return True
    target.parent.mkdir(parents=True, exist_ok=True)
    url = f"{mirror.rstrip('/')}/{package.path}" if mirror else package.url
    with tempfile.TemporaryDirectory(prefix=".part-", dir=target.parent) as folder:
        part = Path(folder) / package.file
        if url.startswith(("http://", "https://")):
            download(url, part, backoff)
        else:
            file = Path(unquote(urlsplit(url).path) if url.startswith("file:") else url)
            if not file.is_file():
                raise MakeError(f"{file} is missing in the mirror")
            shutil.copyfile(file, part)
        if not intact(part, package):
            raise MakeError(f"{url}: another file than the lock's, its {package.algorithm} differs: refused")
        part.chmod(0o644)
        part.replace(target)  # whole or not at all: another build may share the cache
    return False


def fetch_all(packages: list[Package], cache: Path, mirror: str, backoff: float) -> None:
    """Fetches the packages, a few at once; the first failure ends it."""
    begun = time.monotonic()
    pool = concurrent.futures.ThreadPoolExecutor(PARALLEL)
    get = partial(fetch, cache=cache, mirror=mirror, backoff=backoff)
    try:
        for number, (package, held) in enumerate(zip(packages, pool.map(get, packages), strict=True), 1):
            size = (cache / package.path).stat().st_size / 1e6
            origin = "in the cache" if held else "fetched"
            say(f"{number}/{len(packages)} {package.file} ({size:.1f} MB, {origin})")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    say(f"{len(packages)} packages, hashes checked, {time.monotonic() - begun:.1f} s")


def link(conda: str, verb: str, prefix: Path, packages: list[Package], cache: Path, work: Path) -> None:
    """Lets conda link the checked files by `create`, or by `install` into what is there.

    It gets no network, and no settings or caches of the machine.

    Raises:
        MakeError: conda failed.
    """
    lock, condarc = work / "lock.txt", work / "condarc"
    lock.write_text("".join(["@EXPLICIT\n", *(f"file://{cache / one.path}\n" for one in packages)]))
    condarc.write_text(json.dumps({**CONDARC, "pkgs_dirs": [str(work / "pkgs")]}))  # JSON is YAML
    drop = ("CONDA_", "_CONDA_", "MAMBA_", "PYTHON", "XDG_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(drop)}
    env |= NO_NETWORK | NO_BYTECODE | {"CONDARC": str(condarc), "HOME": str(work), "PYTHONNOUSERSITE": "1"}
    words = [conda, verb, "-y", "-p", str(prefix), "--offline", "--override-channels", "-c", "conda-forge"]
    words += ["--no-default-packages"] * (verb == "create") + ["--file", str(lock)]
    code = subprocess.call(words, env=env, stdin=subprocess.DEVNULL)
    if code:
        raise MakeError(f"conda {verb} ended with exit code {code}: see its lines above")


def bytecode(prefix: Path) -> set[Path]:
    """Returns the folders of bytecode."""
    return set(prefix.rglob("__pycache__"))


def tidy(prefix: Path, packages: list[Package], keep: set[Path]) -> None:
    """Makes the tree the same each time: no times, no folders of this build, no bytecode.

    Bytecode that conda makes holds the sources' times; the records no longer name it. Records get the lock's
    URL and hash in place of the local file's, so that `conda list --explicit` tells the source, and for each
    path its place in the prefix (conda leaves noarch packages' own) and a hash (entry points have none).
    """
    meta = prefix / "conda-meta"
    # An empty one stays: without it conda takes the folder for none of its environments.
    (meta / "history").write_text("")
    (meta / "created_at").unlink(missing_ok=True)
    for folder in sorted(bytecode(prefix) - keep):
        shutil.rmtree(folder)
    for package in packages:
        file = meta / f"{package.record}.json"
        record = json.loads(file.read_text())
        for key in LOCAL:
            record.pop(key, None)
        record["url"], record["channel"] = package.url, package.url.rsplit("/", 2)[0]
        record[package.algorithm] = package.digest
        record["files"] = [path for path in record["files"] if "__pycache__/" not in path]
        data = record.setdefault("paths_data", {"paths": [], "paths_version": 1})
        data["paths"] = [path for path in data["paths"] if "__pycache__/" not in path["_path"]]
        if len(data["paths"]) != len(record["files"]):
            raise MakeError(f"{file.name} names other files in `files` than in `paths_data`")
        for path, place in zip(data["paths"], record["files"], strict=True):
            path["_path"] = place
            if path["path_type"] != "softlink" and "sha256_in_prefix" not in path:
                path["sha256_in_prefix"] = hash_of(prefix / place, "sha256")
        file.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


def records(prefix: Path) -> set[str]:
    """Returns the packages that conda's records list as installed."""
    return {file.stem for file in (prefix / "conda-meta").glob("*.json")}


def verify(prefix: Path, packages: list[Package], before: set[str]) -> None:
    """Compares the prefix's records with the lock.

    Raises:
        MakeError: they differ.
    """
    found = records(prefix)
    wanted = before | {package.record for package in packages}
    if found != wanted:
        differ = ", ".join(sorted(found ^ wanted))
        raise MakeError(f"the records of {prefix} are not those of the lock: {differ}")


def make(options: argparse.Namespace) -> None:
    """Makes the environment; a failure may leave it half done: the stage of the image goes then."""
    prefix: Path = options.prefix.absolute()
    try:
        packages = parse_lock(options.lock.read_text(), frozenset(options.allow_md5))
    except (LockError, OSError, UnicodeDecodeError) as error:
        raise LockError(f"{options.lock}: {getattr(error, 'strerror', None) or error}") from None
    if options.add and not (prefix / "conda-meta").is_dir():
        raise LockError(f"{prefix} is no conda environment: nothing can be added to it")
    if not options.add and os.path.lexists(prefix) and (not prefix.is_dir() or any(prefix.iterdir())):
        raise LockError(f"{prefix} is there already: delete it first, or name another folder")
    conda = shutil.which(options.conda)
    if not conda:
        raise LockError(f"no {options.conda} on PATH: run this in the Miniconda stage, or give --conda")
    certificates = os.environ.get("SSL_CERT_FILE")
    if certificates and not Path(certificates).is_file():
        raise LockError(f"SSL_CERT_FILE={certificates} is no file")
    # conda unpacks x-1!2.0 only from a URL with a plain `!`, so that nothing in it can be quoted.
    odd = set(f"{prefix}{options.cache or ''}") & set(" \t\n#%?")
    if odd:
        raise LockError(f"{prefix} or --cache has {sorted(odd)} in its path, which conda cannot read")
    begun = time.monotonic()
    os.umask(0o022)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    # Beside the prefix: conda links files from its package folder where it can, instead of copying them.
    with tempfile.TemporaryDirectory(prefix=".conda_env-", dir=prefix.parent) as folder:
        work = Path(folder)
        cache = options.cache.absolute() if options.cache else work / "packages"
        fetch_all(packages, cache, options.mirror, options.backoff)
        before, keep = records(prefix), bytecode(prefix)
        if prefix.exists() and not options.add:
            prefix.rmdir()
        link(conda, "install" if options.add else "create", prefix, packages, cache, work)
        verify(prefix, packages, before)
        tidy(prefix, packages, keep)
    say(f"{prefix}: {len(packages)} packages in {time.monotonic() - begun:.1f} s")


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description="Makes a conda environment from an explicit, hashed lock.")
    add = parser.add_argument
    add("lock", type=Path, metavar="LOCK", help="@EXPLICIT file of URL#<sha256> lines")
    add("prefix", type=Path, metavar="PREFIX", help="where; a folder that does not exist yet, or is empty")
    add("--add", action="store_true", help="add the lock's packages to the environment that PREFIX is")
    add("--mirror", default="", metavar="URL|DIR", help="stands for the host of the lock's URLs")
    add("--cache", type=Path, metavar="DIR", help="keeps the packages, for the next time (default: not kept)")
    add("--allow-md5", nargs="+", default=[], metavar="NAME", help="packages whose lock line has only an md5")
    add("--conda", default="conda", metavar="FILE", help="the conda to use (%(default)s)")
    add("--backoff", type=float, default=1.0, metavar="SECONDS", help="before the first retry (%(default)g)")
    options = parser.parse_args()

    def stop(line: object, code: int) -> NoReturn:
        print(f"conda_env: {line}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # sys.exit would wait for downloads under way

    try:
        make(options)
    except LockError as error:
        stop(error, 2)
    except (MakeError, OSError) as error:  # or a full disk, a folder of somebody else
        stop(error, 1)


if __name__ == "__main__":
    main()
