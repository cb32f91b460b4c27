"""The pictures of the documentation, drawn from committed results and small examples."""
