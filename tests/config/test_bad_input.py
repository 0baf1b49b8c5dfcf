"""Promise: bad input gives one line with its name and the remedy, exit code 2, and no files."""

import ast
import getpass
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.few_pictures import write_pictures
from tests.helpers.manifests import least_manifest
from tests.helpers.preparing import prepare_only
from tests.helpers.privileges import permissions_count
from tests.helpers.refusals import named, refusal, refused
from trainer.cli import main
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override
from trainer.errors import BadInputError, mendable, paths_explained
from trainer.launch.launcher import Launched
from trainer.models.compiling import CACHE_VARIABLE, prepare_cache
from trainer.runs.manifest import FORMAT
from trainer.train.start import job, local_ranks
from trainer.version import __version__

ROOT = Path(__file__).parents[2]

YAMLS = {
    "text.yaml": "just words",
    "torn.yaml": "optim: {lr: 0.1",
    "twice.yaml": "epochs: 1\nepochs: 2",
    "tag.yaml": "epochs: !!python/object/apply:os.system ['touch hacked']",
    "bomb.yaml": "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
    + "".join(f"{n}: &{n} [{','.join(['*' + p] * 10)}]\n" for p, n in zip("abcde", "bcdef", strict=True)),
    "deep.yaml": "epochs: " + "[" * 600,
    "empty.yaml": "",
    "slip.yaml": "epoch: 3",
    "big.yaml": "about: " + "x" * (1 << 20),
    "dot.yaml": "epochs: 1\noptim.lr: 0.1",
    "few.yaml": "epochs: 1\ndata: {name: synthetic, samples: 2, global_batch_size: 4, micro_batch_size: 1}",
}


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(job, "launch", prepare_only)
    monkeypatch.chdir(tmp_path)


# The words of a command after `train digits`, and what its line names.
SETTINGS = [
    ("optim.lrr=1", "optim.lrr optim.lr"),
    ("train.max_steps=3", "train.max_steps 'max_steps'"),
    ("zzzz=1", "zzzz --help-config"),
    ("optim.lr=fast", "optim.lr=fast"),
    ("optim.lr=-1", "optim.lr=-1 0"),
    ("data.workers=many", "data.workers=many auto"),
    ("optim.name=adam", "optim.name=adam sgd adamw"),
    ("optim=3", "optim"),
    ("optim.lr.x=3", "lr"),
    ("--set optim.lr", "KEY=VALUE"),
    ("optim.lr=[1", "optim.lr=[1 1 YAML"),
    ("data.class_weights={3:5}", "3:5"),
    ("language.chat_template_kwargs={a:1}", "'a:1'"),  # of which null could be the value
    ("optim.lr=.inf", "optim.lr=.inf"),
    ("optim.lr=true", "optim.lr=true"),
    ("evaluation.every=5", "500 end"),
    ("model.blocks=[-1]", "model.blocks"),
    ("model.blocks=[true]", "model.blocks=[true]"),
    ("log.to=[jsonl,jsonl]", "log.to twice"),
    ("data.path=a\n#1", "data.path '"),
    ("about=a\x00b", "U+0000"),
    (r'hooks.use=["a\0b.py:X"]', "NUL"),
    ("seed=on", "seed=on"),
    ("epochs=1000000000", "epochs"),
    ("data.path=/data", "data.name=folder"),
    ("data.path=2024", 'data.path="2024"'),
    ("optim.lrr=1\n2", "optim.lrr"),
    ("--gpus \u00b2", "--gpus"),
    ("data.micro_batch_size=48", "data.global_batch_size=64"),
    ("--nproc-per-node 3", "data.global_batch_size=64 3"),
    ("--grace nan", "--grace nan"),
    ("optim.warmup_steps=2.5", "optim.warmup_steps=2.5 1"),
    ("data.name=folder", "data.path"),
    ("data.name=folder data.path=no/where", "data.path=no/where"),
    *((f"data.name={n} data.path=here", "data.path=here") for n in ("folder", "table", "shards", "pack")),
    ("precision.mode=tf32", "NVIDIA GPU"),
    ("data.last_batch=weighted", "BatchNorm"),
    ("--out /proc/x", "/proc/x"),
    ("--st a=1", "--st --set"),
    ("--resume foce", "force"),
    ("--resume none", "manifest.json runs/none"),
    (f"--resume {'x' * 300}", "--resume"),
    ("optim.lr=1 --batch-size 3", "data.global_batch_size=N"),
    ("optim.clip=1", "optim.clip optim.max_grad_norm"),
    ("task=[language]", "task=[language]"),
]
COMMANDS = [
    ("train digitz", "digitz digits"),
    ("train no/such.yaml", "no/such.yaml"),
    (f"train {'a' * 5000}.yaml", f"{'a' * 60}…"),
    ("train --init-from run@9", "run manifest.json"),
    ("train --resume a --init-from b", "--init-from --resume"),
    ("train .", "--resume"),
    ("train", "RECIPE"),
    ("train speech-commands data.name=folder data.path=here", "data.path=here"),
    ("train coco-fasterrcnn data.name=coco data.path=here", "data.path=here"),
    ("train gpt2-124m data.path=.", "train.bin data.path"),
    ("train gpt-char data.path=/dev/null", "/dev/null"),
    ("data pack here out", "here"),
    ("data stats here", "here"),
    ("data verify here", "here"),
    ("data index here", "here .tar"),
    ("recipes optim.lr=0.1", "optim.lr=0.1"),
    ("job slurm digits --ranks-per-node=2", "--nproc-per-node"),
    ("fly", "fly"),
    ("trian digits", "train"),
    ("train text.yaml", "text.yaml 0.1"),
    ("train empty.yaml", "empty.yaml 0.1"),
    ("train torn.yaml", "torn.yaml 1 YAML"),
    ("train twice.yaml", "twice.yaml 2 epochs"),
    ("train tag.yaml", "tag.yaml YAML"),
    ("train bomb.yaml", "bomb.yaml 10000"),
    ("train deep.yaml", "deep.yaml YAML"),
    ("train big.yaml", "big.yaml 1 MiB"),
    ("train slip.yaml", "slip.yaml 'epoch' epochs 1"),
    ("train dot.yaml", "optim.lr optim: {lr:"),
    ("train few.yaml --nproc-per-node 4", "4 2"),
]
CASES = [*((f"train digits {words}", names) for words, names in SETTINGS), *COMMANDS]


