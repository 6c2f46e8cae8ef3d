"""A federation over real sites with Flower: `server_app.app` is Flower's ServerApp, `client_app.app` its ClientApp.

A Flower app names them in its pyproject:

    [tool.flwr.app.components]
    serverapp = "fedloom.engines.flower.deploy.server_app:app"
    clientapp = "fedloom.engines.flower.deploy.client_app:app"

What both are told is a `RunConfig` (module `agreement`), what a site's owner tells its SuperNode a `NodeConfig`.

Where sites bring their own data, the server reads the configuration's data set too, and uses its test part to judge the global
model and its shape, number of classes and normalisation as what all sites must share; it never sees a sample of theirs. What
sites tell of themselves: how many samples they train and test on, the version of fedloom, and a digest of the model's layout.
"""
