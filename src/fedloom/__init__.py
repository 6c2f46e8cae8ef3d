"""fedloom: federated learning on clients with different data.

    import fedloom as fl

    task = fl.make_task("digits", clients=20, partition="dirichlet(0.1)", model="digits_cnn")
    result = fl.run(fl.FedMR(), task, rounds=50, participation=0.5, seed=0)
    result.accuracy, result.model

`__init__.pyi` lists the names. Each is imported at its first use, so that `import fedloom` loads no
PyTorch.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
