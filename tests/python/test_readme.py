# SPDX-License-Identifier: Apache-2.0
"""README shows the current examples and names both set-up commands, and all its links exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_examples_stand_in_the_readme_verbatim():
    for language, name in (("python", "quickstart.py"), ("c", "quickstart.c")):
        shown = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL).group(1)
        assert shown in (ROOT / "examples" / name).read_text()
        assert "ropeteam" in shown


def test_both_set_up_commands_are_named():
    assert "scripts/demo" in README and "scripts/test" in README


def test_every_link_in_the_documents_leads_somewhere():
    documents = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
    links = [
        (document, link)
        for document in documents
        for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    ]
    assert len(links) > 10
    missing = [(str(document.name), link) for document, link in links if not (document.parent / link).exists()]
    assert missing == []
