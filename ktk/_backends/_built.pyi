ARCHITECTURE: str
MODULES: tuple[str, ...]
ELSEWHERE: dict[str, str]
