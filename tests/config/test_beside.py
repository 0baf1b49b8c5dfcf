"""Promise: what lies beside a task's file is that file's own: no other folder's, no earlier text."""

import importlib
import inspect
import multiprocessing
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

from trainer.config import beside
from trainer.config.task_file import modules_beside, source_hash


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    with beside.imports_kept():
        yield


def write(folder: Path, **files: str) -> Path:
    """Writes modules, a name with __ in it into a package; returns the path of task.py."""
    for name, text in files.items():
        path = folder.joinpath(*name.split("_in_")[::-1]).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "task.py"


def run(path: Path, whose: str = "task") -> ModuleType:
    return beside.run_file(path, whose)[1]


NET = "class Net:\n    NAME = {!r}\n"


def test_folders_with_modules_of_the_same_name(tmp_path: Path) -> None:
    """In any order, in packages and folders without __init__.py, by each way to import."""
    text = """
        from net import Net
        import pkg.deep.net, lay.net as lay
        from pkg import top
        from pkg.deep import net as deep
        import importlib
        def names():
            import late
            dynamic = importlib.import_module("pkg." + "dynamic")
            found = Net, pkg.deep.net.Net, lay.Net, top.Net, late, dynamic
            return [deep.UP, *(one.NAME for one in found)]
        HELD = names()
    """
    made = {}
    for name in "ab":
        folder = tmp_path / name
        made[name] = write(
            folder,
            task=inspect.cleandoc(text),
            net=NET.format(name),
            late=f"NAME = {name!r}",
            __init___in_pkg="from .deep import net",
            top_in_pkg="from pkg.deep.net import Net",
            dynamic_in_pkg=f"NAME = {name!r}",
            net_in_lay=NET.format(name),
        )
        (folder / "pkg" / "deep").mkdir()
        (folder / "pkg" / "deep" / "__init__.py").touch()
        (folder / "pkg" / "deep" / "net.py").write_text(
            NET.format(name) + "from ..top import Net as Up\nUP = Up.NAME"
        )
        (folder / "pkg" / "top.py").write_text(NET.format(name))
    held = [run(made[name]) for name in "abba"]
    for module, name in zip(held, "abba", strict=True):
        assert set(module.HELD) == {name}
    for module, name in reversed([*zip(held[2:], "ba", strict=True)]):
        assert set(module.names()) == {name}, "also long after others were run"
    assert "net" not in sys.modules


def test_an_edited_one_is_read_anew_and_held_classes_stay_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    task = write(
        tmp_path,
        task="from net import Net\nclass Mine(Net):\n"
        "    def late(self):\n        import other\n        return other.NAME",
        net="class Net:\n    def name(self):\n        from net import Net\n"
        "        return 1, isinstance(self, Net)",
        other="NAME = 1",
    )
    first = run(task)
    kept = first.Mine()
    net = tmp_path / "net.py"
    written = net.stat().st_mtime
    net.write_text(net.read_text().replace("1", "2"))  # as long, at once
    os.utime(net, (written, written))
    (tmp_path / "other.py").write_text("NAME = 2")
    second = run(task)
    assert second.Mine().name() == (2, True)
    assert second.Mine().late() == 2
    assert kept.name() == (1, True)
    assert not isinstance(kept, second.Net)
    assert "return 2" in inspect.getsource(second.Net)
    assert pickle.loads(pickle.dumps(kept)).name() == (1, True)
    assert pickle.loads(pickle.dumps(second.Net())).name() == (2, True)


def test_what_is_not_held_is_gone(tmp_path: Path) -> None:
    """A notebook that trains a hundred times keeps one copy of the modules' data."""
    import gc
    import weakref

    task = write(tmp_path, task="import net", net="class Data: pass\nDATA = Data()")
    first = weakref.ref(run(task).net.DATA)
    run(task)
    gc.collect()
    assert first() is None


