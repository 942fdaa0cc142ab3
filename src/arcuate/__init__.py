"""Arcuate: intracortical recordings of attempted speech to text.

The commands as functions with typed arguments and typed results; none of them prints. The public names are in
`__init__.pyi`; each is imported on first use, so that `import arcuate` loads neither torch nor numpy.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
