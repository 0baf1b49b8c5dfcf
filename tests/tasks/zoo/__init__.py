"""Small tasks, one for each kind of training that people do: `trainer check` must hold on all of them."""
