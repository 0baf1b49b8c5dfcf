"""Jobs for engines and clusters: one specification (`spec`), a file for each place that it can run on."""
