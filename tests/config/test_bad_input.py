"""Promise: bad input gives one line with its name and the remedy, exit code 2, and no files."""

import ast
import io
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.few_pictures import write_pictures
from tests.helpers.privileges import permissions_count
from tests.helpers.refusals import named, refusal, refused
from trainer.cli import main
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override
from trainer.errors import BadInputError, mendable, paths_explained
from trainer.launch.launcher import Launched
from trainer.train.request import Request
from trainer.train.start import job, local_ranks, rank
from trainer.version import __version__

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("nothing_starts")


YAMLS = {
    "text.yaml": "just words",
    "list.yaml": "[1, 2]",
    "torn.yaml": "optim: {lr: 0.1",
    "twice.yaml": "epochs: 1\nepochs: 2",
    "tag.yaml": "epochs: !!python/object/apply:os.system ['touch hacked']",
    "self.yaml": "epochs: &a [*a]",
    "bomb.yaml": "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
    + "".join(f"{n}: &{n} [{','.join(['*' + p] * 10)}]\n" for p, n in zip("abcde", "bcdef", strict=True)),
    "deep.yaml": "epochs: " + "[" * 600,
    "empty.yaml": "",
    "slip.yaml": "epoch: 3",
    "big.yaml": "about: " + "x" * (1 << 20),
}

