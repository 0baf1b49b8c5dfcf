"""Configuration of a run: the schema of a recipe, its parsing, and its errors.

`recipe` puts the sections (`data`, `model`, `tasks`, `training`) together and checks them against each other;
`recipe_file` reads one by name or path and applies settings; `section` is their common base: typed keys,
errors that name the key and the remedy, the hash. This room imports `errors` only, and neither torch nor
numpy, so that errors of a recipe in itself are reported in tenths of a second. Checks that need torch or the
data (does torchvision have this model, does this file exist) come later, where the values are used.
Importing the room itself imports nothing: scripts use `suggest` with a Python that has no pydantic.
"""
