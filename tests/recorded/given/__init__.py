"""Tasks and a hook that random recipes name; they are copied to where these are played."""
