"""Implements `tfdistkit k8s manifest`: writes the pods that run a script on Kubernetes as YAML."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdistkit.cli.parser import USAGE_EXIT_CODE, Parser
from tfdistkit.errors import OptionError
from tfdistkit.launcher.kubernetes.manifest import KINDS, PodsSpec, manifests
from tfdistkit.launcher.kubernetes.pod_parts import (
    parse_node_selector,
    parse_secret_variable,
    parse_toleration,
    parse_volume,
)
from tfdistkit.launcher.kubernetes.yaml_text import to_yaml
from tfdistkit.report.secret_values import is_secret

_DESCRIPTION = """\
Writes a manifest for `kubectl apply -f -`: pods that run a script, each with a TF_CONFIG that lists all of them.
Use tfdistkit.strategy("multiworker") in the script; with --ps, tfdistkit.strategy("parameter_server")."""

_EPILOG = """\
kinds:
  job     an indexed Job and a headless Service; requires only Kubernetes 1.24 or later
  jobset  a JobSet (sigs.k8s.io/jobset), which restarts all pods after a failure
  tfjob   a TFJob of Kubeflow's training operator

volumes:
  pvc:CLAIM:/PATH[:ro]              an existing PersistentVolumeClaim
  configmap:NAME:/PATH, secret:NAME:/PATH     one file for each key, read-only
  hostpath:/ON/NODE:/PATH[:ro]      a folder of the node
  emptydir:/PATH                    an empty folder, removed with the pod
  memory:SIZE:/PATH                 an empty folder in memory, such as memory:8Gi:/dev/shm for NCCL

examples:
  tfdistkit k8s manifest --image registry/train:1 -np 4 --gpus 1 train.py --epochs 3 | kubectl apply -f -
  tfdistkit k8s manifest --image registry/train:1 -np 2 --volume pvc:datasets:/data:ro --node-selector disktype=ssd \\
      --toleration nvidia.com/gpu:NoSchedule --service-account trainer train.py /data
  tfdistkit k8s manifest --kind tfjob --image registry/train:1 -np 4 --ps 2 -m my_package.train"""

_IN_PLAIN_TEXT = (
    "the manifest contains the value of {name} in plain text, for all users with access to it or to the pods. "
    "Put the value into a Secret instead: --env-from-secret {name}=SECRET:KEY"
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: What follows `tfdistkit k8s`.

    Returns:
        The exit code: 0, or 2 for wrong usage.
    """
    parser = make_parser()
    found = parser.parse_args(list(arguments))
    words = found.program[1:] if found.program[:1] == ["--"] else found.program
    if not words:
        parser.error("no script is given. Expected: tfdistkit k8s manifest --image IMAGE -np 2 script.py")
    try:
        job = _job(found, tuple(words))
    except OptionError as error:
        print(f"tfdistkit k8s manifest: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    print("---\n".join(map(to_yaml, manifests(job))), end="")
    for name in [name for name, value in job.env.items() if is_secret(name, value)]:
        print(f"tfdistkit k8s manifest: {_IN_PLAIN_TEXT.format(name=name)}", file=sys.stderr)
    return 0


def make_parser() -> Parser:
    """Makes the parser of the command."""
    parser = Parser(prog="tfdistkit k8s", add_help=True, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="manifest", parser_class=Parser)
    manifest = commands.add_parser(
        "manifest",
        help="write a manifest",
        usage="tfdistkit k8s manifest --image IMAGE -np N [options] script.py [args]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_options(manifest)
    return parser


def _job(found: argparse.Namespace, words: tuple[str, ...]) -> PodsSpec:
    stem = words[0].rpartition(".")[2] if found.module else Path(words[0]).stem
    return PodsSpec(
        kind=found.kind,
        name=found.name or stem.lower().replace("_", "-"),
        image=found.image,
        command=(found.python, *(["-m"] if found.module else []), *words),
        workers=found.np,
        ps=found.ps,
        namespace=found.namespace,
        port=found.port,
        gpus=found.gpus,
        cpus=found.cpus,
        memory=found.memory,
        max_restarts=found.max_restarts,
        env=dict(found.env),
        volumes=tuple(map(parse_volume, found.volume)),
        node_selector=dict(map(parse_node_selector, found.node_selector)),
        tolerations=tuple(map(parse_toleration, found.toleration)),
        service_account=found.service_account,
        secret_env=dict(map(parse_secret_variable, found.env_from_secret)),
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kind", choices=KINDS, default="job", help="the kind of manifest (default: job)")
    add("--image", required=True, help="an image with Python, TensorFlow, tfdistkit and the script")
    add("-np", "--num-proc", dest="np", type=int, required=True, metavar="N", help="the number of workers")
    add("--ps", type=int, default=0, metavar="N", help="the number of parameter servers; adds a coordinator")
    add("--name", help="the name of the job in Kubernetes (default: the script's name)")
    add("--namespace", metavar="NAME", help="the namespace (default: kubectl's)")
    add("--gpus", type=int, default=0, metavar="N", help="NVIDIA GPUs for each worker")
    add("--cpus", metavar="N", help="CPUs for each container, such as 4 or 500m")
    add("--memory", metavar="SIZE", help="memory for each container, such as 16Gi")
    add("--port", type=int, default=2222, metavar="N", help="the port of each process (default: 2222)")
    add("--max-restarts", type=int, default=0, metavar="N", help="restart all processes after a failure, up to N times")
    add(
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a variable; can be given several times",
    )
    _add_pod_options(parser)
    add("--python", default="python", metavar="PATH", help="the interpreter in the image (default: python)")
    add("-m", "--module", action="store_true", help="the script is the name of a module, as in `python -m`")
    add(
        "program",
        nargs=argparse.REMAINDER,
        metavar="script.py [args]",
        help="the script in the image, or with -m the module, and its arguments",
    )


def _add_pod_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pods", "options with ... can be given several times")
    for name, form, text in (
        ("--env-from-secret", "NAME=SECRET:KEY...", "a variable with its value in a Secret"),
        ("--volume", "KIND:SOURCE:/PATH...", "a volume of each pod, see below"),
        ("--node-selector", "KEY=VALUE...", "run only on nodes with this label"),
        ("--toleration", "KEY[=VALUE][:EFFECT]...", "run also on nodes with this taint"),
    ):
        group.add_argument(name, action="append", default=[], metavar=form, help=text)
    group.add_argument("--service-account", metavar="NAME", help="the service account of the pods")


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, such as {name or 'NAME'}=1, received {text!r}")
    return name, value
