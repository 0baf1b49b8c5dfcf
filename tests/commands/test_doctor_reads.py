"""Promise P7: the doctor reads a box as it is: planted files, a false NVML, and the real kernel."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.doctor_box import GIB
from tests.helpers.planted import put, write
from trainer.commands.doctor.doctor import judge_facts, make_needs, read_box
from trainer.commands.doctor.facts import Gpus
from trainer.commands.doctor.gpu import read_gpus
from trainer.commands.doctor.machine import read_system
from trainer.commands.doctor.software import read_software
from trainer.config.formats import FORMATS
from trainer.config.recipe_file import provisional, recipe_names
from trainer.data.workers import Sizes, by_rule, bytes_needed
from trainer.host.limits import Limits


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        words = {15: "GPU is lost", 18: "Driver/library version mismatch"}
        super().__init__(words.get(value, f"error {value}"))
        self.value = value


def nvml(gpus: int = 2, init: int = 0, lost: tuple[int, ...] = (), **more: Any) -> Any:
    """A module like pynvml. A handle is the GPU's number."""

    def start() -> None:
        if init:
            raise NVMLError(init)

    def handle(number: int) -> int:
        if number in lost and more.get("at_once", True):
            raise NVMLError(more.get("code", 15))
        return number

    def memory(number: int) -> Any:
        if number in lost:
            raise NVMLError(15)
        return SimpleNamespace(total=80 * GIB, used=GIB)

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=start,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: gpus,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetIndex=lambda number: number,
        nvmlDeviceGetUUID=lambda number: f"GPU-{number}abc",
        nvmlDeviceGetName=lambda _: b"NVIDIA GeForce RTX 4090",
        nvmlDeviceGetCudaComputeCapability=lambda _: (8, 9),
        nvmlDeviceGetMemoryInfo=memory,
        nvmlSystemGetDriverVersion=lambda: "570.86",
    )


def test_gpus_and_those_of_other_jobs_which_are_not_lost(tmp_path: Path) -> None:
    write(tmp_path, {"dev/nvidiactl": ""})
    found = read_gpus(nvml(), tmp_path, {})
    assert (found.driver, found.nodes, found.problem) == ("570.86", True, "")
    assert (found.cards[0].name, found.cards[0].architecture) == ("NVIDIA GeForce RTX 4090", "sm_89")
    assert len(read_gpus(nvml(lost=(1,), code=4), tmp_path, {}).cards) == 1
    assert len(read_gpus(nvml(lost=(1,)), tmp_path, {"CUDA_VISIBLE_DEVICES": "0"}).cards) == 1
    for at_once in (True, False):  # no handle, or no answer
        found = read_gpus(nvml(lost=(1,), at_once=at_once), tmp_path, {"CUDA_VISIBLE_DEVICES": "0,1"})
        assert [card.lost for card in found.cards] == ["", "GPU is lost"]
    found = read_gpus(nvml(), tmp_path, {"CUDA_VISIBLE_DEVICES": "1,7,0"})
    assert (len(found.cards), found.wrong) == (1, "7")


def test_nvml_that_does_not_start(tmp_path: Path) -> None:
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 1"
    write(tmp_path, {"proc/driver/nvidia/version": version})
    found = read_gpus(nvml(init=18), tmp_path, {})
    assert (found.code, found.problem) == (18, "Driver/library version mismatch")
    assert found.kernel == "570.86.15"
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"
    write(tmp_path, {"proc/driver/nvidia/version": version})
    assert read_gpus(nvml(init=12), tmp_path, {}).kernel == "580.65.06"


def test_the_folder_that_gke_mounts_the_driver_in(tmp_path: Path) -> None:
    assert read_gpus(nvml(init=12), tmp_path, {}).unsearched == ""
    write(tmp_path, {"usr/local/nvidia/lib64/libnvidia-ml.so.1": ""})
    assert read_gpus(nvml(init=12), tmp_path, {}).unsearched == "/usr/local/nvidia/lib64"


V2 = {
    "proc/self/cgroup": "0::/",
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
    "proc/meminfo": "MemTotal: 536870912 kB\nMemAvailable: 400000000 kB",
    "sys/fs/cgroup/cpu.max": "400000 100000",
    "sys/fs/cgroup/memory.max": str(8 * GIB),
    "sys/fs/cgroup/memory.stat": f"anon {3 * GIB}\nfile {2 * GIB}\nshmem {GIB}\nslab_unreclaimable 0",
    "sys/fs/cgroup/memory.events": "low 0\noom 4\noom_kill 3",
    "proc/self/status": "Mems_allowed_list:\t0",
}


