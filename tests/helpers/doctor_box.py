"""A box on which everything is well, and what makes each check complain: for the tests of the doctor."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.commands.doctor.facts import Card, Gpus, MachineFacts, RecipeNeeds, Software, System
from trainer.host.disks import Data, Folder, Mount
from trainer.host.limits import Limits
from trainer.host.stacks import read_stacks

GIB, MIB = 1 << 30, 1 << 20
STACK = read_stacks()["torch2.9-cu128"]
DISK = Mount("ext4", "/data", "bind mount")
SOURCES = {"cpus": "/sys/fs/cgroup/cpu.max", "memory_bytes": "/sys/fs/cgroup/memory.max"}


INSTALLED = {"torch": "2.9.1", "torchvision": "0.24.1", "numpy": STACK.wheels["numpy"].split()[-1]}
INSTALLED |= {"nvidia-cudnn-cu12": "9.10.2.21", "nvidia-cublas-cu12": "12.8.4.1"}
INSTALLED |= {"nvidia-nccl-cu12": "2.27.5"}


def card(architecture: str = "sm_90", **facts: Any) -> Card:
    return Card("NVIDIA H100", architecture, **facts)


def folder(path: str = "/data/runs", **facts: Any) -> Folder:
    return replace(Folder(Path(path), "", 500 * GIB, 10**6, DISK), **facts)


def healthy(**changes: Any) -> MachineFacts:
    """Two H100s, a recipe with files: every check that can look finds nothing."""
    box = MachineFacts(
        environ={"USER": "ann", "HOME": "/home/ann", "CUDA_VISIBLE_DEVICES": "0,1"},
        limits=Limits(16, 200 * GIB, 8 * GIB, 4096, SOURCES),
        gpus=Gpus(driver="570.86", kernel="570.86", nodes=True, cards=(card(), card())),
        system=System(available=180 * GIB, shm=8 * GIB),
        run=folder(),
        caches={"XDG_CACHE_HOME": folder("/cache"), "TORCH_HOME": folder("/cache/torch")},
        data=Data("/data/pets", "", DISK, 9000, 400e6),
        software=Software(INSTALLED, torch="2.9.1+cu128", cuda="12.8", lock=STACK.lock),
        interfaces=("eth0", "ib0"),
        needs=RecipeNeeds("pets.yaml", 6, GIB, ranks=2),
    )
    for path, value in changes.items():
        box = put(box, path.split("__"), value)
    return box


def put(thing: Any, path: list[str], value: Any) -> Any:
    """A copy in which one thing is another: fields of dataclasses, and keys of mappings."""
    name, *rest = path
    if isinstance(thing, Mapping):
        return {**thing, name: put(thing[name], rest, value) if rest else value}
    return replace(thing, **{name: put(getattr(thing, name), rest, value) if rest else value})


GONE, GKE = Gpus("Not Found", 12, nodes=True), "/usr/local/nvidia/lib64"
OURS, OLD = "reproducible-trainer", {"software__torch": "2.7.0", "software__installed__torch": "2.7.0"}
# (id, status, what of the healthy box is otherwise, words of the finding, the cause or the remedy)
PROVOKED: list[tuple[str, str, dict[str, Any], str]] = [
    ("gpu.nvml", "bad", {"gpus": Gpus("Driver/library version mismatch", 18, nodes=True)}, "reboot"),
    ("gpu.nvml", "bad", {"gpus": Gpus("Unknown Error", 999, nodes=True)}, "docker restart"),
    ("gpu.nvml", "bad", {"gpus": GONE, "environ": {}}, "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
    ("gpu.nvml", "bad", {"gpus": GONE, "environ": {"NVIDIA_DRIVER_CAPABILITIES": "all"}}, "--gpus all"),
    ("gpu.nvml", "bad", {"gpus": replace(GONE, unsearched=GKE)}, f"LD_LIBRARY_PATH={GKE} GKE"),
    ("gpu.nvml", "warn", {"gpus": Gpus("Not Found", 12, kernel="570.86")}, "--gpus all"),
    ("gpu.nvml", "bad", {"gpus__cards": (card(lost="GPU is lost"),)}, "lost --gpu-reset"),
    ("gpu.visible", "bad", {"gpus__wrong": "7", "environ": {"CUDA_VISIBLE_DEVICES": "0,7"}}, "7 0,7 unset"),
    ("gpu.visible", "warn", {"environ": {"CUDA_VISIBLE_DEVICES": ""}}, "unset CUDA_VISIBLE_DEVICES"),
    ("gpu.driver", "bad", {"gpus__driver": "520.61.05"}, "STACK=pytorch-cuda-11.8"),
    ("gpu.driver", "bad", {"gpus__driver": "390.10"}, "390.10 525.60.13"),
    ("gpu.architecture", "bad", {"gpus__cards": (card("sm_61"),)}, "sm_61 STACK=torch2.6-cu124"),
    ("gpu.architecture", "bad", {"gpus__cards": (card("sm_30"),)}, "sm_30 CUDA_VISIBLE_DEVICES"),
    ("software.lock", "bad", {"software__torch": ""}, "torch"),
    ("software.lock", "bad", {"software__changing": True}, "interrupted"),
    ("software.lock", "bad", {"software__twice": ("numpy 1.26.4 and 2.1.0",)}, "numpy 1.26.4"),
    ("software.lock", "bad", {"software__installed__torch": "2.10.0"}, "2.9.1 2.10.0"),
    ("software.lock", "bad", {"software__torch": "2.10.0", "software__installed__torch": "2.10.0"}, "2.10.0"),
    ("software.lock", "bad", {"software__installed__numpy": "1.0.0"}, "numpy 1.0.0 locked"),
    ("software.lock", "warn", {"software__installed__pyyaml": "5.0"}, "pyyaml 5.0"),
    ("software.lock", "bad", {"software__installed": {"trainer": "0", OURS: "0.1"}}, "trainer"),
    ("software.lock", "warn", {**OLD, "software__lock": ""}, "2.7.0 torch2.9-cu128"),
    ("software.cuda", "bad", {"software__cuda": ""}, "CUDA"),
    ("software.cuda", "bad", {"software__installed__nvidia-cublas-cu11": "11.1"}, "pip uninstall"),
    ("software.lock", "warn", {"software__installed__nvidia-nccl-cu12": "2.20.5"}, "2.20.5 2.27.5"),
    ("software.cuda", "warn", {"software__searched": ("/usr/lib/libcudnn.so.8",)}, "/usr/lib/libcudnn.so.8"),
    ("software.path", "bad", {"software__shadowed": ("torch in /home/ann",)}, "torch /home/ann PYTHONPATH"),
    ("memory.limit", "warn", {"system__available": int(1.5 * GIB)}, "--memory=203g"),
    ("memory.limit", "bad", {"system__available": GIB, "limits__sources": {}}, "data.workers=1"),
    ("memory.limit", "warn", {"system__oom_kills": 2}, "2 --memory=401g"),
    ("shm.size", "bad", {"limits__shm_bytes": 60 * MIB, "system__shm": 64 * MIB}, "--shm-size=2g"),
    ("shm.size", "warn", {"limits__shm_bytes": 512 * MIB}, "ls -l /dev/shm"),
    ("shm.size", "bad", {"system__shm": None}, "/dev/shm"),
    ("pids.limit", "bad", {"limits__pids": 50}, "50 --pids-limit=4096"),
    ("disk.run", "bad", {"run__error": "Read-only file system"}, "Read-only"),
    ("disk.run", "bad", {"run__free": 100 * MIB}, "100 MiB"),
    ("disk.run", "warn", {"run__free": 5 * GIB}, "5 GiB --out"),
    ("disk.run", "warn", {"run__mount": Mount("overlay", "/", "container layer")}, "-v $PWD/runs:/data/runs"),
    ("cache.writable", "warn", {"caches__TORCH_HOME__error": "Permission denied"}, "export TORCH_HOME"),
    ("cache.writable", "warn", {"caches__TORCH_HOME__free": MIB}, "TORCH_HOME 1 MiB"),
    ("cache.writable", "warn", {"caches__TORCH_HOME__mount": Mount("nfs4", "/home")}, "nfs4 TORCH_HOME"),
    ("data.path", "bad", {"data__error": "No such file or directory"}, "-v /data/pets:/data/pets:ro"),
    ("data.path", "warn", {"data__mount": Mount("nfs4", "/data")}, "trainer data pack"),
    ("data.path", "warn", {"data__mount": Mount("overlay", "/", "container layer")}, "-v :/data/pets:ro"),
    ("data.path", "warn", {"data__reads": 80.0}, "80"),
    ("net.nccl", "bad", {"environ": {"NCCL_SOCKET_IFNAME": "eno1"}}, "unset NCCL_SOCKET_IFNAME eth0"),
    ("net.nccl", "warn", {"environ": {"NCCL_SOCKET_IFNAME": "eno1"}, "gpus__cards": ()}, "eth0"),
    ("net.nccl", "bad", {"environ": {"GLOO_SOCKET_IFNAME": "eno1"}, "gpus__cards": ()}, "eth0"),
    ("net.nccl", "warn", {"environ": {"NCCL_P2P_DISABLE": "1"}}, "unset NCCL_P2P_DISABLE"),
]

# (id, what of the healthy box is otherwise): nothing to look at, or it can't be looked at.
ABSENT: list[tuple[str, dict[str, Any]]] = [
    ("gpu.nvml", {"gpus": Gpus("NVML Shared Library Not Found", 12)}),
    *((f"gpu.{name}", {"gpus": Gpus("Not Found", 12)}) for name in ("visible", "driver", "architecture")),
    ("gpu.driver", {"software": Software(torch="1.0", cuda="9.2")}),
    ("gpu.architecture", {"software": Software(torch="2.0", cuda="12.1")}),
    ("software.cuda", {"software": Software()}),
    ("memory.limit", {"limits__memory_bytes": 0}),
    ("data.path", {"data": Data()}),
    ("net.nccl", {"gpus__cards": ()}),
]
