"""A task traced at other lengths than those it is planned for."""
