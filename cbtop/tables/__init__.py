"""Tables of typed columns, and their exchange with other libraries."""
