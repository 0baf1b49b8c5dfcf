"""Promise: ranks of one host ask no name server for each other."""

import ast
import shutil
import sys
from pathlib import Path

import pytest

import trainer
from tests.helpers.programs import ran
from trainer.host.interfaces import services
from trainer.host.reading import text_of

_LOOK_UP = """
import socket, sys
from contextlib import suppress
from trainer.host.interfaces import from_files_alone
with from_files_alone(sys.argv[1]):
    with from_files_alone(sys.argv[1]):
        pass
    with suppress(socket.gaierror):
        print(socket.getnameinfo(("::ffff:127.0.0.1", 80), socket.NI_NUMERICSERV))
if sys.argv[2:]:
    with suppress(socket.gaierror):
        socket.getaddrinfo("host.invalid", 80)
"""
_STORES = ("TCPStore", "init_process_group")


def asked(folder: Path, *words: str) -> int:
    """How often a process that looks up 127.0.0.1 as torch does connects to a name server."""
    if not shutil.which("strace") or "nameserver" not in text_of("/etc/resolv.conf"):
        pytest.skip("needs strace and a name server in resolv.conf")
    told = folder / "told"
    strace = ["strace", "-f", "-qq", "-e", "trace=connect,sendto,sendmmsg", "-o", str(told)]
    done = ran(*strace, sys.executable, "-c", _LOOK_UP, *words)
    if "ptrace" in done.stderr.lower():
        pytest.skip("strace may not look here")
    assert done.returncode == 0, done.stderr
    return told.read_text().count("htons(53)")


def test_the_name_of_a_loopback_address_is_asked_of_nobody(tmp_path: Path) -> None:
    assert asked(tmp_path, "127.0.0.1") == 0
    assert asked(tmp_path, "203.0.113.1") > 0  # ranks of several hosts resolve names as ever
    assert asked(tmp_path, "127.0.0.1", "then") > 0  # and so does all that comes after


def test_services_are_what_they_were() -> None:
    text = "passwd: files\n# hosts: no\nhosts:\tfiles mdns4_minimal [NOTFOUND=return] dns # all\n"
    assert services(text) == "files mdns4_minimal [NOTFOUND=return] dns"
    assert services("hosts:files") == "files"
    assert services("") == services("passwd: files\n") == "dns [!UNAVAIL=return] files"


def test_every_store_is_connected_to_without_a_name_server() -> None:
    """torch looks up whom its store connects to; see `from_files_alone`."""
    found = 0
    for file in Path(trainer.__file__).parent.rglob("*.py"):
        if not any(name in (text := file.read_text()) for name in _STORES):
            continue
        tree = ast.parse(text)
        within = [
            range(one.lineno, (one.end_lineno or 0) + 1)
            for one in ast.walk(tree)
            if isinstance(one, ast.With) and "from_files_alone(" in ast.unparse(one.items[0])
        ]
        calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call)]
        for function in (one for one in tree.body if isinstance(one, ast.FunctionDef)):
            asked = [call.lineno for call in calls if ast.unparse(call.func) == function.name]
            if asked and all(any(line in lines for lines in within) for line in asked):
                within.append(range(function.lineno, (function.end_lineno or 0) + 1))
        for call in calls:
            if ast.unparse(call.func).rpartition(".")[2] in _STORES:
                found += 1
                assert any(call.lineno in lines for lines in within), f"{file}:{call.lineno}"
    assert found >= 4
