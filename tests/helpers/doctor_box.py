"""A box on which everything is well, and what makes each check complain: for the tests of the doctor."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.commands.doctor.facts import Card, Gpus, MachineFacts, Network, RecipeNeeds, Software, System
from trainer.host.disks import Data, Folder, Mount
from trainer.host.limits import Limits
from trainer.host.stacks import read_stacks

GIB, MIB = 1 << 30, 1 << 20
STACK = read_stacks()["torch2.9-cu128"]
DISK = Mount("ext4", "/data", "bind mount")
SOURCES = {"cpus": "/sys/fs/cgroup/cpu.max", "memory_bytes": "/sys/fs/cgroup/memory.max"}


def card(index: int = 0, **facts: Any) -> Card:
    return Card(index, "NVIDIA H100", "sm_90", 80 * GIB, GIB, **facts)


def folder(path: str = "/data/runs", **facts: Any) -> Folder:
    return replace(Folder(Path(path), "", 500 * GIB, 10**6, DISK), **facts)


def healthy(**changes: Any) -> MachineFacts:
    """Two H100s, InfiniBand, a recipe with files: every check that can look finds nothing."""
    box = MachineFacts(
        environ={"USER": "ann", "HOME": "/home/ann", "CUDA_VISIBLE_DEVICES": "0,1"},
        limits=Limits(16, 200 * GIB, 8 * GIB, 4096, SOURCES),
        gpus=Gpus(driver="570.86", kernel="570.86", nodes=True, cards=(card(0), card(1))),
        system=System(
            machine_cpus=16,
            throttled=0.0,
            available=180 * GIB,
            shm=8 * GIB,
            rlimits={"nofile": 65536, "nproc": -1, "memlock": -1},
            uid=1000,
            user="ann",
        ),
        folders={
            "run": folder(),
            "cache": folder("/cache"),
            "tmp": folder("/tmp"),
        },
        caches={"XDG_CACHE_HOME": folder("/cache"), "TORCH_HOME": folder("/cache/torch")},
        data=Data("/data/pets", "", DISK, 9000, 400e6),
        software=Software(
            installed={
                "torch": "2.9.1",
                "torchvision": "0.24.1",
                "numpy": STACK.wheels["numpy"].split()[-1],
                "nvidia-cudnn-cu12": "9.10.2.21",
                "nvidia-cublas-cu12": "12.8.4.1",
                "nvidia-nccl-cu12": "2.27.5",
            },
            torch="2.9.1+cu128",
            cuda="12.8",
            wanted={
                "nvidia-cudnn-cu12": "9.10.2.21",
                "nvidia-cublas-cu12": "12.8.4.1",
                "nvidia-nccl-cu12": "2.27.5",
            },
            lock=STACK.lock,
        ),
        network=Network(("eth0", "ib0"), ("mlx5_0:1",), True, True, ("mlx5_0",)),
        needs=RecipeNeeds("pets.yaml", 6, 2, 64 * 3 * 224**2, GIB, ranks=2),
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


# (id, status, what of the healthy box is otherwise, what the finding or the cause or a remedy says)
PROVOKED: list[tuple[str, str, dict[str, Any], str]] = [
    ("gpu.nvml", "bad", {"gpus": Gpus("Driver/library version mismatch", 18, nodes=True)}, "reboot"),
    ("gpu.nvml", "bad", {"gpus": Gpus("Unknown Error", 999, nodes=True)}, "systemd"),
    ("gpu.nvml", "bad", {"gpus": Gpus("Insufficient Permissions", 4, nodes=True)}, "--group-add"),
    ("gpu.nvml", "bad", {"gpus": Gpus("Not Found", 12, nodes=True)}, "NVIDIA_DRIVER_CAPABILITIES"),
    ("gpu.nvml", "warn", {"gpus": Gpus("Not Found", 12, kernel="570.86")}, "--gpus all"),
    ("gpu.visible", "bad", {"gpus__wrong": "7", "environ": {"CUDA_VISIBLE_DEVICES": "0,7"}}, "7 is none of"),
    ("gpu.visible", "warn", {"environ": {"CUDA_VISIBLE_DEVICES": ""}}, "hides every GPU"),
    ("gpu.lost", "bad", {"gpus__cards": (card(lost="GPU is lost"),)}, "GPU is lost"),
    ("gpu.driver", "bad", {"gpus__driver": "520.61.05"}, "pytorch-cuda-11.8"),
    ("gpu.driver", "bad", {"gpus__driver": "390.10"}, "no other stack fits"),
    ("gpu.architecture", "bad", {"gpus__cards": (replace(card(), architecture="sm_61"),)}, "torch2.6-cu124"),
    ("gpu.architecture", "bad", {"gpus__cards": (replace(card(), architecture="sm_30"),)}, "no kernel image"),
    ("gpu.compat", "bad", {"gpus__compat": ("535.10",)}, "803"),
    ("gpu.compat", "bad", {"gpus__compat": ("580.1",), "gpus__cards": (card(data_center=False),)}, "804"),
    ("gpu.memory", "warn", {"gpus__cards": (replace(card(), used=40 * GIB),)}, "40 GiB of 80 GiB"),
    ("software.lock", "bad", {"software__torch": ""}, "no torch"),
    ("software.lock", "bad", {"software__changing": True}, "interrupted"),
    ("software.lock", "bad", {"software__twice": ("numpy 1.26.4 and 2.1.0",)}, "numpy 1.26.4"),
    ("software.lock", "bad", {"software__installed__torch": "2.10.0"}, "half of it"),
    ("software.lock", "bad", {"software__torch": "2.10.0", "software__installed__torch": "2.10.0"}, "2.10.0"),
    ("software.lock", "bad", {"software__installed__numpy": "1.0.0"}, "numpy 1.0.0 (locked"),
    ("software.lock", "warn", {"software__installed__pyyaml": "5.0"}, "pyyaml 5.0"),
    (
        "software.lock",
        "warn",
        {"software__torch": "2.7.0", "software__installed__torch": "2.7.0", "software__lock": ""},
        "of no stack",
    ),
    ("software.cuda", "bad", {"software__cuda": ""}, "without CUDA"),
    ("software.cuda", "bad", {"software__installed__nvidia-cublas-cu11": "11.1"}, "pip uninstall"),
    ("software.cuda", "bad", {"software__installed__nvidia-cublas-cu12": "12.1"}, "torch wants 12.8.4.1"),
    ("software.cuda", "warn", {"software__searched": ("/opt/cuda/lib/libcublas.so.12",)}, "/opt/cuda"),
    ("software.cuda", "bad", {"software__installed__nvidia-cudnn-cu12": "9.1.0"}, "torch wants 9.10.2.21"),
    ("software.cuda", "bad", {"software__installed__nvidia-cudnn-cu11": "8.9"}, "nvidia-cudnn-cu11"),
    ("software.cuda", "warn", {"software__searched": ("/usr/lib/libcudnn.so.8",)}, "SUBLIBRARY"),
    ("software.compiler", "warn", {"software__uncompiled": "no compiler was found"}, "install g++"),
    ("software.user_site", "bad", {"software__leaked": ("numpy", "black")}, "PYTHONNOUSERSITE"),
    ("software.user_site", "warn", {"software__leaked": ("black",)}, "black"),
    ("software.path", "bad", {"software__shadowed": ("torch in /home/ann",)}, "torch in /home/ann"),
    ("cpu.quota", "warn", {"limits__cpus": 4.0}, "--cpus=14"),
    ("cpu.quota", "warn", {"limits__cpus": 4.0, "system__machine_cpus": 4}, "--set data.workers=1"),
    ("cpu.quota", "warn", {"limits__cpus": 0.5}, "less than one CPU"),
    ("cpu.quota", "warn", {"system__throttled": 0.4}, "40%"),
    (
        "cpu.quota",
        "warn",
        {"limits": Limits(1, 200 * GIB, 8 * GIB, 4096, {"cpus": "sched_getaffinity"})},
        "--cpus-per-task",
    ),
    ("memory.limit", "warn", {"system__available": int(1.5 * GIB)}, "--mem="),
    ("memory.limit", "bad", {"system__available": GIB}, "--memory=203g"),
    ("memory.limit", "bad", {"system__available": GIB, "limits__sources": {}}, "end what else"),
    ("memory.limit", "warn", {"system__oom_kills": 2}, "--mem=401G"),
    ("memory.overcommit", "warn", {"system__overcommit": 2, "system__commit_left": GIB}, "1 GiB"),
    ("memory.lock", "bad", {"system__rlimits__memlock": 8 * MIB}, "--ulimit memlock=-1:-1"),
    ("shm.size", "bad", {"limits__shm_bytes": 60 * MIB, "system__shm": 64 * MIB}, "--shm-size=1g"),
    ("shm.size", "warn", {"limits__shm_bytes": 128 * MIB, "system__shm": 128 * MIB}, "medium: Memory"),
    ("shm.size", "warn", {"limits__shm_bytes": 512 * MIB}, "rm what processes left"),
    ("shm.size", "bad", {"system__shm": None}, "isn't there"),
    (
        "shm.size",
        "warn",
        {"limits__shm_bytes": 64 * MIB, "system__shm": 64 * MIB, "gpus__cards": (card(),)},
        "bus error",
    ),
    ("pids.limit", "bad", {"limits__pids": 50}, "--pids-limit"),
    ("pids.limit", "warn", {"limits__pids": 100}, "podPidsLimit"),
    ("ulimit.nofile", "warn", {"system__rlimits__nofile": 256}, "ulimit -n 65536"),
    ("ulimit.nproc", "warn", {"system__rlimits__nproc": 100}, "ulimit -u"),
    ("disk.run", "bad", {"folders__run__error": "Read-only file system"}, "Read-only"),
    ("disk.run", "bad", {"folders__run__free": 100 * MIB}, "100 MiB"),
    ("disk.run", "bad", {"folders__run__files": 3}, "only 3 more files"),
    ("disk.run", "warn", {"folders__run__free": 5 * GIB}, "5 GiB"),
    ("disk.run", "warn", {"folders__run__mount": Mount("overlay", "/", "container layer")}, "own layer"),
    ("disk.run", "warn", {"folders__run__mount": Mount("tmpfs", "/data")}, "in memory"),
    ("disk.cache", "warn", {"folders__cache__error": "Permission denied"}, "-v trainer-cache:/cache"),
    ("disk.cache", "bad", {"folders__cache__free": MIB}, "compiled code"),
    ("disk.tmp", "bad", {"folders__tmp__error": "Read-only file system"}, "--tmpfs /tmp"),
    ("cache.writable", "warn", {"caches__TORCH_HOME__error": "Permission denied"}, "TORCH_HOME=/cache/torch"),
    ("cache.writable", "warn", {"caches__TORCH_HOME__mount": Mount("nfs4", "/home")}, "nfs4"),
    ("data.path", "bad", {"data__error": "No such file or directory"}, "-v /data/pets:/data/pets:ro"),
    ("data.path", "warn", {"data__mount": Mount("nfs4", "/data")}, "trainer data pack"),
    ("data.path", "warn", {"data__mount": Mount("lustre", "/data")}, "lustre"),
    ("data.path", "warn", {"data__mount": Mount("fuse.s3fs", "/data")}, "fuse.s3fs"),
    ("data.path", "warn", {"data__mount": Mount("overlay", "/", "container layer")}, "copied into"),
    ("data.path", "warn", {"data__mount": Mount("tmpfs", "/data")}, "in memory"),
    ("data.path", "warn", {"data__reads": 80.0}, "80 random reads"),
    ("net.nccl", "bad", {"environ": {"NCCL_SOCKET_IFNAME": "eno1"}}, "eth0"),
    ("net.nccl", "warn", {"environ": {"NCCL_SOCKET_IFNAME": "eno1"}, "gpus__cards": ()}, "eth0"),
    ("net.nccl", "bad", {"environ": {"GLOO_SOCKET_IFNAME": "eno1"}, "gpus__cards": ()}, "eth0"),
    ("net.nccl", "warn", {"environ": {"NCCL_P2P_DISABLE": "1"}}, "unset NCCL_P2P_DISABLE"),
    ("software.cuda", "bad", {"software__installed__nvidia-nccl-cu12": "2.20.5"}, "torch wants 2.27.5"),
    ("software.cuda", "warn", {"software__searched": ("/usr/lib/libnccl.so.2",)}, "LD_LIBRARY_PATH"),
    ("net.infiniband", "warn", {"network__verbs": False}, "--device=/dev/infiniband"),
    ("net.infiniband", "warn", {"network__peer_memory": False}, "modprobe nvidia_peermem"),
    ("net.infiniband", "warn", {"network__listed": None}, "libibverbs.so.1 isn't there"),
    (
        "net.infiniband",
        "warn",
        {"network__listed": ()},
        "libibverbs lists no device: the provider for mlx5_0",
    ),
    ("net.infiniband", "warn", {"network__listed": ("mlx5_1",)}, "ibverbs-providers"),
    ("user.name", "warn", {"system__user": "", "environ": {}}, "-e USER=trainer"),
    ("user.name", "bad", {"system__user": "", "environ": {}, "needs__compiles": True}, "KeyError"),
    ("user.home", "warn", {"system__home_error": "HOME isn't set"}, "HOME=/tmp"),
]

# (id, what of the healthy box is otherwise): nothing to look at, or it can't be looked at.
ABSENT: list[tuple[str, dict[str, Any]]] = [
    ("gpu.nvml", {"gpus": Gpus("NVML Shared Library Not Found", 12)}),
    *((f"gpu.{name}", {"gpus": Gpus("Not Found", 12)}) for name in ("visible", "lost", "driver", "compat")),
    *((f"gpu.{name}", {"gpus": Gpus("Not Found", 12)}) for name in ("architecture", "memory")),
    ("gpu.memory", {"gpus__cards": (replace(card(), total=0),)}),  # GB10, Jetson
    ("gpu.driver", {"software": Software(torch="1.0", cuda="9.2")}),
    ("gpu.architecture", {"software": Software(torch="2.0", cuda="12.1")}),
    ("software.cuda", {"software": Software()}),
    ("memory.limit", {"limits__memory_bytes": 0}),
    ("ulimit.nproc", {"system__rlimits": {}}),
    ("data.path", {"data": Data()}),
    ("net.nccl", {"gpus__cards": ()}),
    ("net.infiniband", {"network__infiniband": ()}),
]
