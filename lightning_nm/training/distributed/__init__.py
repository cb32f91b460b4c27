"""Several processes that train one model: consistent masks, and less to communicate."""
