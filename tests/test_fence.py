"""The chain ships to the Hub as flat files: what each may import, in which order, and that all of it ships."""

import ast
import re
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_relative_imports

PACKAGE = Path(__file__).parent.parent / "hf_mot"
# Data flows down this list, imports point up it.
ORDER = (
    "compat_mot",
    "configuration_mot",
    "positions_mot",
    "rows_mot",
    "channels_mot",
    "layers_mot",
    "geometry_mot",
    "contract_mot",
    "attention_mot",
    "guidance_mot",
    "capture_mot",
    "alignment_mot",
    "inputs_mot",
    "translators_mot",
    "cache_mot",
    "sparse_mot",
    "uncertain_mot",
    "restore_mot",
    "resume_mot",
    "replay_mot",
    "generation_mot",
    "pretrained_mot",
    "modeling_mot",
)
THIRD_PARTY = {"torch", "transformers", "huggingface_hub", "safetensors"}
CHAIN = sorted(PACKAGE.glob("*_mot.py"))

chain_file = pytest.mark.parametrize("path", CHAIN, ids=lambda path: path.stem)


def place(name: str) -> int:
    """A file that a part was split into (`translators_<x>_mot`) stands where the part stands."""
    stems = [index for index, part in enumerate(ORDER) if name.startswith(part.removesuffix("_mot"))]
    assert stems, f"{name}.py is not in the list of the chain's files"
    return stems[0]


def siblings(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module}


def test_the_chain_is_found():
    assert {"configuration_mot", "modeling_mot"} <= {path.stem for path in CHAIN}


@chain_file
def test_chain_file_imports_only_what_ships_or_is_installed_with_transformers(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 and node.module and re.fullmatch(r"\w+_mot", node.module), (
                f"line {node.lineno}: a sibling is imported by `from .x_mot import Name`"
            )
            assert (PACKAGE / f"{node.module}.py").is_file(), f"line {node.lineno}: no {node.module}.py"
            continue
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            top = name.partition(".")[0]
            assert top in THIRD_PARTY or top in sys.stdlib_module_names, f"line {node.lineno}: imports {name}"


@chain_file
def test_chain_file_imports_only_what_stands_above_it(path):
    for sibling in siblings(path):
        assert place(sibling) <= place(path.stem), f"{path.stem} imports {sibling}, which stands below it"


@chain_file
def test_text_has_no_line_that_transformers_takes_for_another_import(path):
    """A docstring line of that form would be followed at save time, and fail or copy too much."""
    assert set(get_relative_imports(path)) == siblings(path)


def test_every_chain_file_is_reached_from_the_model():
    reached, todo = set(), ["modeling_mot"]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += siblings(PACKAGE / f"{name}.py")
    assert reached == {path.stem for path in CHAIN}