def test_the_kernel_with_cgroup_v2(tmp_path: Path) -> None:
    root = write(tmp_path, V2)
    (root / "dev/shm").mkdir(parents=True)
    found = read_system(root)
    assert (found.available, found.oom_kills) == (4 * GIB, 3)
    assert found.shm is not None


def test_an_empty_root_tells_nothing_and_breaks_nothing(tmp_path: Path) -> None:
    found = judge_facts(read_box(None, None, tmp_path / "runs", tmp_path, {}, nvml(init=12)))
    assert len(found) == 14
    assert found["gpu.nvml"].status == found["gpu.driver"].status == "not available"


def test_packages_are_read_from_their_files(tmp_path: Path) -> None:
    version = "__version__ = '2.9.1+cu128'\ncuda: Optional[str] = '12.8'\nhip = None"
    bootstrap = '{"lock": "abc", "changing": true}'
    root = write(tmp_path, {"site/torch/version.py": version, ".bootstrap.json": bootstrap})
    for name in ("torch-2.9.1", "numpy-2.1.0", "numpy-1.26.4", "nvidia_cudnn_cu12-9.1.0"):
        put(root / "site", f"{name}.dist-info/METADATA")
    put(root, "site/PyYAML-6.0.2-py3.12.egg-info/PKG-INFO")
    put(root, "user/numpy/__init__.py", "work/torch/__init__.py")
    put(root / "cuda", "libcudnn.so.9", "libcublasLt.so.12", "libother.so")
    environ = {"PYTHONPATH": f"{root}/work", "LD_LIBRARY_PATH": f"{root}/cuda:/no"}
    environ["LD_PRELOAD"] = "/x/libnccl.so.2"
    paths = [f"{root}/site", f"{root}/user"]
    found = read_software(paths, root, f"{root}/user", environ)
    assert (found.torch, found.cuda, found.lock, found.changing) == ("2.9.1+cu128", "12.8", "abc", True)
    assert (found.installed["pyyaml"], found.installed["nvidia-cudnn-cu12"]) == ("6.0.2", "9.1.0")
    assert found.twice == ("numpy 1.26.4 and 2.1.0",)
    assert found.shadowed == (f"torch in {root}/work", f"numpy in {root}/user")
    libraries = (f"{root}/cuda/libcublasLt.so.12", f"{root}/cuda/libcudnn.so.9")
    assert found.searched == ("/x/libnccl.so.2", *libraries)
    assert read_software(paths[:1], root, f"{root}/user", {}).shadowed == ()


@pytest.mark.parametrize("recipe", recipe_names())
def test_the_needs_of_every_recipe(recipe: str) -> None:
    """It can be read; and what is embedded, or held in memory, wants no workers."""
    keys = provisional(recipe, [])[0]
    workers = make_needs(recipe, keys, Limits(16, 64 * GIB, GIB, None), Gpus()).workers
    assert (workers == 0) == (not FORMATS[keys.data.name].workers)


def test_the_needs_are_those_of_the_loader(tmp_path: Path) -> None:
    """The rule of `auto`, on the bytes of the data set that would be trained on."""
    file = tmp_path / "pets.yaml"
    file.write_text("epochs: 1\ndata: {name: folder, path: x, image_size: 512, micro_batch_size: 128}\n")
    limits = Limits(16, 64 * GIB, GIB, None)
    needs = make_needs("pets.yaml", provisional(str(file), [])[0], limits, Gpus())
    sample = 3 * 512 * 512
    sizes = Sizes(sample, 128 * sample, 256 * sample)
    chosen = by_rule("auto", "auto", sizes, limits, 1)
    assert needs.workers == chosen.workers == 12
    assert needs.loader_bytes == bytes_needed(chosen, sizes)
    tight = make_needs("pets.yaml", provisional(str(file), [])[0], Limits(16, 4 * GIB, GIB, None), Gpus())
    assert tight.workers < 12
    two = make_needs("pets.yaml", provisional(str(file), [])[0], limits, read_gpus(nvml(), tmp_path, {}))
    assert (two.ranks, two.workers) == (2, 6)
