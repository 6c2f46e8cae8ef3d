"""A federation over real sites with Flower: `server_app.app` is Flower's ServerApp, `client_app.app` its ClientApp.

A Flower app names them in its pyproject:

    [tool.flwr.app.components]
    serverapp = "fedloom.sites.server_app:app"
    clientapp = "fedloom.sites.client_app:app"

The run configuration of both is a `RunConfig` (module `agreement`); a site's owner configures its SuperNode by a `NodeConfig`.

Where sites bring their own data, the server reads the configuration's data set too, and uses its test part to judge the global
model; all sites must share its shape, number of classes and normalisation. It never sees a sample of theirs. Sites tell it how
many samples they train and test on, their version of fedloom, and a digest of the model's layout.
"""
