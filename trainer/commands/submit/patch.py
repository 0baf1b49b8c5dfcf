"""Patches of a site for a job's manifests: options, then the files of --patch, merged in.

The merge is Kubernetes' strategic one: mappings by key, lists by the key in `_KEYS`, all else replaced.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.commands.submit.environment import from_secrets, refuse_secret
from trainer.commands.submit.pods import KubernetesObject
from trainer.commands.submit.spec import Site
from trainer.config.redact import is_secret, redact_words
from trainer.config.yaml_text import parse_documents
from trainer.errors import BadInputError
from trainer.host.files import read_bounded

# By what the entries of a list are told apart, as Kubernetes' API says; other lists are replaced as a whole.
_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "ports": ("containerPort", "port"),
    "imagePullSecrets": ("name",),
    "topologySpreadConstraints": ("topologyKey",),
    "hostAliases": ("ip",),
    "resourceClaims": ("name",),
    "replicatedJobs": ("name",),
}
_POD = "Pod"
_QUEUED = ("Job", "JobSet", "TrainJob")


def with_site(documents: Sequence[KubernetesObject], site: Site) -> list[KubernetesObject]:
    """Returns the objects of a job with the site's patches.

    Raises:
        BadInputError: For a patch that can't be read, matches nothing, or holds a secret.
    """
    found = list(documents)
    for patch in _of_options(found, site):
        found = _patched(found, patch, "")
    for path in site.patch:
        for number, patch in enumerate(_read(path)):
            found = _patched(found, patch, f"--patch {path}: document {number + 1}")
    return [_with_pods_resources(found, document) for document in found]


def _of_options(documents: Sequence[KubernetesObject], site: Site) -> list[KubernetesObject]:
    found: list[KubernetesObject] = []
    if site.queue:
        labels = {"kueue.x-k8s.io/queue-name": site.queue}
        found += [{"kind": kind, "metadata": {"labels": labels}} for kind in _QUEUED if _has(documents, kind)]
    if site.service_account:
        found.append({"kind": _POD, "spec": {"serviceAccountName": site.service_account}})
    node: KubernetesObject = {}
    if site.env_from:
        node["envFrom"] = [{"secretRef": {"name": name}} for name in from_secrets(site)]
    if site.rdma:
        resource, _, count = site.rdma.partition("=")
        devices = {resource: count or "1"}
        node["resources"] = {"requests": devices, "limits": devices}
    if node:
        found.append({"kind": _POD, "spec": {"containers": [{"name": _containers(documents)[0], **node}]}})
    return found


def _has(documents: Sequence[KubernetesObject], kind: str) -> bool:
    return any(document["kind"] == kind for document in documents)


def _read(path: Path) -> list[KubernetesObject]:
    try:
        documents = parse_documents(read_bounded(path).decode(), f"--patch {path}")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not a text in UTF-8"
        raise BadInputError(f"--patch {path}: can't be read ({why})") from error
    for document in documents:
        if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
            raise BadInputError(
                f"--patch {path}: each document says what it changes: kind: Pod (the pods), kind: Job, …"
            )
        _refuse_secrets(document, f"--patch {path}: ")
    if not documents:
        raise BadInputError(f"--patch {path}: it is empty; give kind: Pod and what its spec is to have")
    return documents


def _refuse_secrets(value: Any, where: str) -> None:
    if isinstance(value, dict):
        if isinstance(value.get("name"), str) and isinstance(value.get("value"), str | int | float):
            refuse_secret(value["name"], str(value["value"]), "kubernetes", f"{where}env {value['name']}")
        for about in ("annotations", "labels"):
            for name, text in (value.get(about) or {}).items():
                if is_secret(name):
                    refuse_secret(name, str(text), "kubernetes", f"{where}{about} {name}")
        value = list(value.values())
    texts = [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
    if redact_words(texts) != texts:
        raise BadInputError(f"{where}a secret in plain text; give it by --env-from secret:NAME")
    for inside in value if isinstance(value, list) else []:
        _refuse_secrets(inside, where)


def _patched(
    documents: list[KubernetesObject], patch: KubernetesObject, where: str
) -> list[KubernetesObject]:
    """Returns the documents, the matching ones patched."""
    kind, named = patch["kind"], {"apiVersion", "kind"}
    change = {key: value for key, value in patch.items() if key not in named}
    metadata = change.get("metadata")
    own: KubernetesObject = metadata if isinstance(metadata, dict) else {}
    names = {key: own[key] for key in ("name", "namespace") if key in own}
    if not change or (set(change) == {"metadata"} and set(own) == set(names)):
        raise BadInputError(f"{where}: kind {kind} and nothing to change; give its spec or its metadata")
    if kind == _POD:
        if names:
            raise BadInputError(f"{where}: metadata.{next(iter(names))}: it is for every pod; leave it out")
        _check_containers(documents, change, where)
        return [
            _in_pods(document, lambda template: _merged(template, change, f"{where}: {_POD}"))
            for document in documents
        ]
    found, matched = [], False
    for document in documents:
        api = patch.get("apiVersion", document["apiVersion"])
        meant = (document["kind"], document["apiVersion"]) == (kind, api)
        meant = meant and all(document["metadata"][key] == name for key, name in names.items())
        found.append(_merged(document, change, f"{where}: {kind}") if meant else document)
        matched |= meant
    if not matched:
        there = ", ".join(
            f"{document['apiVersion']} {document['kind']} {document['metadata']['name']}"
            for document in documents
        )
        wanted = " ".join(str(part) for part in (patch.get("apiVersion"), kind, *names.values()) if part)
        raise BadInputError(f"{where}: no {wanted} is rendered here; there are {there}, and kind: Pod")
    return found


def _check_containers(documents: Sequence[KubernetesObject], change: KubernetesObject, where: str) -> None:
    """Refuses a new container without an image: its name is a typo, and its pod wouldn't start."""
    spec = change.get("spec")
    given = spec.get("containers") if isinstance(spec, dict) else None
    for one in given if isinstance(given, list) else []:
        name = one.get("name") if isinstance(one, dict) else None
        if name not in _containers(documents) and "image" not in (one or {}):
            raise BadInputError(
                f"{where}: Pod: spec.containers: no container '{name}' is rendered here; there is "
                f"{', '.join(_containers(documents))} (one that is to be added needs an image)"
            )


