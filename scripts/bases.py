"""The bases that the Dockerfile pins by digest."""

from __future__ import annotations

import re
from typing import NamedTuple

from engine_checks import ROOT

from trainer.errors import BadInputError

BASE = re.compile(r"^FROM (?:--\S+ )*(?P<name>\S+)@(?P<digest>sha256:[0-9a-f]{64}) AS (?P<stage>\S+)$", re.M)


class Base(NamedTuple):
    """A base of the Dockerfile: name with tag, digest, and its stage."""

    name: str
    digest: str
    stage: str

    @property
    def ref(self) -> str:
        """Reference to pull."""
        return f"{self.name}@{self.digest}"


def read_bases(text: str) -> list[Base]:
    """Returns the bases that a Dockerfile pins by digest.

    Raises:
        BadInputError: If it doesn't pin exactly the stages conda-base and debian-base.
    """
    found = [Base(**match.groupdict()) for match in BASE.finditer(text)]
    if [base.stage for base in found] != ["conda-base", "debian-base"]:
        raise BadInputError("Dockerfile: no conda-base and debian-base, each FROM NAME:TAG@sha256:…")
    return found


def pinned() -> list[Base]:
    """Returns the bases of this checkout's Dockerfile."""
    return read_bases((ROOT / "Dockerfile").read_text())