def test_a_module_that_the_user_has_imported_stays_and_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "theirs", net=NET.format("theirs"), installed="NAME = 'theirs'")
    monkeypatch.syspath_prepend(str(tmp_path / "theirs"))
    net = importlib.import_module("net")
    task = write(
        tmp_path / "own",
        task="from net import Net\nimport installed\ndef lazy():\n    import net\n    return net.Net.NAME",
        net=NET.format("own"),
    )
    with beside.imports_kept():
        module = run(task)
        assert module.Net.NAME == module.lazy() == "own"
        assert module.installed.NAME == "theirs"
        assert importlib.import_module("net") is net
    assert sys.modules["net"] is net
    assert module.lazy() == "own"
    for name in ("net", "installed"):
        del sys.modules[name]


def test_names_made_at_run_time_are_the_same_modules(tmp_path: Path) -> None:
    """As a registry that is filled by import_module."""
    task = write(
        tmp_path,
        task="import models, pickle\nfrom registry import KNOWN\nAGAIN = pickle.loads(b'cmodels.a\\nA\\n.')\n"
        "def again():\n    import importlib\n    return importlib.import_module('models')",
        registry="KNOWN = []",
        __init___in_models="""
import importlib, pathlib
for file in sorted(pathlib.Path(__file__).parent.glob('[!_]*.py')):
    importlib.import_module(f'models.{file.stem}')
""",
        a_in_models="from registry import KNOWN\nclass A: pass\nKNOWN.append(A)",
    )
    with beside.imports_kept():
        module = run(task)
        assert [one.__module__.rpartition(".")[2] for one in module.KNOWN] == ["a"]
        assert module.AGAIN is module.KNOWN[0]
        assert "models" in sys.modules
    assert not {"models", "models.a", "registry"} & {*sys.modules}
    with beside.imports_kept():
        run(write(tmp_path / "other", task="import models", __init___in_models="", a_in_models=""))
        assert module.again() is module.models, "the importer's own, whoever was run last"
    assert module.again() is module.models
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_another_process_can_be_sent_what_is_defined_there(tmp_path: Path, method: str) -> None:
    task = write(
        tmp_path,
        task="from pkg.work import square",
        __init___in_pkg="",
        work_in_pkg="from scale import SCALE\ndef square(x):\n    import late\n"
        "    return x * x * SCALE * late.ONE",
        scale="SCALE = 10",
        late="ONE = 1",
    )
    square = run(task).square
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.map(square, [3]) == [90]


def test_one_that_is_absent_is_called_as_the_statement_does(tmp_path: Path) -> None:
    text = """
        from importlib import import_module
        said = []
        for load in (lambda: __import__("net.fast"), lambda: import_module("net.fast")):
            try:
                load()
            except ModuleNotFoundError as error:
                said.append((error.name, str(error)))
        try:
            import net.fast
        except ModuleNotFoundError as error:
            said.append((error.name, str(error)))
    """
    module = run(write(tmp_path, net="here = 1", task=dedent(text)))
    for name, line in module.said:
        assert name == "net.fast" and line.startswith("No module named 'net.fast'")


def test_folders_that_a_file_puts_on_the_path_go_with_it(tmp_path: Path) -> None:
    text = "import sys, os\nsys.path.insert(0, os.path.dirname(__file__) + '/lib')\nfrom libnet import Net\n"
    tasks = [write(tmp_path / name, task=text, libnet_in_lib=NET.format(name)) for name in "ab"]
    before = list(sys.path)
    for name, task in zip("ab", tasks, strict=True):
        with beside.imports_kept():
            assert name == run(task).Net.NAME
        assert sys.path == before
        assert "libnet" not in sys.modules


def test_a_file_with_the_name_of_a_package_means_the_package(tmp_path: Path) -> None:
    write(tmp_path, yaml="import yaml\nLOADED = yaml.safe_load('1')\n", json="")
    assert run(tmp_path / "yaml.py").LOADED == 1


def test_a_folder_of_data_is_no_module(tmp_path: Path) -> None:
    (tmp_path / "yaml").mkdir()
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("raise RuntimeError('another trainer')")
    task = write(tmp_path, task="import yaml, trainer.version\nLOADED = yaml.safe_load('1')\n")
    assert run(task).LOADED == 1


