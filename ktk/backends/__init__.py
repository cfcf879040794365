"""Where the modules of the backends that come with ktk are installed; see `ktk.backends()`."""
