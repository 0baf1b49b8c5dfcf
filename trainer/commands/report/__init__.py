"""A run as one static HTML file: read without JavaScript, without a network, in the light and in the dark."""
