"""What only pages need; not part of the library."""
