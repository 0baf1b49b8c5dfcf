"""Packages that tests install: small wheels."""

import zipfile
from pathlib import Path


def wheel(
    folder: Path, name: str, version: str, requires: str = "", script: str = "", tag: str = "any"
) -> Path:
    """A wheel of one module, which knows its version, and of a program with its name, if it is given."""
    info = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        f"{name}.py": f"version = '{version}'\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **({f"{name}-{version}.data/scripts/{name}": script} if script else {}),
    }
    path = folder / f"{name}-{version}-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": "".join(f"{one},,\n" for one in files)}.items():
            entry = zipfile.ZipInfo(file)
            entry.external_attr = 0o100755 << 16
            archive.writestr(entry, text)
    return path
