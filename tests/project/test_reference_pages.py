"""The reference pages of the built site show functions and classes first, under their public names, and once."""

import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

import nt_attention as nta

pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parents[2]
# Users import these modules and what their __all__ has. All other names are those of `nt_attention.__all__`.
MODULES = {f"nt_attention.{name}" for name in ("compat.flash_attn", "data", "distributed", "hf", "hf.trainer")}
MODULES |= {f"nt_attention.integrations.{name}" for name in ("axolotl", "lightning", "trainer")}
# What code on the pages imports from places that are not public, because it has no other.
IMPORTED = {f"nt_attention.{name}" for name in ("kernels.backend", "kernels.backends", "modules.rotary")}
IMPORTED |= {"nt_attention.torch_registry.register", "nt_attention.integrations"}
NOT_OF_A_NAME = {"reference", "command_line", "hugging_face", "trainers"}  # commands, and tables of models and trainers
NAME = re.compile(r"\bnt_attention(?:\.\w+)+")


class Page(HTMLParser):
    """The article of a page: its headings as (id, text), its text, and the targets of its links and anchors."""

    def __init__(self, file):
        super().__init__()
        self.headings, self.text, self.anchors = [], "", []
        self.is_article, self.heading = False, None
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.is_article |= tag == "article"
        if self.is_article:
            self.anchors += [attributes.get("id") or "", attributes.get("href") or ""]
        if self.is_article and re.fullmatch("h[1-6]", tag):
            self.heading = [attributes.get("id"), ""]

    def handle_endtag(self, tag):
        self.is_article &= tag != "article"
        self.text += "" if tag in ("a", "code", "span") else "\n"
        if self.heading is not None and re.fullmatch("h[1-6]", tag):
            key, text = self.heading
            self.headings.append((key, text.split()[0] if key.startswith("nt_attention.") else text))
            self.heading = None

    def handle_data(self, data):
        if self.is_article:
            self.text += data
        if self.heading is not None:
            self.heading[1] += data.replace("¶", "")


def build(folder):
    """The site that `make site` has made, if nothing has changed since. Else a new one."""
    made = ROOT / "site" / "index.html"
    sources = [ROOT / "mkdocs.yml", *ROOT.glob("tools/docs_*.py"), *ROOT.glob("docs/**/*.md")]
    sources += ROOT.glob("nt_attention/**/*.py")
    if made.exists() and made.stat().st_mtime > max(source.stat().st_mtime for source in sources):
        return made.parent
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


def is_public(name):
    if name in MODULES:
        return True
    first = name.split(".")[1]
    if first in nta.__all__ and f"nt_attention.{first}" not in MODULES:
        return True
    owner = max((module for module in MODULES if name.startswith(f"{module}.")), key=len, default=None)
    return owner is not None and name.removeprefix(f"{owner}.").split(".")[0] in exported(owner)


def exported(module):
    path = ROOT / module.replace(".", "/")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8")
    return re.findall(r'"(\w+)"', re.search(r"__all__ = (\[.*?\])", text, re.DOTALL)[1])


def problems_of(name, page):
    documented = [(key, text) for key, text in page.headings if key.startswith("nt_attention.")]
    if name not in NOT_OF_A_NAME:
        key, text = page.headings[1] if page.headings[1:] else ("", "")
        if key != text or not NAME.match(key) or not is_public(key):
            yield f"the first heading is {text!r}, and no public name"
    names = set(NAME.findall(page.text)) | {found for anchor in page.anchors for found in NAME.findall(anchor)}
    yield from (f"{each} is not public" for each in sorted(names - IMPORTED) if not is_public(each))
    yield from (f"{key} is not public" for key, _ in documented if not is_public(key))
    roots = [key.rpartition(".")[2] for key, text in documented if key == text]
    headings = Counter([text for key, text in page.headings[1:] if not key.startswith("nt_attention.")] + [*set(roots)])
    yield from (f"{text} is there {count} times" for text, count in headings.items() if count > 1)


@pytest.mark.sweep
def test_reference_pages(tmp_path):
    files = sorted((build(tmp_path) / "reference").glob("**/index.html"))
    pages = {file.parent.name: Page(file) for file in files}
    assert len(pages) >= 10
    problems = {name: list(problems_of(name, page)) for name, page in pages.items()}
    assert not {name: found for name, found in problems.items() if found}
    documented = Counter(key for page in pages.values() for key, _ in page.headings if key.startswith("nt_attention."))
    assert len(documented) > 60
    assert not [key for key, count in documented.items() if count > 1]
    shown = " ".join(pages["varlen_attention"].text.split()).replace('"', "'")
    parameters = inspect.signature(nta.varlen_attention).parameters.values()
    options = [x for x in parameters if x.kind is inspect.Parameter.KEYWORD_ONLY]
    assert not [x.name for x in options if not re.search(rf"{x.name}: [^=]+ = {re.escape(repr(x.default))},", shown)]


@pytest.mark.parametrize(
    ("article", "problem"),
    [
        ("<h2 id=y>Y</h2>", "the first heading is 'Y', and no public name"),
        ("<h2 id=nt_attention.patching.handle.Counts>Counts</h2>", "nt_attention.patching.handle.Counts is not public"),
        ("<p>nt_attention._patch.patch</p>", "nt_attention._patch.patch is not public"),
        ("<a href='#nt_attention.hf.route.masks'></a>", "nt_attention.hf.route.masks is not public"),
        ("<h2 id=patch>patch</h2><h2 id=nt_attention.patch>nt_attention.patch</h2>", "patch is there 2 times"),
    ],
)
def test_problems_are_found(article, problem, tmp_path):
    file = tmp_path / "index.html"
    file.write_text(f"<p id=nt_attention.kernels></p><article><h1 id=first>First</h1>{article}</article>")
    assert [found for found in problems_of("page", Page(file)) if found.startswith(problem)]
