"""Writes text.txt from Python's own language reference, which every Python carries (465,000 characters)."""

from pathlib import Path
from pydoc_data.topics import topics

Path("text.txt").write_text("\n\n".join(topics.values()), "utf-8")
print(f"text.txt: {Path('text.txt').stat().st_size:,} bytes")
