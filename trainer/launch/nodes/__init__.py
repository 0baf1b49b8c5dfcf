"""Several nodes: which they are, how their launchers meet at node 0, and the rounds that follow."""
