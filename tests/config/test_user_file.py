"""Promise: a user's file runs as a script does, with modules of its folder: no other's, no earlier text."""

import importlib
import importlib.util
import multiprocessing
import os
import py_compile
import sys
from pathlib import Path

import pytest

from tests.helpers.refusals import refused
from trainer.config.task_file import modules_beside, source_hash
from trainer.config.user_file import folders_closed, import_from, run_again, run_file


def write(folder: Path, **files: str) -> Path:
    """Writes modules, a name with _in_ in it into a package; returns the path of task.py."""
    for name, text in files.items():
        path = folder.joinpath(*name.split("_in_")[::-1]).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "task.py"


NET = "class Net:\n    NAME = {!r}\n"


def test_folders_with_modules_of_the_same_name(tmp_path: Path) -> None:
    text = """
from net import Net
import importlib, lay.net, pkg.deep
def names():
    import late
    found = Net, lay.net.Net, pkg.deep.Net, late, importlib.import_module("pkg." + "dynamic")
    return {one.NAME for one in found}
"""
    for name in "ab":
        one = f"NAME = {name!r}"
        more = {"net_in_lay": NET.format(name), "dynamic_in_pkg": one, "__init___in_pkg": "", "late": one}
        more |= {"net": NET.format(name), "deep_in_pkg": "from net import Net"}
        write(tmp_path / name, task=text, **more)
    for name in "abba":
        assert run_file(tmp_path / name / "task.py", alone=True).names() == {name}


