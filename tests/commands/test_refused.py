"""Promise: what a command can't do is one line with its names and exit code 2, and nothing is written."""

import shutil
from pathlib import Path

import pytest

import trainer
from tests.helpers.commands import refuse
from tests.helpers.job_files import IN_IMAGE

EXAMPLE = str(Path(trainer.__file__).parent / "tasks" / "example.py")
REFUSED = [
    ("check EXAMPLE --only plane", "plane"),
    ("data show digits", "task=classification"),
    ("data show gpt-stdlib --samples 0", "--samples"),
    ("doctor digitz", "digitz digits"),
    ("doctor --set data.workers=2", "--set data.workers=2"),
    ("doctor digits --out x.ckpt", "--out x.ckpt"),
    ("evaluate no-run", "no-run"),
    ("evaluate RUN --checkpoint first", "first best last"),
    ("evaluate RUN --set optim.lr=1", "optim.lr"),
    ("evaluate RUN --nproc-per-node 0", "--nproc-per-node"),
    ("evaluate digits", "digits --weights"),
    ("evaluate OTHER", "OTHER --weights"),
    ("evaluate RUN --weights OTHER", "RUN --weights RUN/config.yaml"),
    ("evaluate digits --weights gone.safetensors", "--weights gone.safetensors"),
    ("evaluate digits --weights hub:x", "hub:ORG/NAME@REVISION"),
    ("evaluate digits --weights OTHER --checkpoint best", "--checkpoint"),
    ("evaluate digits --weights OTHER --on far", "--on far"),
    ("evaluate digits --weights OTHER model.width=8", "OTHER"),
    ("export RUN --to onnx --dtype bf16", "bfloat16"),
    ("export RUN --to safetensors --with-normalization", "--with-normalization"),
    ("export RUN --to safetensors --set model.width=3", "model.width"),
    ("predict RUN --out pictures", "--out"),
    ("predict RUN --top 0", "--top"),
    ("predict no", "no"),
    ("runs gone", "gone"),
    ("verify RUN --steps 1", "--steps 1"),
    ("verify RUN --set log.every=3", "--set log.every=3"),
    ("job dokcer digits", "dokcer docker"),
    ("job docker digits --volume a:/workspace/runs", "--image"),
    ("job slurm digits --namespace a", "--namespace a"),
    ("job slurm digits --nodes 3-2", "--nodes 3-2"),
    ("job kubernetes digits IMAGE --nodes 1-2", "--nodes 1-2"),
    ("job kubeflow digits IMAGE --master-port 3000", "--master-port 3000"),
    ("job docker digits --image=--privileged", "--image --privileged"),
    ("job slurm digits --gpus-per-node 1 --nproc-per-node 2", "--nproc-per-node"),
    ("job slurm digits --time 2", "--time 2"),
    ("job slurm digits --nodes 3", "data.global_batch_size=64 data.micro_batch_size=64 --nodes"),
    ("job kubernetes digits IMAGE --user 0:0", "--user 0:0"),
    ("job docker digits IMAGE --env a-b=1", "--env a-b=1"),
    ("job docker digits IMAGE --env NNODES=1", "--env NNODES"),
    ("job docker digits IMAGE --env HF_TOKEN=abc", "--env HF_TOKEN --env-from"),
    ("job docker digits IMAGE --volume a,b:/c", "--volume a,b:/c"),
    ("job docker digits IMAGE --out /tmp/x", "--out /tmp/x --volume"),
    ("job docker digits --image x --volume a:/workspace/runs:ro", "--out --volume"),
    ("job slurm digits --out runs/%j", "--out runs/%j"),
    ("job slurm digits --account a\nb", "--account"),
    ("job slurm digits --nnodes 2", "--nnodes --nodes"),
]


@pytest.mark.parametrize(("words", "names"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_cannot_be_done_is_one_line(
    words: str, names: str, digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(digits_run / "ema.safetensors", "theirs.safetensors")
    Path("x.ckpt").write_bytes(b"PK\x03\x04 is a zip archive, as torch.save writes them")
    places = {"RUN": str(digits_run), "OTHER": "theirs.safetensors", "EXAMPLE": EXAMPLE}
    for name, place in {**places, "IMAGE": " ".join(IN_IMAGE)}.items():
        words, names = words.replace(name, place), names.replace(name, place)
    line = refuse(words.split(" "), names)
    assert "abc" not in line and "\x1b" not in line
    assert {path.name for path in tmp_path.iterdir()} == {"theirs.safetensors", "x.ckpt"}
