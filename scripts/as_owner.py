"""Lets a Python of root in a container of Compose's go on as the owner of /workspace, as the entrypoint does.

`docker compose exec` enters as root, without the right to write what others own (CAP_DAC_OVERRIDE), whatever
program it starts: trainer, pip, python, a debugger. A .pth file runs this for root alone. The standard
library is enough.
"""

import contextlib
import importlib
import os
from pathlib import Path

_DAC_OVERRIDE = 1 << 1


def become_owner(folder: Path, status: Path) -> None:
    """Changes user, group and groups of this process, for good, if root may not write in a folder.

    Raises:
        OSError: If it has no right to change them.
    """
    owner = folder.stat()
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("CapEff:")]
    if owner.st_uid == 0 or int(line.split()[1], 16) & _DAC_OVERRIDE:
        return
    os.setgroups([group for group in os.getgroups() if group])
    os.setgid(owner.st_gid)
    os.setuid(owner.st_uid)
    importlib.invalidate_caches()  # what root couldn't list, it took for empty


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        become_owner(Path("/workspace"), Path("/proc/self/status"))
