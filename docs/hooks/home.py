"""The home page of the site is README.md, with links from this folder."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# What the navigation of the site shows anyway, and links that lead out of the folder.
ELSEWHERE = re.compile(r"<!-- not on the site -->.*?<!-- -->\n", re.DOTALL)
IMAGE = re.compile(r"^!\[(.*)\]\((img/.*)\.svg\)$", re.MULTILINE)
FOR_PHONES = (
    r'<picture><source media="(max-width: 600px)" srcset="\2-narrow.svg">'
    r'<img src="\2.svg" alt="\1"></picture>'
)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the README in the place of index.md."""
    if page.file.src_uri != "index.md":
        return markdown
    text = ELSEWHERE.sub("", (ROOT / "README.md").read_text())
    return IMAGE.sub(FOR_PHONES, text.replace("](docs/", "]("))
