"""What lies under the book: plain Python that loads nothing but Python's own library."""
