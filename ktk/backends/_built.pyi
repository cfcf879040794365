MODULES: tuple[str, ...]
