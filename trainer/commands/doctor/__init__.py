"""What is wrong with the box, said before it hurts. It never imports torch, which may be what is broken."""