@pytest.mark.parametrize(("words", "names"), CASES, ids=[words[-40:] for words, _ in CASES])
def test_one_line_code_2(words: str, names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = words.split(" ")
    for name in set(arguments) & YAMLS.keys():
        (tmp_path / name).write_text(YAMLS[name])
    (tmp_path / "here").touch()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    try:
        code: Any = main(arguments)
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert refusal(code, err, names).startswith("trainer: error: ")
    assert out == ""
    assert sorted(path.name for path in tmp_path.rglob("*")) == before, "something was left behind"


LOCKED = [
    ["train", "locked/recipe.yaml"],
    ["train", "digits", "data.name=folder", "data.path=half", "data.image_size=16"],
    ["train", "digits", "data.name=table", "data.path=locked"],
    ["train", "digits", "--init-from", "locked/run"],
    ["train", "digits", "--out", "fixed/run"],
    ["data", "pack", "half/train", "locked/packed", "--processes", "1"],
    ["data", "stats", "locked/pictures"],
    ["data", "verify", "locked/tokens.bin"],
    ["runs", "locked/run"],
    ["report", "locked/run"],
    ["new", "locked/task.py"],
]


@pytest.mark.parametrize("words", LOCKED, ids=" ".join)
def test_a_denied_path_is_named(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pictures(tmp_path / "half")
    for name in ("locked", "fixed"):
        (tmp_path / name).mkdir()
    held = {tmp_path / "locked": 0, tmp_path / "fixed": 0o555, tmp_path / "half" / "val": 0}
    for path, mode in held.items():
        path.chmod(mode)
    try:
        with permissions_count():
            code = main(words)
    finally:
        for path in held:
            path.chmod(0o755)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert (line.startswith("trainer: error: ") and "denied" in line) or named(line, "directory")
    assert next(word for word in ("locked", "fixed", "half") if word in " ".join(words)) in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fixed", "half", "locked"]


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (PermissionError(13, "Permission denied", "a\nb"), "a\nb"),
        (OSError(28, "No space left on device"), "standard output"),
        (OSError(30, "Read-only file system", b"/x\xff"), "/x\udcff"),
        (PermissionError(13, "Permission denied"), ""),  # of a port, say: it has a traceback
    ],
)
def test_an_error_of_the_file_system_is_one_line(error: OSError, name: str) -> None:
    assert name in mendable(error) and bool(mendable(error)) == bool(name)
    with pytest.raises(BadInputError if name else OSError), paths_explained():
        raise error
    # A library under a site's limit of address space, as on many login nodes; and one that isn't there.
    for text, kind in (("x.so: failed to map segment", BadInputError), ("no module x", ImportError)):
        with refused("x", by=kind), paths_explained():
            raise ImportError(text)


QUICK = """
import contextlib, io, sys
from trainer.cli import main, make_parser
from trainer.commands.train import options_of

for words in map(str.split, sys.argv[1:]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    slow = sorted({"torch", "numpy", "pandas", "rich", "safetensors"} & set(sys.modules))
    print([" ".join(words), code, len(sys.modules), slow, out.getvalue(), err.getvalue()])
"""


