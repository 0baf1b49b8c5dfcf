"""What a run did as one static HTML file: read without JavaScript or a network, in the light and in the dark.

`write` writes the `page`, for `trainer report` and at the end of a training; `read` reads a run folder; the
other files are the page's parts. It imports no torch: a report is written where nothing can be trained.
"""
