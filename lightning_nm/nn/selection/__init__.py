"""Which weights of a model are masked, and how their modules are exchanged."""
