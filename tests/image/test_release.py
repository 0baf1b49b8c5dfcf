"""P1, P9: a release is of the tag and commit that it names, the same bytes twice."""

import tarfile
import zipfile
from pathlib import Path

import pytest
import release

from tests.helpers.programs import ran

FILES = {
    **{"trainer/version.py": '__version__ = "0.2.0"\n', "trainer/__init__.py": "", "docs/a.md": "a\n"},
    "CITATION.cff": "version: 0.2.0\n",
    "pyproject.toml": '[project]\nname = "x"\nversion = "0.2.0"\nreadme = "README.md"\n\n'
    '[project.scripts]\nx = "x:main"\n\n[tool.setuptools]\npackages = ["trainer"]\n',
    "CHANGELOG.md": "## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n- New.\n\n## [0.1.0] - 2026-11-22\n",
    "README.md": "[a](docs/a.md) ![p](p.png) [w](https://x.org) [h](#h)\n\n```\n[c](d.md)\n```\n",
}
WHO = ("-c", "user.name=a", "-c", "user.email=a@b")
URL = "https://code.example/us/trainer"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small checkout with one commit."""
    root = tmp_path / "project"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for words in ("init -q", "add .", "commit -qm one"):
        ran("git", *WHO, *words.split(), code=0, cwd=root)
    monkeypatch.setattr(release, "ROOT", root)
    return root


@pytest.mark.usefixtures("project")
def test_a_release_is_whole_and_the_same_twice(tmp_path: Path) -> None:
    for name in ("one", "two"):
        words = ["--tag=v0.2.0", f"--out={tmp_path / name}", f"--source={URL}"]
        assert release.main(words) == 0
    names = ("one", "two")
    one, two = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in names)
    assert one == two
    assert one["notes.md"] == b"- New.\n"
    with zipfile.ZipFile(tmp_path / "one/x-0.2.0-py3-none-any.whl") as archive:
        said = archive.read("x-0.2.0.dist-info/METADATA").decode()
    assert f"Project-URL: Changelog, {URL}/blob/v0.2.0/CHANGELOG.md" in said
    assert f"[a]({URL}/blob/v0.2.0/docs/a.md) ![p]({URL}/raw/v0.2.0/p.png) [w](https://x.org)" in said
    assert "[c](d.md)" in said, "code stays as it is"
    with tarfile.open(tmp_path / "one/x-0.2.0.tar.gz") as sdist:
        assert {f"x-0.2.0/{name}" for name in (*FILES, "PKG-INFO")} <= set(sdist.getnames())


@pytest.mark.parametrize(
    ("tag", "change", "said"),
    [
        ("v0.3.0", "", "versions differ: the tag 0.3.0, trainer/version.py 0.2.0"),
        ("v0.2.0", "CHANGELOG.md:## [Unreleased]\n", "no section '## [0.2.0] - YEAR-MONTH-DAY'"),
        ("v0.2.0", "README.md:another", "a file differs from the commit (M README.md): commit it first"),
        ("v0.2.0", "tag", "the tag v0.2.0 is of "),
    ],
)
def test_what_isnt_a_release_is_refused(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tag: str, change: str, said: str
) -> None:
    file, _, text = change.partition(":")
    if text:
        (project / file).write_text(text)
    elif file:
        ran("git", "tag", tag, code=0, cwd=project)
        ran("git", *WHO, "commit", "-qm", "two", "--allow-empty", code=0, cwd=project)
    assert release.main([f"--tag={tag}", f"--out={tmp_path / 'out'}"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
