"""A federation over real sites with Flower: `server_app.app` is Flower's ServerApp,
`client_app.app` its ClientApp.

A Flower app names them in its pyproject:

    [tool.flwr.app.components]
    serverapp = "fedloom.sites.server_app:app"
    clientapp = "fedloom.sites.client_app:app"

The run configuration of both is a `RunConfig` (module `agreement`); a site's owner configures its
SuperNode by a `NodeConfig`.
"""