CASES = [
    (["train", "digitz"], "digitz digits"),
    (["train", "no/such.yaml"], "no/such.yaml"),
    (["train", "digits", "--set", "optim.lrr=1"], "optim.lrr optim.lr"),
    (["train", "digits", "--set", "lr=1"], "lr optim.lr"),
    (["train", "digits", "--set", "zzzz=1"], "zzzz --help-config"),
    (["train", "digits", "--set", "optim.lr=fast"], "optim.lr=fast"),
    (["train", "digits", "--set", "optim.lr=-1"], "optim.lr=-1 0"),
    (["train", "digits", "--set", "data.workers=many"], "data.workers=many auto"),
    (
        ["train", "digits", "--set", "data.workers=-1"],
        "data.workers=-1 0",
    ),
    (["train", "digits", "--set", "parallel.threads=0"], "parallel.threads=0"),
    (["train", "digits", "--set", "optim.name=adam"], "optim.name=adam sgd adamw"),
    (["train", "digits", "--set", "optim=3"], "optim"),
    (["train", "digits", "--set", "optim.lr.x=3"], "lr"),
    (["train", "digits", "--set", "optim.lr"], "KEY=VALUE"),
    (["train", "digits", "--set", "=3"], "KEY=VALUE"),
    (["train", f"{'a' * 5000}.yaml"], f"{'a' * 60}…"),
    (["train", "digits", "data.name=folder", f"data.path={'a' * 5000}"], f"{'a' * 60}…"),
    (["train", "--init-from", f"run@{'9' * 5000}"], "run manifest.json"),
    (["train", "digits", "--set", "optim.lr=[1"], "optim.lr=[1 1 YAML"),
    (["train", "digits", "--set", "seed=!!bool maybe"], "seed YAML"),
    (["train", "digits", "--set", "optim={lr: 1, lr: 2}"], "lr"),
    (
        ["train", "digits", "--set", "data.class_weights={3:5}"],
        "3:5",
    ),
    (["train", "digits", "--set", "evaluation.sets={b: {path:x}}"], "path:x"),
    (["train", "digits", "--set", "optim.lr=.inf"], "optim.lr=.inf"),
    (
        ["train", "digits", "--set", "optim.lr=true"],
        "optim.lr=true",
    ),
    (
        ["train", "digits", "--set", "optim.bogus=1"],
        "optim.bogus --help-config",
    ),
    (["train", "digits", "--set", "device=gpu"], "device=gpu"),
    (["train", "digits", "--set", "evaluation.every=5"], "500 end"),
    (["train", "digits", "--set", "optim.lr=null"], "optim.lr=null"),
    (["train", "digits", "--set", "model.blocks=[null, true]"], "model.blocks=null"),
    (["train", "digits", "--set", "optim={lr: a, eps: b}"], "optim.lr=a 1"),
    (["train", "digits", "--set", "about=a\x00b"], "U+0000"),
    (["train", "digits", "--set", r'hooks.use=["a\0b.py:X"]'], "NUL"),
    (["train", "digits", "--set", r'log.to=["a\0b.py:x"]'], "NUL"),
    (["train", "digits", "--set", r'model.pretrained="a\0.safetensors"'], "NUL"),
    (["train", "digits", "--set", "seed=on"], "seed=on"),
    (["train", "digits", "--set", "optim.betas=[2, -1]"], "optim.betas"),
    (["train", "digits", "--set", "parallel.timeout_s=1e300"], "parallel.timeout_s"),
    (["train", "digits", "--set", "model.blocks=[-1]"], "model.blocks"),
    (["train", "digits", "--set", "epochs=1000000000"], "epochs"),
    (["train", "digits", "--set", "data.global_batch_size=1000000000"], "data.global_batch_size"),
    (["train", "digits", "--set", "data.path=/data"], "data.name=folder"),
    (["train", "digits", "--set", "optim.lrr=1\n2"], "optim.lrr"),
    (["train", "digits\nx"], "digits x"),
    (
        ["train", "digits", "--set", "model.name=resnet18"],
        "model.name=resnet18",
    ),
    (["train", "digits", "--gpus", "\u00b2"], "--gpus"),
    (["train", "digits", "--out", ""], "run folder .:"),
    (
        ["train", "digits", "--set", "data.micro_batch_size=48"],
        "data.global_batch_size=64",
    ),
    (["train", "digits", "--nproc-per-node", "3"], "data.global_batch_size=64 3"),
    (["train", "digits", "--nproc-per-node", "0"], "--nproc-per-node 0"),
    (["train", "digits", "--grace", "0"], "--grace 0.0 0"),
    (["train", "digits", "--grace", "nan"], "--grace nan"),
    (["train", "digits", "--grace", "soon"], "--grace"),
    (
        ["train", "digits", "--set", "optim.warmup_steps=2.5"],
        "optim.warmup_steps=2.5 1",
    ),
    (["train", "digits", "--set", "optim.warmup=0.1"], "optim.warmup_steps"),
    (["train", "digits", "--set", "model.name=resnet51"], "resnet51"),
    (["train", "digits", "--set", "data.name=folder"], "data.path"),
    (
        ["train", "digits", "--set", "data.name=folder", "--set", "data.path=no/where"],
        "data.path=no/where",
    ),
    *(
        (
            ["train", recipe, "--set", f"data.name={name}", "--set", "data.path=here"],
            "data.path=here",
        )
        for recipe, name in (
            *(("digits", name) for name in ("folder", "table", "shards", "pack", "cifar10")),
            ("speech-commands", "folder"),
            ("coco-fasterrcnn", "coco"),
            ("gpt2-124m", "tokens"),
        )
    ),
    (["train", "gpt2-124m", "--set", "data.path=."], "train.bin data.path"),
    (["train", "gpt-char", "--set", "data.path=."], ". directory"),
    (
        ["train", "gpt-char", "--set", "data.path=/dev/null"],
        "/dev/null",
    ),
    (["data", "pack", "here", "out"], "here"),
    (["data", "stats", "here"], "here"),
    (["data", "pack", ".", "p", "--processes", "0"], "--processes 0 1"),
    (["data", "verify", "here"], "here"),
    (["data", "index", "here"], "here .tar"),
    (["train", "digits", "--set", "precision.mode=tf32"], "NVIDIA GPU"),
    (["train", "digits", "--set", "data.last_batch=weighted"], "BatchNorm"),
    (["train", "digits", "--out", "/proc/x"], "/proc/x"),
    (["train"], "RECIPE"),
    (["train", "digits", "--st", "a=1"], "--st --set"),
    (["train", "digits", "--resume", "foce"], "force"),
    (["train", "digits", "max_steps=x"], "max_steps=x null"),
    (
        ["train", "digits", "--resume", "none"],
        "manifest.json runs/none",
    ),
    (
        ["train", "--resume", "a", "--init-from", "b"],
        "--init-from --resume",
    ),
    (["train", "."], "--resume"),
    (["train", "digits", "--resume", "runs/none"], "--resume runs/none"),
    (["train", "digits", "--resume", "x" * 300], "--resume"),
    (["train", "digits", "optim.lr=1", "--batch-size", "3"], "data.global_batch_size=N"),
    (["train", "digits", "--lr", "0.1"], "--lr 0.1 optim.lr=0.001"),
    (["train", "digits", "optim.clip=1"], "optim.clip optim.max_grad_norm"),
    (["train", "digits", "batch_size=8"], "data.global_batch_size"),
    (["train", "digits", "--num-workers", "2"], "--num-workers 2 data.workers=N"),
    (["train", "digits", "optim.lrr=0.1"], "optim.lrr optim.lr"),
    (["recipes", "optim.lr=0.1"], "optim.lr=0.1"),
    (["train", "digits", "--ranks", "2"], "--ranks 2 --nproc-per-node"),
    (["job", "slurm", "digits", "--ranks-per-node=2"], "--nproc-per-node"),
    (["fly"], "fly"),
    (["trian", "digits"], "train"),
    (["train", "text.yaml"], "text.yaml 0.1"),
    (["train", "list.yaml"], "list.yaml 0.1"),
    (["train", "empty.yaml"], "empty.yaml 0.1"),
    (["train", "torn.yaml"], "torn.yaml 1 YAML"),
    (["train", "twice.yaml"], "twice.yaml 2 epochs"),
    (["train", "tag.yaml"], "tag.yaml YAML"),
    (["train", "self.yaml"], "self.yaml"),
    (["train", "bomb.yaml"], "bomb.yaml 10000"),
    (["train", "deep.yaml"], "deep.yaml YAML"),
    (["train", "big.yaml"], "big.yaml 1 MiB"),
    (["train", "slip.yaml"], "slip.yaml epoch epochs 1"),
    (["train", "digits", "--set", "task=[language]"], "task=[language]"),
]


