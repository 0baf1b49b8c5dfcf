"""What is told of a file system is what lies there; looking leaves nothing, and no server is waited for."""

import errno
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.planted import put, write
from tests.helpers.waiting import SECONDS
from trainer.host import disks
from trainer.host.disks import Mount, read_data, read_folder, read_mount
from trainer.host.reading import within_seconds

MOUNTS = """\
22 1 0:30 / / rw - overlay overlay rw,lowerdir=/a
23 22 8:1 /var/lib/docker/volumes/cache/_data /cache rw - ext4 /dev/sda1 rw
24 22 8:1 /home/ann/pets /data/pets rw - ext4 /dev/sda1 rw
25 22 0:40 / /data/nfs rw - nfs4 server:/x rw
26 22 0:41 / /data/a\\040b rw - fuse.s3fs s3fs rw
27 22 8:1 /pods/1/volumes/kubernetes.io~csi/pvc/mount /runs rw - xfs /dev/sdb rw
28 22 0:42 / /dev/shm rw - tmpfs tmpfs rw"""


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/elsewhere", Mount("overlay", "/", "container layer")),
        ("/cache/torch", Mount("ext4", "/cache", "volume")),
        ("/data/pets/train", Mount("ext4", "/data/pets", "bind mount")),
        ("/data/nfs", Mount("nfs4", "/data/nfs", "mount")),
        ("/data/nfs2", Mount("overlay", "/", "container layer")),
        ("/data/a b/c", Mount("fuse.s3fs", "/data/a b", "mount")),
        ("/runs/1", Mount("xfs", "/runs", "volume")),
    ],
)
def test_what_a_path_lies_on(tmp_path: Path, path: str, mount: Mount) -> None:
    write(tmp_path, {"proc/self/mountinfo": MOUNTS})
    assert read_mount(Path(path), tmp_path) == mount


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, its disk is no server that never answers."""

    def waited_for(_: float, function: Any, otherwise: Any) -> Any:
        return within_seconds(SECONDS, function, otherwise)

    monkeypatch.setattr(disks, "within_seconds", waited_for)
    monkeypatch.setattr(disks, "_WALKING", SECONDS)


@pytest.mark.usefixtures("patient")
def test_a_folder_is_written_to_and_left_as_it_was(tmp_path: Path) -> None:
    found = read_folder(tmp_path / "not/yet/there")
    assert found.error == "" and found.free > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("patient")
def test_what_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert read_folder(tmp_path / "file").error.endswith("file is no folder")

    def refuse(**_: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert read_folder(tmp_path).error == "Read-only file system"


def test_a_server_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "_LONGEST", 0.05)
    answered = threading.Event()

    def hang(_: object) -> None:
        answered.wait()
        raise OSError

    monkeypatch.setattr("os.statvfs", hang)
    assert read_folder(tmp_path).error == "no answer within 0.05 s"
    answered.set()


@pytest.mark.usefixtures("patient")
def test_data_is_read_at_random(tmp_path: Path) -> None:
    assert read_data(None).path is None
    assert read_data("s3://bucket/x").error == ""
    assert read_data(str(tmp_path)).error == "it holds no files"
    assert read_data(str(tmp_path / "no")).error == "No such file or directory"
    put(tmp_path, *(f"{number}.jpg" for number in range(20)), content=b"x" * 1000)
    found = read_data(str(tmp_path))
    assert found.error == "" and found.speed == pytest.approx(1000 * found.reads)
