"""The dataset card: what the bank is, what from, how to open it. The same for two runs of one plan: no times, no hosts."""

from __future__ import annotations

from collections.abc import Mapping

SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"), (10_000_000, "1M<n<10M"))


def card(title: str, *, rows: int, facts: Mapping[str, object], snippet: str, tags: tuple[str, ...] = ()) -> str:
    """A README.md with front matter, the facts as a list, and the `snippet` that opens the bank."""
    size = next((name for limit, name in SIZES if rows < limit), "10M<n<100M")
    tag_lines = "".join(f"- {tag}\n" for tag in ("arrowbank", *tags))
    fact_lines = "".join(f"- {name}: {_plain(value)}\n" for name, value in facts.items())
    return (
        f"---\ntags:\n{tag_lines}size_categories:\n- {size}\n---\n\n# {title}\n\n{fact_lines}\n"
        f"## Open it\n\n```python\n{snippet}\n```\n\n"
        "`arrowbank verify` proves every file of this folder against `manifest.json`, which says in full what made it.\n"
    )


def _plain(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
