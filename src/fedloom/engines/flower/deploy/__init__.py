"""A federation over real sites with Flower: `server_app.app` is Flower's ServerApp, `client_app.app` its ClientApp.

A Flower app names them in its pyproject:

    [tool.flwr.app.components]
    serverapp = "fedloom.engines.flower.deploy.server_app:app"
    clientapp = "fedloom.engines.flower.deploy.client_app:app"

Its run configuration, `[tool.flwr.app.config]`, goes to the server and to every site. It holds

    configuration   text of a TOML file as `fedloom run` takes it (or the path of one, which must then exist, under the same
                    path, on the server and at every site); `data.clients` is the number of sites, numbered from 0
    output          folder on the server that becomes the run directory: checkpoints, metrics, report, model. Starting a run
                    again with the same folder goes on where that run was stopped
    deadline        seconds that sites have for one round; 0, the default: as long as they need
    sites           how many sites must be there before round 1; 0, the default: all
    wait            seconds to wait for them, 600 by default

`algorithm` must stand in the configuration; `engine` and `directory` mean nothing here.

A site is told about itself by its SuperNode,
`--node-config "partition-id=0 num-partitions=3 data='/srv/data' memory='/srv/memory'"`:

    partition-id    which client it is; two sites may not have the same number
    num-partitions  how many there are; must be `data.clients` where it is given
    data            its own data: `module:function`, called without arguments, or a folder of npy files or an npz file, as the
                    data sets `python` and `arrays` read them: (inputs, labels), or training and test part. Without it, for
                    trials, the site takes its client's share of the configuration's data, as in a simulation
    identity, peers where sites exchange layers (`secure`): the site's private key, that of its SuperNode, and the list of all
                    sites' public keys, which must not come to it through the server
    choices         `secret`, or for trials `rehearsed`: what it chooses in an exchange is what a simulation with the run's seed
                    chooses, and hides nothing
    memory          folder for what the client remembers from round to round; by default `fedloom` under FLWR_HOME, or under
                    ~/.flwr where that is not set

Where sites bring their own data, the server reads the configuration's data set too, and uses its test part to judge the global
model and its shape, number of classes and normalisation as what all sites must share; it never sees a sample of theirs. What
sites tell of themselves: how many samples they train and test on, the version of fedloom, and a digest of the model's layout.
"""
