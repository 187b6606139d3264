"""What the documentation says exists does."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_test_that_the_scheduler_page_names_exists() -> None:
    text = (ROOT / "docs" / "scheduling.md").read_text()
    table = text[text.index("## Promises") : text.index("## What it costs")]
    named = set(re.findall(r"`(test_\w+)`", table))
    defined = {
        name for path in ROOT.glob("tests/**/test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 20
    assert named - defined == set()


def test_every_setting_is_documented() -> None:
    import dataclasses

    from noria.config import EngineConfig

    text = (ROOT / "docs" / "scheduling.md").read_text() + (ROOT / "README.md").read_text()
    assert [field.name for field in dataclasses.fields(EngineConfig) if f"`{field.name}`" not in text] == []