def test_a_module_that_fails_can_be_mended(tmp_path: Path) -> None:
    task = write(tmp_path, task="from net import Net", net="1 / 0")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as failed:
            run(task)
        assert str(tmp_path / "net.py") in str(failed.traceback[-1].path)
    write(tmp_path, net=NET.format("mended"))
    assert run(task).Net.NAME == "mended"


def test_imports_within_the_folder_only(tmp_path: Path) -> None:
    """Of each other, relative, in circles, of everything, and what isn't there."""
    task = write(
        tmp_path,
        task="from one import *\nfrom .one import TWO as AGAIN\n"
        "try:\n    import nowhere\nexcept ModuleNotFoundError as error:\n    SAID = str(error)",
        one="import two\nONE = 1\nfrom two import TWO",
        two="import one\nTWO = 2\ndef back():\n    return one.ONE",
    )
    module = run(task)
    assert (module.ONE, module.TWO, module.AGAIN, module.two.back()) == (1, 2, 2, 1)
    assert module.SAID == "No module named 'nowhere'"


# --- the hash ---


def test_what_a_task_imports_from_its_folder_is_part_of_it(tmp_path: Path) -> None:
    task = write(
        tmp_path,
        task="import torch, net\nfrom pkg.deep import thing\nfrom lay import one\n\n"
        "def f():\n    from late import x\n"
        "    import_module('named')\n    import os.path",
        net="from helper import h",
        helper="h = 1",
        late="x = 1",
        named="",
        unused="",
        torch_in_unused="",
        __init___in_pkg="",
        other_in_pkg="",
        one_in_lay="",
    )
    (tmp_path / "pkg" / "deep").mkdir()
    (tmp_path / "pkg" / "deep" / "__init__.py").write_text("from . import thing")
    (tmp_path / "pkg" / "deep" / "thing.py").write_text("from ..near import n")
    (tmp_path / "pkg" / "near.py").write_text("n = 1")
    found = modules_beside(task)
    assert sorted(found) == [
        "helper.py",
        "late.py",
        "lay/one.py",
        "named.py",
        "net.py",
        "pkg/__init__.py",
        "pkg/deep/__init__.py",
        "pkg/deep/thing.py",
        "pkg/near.py",
    ]
    hashes = {source_hash(task)}
    for name in found:
        with (tmp_path / name).open("a") as file:
            file.write("# changed\n")
        hashes.add(source_hash(task))
    assert len(hashes) == len(found) + 1
    last = source_hash(task)
    (tmp_path / "unused.py").write_text("changed = 1")
    assert source_hash(task) == last


def test_moved_together_it_is_the_same_task(tmp_path: Path) -> None:
    task = write(tmp_path / "a", task="import net", net="x = 1")
    before = source_hash(task)
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "b" / "task.py").rename(tmp_path / "b" / "yours.py")
    assert source_hash(tmp_path / "b" / "yours.py") == before


def test_a_file_alone_has_the_hash_that_it_had(tmp_path: Path) -> None:
    """Runs that were begun before resume."""
    import hashlib

    task = write(tmp_path, task="import os\n")
    assert source_hash(task) == hashlib.sha256(b"import os\n").hexdigest()[:16]


def test_names_made_at_run_time_take_in_the_folder(tmp_path: Path) -> None:
    task = write(
        tmp_path,
        task="import models",
        beside="",
        __init___in_models="import importlib\nimportlib.import_module(f'models.{x}')",
        a_in_models="",
        b_in_models="broken(",
    )
    assert sorted(modules_beside(task)) == ["models/__init__.py", "models/a.py", "models/b.py"]


def test_files_that_import_each_other(tmp_path: Path) -> None:
    task = write(tmp_path, task="import one", one="import task, two", two="import one, trainer, missing")
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").touch()
    assert sorted(modules_beside(task)) == ["one.py", "two.py"]
    (tmp_path / "two.py").chmod(0o000)
    assert "one.py" in modules_beside(task)
