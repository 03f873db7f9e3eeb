"""The laboratory above the book: files, caches, queues and commands that make its runs."""
