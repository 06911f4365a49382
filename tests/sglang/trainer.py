"""A trainer that pushes weights into a running server: by serialised tensors, and by a broadcast."""

from __future__ import annotations

import base64
import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer, init_custom_process_group

GROUP = "weights"
WITHIN_S = 120


def push(url: str, folder: str, how: str, *, port: int, cut: str | None, weight_version: str | None) -> list[dict]:
    """Every tensor of a folder in one session; `cut` names one that is made too short. The server's answers."""
    tensors = [item for shard in sorted(Path(folder).glob("*.safetensors")) for item in load_file(shard).items()]
    tensors = [(name, each[:-4].contiguous() if name == cut else each) for name, each in tensors]
    answers = [_post(url, "/begin_weight_update", {})]
    send = _serialised if how == "tensor" else _broadcast
    answers.append(send(url, tensors, port, weight_version))
    answers.append(_post(url, "/end_weight_update", {}))
    return answers


def _serialised(url: str, tensors: list[tuple[str, torch.Tensor]], port: int, weight_version: str | None) -> dict:
    torch.multiprocessing.set_sharing_strategy("file_system")  # the other one is for parents and children
    given = base64.b64encode(MultiprocessingSerializer.serialize(tensors)).decode()
    return _post(
        url,
        "/update_weights_from_tensor",
        {"serialized_named_tensors": [given], "weight_version": weight_version},
    )


def _broadcast(url: str, tensors: list[tuple[str, torch.Tensor]], port: int, weight_version: str | None) -> dict:
    place = {"master_address": "127.0.0.1", "master_port": port, "group_name": GROUP, "world_size": 2}
    answers: list[dict] = []
    joining = threading.Thread(
        target=lambda: _post(url, "/init_weights_update_group", place | {"rank_offset": 1, "backend": "gloo"})
    )
    joining.start()
    group = init_custom_process_group(
        backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name=GROUP
    )
    joining.join(WITHIN_S)
    what = {
        "names": [name for name, _ in tensors],
        "dtypes": [str(each.dtype).removeprefix("torch.") for _, each in tensors],
        "shapes": [list(each.shape) for _, each in tensors],
        "group_name": GROUP,
        "weight_version": weight_version,
    }
    asking = threading.Thread(target=lambda: answers.append(_post(url, "/update_weights_from_distributed", what)))
    asking.start()
    for _, each in tensors:
        torch.distributed.broadcast(each, src=0, group=group)
    asking.join(WITHIN_S)
    torch.distributed.destroy_process_group(group)
    _post(url, "/destroy_weights_update_group", {"group_name": GROUP})
    return answers[0]


def _post(url: str, path: str, body: dict) -> dict:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
            return json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as exc:
        return json.loads(exc.read())
