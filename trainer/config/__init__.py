"""The configuration of a run: the schema of a recipe, how one is read, and what is said of a wrong one.

`recipe` puts the sections (`data`, `model`, `tasks`, `training`) together and says what excludes what;
`recipe_file` reads one by name or path and applies settings; `section` is what all share: typed keys, errors
that name the key and the remedy, the hash. This room imports `errors` only, and neither torch nor
numpy, so that all that is wrong with a recipe in itself is said in tenths of a second. What needs torch or
the data to be known (has torchvision this model, is this file there) is checked later, where it is used.
Importing the room itself imports nothing: scripts use `suggest` with a Python that has no pydantic.
"""
