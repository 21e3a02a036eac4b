"""What `tools/structure.py` counts, in a small package and in this one."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
STRUCTURE = runpy.run_path(str(ROOT / "tools" / "structure.py"))


@pytest.fixture
def tree(tmp_path):
    files = {
        "__init__.py": "",
        "a.py": "from .b import g",
        "b/__init__.py": "from . import c",
        "b/c.py": "import typing\nif typing.TYPE_CHECKING:\n    from ..a import f",
        "d.py": "def f():\n    import nt_attention.e as e\n    return e",
        "e.py": "from . import a\n",
        "cli/__init__.py": "softcap = 0.0\n",
        "long.py": "def short():\n    '''\n" + "\n" * 60 + "'''\n\ndef long():\n" + "    softcap = 0\n" * 60,
    }
    for name, text in files.items():
        path = tmp_path / "nt_attention" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_structure_of_a_small_package(tree):
    found = STRUCTURE["measure"](tree)
    assert found["files that name softcap"] == ["nt_attention/long.py"]
    assert found["functions over 60 lines"] == ["nt_attention/long.py:65 long, 61 lines"]
    assert found["import cycles"] == ["nt_attention.a, nt_attention.b, nt_attention.b.c"]
    assert found["lines"] == 2 + 2 + 1 + 125  # of c, d, e and long, as wc -l counts
    assert found["lines of the command line"] == 1


def test_structure_of_this_package():
    found = STRUCTURE["measure"](ROOT)
    assert len(found["hand-ordered option lists"]) <= 1
    assert len(found["files that name softcap"]) <= 15
    assert found["functions over 60 lines"] == []
    assert found["import cycles"] == []
    assert found["lines of the command line"] <= 1015  # without __main__.py; of these, run has 129


def test_files_that_the_package_names_exist():
    """In error messages and docstrings, such as (docs/coming_from/attention.md)."""
    sources = [path.read_text() for path in (ROOT / "nt_attention").rglob("*.py")]
    names = {name for source in sources for name in re.findall(r"[\w/]+\.md\b", source)}
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []
