"""From what a user types to a spec: presets, files, folders, and this machine.

load_model    "llama-3-70b"      a preset of catalogue/models.toml
              "path/config.json" a Hugging Face configuration, or a folder with one
              "path/model.toml"  a ModelSpec as TOML
load_cluster  "8x8xh100"         8 nodes of 8; "8xh100" is one node
              "local:4"          4 CPU ranks of this machine; "local" is one per core
              "selene"           a preset of catalogue/clusters.toml
              "path/mine.toml"   a cluster file
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import ceil
from pathlib import Path
from typing import Any

from meshwright.core.cgroups import limits
from meshwright.core.cluster import ClusterSpec
from meshwright.core.errors import InputError
from meshwright.core.hf_config import from_hf_config
from meshwright.core.model import ModelSpec
from meshwright.core.profile import OWN, Stack
from meshwright.core.values import parse_json, parse_toml, read_text

Table = dict[str, Any]
HOST_SHARE = "host_memory_bytes_per_device"
"""Key of a device of the catalogue: of a usual node's memory, one device's share."""


# --- the catalogue -----------------------------------------------------------------------------------------


@cache
def _catalogue(kind: str) -> Mapping[str, Table]:
    """The entries of catalogue/<kind>.toml, each with what it is `like` filled in."""
    where = f"catalogue/{kind}.toml"
    text = (resources.files("meshwright.core") / "catalogue" / f"{kind}.toml").read_text(encoding="utf-8")
    entries: dict[str, Table] = {}
    for name, entry in parse_toml(text, where).items():
        base = entries[entry["like"]] if "like" in entry else {}
        own = {key: value for key, value in entry.items() if key != "like"}
        entries[name] = {**{key: value for key, value in base.items() if key != "aliases"}, **own}
    return entries


def model_names() -> tuple[str, ...]:
    """Names of the model presets."""
    return tuple(_catalogue("models"))


def device_names() -> tuple[str, ...]:
    """Names of the devices that a cluster may be made of."""
    return tuple(_catalogue("devices"))


def cluster_names() -> tuple[str, ...]:
    """Names of the cluster presets."""
    return tuple(_catalogue("clusters"))


def stack_of(text: str) -> Stack:
    """The training stack of catalogue/stacks.toml that a published row's own words name; this library's where none is.

    Args:
        text: the row's table, source, sharding and notes.
    """
    lower = text.lower()
    named = [(name, e) for name, e in _catalogue("stacks").items() if all(word in lower for word in e["words"])]
    if not named:
        return OWN
    name, entry = max(named, key=lambda item: len(item[1]["words"]))
    known = {key: value for key, value in entry.items() if key != "words"}
    return Stack.parse({"name": name, **known}, f"catalogue/stacks.toml: {name}")


@dataclass(frozen=True, slots=True)
class Reach:
    """What training traffic reaches of a network's line rate."""

    reached: float = 1.0
    collective_share: float = 1.0


def network_reach(name: str) -> Reach:
    """What catalogue/networks.toml says of a network of that name; all of it where it says nothing."""
    lower = name.lower()
    entries = _catalogue("networks").values()
    found = next((entry for entry in entries if any(word in lower for word in entry["words"])), {})
    return Reach(found.get("reached", 1.0), found.get("collective_share", 1.0))


