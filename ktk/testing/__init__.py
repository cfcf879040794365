"""Conformance kit for authors of backends; needs the extra ``ktk[kit]``.

    python -m ktk.testing MY_BACKEND

There is nothing to subclass. The kit finds the backend by name, derives from the formats it
declares what to expect, and tests every variant that can run here. Further arguments go to pytest.

Modules: ``conformance`` holds the properties of a backend, ``conformance_moe`` those of a layer
computed with it, ``formats`` what a format can represent, ``bounds`` how much a float32 computation
may lose, ``reference`` the layer in float64, ``strategies`` the inputs.
"""
