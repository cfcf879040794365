"""Where the modules of the backends that come with ktk are installed; see `ktk.backends()`."""

from pkgutil import extend_path

# See ktk/__init__.py.
__path__ = extend_path(__path__, __name__)
