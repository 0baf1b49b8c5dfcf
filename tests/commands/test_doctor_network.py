"""Promise: the doctor reads InfiniBand's devices as libibverbs would use them."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.doctor_box import healthy
from tests.helpers.planted import write
from trainer.commands.doctor import network
from trainer.commands.doctor.facts import Network


def no_library(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file: No such file or directory")


class Verbs:
    """libibverbs with some devices."""

    def __init__(self, name: str, *devices: bytes) -> None:
        assert name == "libibverbs.so.1"
        self._names = [ctypes.create_string_buffer(device) for device in devices]
        self.ibv_get_device_list = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))(self._list)
        self.ibv_get_device_name = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda device: device)
        self.ibv_free_device_list = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)

    def _list(self, count: Any) -> int:
        count[0] = len(self._names)
        self._array = (ctypes.c_void_p * (len(self._names) + 1))(*map(ctypes.addressof, self._names))
        return ctypes.addressof(self._array)


def test_infiniband(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
            "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
            "sys/class/net/eth0/x": "",
            "sys/class/net/lo/x": "",
            "dev/infiniband/uverbs0": "",
        },
    )
    found = network.read_interfaces(root, no_library)
    assert (found.infiniband, found.verbs, found.peer_memory) == (("mlx5_0:1",), True, False)
    assert found.listed is None
    assert network.infiniband(healthy(network=found)).status == "warn"
    found = network.read_interfaces(root, lambda name: Verbs(name, b"mlx5_0", b"mlx5_1"))
    assert found.listed == ("mlx5_0", "mlx5_1")
    assert network.read_interfaces(root, Verbs).listed == ()
    assert found.interfaces == ("eth0",)
    (root / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert network.read_interfaces(root).peer_memory


# A libibverbs.so.1 with one device, as far as the doctor calls it.
VERBS = """
#include <stdlib.h>
static const char *device = "mlx5_0";
void **ibv_get_device_list(int *count) {
    void **list = calloc(2, 8);
    list[0] = &device;
    *count = 1;
    return list;
}
const char *ibv_get_device_name(void *one) { return *(const char **)one; }
void ibv_free_device_list(void **list) { free(list); }
"""


LISTED = "from pathlib import Path; import sys; from trainer.commands.doctor.network import read_interfaces"


def test_infiniband_can_be_used_only_while_its_library_is_there(tmp_path: Path) -> None:
    """A real library, which the loader finds by its name; then it is taken away."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    root = write(tmp_path / "root", {"sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE"})
    (tmp_path / "verbs.c").write_text(VERBS)
    library = tmp_path / "libibverbs.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "verbs.c"], check=True)

    def status() -> str:
        code = f"{LISTED}; print(*read_interfaces(Path(sys.argv[1])).listed or ())"
        done = subprocess.run(
            [sys.executable, "-c", code, str(root)],
            env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        found = Network(
            infiniband=("mlx5_0:1",), verbs=True, peer_memory=True, listed=tuple(done.stdout.split())
        )
        return network.infiniband(healthy(network=found)).status

    assert status() == "ok"
    library.unlink()
    assert status() == "warn"
