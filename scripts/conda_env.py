#!/usr/bin/env python3
"""Makes a conda environment from an explicit lock: every package by its hash, the same tree each time.

conda checks no hash over file:// and asks channels for notices even for an explicit lock. So this fetches the
packages and checks them itself; conda gets local files and no network. Runs while the image is built; the
standard library is enough.
"""

import argparse
import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from locks import LockError, Package, digest_of, read_conda

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


def download(url: str, target: Path, backoff: float) -> None:
    """Fetches a URL to a file; after a failure that may pass again, waiting twice as long each time."""
    # A user agent of its own: some hosts refuse Python's.
    request = urllib.request.Request(url, headers={"User-Agent": "conda_env"})
    for attempt in range(TRIES):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer, target.open("wb") as sink:
                shutil.copyfileobj(answer, sink)
                expected = answer.headers.get("Content-Length")
            if expected is None or target.stat().st_size == int(expected):
                return
            why = f"cut short: {target.stat().st_size} of {expected} bytes"
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            why = str(error)
            code = getattr(error, "code", 500)
            if (code < 500 and code not in (408, 425, 429)) or url.startswith("file:"):
                break
        if attempt + 1 < TRIES:
            say(f"{url}: {why}; again in {backoff * 2**attempt:g} s")
            time.sleep(backoff * 2**attempt)
    raise MakeError(f"{url}: {why}")


def fetch(package: Package, cache: Path, mirror: str, backoff: float) -> str:
    """Puts a package into the cache, its hash checked; returns what was done.

    Args:
        package: Of the lock.
        cache: Where packages are kept.
        mirror: A URL or a folder that stands for the host of the lock's URLs; or "".
        backoff: Seconds before the second attempt.

    Raises:
        MakeError: missing, or another file than the lock's.
    """
    target = cache / package.path
    if target.is_file() and digest_of(target, package.algorithm) == package.digest:
        return "in the cache"
    target.parent.mkdir(parents=True, exist_ok=True)
    url = f"{mirror.rstrip('/')}/{package.path}" if mirror else package.url
    with tempfile.TemporaryDirectory(prefix=".part-", dir=target.parent) as folder:
        part = Path(folder) / package.file
        download(url if "://" in url else f"file://{url}", part, backoff)
        if digest_of(part, package.algorithm) != package.digest:
            raise MakeError(f"{url}: another file than the lock's, its {package.algorithm} differs: refused")
        part.chmod(0o644)
        part.replace(target)  # whole or not at all: another build may share the cache
    return "fetched"


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
    for folder in sorted(set(prefix.rglob("__pycache__")) - keep):
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
                path["sha256_in_prefix"] = digest_of(prefix / place)
        file.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


def records(prefix: Path) -> set[str]:
    """Returns the packages that conda's records list as installed."""
    return {file.stem for file in (prefix / "conda-meta").glob("*.json")}


def make(options: argparse.Namespace) -> None:
    """Makes the environment; a failure may leave it half done: the stage of the image goes then."""
    packages = read_conda(options.lock.read_text(), options.allow_md5)
    begun, prefix = time.monotonic(), options.prefix.absolute()
    os.umask(0o022)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    # Beside the prefix: conda links files from its package folder where it can, instead of copying them.
    with tempfile.TemporaryDirectory(prefix=".conda_env-", dir=prefix.parent) as folder:
        work = Path(folder)
        cache = options.cache.absolute() if options.cache else work / "packages"
        get = partial(fetch, cache=cache, mirror=options.mirror, backoff=options.backoff)
        pool = ThreadPoolExecutor(PARALLEL)
        try:
            for number, (package, how) in enumerate(zip(packages, pool.map(get, packages), strict=True), 1):
                say(f"{number}/{len(packages)} {package.file} ({how})")
        finally:
            pool.shutdown(cancel_futures=True)
        before, keep = records(prefix), set(prefix.rglob("__pycache__"))
        link(options.conda, "install" if options.add else "create", prefix, packages, cache, work)
        differ = records(prefix) ^ (before | {package.record for package in packages})
        if differ:
            raise MakeError(f"the records of {prefix} are not those of the lock: {', '.join(sorted(differ))}")
        tidy(prefix, packages, keep)
    say(f"{prefix}: {len(packages)} packages, hashes checked, in {time.monotonic() - begun:.1f} s")


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description="Makes a conda environment from an explicit, hashed lock.")
    add = parser.add_argument
    add("lock", type=Path, metavar="LOCK", help="@EXPLICIT file of URL#<sha256> lines")
    add("prefix", type=Path, metavar="PREFIX", help="where; a folder that does not exist yet")
    add("--add", action="store_true", help="add the lock's packages to the environment that PREFIX is")
    add("--mirror", default="", metavar="URL|DIR", help="stands for the host of the lock's URLs")
    add("--cache", type=Path, metavar="DIR", help="keeps the packages, for the next time (default: not kept)")
    add("--allow-md5", nargs="+", default=[], metavar="NAME", help="packages whose lock line has only an md5")
    add("--conda", default="conda", metavar="FILE", help="the conda to use (%(default)s)")
    add("--backoff", type=float, default=1.0, metavar="SECONDS", help="before the first retry (%(default)g)")
    options = parser.parse_args()
    try:
        make(options)
    except LockError as error:
        print(f"conda_env: {options.lock}: {error}", file=sys.stderr)
        sys.exit(2)
    except (MakeError, OSError) as error:  # or a full disk, a folder of somebody else
        print(f"conda_env: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
