"""Strategies by name: a table, each loaded when it is asked for."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NewType

from tfdistkit.cluster import requested
from tfdistkit.cluster.detection import detect_cluster
from tfdistkit.cluster.environments.mpi_addresses import can_exchange
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import OptionError, UnsupportedError, explain, nearest
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

# How TensorFlow's Model Garden and Lightning spell them.
_ALIASES = {
    "off": "one_device",
    "dp": "mirrored",
    "central": "central_storage",
    "ddp": "multiworker",
    "multi_worker": "multiworker",
    "ps": "parameter_server",
    "multi_worker_mirrored": "multiworker",
}

# What other packages may add strategies under, in the `entry_points` of their metadata.
ENTRY_POINT_GROUP = "tfdistkit.strategies"

Build = Callable[..., "tf.distribute.Strategy"]
# A name that type checkers cannot know: of a registered strategy, or read from a configuration.
StrategyName = NewType("StrategyName", str)
_registered: dict[str, Build] = {}
_made = ""


def make(name: str, options: dict[str, Any]) -> tf.distribute.Strategy:
    """Makes a strategy: see `tfdistkit.strategy`."""
    requested.note("strategy")
    cluster = detect_cluster()
    known = _known_name(name)
    _check_servers(known, cluster)
    require_keras_on_tensorflow()
    if known == "auto":
        known = _choose(cluster)
        options = _options_of_auto(known, options)
    build = _registered.get(known) or _load(known)
    _check_options(known, build, options)
    _require_no_other_strategy(known, cluster)
    made = build(cluster, **options)
    _offer_collectives(made)
    _remember(known)
    return made


def register_strategy(name: str, build: Build) -> StrategyName:
    """Adds a strategy of your own to those that `tfdistkit.strategy` makes by name.

    A package can do the same without being imported: an entry point of the group `tfdistkit.strategies`.

    Args:
        name: The name to ask for it by. A name that is registered already is replaced.
        build: Called as `build(cluster, **options)` with a `tfdistkit.cluster.ClusterSpec`; returns a
            `tf.distribute.Strategy`. Its keyword parameters are the options that are let through.

    Returns:
        The name, as one that type checkers let `tfdistkit.strategy` take with any options.

    Raises:
        OptionError: (a ValueError) if the name is one of tfdistkit's own, or `build` cannot be called.
    """
    if name in _MODULES or name in _ALIASES or name == "auto":
        raise OptionError(
            explain("`name` is taken by tfdistkit itself.", received=f"name={name!r}", expected="another name")
        )
    if not callable(build):
        raise OptionError(
            explain("`build` cannot be called.", received=f"build={build!r}", expected="build(cluster, **options)")
        )
    _registered[name] = build
    return StrategyName(name)


def _known_name(name: str) -> str:
    """Resolves aliases and entry points; anything else is an error that names the nearest."""
    if not isinstance(name, str):
        raise OptionError(explain("`name` is not a string.", received=repr(name), expected="the name of a strategy"))
    wanted = name.strip().lower().replace("-", "_")
    wanted = _ALIASES.get(wanted, wanted)
    if wanted == "auto" or wanted in _MODULES or wanted in _registered:
        return wanted
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == wanted:
            register_strategy(wanted, entry.load())
            return wanted
    names = ["auto", *_MODULES, *_registered]
    raise OptionError(
        explain(
            f"`name` is no strategy.{nearest(wanted, names + list(_ALIASES))}",
            received=f"name={name!r}",
            expected=f"one of: {', '.join(names)}",
        )
    )


def _check_servers(name: str, cluster: ClusterSpec) -> None:
    """A strategy of our own without servers would leave them, and those who wait for them, alone."""
    of_ours = name in _MODULES and name != "parameter_server"
    if not of_ours or not cluster.has_servers or cluster.task.role == "evaluator":
        return
    counts = ", ".join(f"{len(cluster.addresses[role])} {role}" for role in ("chief", "worker", "ps"))
    raise UnsupportedError(
        explain(
            f"The strategy {name!r} makes no use of parameter servers, and this cluster has some.",
            received=f"{cluster.task.role} {cluster.task.index} in {cluster.source} with {counts}",
            expected='the strategy "parameter_server"',
            do='Ask for tfdistkit.strategy("parameter_server"), or start the script without `ps` (`--ps`).',
        )
    )


def _require_no_other_strategy(name: str, cluster: ClusterSpec) -> None:
    import tensorflow as tf

    from tfdistkit.collectives import registry

    if tf.distribute.has_strategy():
        raise UnsupportedError(
            explain(
                "`tfdistkit.strategy(...)` was called inside of a strategy's scope.",
                received=f"tfdistkit.strategy({name!r}) in the scope of {type(tf.distribute.get_strategy()).__name__}",
                expected="one strategy a script, made at its top",
                do="Move this line out of `with strategy.scope():`, or use the strategy that is there.",
            )
        )
    several = cluster.has_servers or cluster.world_size > 1
    last = registry.last_made()
    if last is not None and several and cluster.is_training and name in ("multiworker", "parameter_server"):
        raise UnsupportedError(
            explain(
                "This process has a strategy already, and TensorFlow connects the processes of a job only once.",
                received=f"tfdistkit.strategy({name!r}) after {_made or type(last.strategy).__name__}",
                expected="one strategy in each process of the job, for all of its models",
                do="Keep what the first call returned: in a notebook in a variable, in pytest in a fixture with "
                'scope="session". Tests that each need a strategy of their own need processes of their own: '
                "tfdistkit.launch(function, np=2) starts some.",
            )
        )


def _remember(name: str) -> None:
    """Keeps which strategy was made last, and in which line, for the error of the next one."""
    from tfdistkit.strategies.model_scope import line_of_user

    global _made
    _made = f"tfdistkit.strategy({name!r}) in {line_of_user()}"


def _load(name: str) -> Build:
    build: Build = importlib.import_module(_MODULES[name]).build
    return build


def _offer_collectives(made: Any) -> None:
    """Makes `tfdistkit.collectives` outside of a replica those of this strategy."""
    import tensorflow as tf

    from tfdistkit.collectives import registry
    from tfdistkit.strategies.sync import peer_errors

    if isinstance(made, tf.distribute.Strategy):
        registry.use(made, peer_errors.explained)


def _choose(cluster: ClusterSpec) -> str:
    import tensorflow as tf

    # An evaluator beside workers and servers evaluates on its own.
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
                    f"`{option}` is no option of the strategy {name!r}.{nearest(option, allowed)}",
                    received=f"{option}={options[option]!r}",
                    expected=f"one of: {', '.join(allowed) or 'none'}",
                )
            )


def _options_of_auto(chosen: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns those options that the chosen strategy has; the others belong to one that it might have become."""
    known = {name: _option_names(name) for name in _CHOSEN_BY_AUTO}
    _require_known("auto", sorted(set().union(*known.values())), options)
    return {option: value for option, value in options.items() if option in known[chosen]}


def _option_names(name: str) -> list[str]:
    """Returns the options of a strategy of ours; from its source, as Horovod may not be installed."""
    spec = importlib.util.find_spec(_MODULES[name])
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    build = next(one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "build")
    return [argument.arg for argument in build.args.kwonlyargs]
