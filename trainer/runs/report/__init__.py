"""Report of a run: one static HTML file without JavaScript or network requests, with light and dark theme.

`write` writes the `page`, for `trainer report` and at the end of a training; `read` reads a run folder; the
other files are its sections. It imports no torch: a report can be written where nothing can be trained.
"""
