"""Pages that are made from the code say what the code says."""

from pathlib import Path

from tutel_pack.convert import catalog

ROOT = Path(__file__).resolve().parents[1]


def test_models_page_is_current():
    assert (ROOT / "docs" / "models.md").read_text(encoding="utf-8") == catalog.page()
