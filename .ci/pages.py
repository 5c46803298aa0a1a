"""The site also has pages that stand outside of docs/: README is its first page. Links between files keep working."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("*.md", "LICENSE", "benchmarks/*.md", "benchmarks/accuracy/*")


def page_of(path: str) -> str:
    """Return where the site has a file of the repository."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def on_files(files: Files, config: Any) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            uri = page_of(str(path.relative_to(ROOT)))
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between pages."""
    uri = page.file.src_uri
    source = "README.md" if uri == "index.md" else uri if (ROOT / uri).exists() else f"docs/{uri}"

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        return match[1] + posixpath.relpath(page_of(path), posixpath.dirname(uri) or ".")

    return re.sub(r"""(\]\(|src=")(?!https?:|#)([^)#"]+)""", link, markdown)