def test_what_needs_no_torch_does_not_wait_for_it(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text("import torch\n\nRECIPE = {'epochs': 1}\n")
    said = {
        "--help": (0, "verify"),
        "--version": (0, f"trainer {__version__}"),
        "train --help": (0, "--help-config"),
        "recipes": (0, "digits"),
        "train digits --help-config": (0, "optim.lr "),
        f"train {task} --help-config": (0, f"; {task.name}: "),
        "train digist": (2, "digist"),
        f"train {task} --set optim.lrr=1": (2, "optim.lrr"),
        "train digits --set data.micro_batch_size=auto --set seeed=1": (2, "seeed"),
        "evaluate nothing": (2, "nothing"),
        "verify nothing": (2, "nothing"),
        "export nothing --to onnx": (2, "nothing"),
        "doctor digits optim.lr=1 --json": (None, "gpu.nvml"),
    }
    words = [sys.executable, "-c", QUICK, *said]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == list(said)
    for (line, code, modules, slow, out, err), (wanted, text) in zip(lines, said.values(), strict=True):
        assert "torch" not in slow, line
        assert wanted is None or (code, slow) == (wanted, []), (line, err)
        assert text in (err if code == 2 else out), line
        # argparse alone, or with pydantic and yaml: some 120 and 310 on Python 3.11.
        assert modules < (200 if line.startswith("-") or line == "train --help" else 450) or slow, line


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, so asking for one is right")
@pytest.mark.parametrize("arguments", [["--set", "device=cuda"], ["--gpus", "0,1", "--set", "device=cpu"]])
def test_a_gpu_where_there_is_none(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    err = refusal(main(["train", "digits", *arguments]), capsys.readouterr().err)
    assert "device=cpu" in err or "--nproc-per-node N" in err


def test_gpus_are_counted_or_named_and_never_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "count_gpus", lambda _: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")

    def ranks(gpus: str | None) -> tuple[int, str | None]:
        planned = local_ranks.plan_local_ranks(Recipe(epochs=1), gpus, None)
        return planned.ranks, planned.environment.get("CUDA_VISIBLE_DEVICES")

    cases = {None: (3, None), "2": (2, "2,5"), "0,2": (2, "2,7"), "id:1": (1, "5"), "id:2,0": (2, "7,2")}
    assert {gpus: ranks(gpus) for gpus in cases} == cases
    for wrong in ("4", "0", "1,3", "1,1", "x", "", "id:3", "id:0,0", "id:x", "1,id:2"):
        with refused("--gpus"):
            ranks(wrong)


def test_bytes_that_the_locale_cannot_read_are_named_as_such() -> None:
    with refused("LC_ALL=C.UTF-8"):
        override({}, ["about=\udcc3\udca4"])


def test_files_are_looked_up_before_ranks_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = write_pictures(tmp_path / "pictures")
    (pictures / "val" / "0" / "dead.png").symlink_to("gone.png")
    settings = {"data.path": pictures, "data.name": "folder", "data.image_size": 16, "data.workers": 0}
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    names = f"1 5 {pictures}/val {pictures}/val/0/dead"
    refusal(main(["train", "digits", *sets]), capsys.readouterr().err, names, folder=tmp_path / "runs")
    with pytest.raises(AssertionError):  # ranks were started
        main(["train", "digits", *sets, "--set", "data.check=none"])


def test_a_folder_with_something_in_it_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "notes.txt").write_text("mine")
    refusal(main(["train", "digits", "--out", "."]), capsys.readouterr().err)
    assert (tmp_path / "tensorboard" / "notes.txt").read_text() == "mine"


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "digits", "--out", str(tmp_path)]
    older = [["verify", str(tmp_path)], ["runs", str(tmp_path)], ["export", "--to", "onnx", str(tmp_path)]]
    for manifest, commands, names in (
        ({}, [train], tmp_path / "manifest.json"),
        (least_manifest(format=1), [train, *older], f"1 {FORMAT}"),
        (least_manifest(format=FORMAT), [train, [*train, "--resume", "never"]], tmp_path),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        for words in commands:
            refusal(main(words), capsys.readouterr().err, names)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_without_a_name_a_home_or_a_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o555)
    if not (child := os.fork()):
        code: Any = 1
        try:
            for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME", CACHE_VARIABLE):
                os.environ.pop(name, None)
            os.setresuid(987_654, 0, 0)  # others may not read a clone in root's home
            with permissions_count():
                prepare_cache()
                code = main(["train", "digits"]) if getpass.getuser() == "uid-987654" else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert named(capfd.readouterr().err, "runs")
    assert list(tmp_path.iterdir()) == []


def test_what_ranks_find_bad_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(_: str, request: dict[str, Any], *__: Any, **___: Any) -> Launched:
        folder = Path(request["folder"] or "runs/digits-1").absolute()
        folder.mkdir(parents=True)
        (folder / ".lock").touch()
        return Launched(2, {**request, "folder": str(folder), "again": True, "made": True})

    monkeypatch.setattr(job, "launch", launch)
    assert main(["train", "digits"]) == main(["train", "digits", "--out", "mine"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert list((tmp_path / "runs").iterdir()) == []
