"""Curves as inline SVG, for the report and for benchmarks: no script, no library, no torch.

- `lines`: a chart, with its curves, marks and labels
- `axis`: positions of values, and labels of an axis
- `thin`: reduces any number of records to few points, with minimum and maximum
"""
