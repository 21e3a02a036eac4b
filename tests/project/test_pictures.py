"""The pictures in docs/pictures show what the plan of token_tiled says now."""

import json
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"

pytest.importorskip("matplotlib")
DRAW = runpy.run_path(str(ROOT / "tools" / "draw_pictures.py"))


@pytest.mark.parametrize("name", DRAW["DRAWINGS"])
def test_picture_is_up_to_date(name):
    picture = ET.parse(ROOT / "docs" / "pictures" / f"{name}.svg")
    shown = json.loads(picture.find(f".//{DESCRIPTION}").text)
    data, _ = DRAW["DRAWINGS"][name]
    assert shown == json.loads(json.dumps(data())), "run `python tools/draw_pictures.py`"


def test_every_picture_has_a_drawing():
    assert {path.stem for path in (ROOT / "docs" / "pictures").iterdir()} == set(DRAW["DRAWINGS"])
