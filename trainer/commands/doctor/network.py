"""Settings by which ranks communicate."""

from __future__ import annotations

from pathlib import Path

from trainer.commands.doctor.facts import CheckResult, MachineFacts, bad, fine, some, unavailable, warning


def read_interfaces(root: Path) -> tuple[str, ...]:
    """Reads the names of the network interfaces, without loopback.

    Args:
        root: Folder that stands for "/".
    """
    try:
        names = sorted(entry.name for entry in (root / "sys/class/net").iterdir())
    except OSError:
        names = []
    return tuple(name for name in names if name != "lo")


def nccl(box: MachineFacts) -> CheckResult:
    """Checks whether the settings of NCCL and Gloo are right."""
    environ = box.environ
    known = (*box.interfaces, "lo")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        words = [word for word in environ.get(name, "").split(",") if word]
        if words and not words[0].startswith("^") and not any(_names(word, known) for word in words):
            judge = warning if name.startswith("NCCL") and not box.gpus.cards else bad
            return judge(
                f"{name}={environ[name]}: there is {some(known)}",
                "ranks can't connect: no interface has that name",
                f"unset {name}   (or name an interface that every node has)",
            )
    off = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if environ.get(name) == "1"]
    if off and box.gpus.cards:
        why = "NCCL takes a slower way; such a line often stays from a search for a fault"
        return warning(f"{', '.join(off)}=1", why, f"unset {' '.join(off)}")
    if not box.gpus.cards:
        return unavailable("no GPU: ranks talk through Gloo")
    return fine("no setting slows NCCL")


def _names(word: str, known: tuple[str, ...]) -> bool:
    """Returns True if a word of NCCL_SOCKET_IFNAME matches an interface: by prefix, or with = exactly."""
    name = word.removeprefix("=")
    return any(one == name if word.startswith("=") else one.startswith(name) for one in known)


NETWORK_CHECKS = (("net.nccl", nccl),)
