"""`tfdistkit horovod install`: plan, download, build or take from the cache, install, check."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tfdistkit import env
from tfdistkit.errors import BuildFailedError, MissingDependencyError, explain
from tfdistkit.horovod_build import pinned, prerequisites, recipe
from tfdistkit.horovod_build.checking import HorovodStatus, check_horovod
from tfdistkit.horovod_build.commands import Say, run_logged
from tfdistkit.horovod_build.recipe import BuildOptions, Machine
from tfdistkit.horovod_build.source import fetch_source, unpack_source
from tfdistkit.horovod_build.target import Target, ask_target
from tfdistkit.horovod_build.wheels import WheelCache

# The build takes two minutes on two cores, an hour on a slow machine with one core.
_BUILD_S = 2 * 3600.0
_PIP_S = 600.0


@dataclass(frozen=True)
class BuildPlan:
    """The plan of a build, made before anything is changed.

    Args:
        target: The Python environment to build for.
        options: The options of the build.
        machine: The machine that builds.
        variables: The variables of the build.
        name: The wheel's name in the cache.
    """

    target: Target
    options: BuildOptions
    machine: Machine
    variables: Mapping[str, str | None]
    name: str


def plan_build(python: str, *, with_mpi: bool | None, with_nccl: bool) -> BuildPlan:
    """Inspects the environment and the machine, and plans the build.

    Args:
        python: The interpreter of the environment to build for.
        with_mpi: Whether to build with MPI; None if this machine has it.
        with_nccl: Whether to build with NCCL.

    Returns:
        The plan.

    Raises:
        MissingDependencyError: if TensorFlow is not installed.
        UnsupportedError: if the Python cannot be run.
    """
    target = ask_target(python, recipe.BUILD_PACKAGES)
    inherited = env.child_env({})
    path = os.pathsep.join([target.scripts, inherited.get("PATH", os.defpath)])
    machine = prerequisites.look_at_machine(path)
    options = BuildOptions(with_mpi=bool(machine.mpi) if with_mpi is None else with_mpi, with_nccl=with_nccl)
    return BuildPlan(
        target=target,
        options=options,
        machine=machine,
        variables=recipe.build_variables(options, target, machine, inherited),
        name=recipe.wheel_name(options, target, machine, inherited),
    )


def install_horovod(plan: BuildPlan, cache: WheelCache, say: Say) -> HorovodStatus:
    """Builds and installs Horovod by a plan.

    Args:
        plan: The plan from `plan_build`.
        cache: The cache of built wheels.
        say: Called with each progress message.

    Returns:
        The status of the installed Horovod.

    Raises:
        MissingDependencyError: if the machine lacks a prerequisite of the build.
        BuildFailedError: if a step fails.
    """
    wheel, log = make_wheel(plan, cache, say), cache.log(plan.name)
    say(f"Installing {wheel.name}.")
    command = recipe.install_command(plan.target.executable, str(wheel))
    run_logged("The installation", command, log, say=say, timeout_s=_PIP_S)
    status = check_horovod(plan.target.executable)
    if not status.is_good:
        raise BuildFailedError(
            explain(
                "Horovod was built and installed, but does not load.",
                received=status.problem,
                do=f"Read the log: {log}",
            )
        )
    return status


def make_wheel(plan: BuildPlan, cache: WheelCache, say: Say) -> Path:
    """Takes the wheel from the cache, or builds it; also installs Horovod's requirements.

    Args:
        plan: The plan from `plan_build`.
        cache: The cache of built wheels.
        say: Called with each progress message.

    Returns:
        The wheel.

    Raises:
        MissingDependencyError: if the machine lacks a prerequisite of the build.
        BuildFailedError: if a step fails.
    """
    with cache.alone(plan.name, say, _BUILD_S) as work:
        # Checked under the lock: another process may just have built it.
        wheel = cache.find(plan.name)
        log = cache.log(plan.name)
        if wheel is None:
            _check_needs(plan)
            log.write_bytes(b"")  # clears the log of an earlier attempt
        _install_packages(plan, recipe.RUN_PACKAGES if wheel else recipe.BUILD_PACKAGES, work, log, say)
        if wheel is None:
            return _build(plan, cache, work, log, say)
        say(f"Taking it from the cache: {wheel}")
        return wheel


def plan_text(plan: BuildPlan, cache: WheelCache) -> str:
    """Describes the commands, variables and prerequisites of a plan.

    Args:
        plan: The plan from `plan_build`.
        cache: The cache of built wheels.
    """
    target, wheel = plan.target, cache.find(plan.name)
    lines = [
        f"for       Python {target.version} ({target.executable}), TensorFlow {target.tensorflow}",
        f"options   {plan.options.name}",
    ]
    missing = _missing(plan, recipe.RUN_PACKAGES if wheel else recipe.BUILD_PACKAGES)
    lines += [f"install   {pinned.spelled(name)}, checksum pinned" for name in missing]
    commands = [recipe.packages_command(target.executable, "<packages.txt>")] if missing else []
    if wheel:
        lines.append(f"cache     {wheel}")
    else:
        found = prerequisites.look_at_needs(plan.options, target, plan.variables)
        lines += [f"needs     {need.what}: {need.found or 'MISSING: ' + need.install}" for need in found]
        lines.append(f"cache     not there yet: {cache.folder / plan.name}")
        lines += [f"variable  {name}={value}" for name, value in plan.variables.items() if value is not None]
        lines += [f"variable  {name} removed" for name, value in plan.variables.items() if value is None]
        lines += [f"edit      {file}: {before.strip()!r} becomes {after!r}" for file, before, after in recipe.EDITS]
        commands.append(recipe.download_command(target.executable, "<requirements.txt>", "<folder>"))
        commands.append(recipe.wheel_command(target.executable, "<source>", "<folder>"))
    commands.append(recipe.install_command(target.executable, str(wheel or "<wheel>")))
    return "\n".join([*lines, *(f"command   {' '.join(command)}" for command in commands)])


def _missing(plan: BuildPlan, wanted: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in wanted if name not in plan.target.packages)


def _install_packages(plan: BuildPlan, wanted: Sequence[str], work: Path, log: Path, say: Say) -> None:
    """Installs the missing Python packages."""
    missing = _missing(plan, wanted)
    if not missing:
        return
    names = ", ".join(map(pinned.spelled, missing))
    say(f"Installing {names}.")
    listed = work / "packages.txt"
    listed.write_text(pinned.requirements(missing), encoding="utf-8")
    run_logged(
        f"The installation of {names}",
        recipe.packages_command(plan.target.executable, str(listed)),
        log,
        say=say,
        timeout_s=_PIP_S,
        do=f"Installed packages are used as they are: install versions that you trust, and try again: "
        f"{plan.target.executable} -m pip install {' '.join(missing)}",
    )


def _build(plan: BuildPlan, cache: WheelCache, work: Path, log: Path, say: Say) -> Path:
    python = plan.target.executable
    archive = fetch_source(python, cache.folder, work, log, say)
    source = unpack_source(archive, work)
    say(
        f"Building Horovod {recipe.VERSION} ({plan.options.name}) for TensorFlow {plan.target.tensorflow}. "
        "This takes minutes."
    )
    run_logged(
        "The build of Horovod",
        recipe.wheel_command(python, str(source), str(work)),
        log,
        say=say,
        timeout_s=_BUILD_S,
        # Temporary files on the file system of the cache.
        variables={**plan.variables, "TMPDIR": str(work)},
    )
    built = sorted(work.glob("horovod-*.whl"))
    if len(built) != 1:
        what = "The build of Horovod succeeded, but created no wheel."
        raise BuildFailedError(explain(what, do=f"Read the log: {log}"))
    ingredients = {"target": asdict(plan.target), "options": asdict(plan.options), "machine": asdict(plan.machine)}
    return cache.keep(plan.name, built[0], ingredients)


def _check_needs(plan: BuildPlan) -> None:
    missing = prerequisites.missing_text(prerequisites.look_at_needs(plan.options, plan.target, plan.variables))
    if missing:
        raise MissingDependencyError(f"Prerequisites of the build of Horovod are missing. Install them:\n{missing}")
