"""The contracts: lint, no break against the baseline, and stubs that are what they generate."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASELINE = ROOT / "protos" / "baseline.binpb"
PROTOC = ROOT / ".venv-protos" / "bin" / "python"


def buf(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = shutil.which("buf", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.fail("buf is missing beside this interpreter: run `make setup`")
    return subprocess.run([command, *args], cwd=cwd, capture_output=True, text=True, check=False)


def copy_of_the_contracts(folder: Path) -> Path:
    shutil.copytree(ROOT / "protos", folder / "protos")
    shutil.copy(ROOT / "buf.yaml", folder)
    return folder / "protos" / "offbeat" / "v1"


def test_contracts_pass_lint() -> None:
    result = buf("lint")
    assert result.returncode == 0, result.stdout


def test_contracts_do_not_break_the_baseline() -> None:
    result = buf("breaking", "--against", str(BASELINE))
    assert result.returncode == 0, result.stdout


def test_a_removed_field_is_a_break(tmp_path: Path) -> None:
    samples = copy_of_the_contracts(tmp_path) / "samples.proto"
    text = samples.read_text()
    field = next(line for line in text.splitlines() if " ordinal = " in line)
    samples.write_text(text.replace(field + "\n", "", 1))
    result = buf("breaking", "--against", str(BASELINE), cwd=tmp_path)
    assert result.returncode != 0
    assert "ordinal" in result.stdout


def test_stubs_are_what_the_contracts_generate(tmp_path: Path) -> None:
    if not PROTOC.exists():
        pytest.fail("the stub generator's environment is missing: run `make setup`")
    protos = sorted(str(p) for p in (ROOT / "protos/offbeat/v1").glob("*.proto"))
    outputs = [f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    command = [str(PROTOC), "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *outputs, *protos]
    subprocess.run(command, check=True)
    generated = sorted((tmp_path / "offbeat" / "v1").glob("*.py"))
    assert generated, "protoc wrote nothing"
    for stub in generated:
        assert (ROOT / "offbeat/v1" / stub.name).read_text() == stub.read_text(), stub.name
