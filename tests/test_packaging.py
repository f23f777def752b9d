"""What pip installs: pinned, declared, complete."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hf_mot

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = {
    canonicalize_name(requirement.name): requirement
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for requirement in [Requirement(line)]
}


# Files that are an extra as a whole, since their classes derive from its own: nothing imports them but its users.
EXTRA_FILES = {"hf_mot/evaluation/lm_eval_harness.py": "lm_eval"}


def declared(*extras: str) -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return [Requirement(line) for line in lines]


def test_version_is_the_same_everywhere():
    assert PROJECT["version"] == hf_mot.__version__
    assert f"## {hf_mot.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("requirement", declared(*PROJECT["optional-dependencies"]), ids=str)
def test_dependency_is_pinned_to_a_version_that_it_allows(requirement):
    (pin,) = PINS[canonicalize_name(requirement.name)].specifier
    assert pin.operator == "=="
    assert requirement.specifier.contains(pin.version)


def test_constraints_pin_all_that_is_installed_with_the_package():
    """Else a later release of an indirect dependency could break the README's commands."""
    installed = {name: version(name) for name in ("torch", "transformers")}
    if any(not PINS[name].specifier.contains(found) for name, found in installed.items()):
        pytest.skip(f"another set is installed: {installed}")
    seen, todo = set(), [requirement.name for requirement in declared("dev")]
    while todo:
        name = canonicalize_name(todo.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            needed = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:  # for another platform
            continue
        assert name in PINS, f"{name} is installed with the package, but constraints.txt does not pin it"
        todo += [need.name for need in needed if need.marker is None or need.marker.evaluate({"extra": ""})]
    assert len(seen) > 20


def test_what_the_package_imports_is_declared():
    # transformers cannot do without tokenizers, and itself says which version.
    base = {requirement.name for requirement in declared()} | {"tokenizers"}
    extras = declared(*PROJECT["optional-dependencies"])
    extra = base | {requirement.name.replace("-", "_") for requirement in extras}
    for path in sorted((ROOT / "hf_mot").rglob("*.py")):
        own = {EXTRA_FILES.get(path.relative_to(ROOT).as_posix())}
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            for top in {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"hf_mot"}:
                # An extra may be missing, so only a function that needs it may import it.
                assert top in (base | own if node in tree.body else extra), (
                    f"{path.relative_to(ROOT)}:{node.lineno} imports {top}, which is not declared"
                )


def test_a_file_that_is_an_extra_is_imported_by_none():
    names = {path.removesuffix(".py").replace("/", ".") for path in EXTRA_FILES}
    for path in sorted((ROOT / "hf_mot").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert not [name for name in names if f"{name} import" in text or f"import {name}" in text], path


def test_wheel_holds_the_whole_package_and_nothing_else(tmp_path):
    build_meta = "from setuptools import build_meta; build_meta.build_wheel('.')"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "hf_mot", tmp_path / "hf_mot", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", build_meta], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("hf_mot-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "hf-mot = hf_mot.cli.main:main" in archive.read(entry_points).decode()
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    files = [path for path in (ROOT / "hf_mot").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert packed == {path.relative_to(ROOT).as_posix() for path in files}
    assert "hf_mot/py.typed" in packed


def test_readme_and_ci_run_the_same_commands():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "pip install -c constraints.txt -e . && hf-mot demo" in readme
    (command,) = re.findall(r"^(pip install .*) && (pytest)$", readme, flags=re.MULTILINE)
    for part in command:
        assert re.search(rf"^{re.escape(part)}$", ci, flags=re.MULTILINE), f".ci/run does not run {part!r}"


@pytest.mark.skipif(os.name != "posix", reason="permission bits")
def test_ci_script_can_be_executed():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
