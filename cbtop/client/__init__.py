"""A viewer's end: receives what daemons publish, keeps it, and hands out views of it, live or replayed."""
