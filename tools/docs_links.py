"""mkdocs hook: links from a page to a file outside docs/ become links to the repository.

A page links to such a file by its relative path, e.g. `../benchmarks/results/attention_cpu.md`. This also works where
the Markdown is read in the repository. A link to a file that does not exist is a warning, and `make docs` fails on
warnings.

The links of type names have titles with the file of each name. They are left out: users import from `nt_attention`.
"""

import logging
import re
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.hooks.docs_links")


def on_page_markdown(markdown, page, config, **_):
    def replace(match):
        path = (ROOT / "docs" / PurePosixPath(page.file.src_uri).parent / match[1]).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return match[0]  # mkdocs checks these
        if not path.exists() or not path.is_relative_to(ROOT):
            log.warning("%s links to %s, which does not exist", page.file.src_uri, match[1])
            return match[0]
        kind = "tree" if path.is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{path.relative_to(ROOT).as_posix()}{match[2] or ''})"

    return LINK.sub(replace, markdown)


def on_post_page(output, page, config, **_):
    return re.sub(r' title="[^"]*\bnt_attention\.[^"]*"', "", output)