def test_an_edited_one_is_read_anew(tmp_path: Path) -> None:
    """Also one of the same size and time, for which another process has left bytecode."""
    text = "import net\ndef late():\n    import other\n    return other.NAME"
    task = write(tmp_path, task=text, net="NAME = 1", other="NAME = 1")
    first = run_file(task)
    assert (first.net.NAME, first.late()) == (1, 1)
    assert run_file(task) is first is importlib.import_module("task"), "once until it is edited"
    for name in ("net.py", "other.py"):
        py_compile.compile(str(tmp_path / name))
        times = (tmp_path / name).stat()
        (tmp_path / name).write_text("NAME = 2")
        os.utime(tmp_path / name, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = run_file(task)
    assert (second.net.NAME, second.late()) == (2, 2)
    assert first.net.NAME == 1


def test_what_a_file_made_is_gone_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that it put on sys.path, too; what the process had by these names is there again."""
    write(tmp_path / "theirs", net=NET.format("theirs"))
    monkeypatch.syspath_prepend(str(tmp_path / "theirs"))
    net = importlib.import_module("net")
    text = "import sys, os, net\nsys.path.insert(0, os.path.dirname(__file__) + '/lib')\nimport libnet\n"
    before = list(sys.path)
    for name in "ab":
        task = write(tmp_path / name, task=text, net=NET.format(name), libnet_in_lib=NET.format(name))
        with folders_closed():
            module = run_file(task)
            assert module.net.Net.NAME == module.libnet.Net.NAME == name
        assert sys.path == before and sys.modules["net"] is net
        assert not {"task", "libnet"} & {*sys.modules}
    del sys.modules["net"]


def test_its_own_folder_is_the_first_as_a_scripts_is(tmp_path: Path) -> None:
    task = write(tmp_path, task="import sys\nfirst = sys.path[0]")
    with folders_closed():
        assert run_file(task).first == str(tmp_path)


def test_one_that_is_run_again_takes_no_names_away(tmp_path: Path) -> None:
    task = write(tmp_path, task="import net\nclass Mine: pass", net="FOUND = []")
    first = run_file(task)
    with run_again(task) as second:
        assert second is not first and second.net.FOUND is not first.net.FOUND
    assert run_file(task) is first is sys.modules["task"] and sys.modules["net"] is first.net


def test_a_hook_of_another_folder(tmp_path: Path) -> None:
    """It has its own modules, and so has the task; where both have one of a name, it is refused."""
    lazy = "def late():\n    import lay.{0}, {0}\n    return lay.{0}.NAME + {0}.NAME"
    for name, text in (("a", f"import lay.own\n{lazy.format('mine')}"), ("b", "")):
        one = f"NAME = {name!r}"
        write(tmp_path / name, task=text, mine=one, own=one, mine_in_lay=one, own_in_lay=one)
    task = run_file(tmp_path / "a" / "task.py", alone=True)
    write(tmp_path / "b", hook=lazy.format("own").replace("lay.own", "own"))
    assert run_file(tmp_path / "b" / "hook.py").late() == "bb"
    assert task.late() == "aa"
    write(tmp_path / "c", another="import mine", third="from mine import NAME", mine="NAME = 'c'")
    with refused("mine", tmp_path / "a", tmp_path / "c"):
        run_file(tmp_path / "c" / "another.py")
    with refused("mine"):
        import_from(tmp_path / "c", "third")
    with refused("task"):
        run_file(tmp_path / "b" / "task.py")
    write(tmp_path / "d", placed="NAME = 'd'")
    assert import_from(tmp_path / "d", "placed").NAME == "d"


@pytest.mark.parametrize("name", ["yaml", "trainer", "__main__"])
def test_a_name_that_is_taken_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, **{name: "raise RuntimeError"}, task=f"import {name}", other="import trainer.version")
    with refused(name):
        run_file(tmp_path / f"{name}.py")
    if name not in ("trainer", "__main__"):
        with refused(name):
            run_file(tmp_path / "task.py")
    run_file(tmp_path / "other.py")
    if name != "__main__":  # which may have no spec
        assert "RuntimeError" not in str(importlib.util.find_spec(name))


def test_an_installed_one_comes_before_one_unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, colorsys="raise RuntimeError", task="import yaml")
    (tmp_path / "yaml").mkdir()  # data
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    module = run_file(tmp_path / "task.py")
    assert importlib.import_module("colorsys").rgb_to_hsv and module.yaml.safe_load("1") == 1


def test_another_process_is_sent_what_is_defined_there(tmp_path: Path) -> None:
    text = "from pkg.work import TEN\nclass Square:\n    def __call__(self, x):\n        return x**2 * TEN"
    write(tmp_path, **{"my-task": text, "__init___in_pkg": "", "work_in_pkg": "TEN = 10"})
    square = run_file(tmp_path / "my-task.py").Square()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(square, [3]) == [90]


def test_what_a_task_imports_from_its_folder_is_part_of_it(tmp_path: Path) -> None:
    text = "import torch, net\nfrom pkg.deep import thing\nfrom lay import one\n\n"
    text += "def f():\n    from late import x\n    import_module('named')\n    import os.path"
    empty = dict.fromkeys(("named", "unused", "__init___in_pkg", "other_in_pkg", "one_in_lay"), "")
    task = write(tmp_path, task=text, net="from helper import h", helper="h = 1", late="x = 1", **empty)
    deep = {"__init___in_deep": "from . import thing", "thing_in_deep": "from ..near import n"}
    write(tmp_path / "pkg", near="n = 1", **deep)
    found = modules_beside(task)
    assert {*found} == {
        *("helper.py", "late.py", "lay/one.py", "named.py", "net.py", "pkg/__init__.py"),
        *("pkg/deep/__init__.py", "pkg/deep/thing.py", "pkg/near.py"),
    }
    hashes = {source_hash(task)}
    for name in found:
        with (tmp_path / name).open("a") as file:
            file.write("# changed\n")
        hashes.add(source_hash(task))
    assert len(hashes) == len(found) + 1
    last = source_hash(task)
    (tmp_path / "unused.py").write_text("changed = 1")
    assert source_hash(task) == last


def test_names_made_at_run_time_take_in_the_folder(tmp_path: Path) -> None:
    text = "import importlib\nimportlib.import_module(f'models.{x}')"
    models = {"__init___in_models": text, "a_in_models": "", "b_in_models": "broken("}
    task = write(tmp_path, task="import models", beside="", **models)
    assert sorted(modules_beside(task)) == ["models/__init__.py", "models/a.py", "models/b.py"]
