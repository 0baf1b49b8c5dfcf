"""Tasks of `trainer check --self-test`: BatchNorm, dropout, clipping; with and without items."""
