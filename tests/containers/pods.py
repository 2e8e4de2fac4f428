"""Pods of the manifests as containers of the Docker engine: commands, variables, files, users, probes."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.containers.engine import LIMIT_S, TAG, run, serves
from tests.deployment.kustomize import Manifest, find
from tests.deployment.manifests import WORKLOADS, workloads

NETWORK = "millrace-test-pods"


class Pods:
    """What `kubectl apply` would run, one pod of each workload, under the names of their Services."""

    def __init__(self, manifests: list[Manifest], folder: Path) -> None:
        self._manifests = manifests
        self._pods = dict(workloads(manifests))
        self._labels = {
            each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
            for each in manifests
            if each["kind"] in WORKLOADS
        }
        self._folder = folder
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        self._started: list[str] = []

    def __enter__(self) -> Pods:
        run("docker", "network", "create", NETWORK)
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._started:
            run("docker", "rm", "--force", "--volumes", each)
        run("docker", "network", "rm", NETWORK)

    def start(self, name: str) -> None:
        """Runs the init containers of a pod to their ends, then starts its container."""
        pod = self._pods[name]
        mounts = {volume["name"]: self._lay_out(name, volume, pod) for volume in self._volumes(name, pod)}
        for container in pod.get("initContainers", ()):
            run("docker", "run", "--rm", *self._words(pod, container, mounts))
        (container,) = pod["containers"]
        aliases = [word for each in self.services(name) for word in ("--network-alias", each)]
        self._started.append(f"{NETWORK}-{name}")
        words = self._words(pod, container, mounts)
        run("docker", "run", "--detach", "--name", f"{NETWORK}-{name}", *aliases, *words)

    def services(self, name: str) -> list[str]:
        """Names of the Services that choose a workload's pods."""
        return [
            each["metadata"]["name"]
            for each in self._manifests
            if each["kind"] == "Service" and each["spec"]["selector"].items() <= self._labels[name].items()
        ]

    def probe(self, name: str, kind: str) -> bool:
        """What the kubelet would find: kind is "startup", "readiness" or "liveness"."""
        (container,) = self._pods[name]["containers"]
        probe = container[f"{kind}Probe"]
        if "exec" in probe:
            done = run(
                "docker",
                "exec",
                f"{NETWORK}-{name}",
                "/bin/sh",
                "-c",
                '"$@" && echo good || true',
                "sh",
                *probe["exec"]["command"],
            )
            return done.rstrip().endswith("good")
        address = self.address(name)
        ((how, what),) = [(key, probe[key]) for key in ("grpc", "httpGet", "tcpSocket") if key in probe]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        port = ports.get(what["port"], what["port"])
        if how == "grpc":
            return serves(f"{address}:{port}", what.get("service", ""))
        try:
            if how == "httpGet":
                page = httpx.get(f"http://{address}:{port}{what['path']}", trust_env=False, timeout=5)
                return page.status_code == 200
            socket.create_connection((address, port), timeout=5).close()
        except (OSError, httpx.TransportError):
            return False
        return True

    def wait(self, name: str, kind: str) -> float:
        """Seconds until the probe succeeds; fails with the container's log, at the latest when a kubelet
        would end the pod, which it does for all but readiness.
        """
        (container,) = self._pods[name]["containers"]
        probe = container[f"{kind}Probe"]
        limit_s = LIMIT_S
        if kind != "readiness":
            patience_s = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
            limit_s = min(LIMIT_S, probe.get("initialDelaySeconds", 0) + patience_s)
        began_s = time.monotonic()
        while not self.probe(name, kind):
            assert time.monotonic() - began_s < limit_s, f"{name}: {kind}: {self.log(name)}"
            time.sleep(0.2)
        return time.monotonic() - began_s

    def period_s(self, name: str, kind: str) -> float:
        """How often a kubelet probes."""
        (container,) = self._pods[name]["containers"]
        return float(container[f"{kind}Probe"].get("periodSeconds", 10))

    def address(self, name: str) -> str:
        """Where this machine reaches the pod."""
        found = run("docker", "inspect", "-f", "{{json .NetworkSettings.Networks}}", f"{NETWORK}-{name}")
        return str(json.loads(found)[NETWORK]["IPAddress"])

    def log(self, name: str) -> str:
        """The end of what a pod's container said."""
        return run("docker", "logs", "--tail", "50", f"{NETWORK}-{name}")

    def stop(self, name: str) -> int:
        """Exit status after the pod's grace period at most; its preStop hook runs first."""
        (container,) = self._pods[name]["containers"]
        hook = container.get("lifecycle", {}).get("preStop")
        if hook:
            run("docker", "exec", f"{NETWORK}-{name}", *hook["exec"]["command"])
        run(
            "docker",
            "stop",
            "-t",
            str(self._pods[name]["terminationGracePeriodSeconds"]),
            f"{NETWORK}-{name}",
        )
        return int(run("docker", "inspect", "-f", "{{.State.ExitCode}}", f"{NETWORK}-{name}"))

    def _volumes(self, name: str, pod: Mapping[str, Any]) -> list[dict[str, Any]]:
        claims = [
            {"name": claim["metadata"]["name"]}
            for manifest in self._manifests
            if manifest["kind"] == "StatefulSet" and manifest["metadata"]["name"] == name
            for claim in manifest["spec"].get("volumeClaimTemplates", ())
        ]
        return [*pod.get("volumes", ()), *claims]

    def _lay_out(self, name: str, volume: Mapping[str, Any], pod: Mapping[str, Any]) -> Path:
        """The volume as a folder: maps for all, secrets for the group to read, the rest to write."""
        folder = self._folder / name / str(volume["name"])
        folder.mkdir(parents=True)
        (self._folder / name).chmod(0o755)
        group = pod["securityContext"].get("fsGroup", pod["securityContext"]["runAsGroup"])
        data: Mapping[str, str] = {}
        if "configMap" in volume:
            data = self._data("ConfigMap", volume["configMap"]["name"])
        elif "secret" in volume:
            data = self._data("Secret", volume["secret"]["secretName"])
        for file, text in data.items():
            (folder / file).write_text(text)
            (folder / file).chmod(volume.get("secret", {}).get("defaultMode", 0o644))
        run("chgrp", "-R", str(group), str(folder))
        folder.chmod(0o755 if data else 0o2775)
        return folder

    def _data(self, kind: str, name: str) -> Mapping[str, str]:
        found = find(self._manifests, kind, name)
        assert found is not None, name
        return dict(found["data" if kind == "ConfigMap" else "stringData"])

    def _words(
        self, pod: Mapping[str, Any], container: Mapping[str, Any], mounts: Mapping[str, Path]
    ) -> list[str]:
        """Arguments of `docker run` up to the image's own."""
        security, own = pod["securityContext"], container["securityContext"]
        assert own["readOnlyRootFilesystem"] is True
        assert own["allowPrivilegeEscalation"] is False
        group = security.get("fsGroup", security["runAsGroup"])
        words = [
            "--network",
            NETWORK,
            "--read-only",
            "--cap-drop",
            "ALL",
            "--security-opt",
            "no-new-privileges",
        ]
        words += ["--user", f"{security['runAsUser']}:{security['runAsGroup']}", "--group-add", str(group)]
        words += ["--memory", container["resources"]["limits"]["memory"].removesuffix("i").lower()]
        for mount in container.get("volumeMounts", ()):
            end = ":ro" if mount.get("readOnly") else ""
            words += ["--volume", f"{mounts[mount['name']]}:{mount['mountPath']}{end}"]
        variables = dict(self._variables(container))
        for key, value in variables.items():
            words += ["--env", f"{key}={value}"]
        if "workingDir" in container:
            words += ["--workdir", container["workingDir"]]
        command = [_expanded(word, variables) for word in container.get("command", ())]
        if command:
            words += ["--entrypoint", command[0]]
        arguments = [_expanded(word, variables) for word in container.get("args", ())]
        image = re.sub(r"^(millrace/\w+):0\.1\.0", rf"\1:{TAG}", container["image"])
        return [*words, image, *command[1:], *arguments]

    def _variables(self, container: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        known: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            known |= self._data("ConfigMap", source["configMapRef"]["name"])
        for entry in container.get("env", ()):
            if "valueFrom" in entry:
                reference = entry["valueFrom"]["secretKeyRef"]
                known[entry["name"]] = self._data("Secret", reference["name"])[reference["key"]]
            else:
                known[entry["name"]] = _expanded(entry["value"], known)
        yield from known.items()


def _expanded(text: str, known: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: known[match[1]], text)
