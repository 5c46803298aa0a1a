"""What the site has beside docs/*.md: README as its first page, other pages of the repository, and the notebooks."""

from __future__ import annotations

import base64
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("*.md", "LICENSE", "benchmarks/*.md", "benchmarks/accuracy/*")
COLOURS = re.compile(r"\x1b\[[\d;]*m")  # and other styles of a console


def page_of(path: str) -> str:
    """Return where the site has a file of the repository."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/").replace(".ipynb", ".md")


def on_files(files: Files, config: Any) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            uri = page_of(str(path.relative_to(ROOT)))
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    for path in sorted(ROOT.glob("docs/gallery/*.ipynb")):
        text, pictures = notebook_page(path)
        files.append(File.generated(config, f"gallery/{path.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"gallery/{name}", content=content))
    return files


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by their names."""
    parts, pictures = list[str](), dict[str, bytes]()
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = {kind: "".join(lines) for kind, lines in output.get("data", {}).items()}
            if "image/png" in data:
                name = f"{path.stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![Output]({name})")
            elif "text/markdown" in data:
                parts.append(data["text/markdown"])
            elif table := re.search(r"<table.*</table>", data.get("text/html", ""), flags=re.DOTALL):
                # A DataFrame; the site has a style for tables
                parts.append(re.sub(r"\n\s*", "\n", re.sub(r"<table[^>]*>", "<table>", table[0])))
            else:
                text = COLOURS.sub("", "".join(output.get("text", data.get("text/plain", ""))))
                parts.append(f"```text\n{text.strip()}\n```")
    parts.append(f"The notebook: [{path.name}](FILE/{path.name})")
    return "---\nhide: [toc]\n---\n" + "\n\n".join(parts), pictures  # the width is for code and tables


def on_page_content(html: str, **_: Any) -> str:
    """Give cells that are verdicts on claims a class, which has a colour, as ``mtl/report/page.html`` does."""
    return re.sub(r"<td>(?=(?:<strong>)?(holds|contradicted)<)", r'<td class="\1">', html)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between pages."""
    uri = page.file.src_uri
    source = "README.md" if uri == "index.md" else uri if (ROOT / uri).exists() else f"docs/{uri}"

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        return match[1] + posixpath.relpath(page_of(path), posixpath.dirname(uri) or ".")

    return re.sub(r"""(\]\(|src=")(?!https?:|#|FILE)([^)#"]+)""", link, markdown).replace("FILE/", "")
