"""TensorBoard shows each run once, although runs/latest is a link to one and TensorBoard follows links."""

import sys
from pathlib import Path
from typing import Any

from tensorboard_once import walk

from tests.helpers.programs import ran

ROOT = Path(__file__).resolve().parents[2]


def test_links_inside_are_left_out_and_links_elsewhere_followed(tmp_path: Path) -> None:
    runs, other = tmp_path / "runs", tmp_path / "other"
    for folder in (runs / "one/tensorboard", runs / "two/tensorboard", other / "three/tensorboard"):
        folder.mkdir(parents=True)
        (folder / "events.out.tfevents.1").touch()
    links: dict[str, Any] = {"latest": "two", "absolute": runs / "one", "two/up": "..", "one/self": "."}
    links |= {"root": "/", "far": other, "zone": other / "three", "broken": "nowhere"}
    links |= {"file": runs / "one/tensorboard/events.out.tfevents.1", "../other/again": other}
    for name, target in links.items():
        (runs / name).symlink_to(target)
    (tmp_path / "link").symlink_to(runs)
    for top in (runs, tmp_path / "link"):
        seen = [folder for folder, files in walk(str(top)) if "tfevents" in str(files)]
        found = [Path(folder).relative_to(top).as_posix() for folder in seen]
        assert found == ["far/three/tensorboard", "one/tensorboard", "two/tensorboard"]
    assert list(walk(str(tmp_path / "none"))) == []


def test_tensorboard_walks_so(tmp_path: Path) -> None:
    """Its own function that lists a log folder, with the loader in which it does."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one/events.out.tfevents.1").touch()
    (tmp_path / "latest").symlink_to("one")
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
import tensorboard_once
from tensorboard.backend.event_processing import io_wrapper
tensorboard_once.tensorboard.run_main = lambda: None
tensorboard_once.main()
print(sys.argv, [str(one) for one in io_wrapper.GetLogdirSubdirectories({str(tmp_path)!r})])
"""
    said = ran(sys.executable, "-c", code, "--logdir=x", code=0).stdout
    assert said == f"['tensorboard', '--logdir=x', '--load_fast=false'] ['{tmp_path}/one']\n"