@pytest.mark.parametrize(("arguments", "names"), CASES, ids=[" ".join(case[0])[-40:] for case in CASES])
def test_one_line_and_code_2(
    arguments: list[str], names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    ["train", "digits", "data.name=folder", "data.path=locked/pictures"],
    ["train", "digits", "data.name=folder", "data.path=half", "data.image_size=16"],
    ["train", "digits", "data.name=table", "data.path=locked"],
    ["train", "digits", "--init-from", "locked/run"],
    ["train", "digits", "--out", "locked/run"],
    ["train", "digits", "--out", "fixed/run"],
    ["data", "pack", "locked/pictures", "packed"],
    ["data", "pack", "half/train", "locked/packed", "--processes", "1"],
    ["data", "stats", "locked/pictures"],
    ["data", "index", "locked"],
    ["data", "verify", "locked/tokens.bin"],
    ["data", "show", "digits", "--set", "data.name=folder", "--set", "data.path=locked/pictures"],
    ["runs", "locked"],
    ["runs", "locked/run"],
    ["report", "locked/run"],
    ["new", "locked/task.py"],
    ["job", "slurm", "locked/recipe.yaml"],
]


@pytest.mark.parametrize("words", LOCKED, ids=" ".join)
def test_a_path_that_may_not_be_used_is_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    ("error", "line"),
    [
        (PermissionError(13, "Permission denied", "a\nb"), "a\nb: permission denied: give another"),
        (
            OSError(28, "No space left on device"),
            "a file or standard output can't be written: no room is left",
        ),
        (OSError(30, "Read-only file system", b"/x\xff"), "/x\udcff: is on a read-only file system"),
        (IsADirectoryError(21, "Is a directory", Path("d")), "d: is a folder"),
        (PermissionError(13, "Permission denied"), ""),  # of a port, say: it has a traceback
    ],
)
def test_an_error_of_the_file_system_is_one_line(error: OSError, line: str) -> None:
    assert mendable(error).startswith(line) and bool(mendable(error)) == bool(line)
    with pytest.raises(BadInputError if line else OSError), paths_explained():
        raise error
    # A library under a site's limit of address space, as on many login nodes; and one that isn't there.
    for text, kind in (("x.so: failed to map segment", BadInputError), ("no module x", ImportError)):
        with refused("x", by=kind), paths_explained():
            raise ImportError(text)


