#!/usr/bin/env python3
"""Makes a new stack from an old one with another torch: `make stack FROM=torch2.9-cu128 TORCH=2.14.1`.

It keeps the old stack's conda half and, where it can, its other wheels. The versions of torchvision, CUDA,
cuDNN, NCCL and Triton come from resolving torch, the GPUs from the installed torch. The stack is made in
build/stack and moved to stacks/ once it is locked and installed: a failure before leaves stacks/ as it was.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import lock
import stack_table
from conda_lock import FILES, read_toml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
# The last torchaudio; its import fails from torch 2.15 on (CUDA 13.2). The trainer doesn't need it.
LAST_AUDIO, LAST_WITH_AUDIO = "2.11.0", (2, 14)
WHERE = {
    **{"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"},
    **{"python_version": "3.12", "python_full_version": "3.12.0", "implementation_name": "cpython"},
    "platform_python_implementation": "CPython",
}
# Prints versions with their CUDA (`0.29.2+cu132`), which an index's metadata lacks, and torch's GPUs.
ASK = """
import importlib.util, json, pathlib, re, torch
said = {"torch": torch.__version__, "gpus": torch._C._cuda_getArchFlags() or ""}
for name in ("torchvision", "torchaudio"):
    if spec := importlib.util.find_spec(name):
        text = pathlib.Path(spec.origin).with_name("version.py").read_text()
        said[name] = re.search(r"__version__ = ['\\"](.+)['\\"]", text)[1]
print(json.dumps(said))
"""


class StackError(Exception):
    """Raised where no stack can be made, with the reason in one line."""


class OtherCudaError(StackError):
    """Raised where torchvision was built for another CUDA than torch; has the version of torchvision."""


def audio_of(torch: str) -> str:
    """Returns the version of torchaudio that fits a torch; "" if none does."""
    major, minor = map(int, torch.split(".")[:2])
    if (major, minor) > LAST_WITH_AUDIO:
        return ""
    return torch if (major, minor) <= (2, 10) else LAST_AUDIO


def brought(resolved: str) -> dict[str, str]:
    """Returns the packages that a torch needs on Linux x86_64, from its resolution (`name==version ; marker`
    lines).

    Raises:
        StackError: something is missing.
    """
    lines = [Requirement(one.rstrip(" \\")) for one in resolved.splitlines() if re.match(r"[\w.-]+==", one)]
    held = {
        one.name: str(one.specifier).removeprefix("==")
        for one in lines
        if one.marker is None or one.marker.evaluate(WHERE)
    }

    def one(*names: str) -> str:
        found = [held[name] for name in names if name in held]
        if not found:
            raise StackError(
                f"torch {held.get('torch', '')} brings no {names[0]}: its stack must be made by hand"
            )
        return found[0]

    # From CUDA 13 on the toolkit's wheels carry no suffix.
    runtime = one("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime")
    return {
        "torchvision": one("torchvision"),
        "cuda": ".".join(runtime.split(".")[:2]),
        "cudnn": one("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
        "nccl": one("nvidia-nccl-cu12", "nvidia-nccl-cu13"),
        "triton": one("triton"),
    }


def drivers(cuda: str, given: str, stacks: Path) -> tuple[str, str]:
    """Returns native driver and floor of a CUDA: as given (NATIVE,FLOOR), else from a stack of that CUDA.

    Raises:
        StackError: given is malformed, or no stack has that CUDA.
    """
    if given:
        found = re.fullmatch(r"(\d+[\d.]*),(\d+[\d.]*)", given)
        if not found:
            raise StackError(f"DRIVER={given}: give NATIVE,FLOOR as 580.65.06,580")
        return found[1], found[2]
    for file in sorted(stacks.glob("*/stack.toml")):
        stack = read_toml(file)
        if stack["brings"]["cuda"] == cuda:
            return stack["driver"]["native"], stack["driver"]["floor"]
    raise StackError(
        f"no stack has CUDA {cuda}: give DRIVER=NATIVE,FLOOR from the release notes of that toolkit"
    )


def described(
    old: str, name: str, pins: Mapping[str, str], brings: Mapping[str, str], driver: tuple[str, str]
) -> str:
    """Returns the text of the new stack.toml, from that of the old."""

    def put(text: str, key: str, value: str) -> str:
        return re.sub(rf'(?m)^{key} = ".*?"', f'{key} = "{value}"', text)

    text = old.replace(str(re.search(r'(?m)^name = "(.*)"', old)[1]), name)  # type: ignore[index]
    text = put(text, "about", f"PyTorch {pins['torch']} with CUDA {brings['cuda']}.")
    year, month = time.gmtime()[:2]
    text = re.sub(r"(?m)^(supported_until = )\S+", rf"\g<1>{year + 1}-{month:02}-28", text)
    for key, value in {**pins, **brings}.items():
        text = put(text, key, value)
    if "torchaudio" not in pins:
        text = re.sub(r'(?m)^torchaudio = ".*"\n', "", text)
    text = put(put(text, "native", driver[0]), "floor", driver[1])
    return re.sub(r"(?ms)^# GB unpacked\..*?(?=^# |^\[(?!budget)|\Z)", "", text).rstrip() + "\n"


def with_architectures(text: str, flags: str) -> str:
    """Returns stack.toml with the GPU architectures in torch's flags (`sm_80 sm_90a`).

    Raises:
        StackError: the flags have none.
    """
    found = list(dict.fromkeys(re.findall(r"sm_\d+", flags)))
    if not found:
        raise StackError("the installed torch names no GPU: it is built without CUDA")
    return re.sub(r"(?m)^architectures = \[.*\]", f"architectures = {found}".replace("'", '"'), text)


def call(*words: object) -> None:
    """Runs a program after printing its command.

    Raises:
        StackError: it failed.
    """
    print("stack:", *words, flush=True)
    if subprocess.call([str(word) for word in words], cwd=ROOT):
        raise StackError(f"{' '.join(map(str, words[1:4]))} failed (above)")


def install(stack: str, name: str) -> Path:
    """Installs a stack's wheels into build/compat; returns the Python of that environment.

    Args:
        stack: Name in stacks/, or path of the stack's folder.
        name: Name of the environment.
    """
    venv = ROOT / "build/compat" / name
    call(
        *(sys.executable, "scripts/bootstrap.py", "--stack", stack, "--venv", venv),
        *("--groups", "train", "test"),
    )
    return venv / "bin/python"


def resolved(asked: list[str], environments: list[str]) -> tuple[str, list[str]]:
    """Returns uv's resolution of requirements, and its environments: without Pythons that torch has left.

    Raises:
        StackError: there is none, or the index can't be reached.
    """
    uv = shutil.which("uv", path=Path(sys.prefix) / "bin") or shutil.which("uv") or "uv"
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "pyproject.toml").write_text(
            f"[tool.uv]\nenvironments = {json.dumps(environments)}\n"
        )
        try:
            return lock.resolve(uv, asked, "", Path(temporary)), environments
        except OSError as error:
            raise StackError(f"uv can't be run: {error}") from None
        except subprocess.CalledProcessError as error:
            needs = re.search(r"\btorch==\S+ depends on Python>=(3\.\d+)", error.stderr)
            later = f"python_full_version >= '{needs[1]}'" if needs else ""
            if not later or later in environments[0]:
                raise StackError(f"uv: no versions fit {' '.join(asked)} (above)") from None
    print(f"stack: {asked[0]}: {later}: so has the new stack", flush=True)
    return resolved(asked, [f"{one} and {later}" for one in environments])


def lock_and_install(old: Path, made: Path, text: str) -> None:
    """Locks a new stack's wheels in a folder, installs them, and takes the GPUs from the installed torch.

    Raises:
        OtherCudaError: torchvision was built for another CUDA than torch.
        StackError: a step failed.
    """
    shutil.rmtree(made, ignore_errors=True)  # of another try, or of a call that was killed
    made.mkdir(parents=True)
    (made / "stack.toml").write_text(text)
    for file in (*FILES.values(), "records.json", "environment.yml", "wheels.lock"):
        (made / file).write_text((old / file).read_text().replace(old.name, made.name))
    inside = str(made.relative_to(ROOT))
    call(sys.executable, "scripts/lock.py", "--stack", inside, "--only", "wheels")
    python = install(inside, made.name)
    said = json.loads(subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=True).stdout)
    for name in ("torchaudio", "torchvision"):
        if said.get(name, said["torch"]).partition("+")[2] != said["torch"].partition("+")[2]:
            kind = OtherCudaError if name == "torchvision" else StackError
            raise kind(f"{name} {said[name]} was built for another CUDA than torch {said['torch']}")
    (made / "stack.toml").write_text(with_architectures((made / "stack.toml").read_text(), said["gpus"]))
    wheels = made / "wheels.lock"
    wheels.write_text(wheels.read_text().replace(inside, made.name))


def planned(old: Path, torch: str, vision: str, driver: str) -> tuple[str, str, str]:
    """Returns name, stack.toml and version of torchvision for a torch; `vision` bounds the latter.

    Raises:
        StackError: no versions fit, or the stack exists.
    """
    about, stacks = read_toml(old / "stack.toml"), old.parent
    audio = {"torchaudio": audio_of(torch)} if audio_of(torch) else {}
    asked = [f"torch=={torch}", f"torchvision{vision}", *(f"{key}=={value}" for key, value in audio.items())]
    project = read_toml(ROOT / "pyproject.toml")["tool"]["uv"]["environments"]
    resolution, environments = resolved(asked, about.get("environments", project))
    brings = brought(resolution)
    pins = {"torch": torch, "torchvision": brings.pop("torchvision"), **audio}
    name = f"torch{'.'.join(torch.split('.')[:2])}-cu{brings['cuda'].replace('.', '')}"
    if (stacks / name).exists():
        raise StackError(f"stacks/{name} is there: make lock STACK={name} locks it anew")
    found = drivers(brings["cuda"], driver, stacks)
    text = described((old / "stack.toml").read_text(), name, pins, brings, found)
    if environments not in (project, about.get("environments")):
        text = re.sub(r"(?m)^environments = .*\n", "", text)
        line = f"environments = {json.dumps(environments)}\n"
        text = re.sub(
            r'(?m)^(python = "[^"]*").*\n', lambda match: f"{match[1]}  # of the image\n{line}", text
        )
    return name, text, pins["torchvision"]


def make(base: str, torch: str, driver: str) -> str:
    """Makes the stack; returns its name.

    Raises:
        StackError: it can't be made; stacks/ is as it was.
    """
    old = ROOT / "stacks" / base
    if not base or not (old / "stack.toml").is_file():
        raise StackError(f"FROM={base}: no such folder of stacks/")
    if not re.fullmatch(r"\d+\.\d+\.\d+", torch):
        raise StackError(f"TORCH={torch}: give a release, as 2.14.1")
    if read_toml(old / "stack.toml")["kind"] != "wheels":
        raise StackError(f"FROM={base} is conda's, whose channel ended with torch 2.5.1: give one of wheels")
    name, text, vision = planned(old, torch, "", driver)
    made, venv = ROOT / "build/stack" / name, ROOT / "build/compat" / name
    kept = venv.exists()
    try:
        while True:
            try:
                lock_and_install(old, made, text)
                break
            except OtherCudaError as error:
                print(f"stack: {error}: trying an older torchvision", flush=True)
                _, text, vision = planned(old, torch, f"<{vision}", driver)
    except BaseException:
        for folder in (made, *([] if kept else [venv])):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    made.rename(ROOT / "stacks" / name)
    stack_table.main()
    return name


def main(words: Sequence[str] | None = None) -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description="Makes a new stack from an old one with another torch.")
    add = parser.add_argument
    add("--base", required=True, metavar="STACK", help="folder of stacks/ to begin with")
    add("--torch", required=True, metavar="VERSION", help="release of PyTorch")
    add("--driver", default="", metavar="NATIVE,FLOOR", help="for a CUDA that no stack has yet")
    options = parser.parse_args(words)
    try:
        name = make(options.base, options.torch, options.driver)
    except (StackError, OSError, subprocess.CalledProcessError) as error:
        print(f"stack: {error}", file=sys.stderr)
        return 2
    print(
        f"stack: stacks/{name} is made; next: docs/stacks.md, .github/workflows/image.yml,\n"
        f"build/compat/{name}/bin/python -m pytest -m compat, and after make image STACK={name} its budget_gb"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
