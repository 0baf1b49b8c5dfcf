"""Random recipes, stopped and resumed, and the record of 60 of them.

- `draw`: a seed gives a recipe, with how it is cut off and which commands follow
- `files`: the data, models and tasks that recipes name
- `play`: trains a recipe whole and in parts, and compares the two
- `refusals`: bad input, with exit code and names
- `__main__`: `python -m tests.recorded` compares with `recipes.json`, the record
- `nightly`: `make nightly` plays recipes of other seeds
"""
