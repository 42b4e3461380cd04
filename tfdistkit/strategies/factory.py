"""Makes strategies by name: a table of modules, each imported on first use."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NewType

from tfdistkit.cluster import requested
from tfdistkit.cluster.detection import detect_cluster
from tfdistkit.cluster.environments.mpi_addresses import can_exchange
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.entry_points import entry_points, load_any
from tfdistkit.errors import OptionError, UnsupportedError, explain, nearest
from tfdistkit.report.hangs import notes
from tfdistkit.report.hangs.layout import Phase
from tfdistkit.strategies.prerequisites import require_keras_on_tensorflow

if TYPE_CHECKING:
    import tensorflow as tf

# A new strategy is one module with `build(cluster, **options)` and one row here.
_MODULES = {
    "one_device": "tfdistkit.strategies.one_device",
    "mirrored": "tfdistkit.strategies.mirrored",
    "central_storage": "tfdistkit.strategies.central_storage",
    "multiworker": "tfdistkit.strategies.multiworker",
    "horovod": "tfdistkit.strategies.horovod.strategy",
    "parameter_server": "tfdistkit.strategies.parameter_server.strategy",
}

_CHOSEN_BY_AUTO = ("one_device", "mirrored", "multiworker", "horovod", "parameter_server")

# Spellings of TensorFlow's Model Garden and of Lightning.
_ALIASES = {
    "off": "one_device",
    "dp": "mirrored",
    "central": "central_storage",
    "ddp": "multiworker",
    "multi_worker": "multiworker",
    "ps": "parameter_server",
    "multi_worker_mirrored": "multiworker",
}

# The options of what processes send each other.
_SENT_BETWEEN_PROCESSES = (
    'Use "multiworker" or "horovod", whose workers are processes that send gradients to each other, or leave it out.'
)

# The entry point group in which other packages register strategies.
ENTRY_POINT_GROUP = "tfdistkit.strategies"

Build = Callable[..., "tf.distribute.Strategy"]
# A name that type checkers cannot know: a registered strategy, or a value from a configuration.
StrategyName = NewType("StrategyName", str)
_registered: dict[str, Build] = {}
_made = ""


def make(name: str, options: dict[str, Any]) -> tf.distribute.Strategy:
    """Makes a strategy; see `tfdistkit.strategy`."""
    requested.note("strategy")
    notes.own.enter(Phase.SETUP)
    cluster = detect_cluster()
    known = _known_name(name)
    _check_servers(known, cluster)
    is_tested = require_keras_on_tensorflow()
    if known == "auto":
        known = _choose(cluster)
        options = _options_of_auto(known, options)
    build = _registered.get(known) or _load(known)
    _check_options(known, build, options)
    _require_no_other_strategy(known, cluster)
    made = build(cluster, **options)
    _require_strategy(known, made)
    if not is_tested:  # After the strategy, which has to be the first to use TensorFlow's devices.
        importlib.import_module("tfdistkit.keras_adapter.canaries").check_behaviour()
    _offer_collectives(made)
    _remember(known)
    return made


def register_strategy(name: str, build: Build) -> StrategyName:
    """Registers a strategy of your own under a name for `tfdistkit.strategy`.

    A package can do the same without being imported: an entry point of the group `tfdistkit.strategies`.

    Args:
        name: The name. A strategy that is already registered under it is replaced.
        build: Called as `build(cluster, **options)` with a `tfdistkit.cluster.ClusterSpec`; returns a
            `tf.distribute.Strategy`. Its keyword parameters are the allowed options.

    Returns:
        The name, typed so that type checkers accept it in `tfdistkit.strategy` with any options.

    Raises:
        OptionError: (a ValueError) if the name is no string or one of tfdistkit's own, or `build` is not callable.
    """
    wanted = _normalized(name)
    if wanted in _MODULES or wanted in _ALIASES or wanted == "auto":
        raise OptionError(
            explain(
                "`name` must not be the name of a strategy of tfdistkit.",
                received=f"name={name!r}",
                do="Choose another name.",
            )
        )
    if not callable(build):
        raise OptionError(
            explain("`build` must be callable as build(cluster, **options).", received=f"build={build!r}")
        )
    _registered[wanted] = build
    return StrategyName(name)


def _normalized(name: str) -> str:
    """Returns the form in which names are compared: "Multi-Worker" is "multi_worker"."""
    if not isinstance(name, str):
        raise OptionError(explain("`name` must be a string: the name of a strategy.", received=f"name={name!r}"))
    return name.strip().lower().replace("-", "_")


def _known_name(name: str) -> str:
    """Resolves aliases and entry points; raises an error with the nearest name for an unknown one."""
    wanted = _normalized(name)
    wanted = _ALIASES.get(wanted, wanted)
    if wanted == "auto" or wanted in _MODULES or wanted in _registered:
        return wanted
    others = entry_points(ENTRY_POINT_GROUP)
    for entry in others:
        if _normalized(entry.name) == wanted:
            register_strategy(wanted, load_any(entry, OptionError))
            return wanted
    names = list(dict.fromkeys(["auto", *_MODULES, *_registered, *(entry.name for entry in others)]))
    raise OptionError(
        explain(
            f"`name` must be one of: {', '.join(names)}.{nearest(wanted, names + list(_ALIASES))}",
            received=f"name={name!r}",
        )
    )


def _check_servers(name: str, cluster: ClusterSpec) -> None:
    """Refuses a strategy of ours without servers in a cluster with servers, which would stay idle."""
    uses_no_servers = name in _MODULES and name != "parameter_server"
    if not uses_no_servers or not cluster.has_servers or cluster.task.role == "evaluator":
        return
    counts = ", ".join(f"{len(cluster.addresses[role])} {role}" for role in ("chief", "worker", "ps"))
    raise UnsupportedError(
        explain(
            f"The strategy {name!r} does not use parameter servers, and this cluster has some.",
            received=f"{cluster.task.role} {cluster.task.index} in {cluster.source} with {counts}",
            expected='the strategy "parameter_server"',
            do='Use tfdistkit.strategy("parameter_server"), or start the script without `ps` (`--ps`).',
        )
    )


def _require_no_other_strategy(name: str, cluster: ClusterSpec) -> None:
    import tensorflow as tf

    from tfdistkit.collectives import registry

    if tf.distribute.has_strategy():
        raise UnsupportedError(
            explain(
                "`tfdistkit.strategy(...)` must be called outside of any strategy's scope.",
                received=f"tfdistkit.strategy({name!r}) in the scope of {type(tf.distribute.get_strategy()).__name__}",
                expected="one strategy per script, made at its top",
                do="Move this line out of `with strategy.scope():`, or use the strategy of that scope.",
            )
        )
    several = cluster.has_servers or cluster.world_size > 1
    last = registry.last_made()
    if last is not None and several and cluster.is_training and name in ("multiworker", "parameter_server"):
        raise UnsupportedError(
            explain(
                "This process already has a strategy, and TensorFlow connects the processes of a job only once.",
                received=f"tfdistkit.strategy({name!r}) after {_made or type(last.strategy).__name__}",
                expected="one strategy in each process of the job, for all of its models",
                do="Keep the strategy that the first call returned: in a notebook in a variable, in pytest in a "
                'fixture with scope="session". Run tests that each need another strategy in new processes: '
                "tfdistkit.launch(function, np=2).",
            )
        )


def _require_strategy(name: str, made: Any) -> None:
    import tensorflow as tf

    if not isinstance(made, tf.distribute.Strategy):
        raise OptionError(
            explain(
                f"The registered `build` of the strategy {name!r} must return a tf.distribute.Strategy.",
                received=f"a {type(made).__name__}",
                expected="the result of a `build` of tfdistkit, or a strategy of your own",
            )
        )


def _remember(name: str) -> None:
    """Records the call and line that made the last strategy, for the error of the next call."""
    from tfdistkit.strategies.model_scope import line_of_user

    global _made
    _made = f"tfdistkit.strategy({name!r}) in {line_of_user()}"


def _load(name: str) -> Build:
    build: Build = importlib.import_module(_MODULES[name]).build
    return build


def _offer_collectives(made: Any) -> None:
    """Sets the strategy as the default for `tfdistkit.collectives` outside of a replica."""
    import tensorflow as tf

    from tfdistkit.collectives import registry
    from tfdistkit.strategies.sync import peer_errors

    if isinstance(made, tf.distribute.Strategy):
        registry.use(made, peer_errors.explained)


def _choose(cluster: ClusterSpec) -> str:
    import tensorflow as tf

    # An evaluator is not part of the training of workers and servers.
    if cluster.has_servers and cluster.task.role != "evaluator":
        return "parameter_server"
    if cluster.is_training and cluster.world_size > 1:
        # mpirun starts Horovod's ranks; where Horovod is not installed, they exchange their addresses.
        exchanges = can_exchange(cluster) and importlib.util.find_spec("horovod") is None
        return "multiworker" if cluster.has_addresses or exchanges else "horovod"
    return "mirrored" if len(tf.config.list_physical_devices("GPU")) > 1 else "one_device"


def _check_options(name: str, build: Build, options: dict[str, Any]) -> None:
    parameters = list(inspect.signature(build).parameters.values())[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    allowed = [p.name for p in parameters]
    _require_known(name, allowed, options)


def _require_known(name: str, allowed: list[str], options: dict[str, Any]) -> None:
    for option in options:
        if option not in allowed:
            raise OptionError(
                explain(
                    f"The strategy {name!r} has no option `{option}`.{nearest(option, allowed)}",
                    received=f"{option}={options[option]!r}",
                    expected=f"one of: {', '.join(allowed) or 'none'}",
                    do=_SENT_BETWEEN_PROCESSES if option in ("algorithm", "compression") else None,
                )
            )


def _options_of_auto(chosen: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of the chosen strategy; drops those of the other strategies that `auto` may choose."""
    known = {name: _option_names(name) for name in _CHOSEN_BY_AUTO}
    _require_known("auto", sorted(set().union(*known.values())), options)
    return {option: value for option, value in options.items() if option in known[chosen]}


def _option_names(name: str) -> list[str]:
    """Returns the options of a strategy of ours, read from its source because Horovod may not be installed."""
    spec = importlib.util.find_spec(_MODULES[name])
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    build = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "build")
    return [argument.arg for argument in build.args.kwonlyargs]
