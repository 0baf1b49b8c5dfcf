"""Curves as inline SVG, for the report and for what measures: no script, no library, no torch.

- `lines`: a chart, with its curves, marks and labels
- `axis`: where a value lies, and what is written beside it
- `thin`: any number of rows as few points, with the least and the largest of what they stand for
"""
