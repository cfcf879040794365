"""The CPU in kt-kernel's words."""

from ktk import _core


def variant() -> str:
    """Return what kt-kernel would call the code for this CPU: "amx", "avx512", "avx2" or "arm".

    Its programs show the word, and compute nothing from it; `ktk version` says what backends run.
    """
    sets = _core.allowed_isa()
    if any(name.startswith("amx") for name in sets):
        return "amx"
    return next((name for name in ("avx512", "avx2") if name in sets), "arm")
