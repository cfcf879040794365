"""The site: sphinx-build -W -c docs -b html . build/site, from the root of the checkout.

Sources are where GitHub's readers find them, so the root of the checkout is Sphinx's source folder,
and links between files are the same in both places.
"""

from importlib.metadata import version as installed
from typing import Any

from sphinx.addnodes import pending_xref

project = "ktk"
author = "The ktk authors"
release = version = installed("ktk")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/**",
    "ktk/README.md",
    "ktk/*/README.md",
    "native/README.md",
    "backends/*.md",
    "backends/*/*.md",
    "tests/README.md",
    "tests/*/README.md",
    "tools/bench/*.md",
]
exclude_patterns = ["build*", "**/.*"]

# Anchors of headings, as GitHub makes them.
myst_heading_anchors = 3
autodoc_typehints = "none"  # docstrings give types
napoleon_google_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"ktk {release}"


def unlink_words(app: Any, page: Any) -> None:
    """Let words of types be words: "path" is no link to an attribute `path`, of whatever class."""
    for link in list(page.findall(pending_xref)):
        if link["reftype"] == "class" and link["reftarget"].islower():
            link.replace_self(link.children)


def setup(app: Any) -> None:
    app.connect("doctree-read", unlink_words)
