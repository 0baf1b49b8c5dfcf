"""Who runs it, the clock, the time zone and the locale."""

from __future__ import annotations

import ctypes
import locale
import os
import pwd
import re
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from trainer.commands.doctor.facts import Box, Finding, Session, bad, fine, unavailable, warn
from trainer.commands.doctor.stacks import numbers, read_stacks
from trainer.host.reading import kind_of

_UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)
_SKEW, _MUCH_SKEW = 2.0, 300.0  # seconds; S3 refuses requests from 15 minutes on


def read_session(root: Path, environ: Mapping[str, str]) -> Session:
    """Reads it.

    Args:
        root: Folder that stands for "/", of the time zones.
        environ: For HOME, TZ and the locale.
    """
    home = environ.get("HOME", "")
    return Session(
        uid=os.getuid(),
        name=_name(os.getuid()),
        home=home,
        home_error=_unwritable(home),
        time=time.time(),
        synchronised=_synchronised(),
        zone_error=zone_error(root, environ),
        encoding=sys.getfilesystemencoding(),
        locale_error=_locale_error(),
    )


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def _unwritable(home: str) -> str:
    if not home:
        return "HOME isn't set"
    if kind_of(home) != "folder":
        return "it isn't there"
    return "" if os.access(home, os.W_OK | os.X_OK) else "it can't be written"


def _synchronised() -> bool | None:
    """Whether the kernel's clock is kept right by NTP or the hypervisor."""
    try:
        buffer = ctypes.create_string_buffer(1024)  # struct timex: modes, 4 longs, status, …
        if ctypes.CDLL(None).adjtimex(buffer) < 0:
            return None
        return not struct.unpack_from("@i4li", buffer.raw)[5] & _UNSYNCHRONISED
    except (OSError, AttributeError):
        return None


def zone_error(root: Path, environ: Mapping[str, str]) -> str:
    """What is wrong with TZ: a name of a zone that isn't installed means UTC without a word."""
    zone = environ.get("TZ", "").removeprefix(":")
    if not re.fullmatch(r"[A-Za-z_+-]+(/[\w+-]+)+", zone):  # CET-1CEST, UTC, or a file
        return "" if not zone.startswith("/") or kind_of(zone) else f"TZ={zone} isn't there"
    folder = Path(environ.get("TZDIR") or "usr/share/zoneinfo")
    return "" if kind_of(root / folder / zone) == "file" else f"TZ={zone}: no such zone is installed"


def _locale_error() -> str:
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, "")
    except locale.Error:
        words = [
            f"{name}={os.environ[name]}" for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)
        ]
        return f"{words[0] if words else 'the locale'} isn't installed"
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    return ""


def name(box: Box) -> Finding:
    """Whether the user has a name."""
    session = box.session
    told = box.environ.get("LOGNAME") or box.environ.get("USER")
    if session.name:
        return fine(f"uid {session.uid} is {session.name}")
    if told:
        return fine(f"uid {session.uid} has no name, but LOGNAME or USER gives one ({told})")
    said = f"uid {session.uid} has no name, and neither USER nor LOGNAME is set"
    why = "torch.compile asks for one, and ends with a KeyError"
    remedy = {
        "docker": "docker run -e USER=trainer -e LOGNAME=trainer …",
        "compose": "environment: {USER: trainer, LOGNAME: trainer}",
        "kubernetes": "env: [{name: USER, value: trainer}, {name: LOGNAME, value: trainer}]",
        "slurm": "export USER=trainer LOGNAME=trainer",
        "host": "export USER=trainer LOGNAME=trainer",
    }
    if numbers(box.software.torch) >= [2, 13]:
        return fine(f"{said}; this torch does without")
    return (bad if box.plan.compiles else warn)(said, why, **remedy)