def test_a_rank_that_torchrun_started_says_it_in_a_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    error = PermissionError(13, "Permission denied", "data/train")
    monkeypatch.setattr(rank, "prepared_in_turns", mock.Mock(side_effect=error))
    with refused("data/train"):
        rank.train_rank(Request(Recipe(epochs=1), "digits"))


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
    """Help, and what is wrong with a recipe in itself: counted in modules, in a process that has none yet."""
    task = tmp_path / "task.py"
    task.write_text("import torch\n\nRECIPE = {'epochs': 1}\n")
    said = {
        "--help": (0, "verify"),
        "--version": (0, f"trainer {__version__}"),
        "train --help": (0, "--help-config"),
        "recipes": (0, "digits"),
        "train digits --help-config": (0, "optim.lr "),
        "train --help-config": (0, "optim.lr "),
        f"train {task} --help-config": (0, f"; {task.name}: "),
        "train digist": (2, "no recipe 'digist'; did you mean 'digits'?"),
        "train digits --set optim.lrr=1": (2, "unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
        "train digits --set optim.name=sgdd": (2, "did you mean 'sgd'?"),
        f"train {task} --set optim.lrr=1": (2, "unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
        "train digits --set data.micro_batch_size=auto --set seeed=1": (2, "did you mean 'seed'?"),
        "evaluate nothing": (2, "nothing: not a run folder"),
        "predict nothing x.png": (2, "nothing: not a run folder"),
        "verify nothing": (2, "nothing: not a run folder"),
        "export nothing --to onnx": (2, "nothing: not a run folder"),
    }
    done = subprocess.run(
        [sys.executable, "-c", QUICK, *said], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == list(said)
    for (words, code, modules, slow, out, err), (wanted, text) in zip(lines, said.values(), strict=True):
        assert (code, slow) == (wanted, []), (words, err)
        assert text in (err if code else out), words
        # argparse alone, or with pydantic and yaml: some 120 and 310 on Python 3.11.
        assert modules < (200 if words.startswith("-") or words == "train --help" else 450), words


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, so asking for one is right")
@pytest.mark.parametrize(
    "arguments", [["--set", "device=cuda"], ["--gpus", "1"], ["--gpus", "0,1", "--set", "device=cpu"]]
)
def test_a_gpu_where_there_is_none(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    err = refusal(main(["train", "digits", *arguments]), capsys.readouterr().err)
    assert "device=cpu" in err or "--nproc-per-node N" in err


def test_the_grace_reaches_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def launch(_: str, request: dict[str, Any], *__: Any, grace_seconds: float, **___: Any) -> Launched:
        given.append(grace_seconds)
        return Launched(2, request)

    monkeypatch.setattr(job, "launch", launch)
    main(["train", "digits"])
    main(["train", "digits", "--grace", "7.5"])
    assert given == [25.0, 7.5]


def test_gpus_are_counted_or_named_and_never_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "count_gpus", lambda _: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")

    def ranks(gpus: str | None) -> tuple[int, str | None]:
        planned = local_ranks.plan_local_ranks(Recipe(epochs=1), gpus, None)
        return planned.ranks, planned.environment.get("CUDA_VISIBLE_DEVICES")

    assert ranks(None) == (3, None)
    assert ranks("2") == (2, "2,5")
    assert ranks("0,2") == (2, "2,7")
    assert ranks("id:1") == (1, "5")
    assert ranks("id:2,0") == (2, "7,2")
    for wrong in ("4", "0", "1,3", "1,1", "x", "-1", "1,", "", "id:", "id:3", "id:0,0", "id:x", "1,id:2"):
        with pytest.raises(BadInputError, match="--gpus"):
            ranks(wrong)


def test_bytes_that_the_locale_cannot_read_are_named_as_such() -> None:
    with refused("LC_ALL=C.UTF-8"):
        override({}, ["about=\udcc3\udca4"])


def test_a_locale_without_umlauts_ends_in_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("about: ä\nepochs: 1\n", "utf-8")
    out = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, "ascii", write_through=True))
    assert main(["train", "mine.yaml", "--help-config"]) == 0
    assert b"; mine.yaml: \\xe4" in out.getvalue()