def _suggest(name: str, known: Iterable[str]) -> str:
    """Names close to `name`, or all of them where none is close."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(f'`{c}`' for c in close)}?" if close else f"known: {', '.join(names)}"


# --- models ------------------------------------------------------------------------------------------------


def load_model(text: str) -> ModelSpec:
    """The model that `text` names: a preset, a `config.json`, a folder with one, or a TOML file.

    A preset's name wins over a folder of the same name; write `./gpt2` for the folder.

    Raises:
        InputError: nothing of that name, or a file that cannot be read as a model.
        UnsupportedError: an architecture that is not built.
    """
    presets = _catalogue("models")
    if text.lower() in presets:
        return from_hf_config(presets[text.lower()], text.lower())
    path = Path(text).expanduser()
    if not text.strip() or not (path.exists() or _looks_like_path(text)):
        raise InputError(f"no model `{text}`: neither a preset nor a file; {_suggest(text.lower(), presets)}")
    if path.suffix == ".toml":
        return ModelSpec.from_toml(read_text(path), str(path))
    return _read_config(path / "config.json" if path.is_dir() else path)


def _looks_like_path(text: str) -> bool:
    return "/" in text or os.sep in text or text.endswith((".json", ".toml"))


def _read_config(path: Path) -> ModelSpec:
    data = parse_json(read_text(path), str(path))
    of_file = path.stem if path.name != "config.json" else path.absolute().parent.name
    return from_hf_config(data, of_file or "model", str(path))


# --- clusters ----------------------------------------------------------------------------------------------

_SHAPE = re.compile(r"(?:(?P<nodes>\d+)x)?(?P<devices>\d+)x(?P<device>[a-z0-9][a-z0-9._-]*)")
_LOCAL = re.compile(r"local(?::(?P<ranks>.*))?")


def load_cluster(text: str) -> ClusterSpec:
    """The cluster that `text` names.

    Args:
        text: `NODESxDEVICESxDEVICE`, `DEVICESxDEVICE`, `local`, `local:N`, a preset, or a TOML file. A file is
            either a whole ClusterSpec, or `num_nodes`, `devices_per_node` and the `device`'s name with overrides.

    Raises:
        InputError: no such device, preset or file, or no devices at all.
    """
    name = text.strip().lower()
    if local := _LOCAL.fullmatch(name):
        machine = this_machine()
        return local_cluster(_num_ranks(text, local["ranks"], machine.num_cores), machine)
    if shape := _SHAPE.fullmatch(name):
        return _sized(name, int(shape["nodes"] or 1), int(shape["devices"]), shape["device"])
    if name in _catalogue("clusters"):
        return _from_table({"name": name, **_catalogue("clusters")[name]}, "catalogue/clusters.toml")
    path = Path(text).expanduser()
    if name and (path.exists() or _looks_like_path(text)):
        return _from_table({"name": path.stem, **parse_toml(read_text(path), str(path))}, str(path))
    raise InputError(
        f"no cluster `{text}`: write 8x8xh100 (8 nodes of 8 H100), 8xh100 (one node), local:4 (CPU ranks of this "
        f"machine), the path of a TOML file, or a preset; {_suggest(name, _catalogue('clusters'))}"
    )


def _sized(name: str, num_nodes: int, devices_per_node: int, device: str) -> ClusterSpec:
    if num_nodes * devices_per_node == 0:
        raise InputError(f"cluster `{name}` has 0 devices: at least one is needed to run anything")
    table = {"name": name, "num_nodes": num_nodes, "devices_per_node": devices_per_node, "device": device}
    return _from_table(table, f"cluster `{name}`")


def _from_table(table: Table, where: str) -> ClusterSpec:
    """A cluster whose device may be a name of the catalogue; other keys override what comes with it."""
    for key in ("num_nodes", "devices_per_node"):
        if table.get(key) == 0:
            raise InputError(f"{where}: `{key}` is 0: a cluster needs at least one device")
    if isinstance(table.get("device"), str):
        table = {**_device_defaults(table["device"], where), **{k: v for k, v in table.items() if k != "device"}}
        own_bytes, per_node = table.pop(HOST_SHARE, None), table.get("devices_per_node")
        if own_bytes and isinstance(per_node, int):
            table.setdefault("host_memory_bytes", own_bytes * per_node)
    return ClusterSpec.parse(table, where)


def _device_defaults(name: str, where: str) -> Table:
    """The keys of a cluster that come with a device: device, links, backend, fractions."""
    devices = _catalogue("devices")
    names = {alias: key for key, entry in devices.items() for alias in (key, *entry.get("aliases", ()))}
    if name.lower() not in names:
        raise InputError(f"{where}: no device `{name}`; {_suggest(name.lower(), names)}")
    entry = {key: value for key, value in devices[names[name.lower()]].items() if key != "aliases"}
    keys = {*ClusterSpec.model_fields, HOST_SHARE} - {"name"}
    of_cluster = {key: entry.pop(key) for key in tuple(entry) if key in keys}
    links = {key: _link(of_cluster[key]) for key in ("intra_link", "inter_link")}
    return {**of_cluster, **links, "device": entry}


def _link(entry: Table) -> Table:
    """A link whose bandwidth is what it reaches, not its peak."""
    reached = entry.get("reached", 1.0)
    plain = {key: value for key, value in entry.items() if key != "reached"}
    return {**plain, "bandwidth_bytes_per_s": entry["bandwidth_bytes_per_s"] * reached}


# --- this machine ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use of the machine it runs on."""

    num_cores: int
    memory_bytes: int


def num_cores(root: Path = Path("/")) -> int:
    """CPU cores that this process may use: those it may run on, or what its control group has of them, rounded up.

    Args:
        root: where `proc` and `sys` are.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cores, ceil(limits(root).num_cores or cores)))


def this_machine(root: Path = Path("/")) -> Machine:
    """Cores and memory of this machine, or of the container's share of it. `root` as of :func:`num_cores`."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(num_cores(root), min(memory_bytes, limits(root).memory_bytes or memory_bytes))


def local_cluster(num_ranks: int, machine: Machine) -> ClusterSpec:
    """`num_ranks` CPU ranks of one machine: memory is divided among them, and cores where there are fewer."""
    defaults = _device_defaults("cpu", "local")
    share = min(1.0, machine.num_cores / num_ranks)
    device: Table = defaults["device"]
    peaks = {dtype: peak * share for dtype, peak in device["peak_flops_per_s"].items()}
    shared = {
        "memory_bytes": machine.memory_bytes // num_ranks,
        "memory_bandwidth_bytes_per_s": device["memory_bandwidth_bytes_per_s"] * share,
        "peak_flops_per_s": peaks,
    }
    name = f"local:{num_ranks}"
    sizes = {"name": name, "num_nodes": 1, "devices_per_node": num_ranks}
    return ClusterSpec.parse({**defaults, **sizes, "device": {**device, **shared}}, name)


def _num_ranks(text: str, ranks: str | None, cores: int) -> int:
    if ranks is None:
        return cores
    if not ranks.isdecimal():
        raise InputError(f"cluster `{text}`: local:N needs a whole number of ranks, for instance local:4")
    if int(ranks) == 0:
        raise InputError(f"cluster `{text}` has 0 devices: at least one is needed to run anything")
    return int(ranks)


def cores_of_rank(cluster: ClusterSpec) -> float | None:
    """Of this machine's cores, for each CPU rank of the cluster; None where each has one or more."""
    if cluster.backend != "gloo" or cluster.devices_per_node <= num_cores():
        return None
    return num_cores() / cluster.devices_per_node


def cluster_warning(cluster: ClusterSpec) -> str | None:
    """:func:`core_warning` of a CPU cluster; None for other clusters, whose ranks are not this machine's."""
    return core_warning(cluster.devices_per_node, num_cores()) if cluster.backend == "gloo" else None


def core_warning(num_ranks: int, cores: int) -> str | None:
    """One line where this machine has more ranks than cores, else None."""
    if num_ranks <= cores:
        return None
    return (
        f"{num_ranks} ranks share {cores} core{'s' if cores > 1 else ''}: right for a rehearsal, "
        "but times say nothing about a machine with a core for each"
    )