def home(box: Box) -> Finding:
    """Whether the home folder can be written."""
    session = box.session
    if not session.home_error:
        return fine(f"HOME={session.home} can be written")
    return warn(
        f"HOME={session.home}: {session.home_error}" if session.home else session.home_error,
        "libraries keep caches and settings there, and some fail without",
        docker="docker run -e HOME=/tmp …   (the images of this project set /home/trainer, for any user)",
        compose="environment: {HOME: /tmp}",
        kubernetes="env: [{name: HOME, value: /tmp}]",
        slurm="export HOME=/tmp",
        host="export HOME=/tmp",
    )


def clock(box: Box) -> Finding:
    """Whether the clock is right, as far as that can be told without a network."""
    session = box.session
    remedy = {
        "host": "sudo timedatectl set-ntp true   (or: sudo chronyc makestep)",
        "docker": "of the host: sudo timedatectl set-ntp true (a container has the host's clock)",
        "kubernetes": "of the node: chronyc makestep",
        "slurm": "chronyc makestep on the node (an administrator's)",
    }
    made = max(stack.made for stack in read_stacks().values())
    if session.time < made:
        today, then = (time.strftime("%Y-%m-%d", time.gmtime(when)) for when in (session.time, made))
        return bad(
            f"the clock says {today}, but this was made on {then}",
            "TLS refuses certificates, and what was changed last can't be told",
            **remedy,
        )
    skewed = max(box.folders.values(), key=lambda folder: abs(folder.skew), default=None)
    if skewed is not None and abs(skewed.skew) > _SKEW:
        judge = bad if abs(skewed.skew) > _MUCH_SKEW else warn
        return judge(
            f"the file server of {skewed.path} is {abs(skewed.skew):.0f} s "
            f"{'ahead' if skewed.skew > 0 else 'behind'}",
            "one of the two clocks is wrong: the newest run or checkpoint may not be the newest",
            **remedy,
        )
    if session.synchronised is False:
        return warn(
            "the kernel's clock isn't synchronised",
            "it drifts: logs of several hosts don't fit together, and S3 refuses requests 15 minutes off",
            **remedy,
        )
    if session.synchronised is None:
        return unavailable("the kernel doesn't tell whether its clock is synchronised")
    return fine("the clock is synchronised")


def zone(box: Box) -> Finding:
    """Whether the time zone is there."""
    if box.session.zone_error:
        return warn(
            box.session.zone_error,
            "times in logs are UTC without saying so",
            docker="docker run -e TZ=UTC …   (or -v /usr/share/zoneinfo:/usr/share/zoneinfo:ro)",
            compose="environment: {TZ: UTC}",
            kubernetes="env: [{name: TZ, value: UTC}]",
            slurm="export TZ=UTC",
            host="sudo apt-get install tzdata, or export TZ=UTC",
        )
    return fine(f"time zone {box.environ.get('TZ') or 'of the system'}")


def language(box: Box) -> Finding:
    """Whether text and file names are UTF-8."""
    session = box.session
    remedy = {
        "docker": "docker run -e LANG=C.UTF-8 -e LC_ALL=C.UTF-8 …",
        "compose": "environment: {LANG: C.UTF-8, LC_ALL: C.UTF-8}",
        "kubernetes": "env: [{name: LANG, value: C.UTF-8}, {name: LC_ALL, value: C.UTF-8}]",
        "slurm": "export LANG=C.UTF-8 LC_ALL=C.UTF-8",
        "host": "export LANG=C.UTF-8 LC_ALL=C.UTF-8",
    }
    if session.encoding.lower().replace("-", "") != "utf8":
        return bad(
            f"file names are {session.encoding}",
            "names and texts with other letters end with a UnicodeEncodeError",
            **remedy,
        )
    if session.locale_error:
        return warn(session.locale_error, "programs fall back to ASCII, and complain", **remedy)
    return fine("text is UTF-8")


CHECKS = (
    ("user.name", name),
    ("user.home", home),
    ("time.clock", clock),
    ("time.zone", zone),
    ("locale.encoding", language),
)
