"""Scripts that the lab's kit carries, as the real kit does: they make what its git copy lacks."""
