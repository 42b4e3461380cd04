"""What type checkers refuse: each line with a comment is an error that has those words, and no other line is one."""

import tfdistkit
from tfdistkit import callbacks
from tfdistkit import lauch  # error: has no attribute "lauch"; maybe "launch"?
from tfdistkit.callbacks import ChiefChekpoint  # error: has no attribute "ChiefChekpoint"


def train(rate: float, name: str = "adam") -> float:
    return rate if name else 0.0


tfdistkit.stratgy("multiworker")  # error: no attribute "stratgy"; maybe "strategy"?
tfdistkit.rnak()  # error: no attribute "rnak"
tfdistkit.data.shart([])  # error: no attribute "shart"
tfdistkit.collectives.all_redcue(1.0)  # error: no attribute "all_redcue"
tfdistkit.cluster.free_port(2)  # error: no attribute "free_port"
tfdistkit.errors.OptionsError("")  # error: no attribute "OptionsError"
tfdistkit.layers.ShardedEmbeding(10, 2)  # error: no attribute "ShardedEmbeding"
callbacks.ChiefCheckpoint("a.keras", keeps=2)  # error: Unexpected keyword argument "keeps"
print(lauch, ChiefChekpoint)

tfdistkit.strategy("multiwroker")  # error: No overload variant of "strategy" matches argument type "str"
tfdistkit.strategy(3)  # error: No overload variant
tfdistkit.strategy("auto", time_out=3)  # error: No overload variant
tfdistkit.strategy("one_device", communication="ring")  # error: No overload variant
tfdistkit.strategy("mirrored", device=2)  # error: No overload variant
tfdistkit.strategy("central_storage", parameter_devices="CPU:0")  # error: No overload variant
tfdistkit.strategy("multiworker", comunication="ring")  # error: No overload variant
tfdistkit.strategy("multiworker", communication="rign")  # error: No overload variant
tfdistkit.strategy("multiworker", timeout_s="30")  # error: No overload variant
tfdistkit.strategy("multiworker", op="sum")  # error: No overload variant
tfdistkit.strategy("horovod", op="mean")  # error: No overload variant
tfdistkit.strategy("horovod", compression=16)  # error: No overload variant
tfdistkit.strategy("parameter_server", check_data=False)  # error: No overload variant
tfdistkit.strategy("parameter_server", synchronous=True)  # error: No overload variant

tfdistkit.launch(train)  # error: incompatible type "Callable[[float, str], float]"; expected "Callable[[], float]"
tfdistkit.launch(train, ("a",))  # error: Argument 2 to "launch" has incompatible type "tuple[str]"
tfdistkit.launch(train, 2)  # error: No overload variant of "launch"
tfdistkit.launch(train, (0.1,), timeout=3)  # error: did you mean "timeout_s"?
tfdistkit.launch(train, (0.1,), backend="slurm")  # error: No overload variant of "launch"
tfdistkit.launch(train(0.1), (0.1,))  # error: No overload variant of "launch"
losses = tfdistkit.launch(train, (0.1,), np=2)
losses.mean()  # error: "list[float]" has no attribute "mean"
of_coordinator = tfdistkit.launch(train, (0.1,), np=2, ps=1)
of_coordinator[0]  # error: "float" is not indexable
