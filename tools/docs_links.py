"""mkdocs hook: the front page from README.md, pages from notebooks, and links to files outside docs/.

README.md is the front page, and each notebook of tools/notebooks.py a page, so that nothing is written twice. A page
links to a file outside docs/ by its relative path, e.g. `../benchmarks/results/attention_cpu.md`, which also works
where the Markdown is read in the repository. On the site it is a link to the repository or, for these notebooks, to
their page. A link to a file that does not exist is a warning, and `make docs` fails on warnings.

The links of type names have titles with the file of each name. They are left out: users import from `nt_attention`.
"""

import json
import logging
import os
import re
import runpy
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
NOTEBOOKS = runpy.run_path(str(ROOT / "tools" / "notebooks.py"))
PAGES = {NOTEBOOKS["EXAMPLES"] / name: DOCS / page for name, page in NOTEBOOKS["SHOWN"].items()}
log = logging.getLogger("mkdocs.hooks.docs_links")


def moved(text, folder, target):
    """A text with the relative links of a file in `folder`, for a page in `target`."""

    def replace(match):
        path = os.path.relpath(folder / match[1], target) + ("/" if match[1].endswith("/") else "")
        return f"]({path}{match[2] or ''})"

    return LINK.sub(replace, text)


def on_files(files, config):
    readme = ROOT / "README.md"
    texts = {path: NOTEBOOKS["markdown"](json.loads(path.read_text("utf-8"))) for path in PAGES}
    for path, text in (texts | {readme: readme.read_text("utf-8")}).items():
        page = PAGES.get(path, DOCS / "index.md")
        content = "---\nhide: [toc]\n---\n" + moved(text, path.parent, page.parent)  # wide enough for the code
        files.append(File.generated(config, page.relative_to(DOCS).as_posix(), content=content))
    return files


def on_page_markdown(markdown, page, config, **_):
    folder = (DOCS / page.file.src_uri).parent

    def replace(match):
        path = (folder / match[1]).resolve()
        if path.is_relative_to(DOCS):
            return match[0]  # mkdocs checks these
        if path in PAGES:
            return f"]({os.path.relpath(PAGES[path], folder)}{match[2] or ''})"
        if not path.exists() or not path.is_relative_to(ROOT):
            log.warning("%s links to %s, which does not exist", page.file.src_uri, match[1])
            return match[0]
        kind = "tree" if path.is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{path.relative_to(ROOT).as_posix()}{match[2] or ''})"

    return LINK.sub(replace, markdown)


def on_post_page(output, page, config, **_):
    return re.sub(r' title="[^"]*\bnt_attention\.[^"]*"', "", output)
