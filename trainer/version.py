"""The package's version, and that of its arithmetic: of its own, so that every room can say them."""

__version__ = "0.1.0"

# The newest number is that of every run that begins now. It rises when the same recipe, data and stack give
# other bits than before; the changelog has the same numbers.
ARITHMETIC_CHANGES = {
    2: "see CHANGELOG.md",
}
ARITHMETIC = max(ARITHMETIC_CHANGES)
