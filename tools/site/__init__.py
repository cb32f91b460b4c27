"""The documentation site: ``python -m tools.site`` builds it, ``make docs`` installs what that needs."""
