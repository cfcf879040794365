"""Conformance kit for authors of backends; needs the extra ``ktk[kit]``.

    python -m ktk.testing MY_BACKEND

There is nothing to subclass. The kit finds the backend by name, derives from the formats it
declares what to expect, and tests every variant that can run here. Further arguments go to pytest.

Modules: ``conformance_codecs`` and ``conformance_kernels`` hold the properties of a backend,
``conformance_moe``, ``conformance_linear`` and ``conformance_train`` those of layers computed with
it, ``dense`` what a dense layer is and should give, ``formats`` what a format can represent,
``bounds`` how much a float32 computation may lose, ``reference`` the layer in float64,
``gradients`` its backward pass, ``strategies`` the inputs.
"""

#: The modules with properties, of a backend alone and of whole layers.
BACKEND = ("ktk.testing.conformance_codecs", "ktk.testing.conformance_kernels")
LAYER = (
    "ktk.testing.conformance_moe",
    "ktk.testing.conformance_linear",
    "ktk.testing.conformance_train",
)
