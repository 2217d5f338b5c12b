"""Compiled code on disk: used again, made again where it is damaged, and never needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_bodies import FIRST, OTHERS

from forerun.errors import ForerunError
from forerun.kernels.cpu.emit import Module
from forerun.kernels.cpu.machine import BODIES, BODY_VARIABLE, Code, chosen_body, source_key, usable_bodies


def twice(module: Module) -> None:
    f = module.function("twice", [("x", "i64")], "i64")
    f.ret(f["x"] + f["x"])


class Made:
    """Counts how often it was compiled."""

    def __init__(self, folder: Path | None, key: str = "a") -> None:
        self.folder, self.key, self.times = folder, key, 0

    def text(self) -> str:
        self.times += 1
        module = Module()
        twice(module)
        return module.text()

    def answer(self, body: int = 0) -> int:
        from ctypes import c_int64

        code = Code((FIRST, *OTHERS)[body], self.key, self.text, self.folder)
        found: int = code.function("twice", [c_int64], c_int64)(21)
        return found


def test_it_is_compiled_once(tmp_path: Path) -> None:
    made = Made(tmp_path / "code")
    assert [made.answer(), made.answer()] == [42, 42] and made.times == 1
    (file,) = (tmp_path / "code").iterdir()
    assert file.name.startswith(FIRST.name) and file.suffix == ".o"


def test_other_sources_and_other_bodies_have_code_of_their_own(tmp_path: Path) -> None:
    made = Made(tmp_path)
    assert made.answer() == 42
    made.key = "b"
    assert made.answer() == 42 and made.times == 2
    assert made.answer(-1) == 42 and made.times == 3 - (FIRST is usable_bodies()[-1])
    text = tmp_path / "text"
    text.write_text("one")
    before = source_key([str(text)])
    text.write_text("two")
    assert source_key([str(text)]) != before


@pytest.mark.parametrize("damage", [b"", b"not an object", None])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: bytes | None) -> None:
    made = Made(tmp_path)
    made.answer()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    assert made.answer() == 42 and made.times == 2
    assert file.read_bytes() == whole and made.answer() == 42 and made.times == 2


def test_a_folder_that_cannot_be_written_is_no_reason_not_to_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    made = Made(tmp_path / "file" / "code")
    assert made.answer() == 42
    assert Made(None).answer() == 42
    folder = tmp_path / "code"
    folder.mkdir()
    folder.chmod(0o500)
    assert Made(folder).answer() == 42
    folder.chmod(0o700)


def test_a_full_disk_is_no_reason_not_to_run(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    program = f"""
import resource, sys
from pathlib import Path
from test_cpu_code import Made
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
sys.exit(Made(Path({str(tmp_path / "code")!r})).answer())
"""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": paths}, capture_output=True)
    assert done.returncode == 42, done.stderr.decode()
    assert list((tmp_path / "code").iterdir()) == [], "what could not be written is not left behind"


def test_the_environment_may_name_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BODY_VARIABLE, raising=False)
    assert chosen_body() is FIRST
    for body in (FIRST, *OTHERS):
        monkeypatch.setenv(BODY_VARIABLE, body.name)
        assert chosen_body() is body
    for other in ("fast", next(body.name for body in BODIES if body not in usable_bodies())):
        monkeypatch.setenv(BODY_VARIABLE, other)
        with pytest.raises(ForerunError, match=f"FORERUN_CPU='{other}' is not a body that runs on this CPU; it has"):
            chosen_body()


def test_every_machine_has_a_body() -> None:
    assert usable_bodies()[-1].name == "portable" and len({body.name for body in BODIES}) == len(BODIES)
