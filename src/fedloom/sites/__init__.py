"""A federation over real sites with Flower.

`server_app.app` is Flower's ServerApp, `client_app.app` its ClientApp. A Flower app names them in
its pyproject:

    [tool.flwr.app.components]
    serverapp = "fedloom.sites.server_app:app"
    clientapp = "fedloom.sites.client_app:app"

Both share the run configuration, a `RunConfig` (module `agreement`). A site's owner configures its
SuperNode by a `NodeConfig`.
"""