def _containers(documents: Sequence[KubernetesObject]) -> list[str]:
    """Returns the names of the pods' containers."""
    found: list[str] = []

    def look(template: KubernetesObject) -> KubernetesObject:
        found.extend(one["name"] for one in template["spec"]["containers"])
        return template

    for document in documents:
        _in_pods(document, look)
    return list(dict.fromkeys(found))


def _in_pods(value: Any, change: Callable[[KubernetesObject], KubernetesObject]) -> Any:
    """Returns a document with each pod template replaced by `change` of it."""
    if isinstance(value, dict):
        if isinstance(value.get("spec"), dict) and "containers" in value["spec"]:
            return change(value)
        return {key: _in_pods(inside, change) for key, inside in value.items()}
    return [_in_pods(inside, change) for inside in value] if isinstance(value, list) else value


def _merged(before: Any, change: Any, where: str, key: str = "") -> Any:
    """Returns a value with a change merged in; null removes a key."""
    if isinstance(before, dict) and isinstance(change, dict):
        found = dict(before)
        for name, value in change.items():
            if name.startswith("$"):
                raise BadInputError(f"{where}.{name}: no directives here: null takes a key away")
            found.pop(name, None) if value is None else found.update(
                {name: _merged(before.get(name), value, f"{where}.{name}", name)}
            )
        return found
    if before is not None and (isinstance(before, dict | list) or isinstance(change, dict | list)):
        kinds = [_kind(value) for value in (before, change)]
        if kinds[0] != kinds[1]:
            raise BadInputError(f"{where}: {kinds[0]} is rendered there, and the patch has {kinds[1]}")
    if isinstance(change, list) and key in _KEYS:
        return _merged_list(before or [], change, where, _KEYS[key])
    return _without_null(change)


def _merged_list(before: list[Any], change: list[Any], where: str, keys: Sequence[str]) -> list[Any]:
    """Merges lists: entries with the same key are merged, others appended."""
    key = next((key for key in keys if all(_has_key(one, key) for one in [*before, *change])), None)
    if key is None:
        raise BadInputError(f"{where}: each entry needs its {' or '.join(keys)}, which tells it from others")
    found = {one[key]: one for one in before}
    for one in change:
        found[one[key]] = _merged(found.get(one[key], {}), one, f"{where}[{one[key]}]")
    return list(found.values())


def _has_key(entry: Any, key: str) -> bool:
    return isinstance(entry, Mapping) and key in entry


def _kind(value: Any) -> str:
    return "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else "one value"


def _without_null(value: Any) -> Any:
    """Removes nulls from a new value, where there is nothing to remove."""
    if isinstance(value, dict):
        return {key: _without_null(inside) for key, inside in value.items() if inside is not None}
    return value


def _with_pods_resources(
    documents: Sequence[KubernetesObject], document: KubernetesObject
) -> KubernetesObject:
    """Copies the runtime's resources to the TrainJob, which otherwise overrides them."""
    if document["kind"] != "TrainJob":
        return document
    found: list[KubernetesObject] = []

    def look(template: KubernetesObject) -> KubernetesObject:
        found.append(template["spec"]["containers"][0]["resources"])
        return template

    for one in documents:
        _in_pods(one, look)
    trainer = {**document["spec"]["trainer"], "resourcesPerNode": found[0]}
    return {**document, "spec": {**document["spec"], "trainer": trainer}}
