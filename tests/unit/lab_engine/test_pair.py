"""Two ranks serve one model: answers, streams, stalls, hangs, refusals."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.unit.lab_engine.harness import Inputs, Pair, mapped, set_gid, tool

PairFactory = Callable[..., Pair]
QUESTION = [{"role": "user", "content": "What is a rail?"}]


def client(pair: Pair, timeout: float = 20, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{pair.url}/v1", api_key=key, timeout=timeout, max_retries=0)


def ask(pair: Pair, timeout: float = 20, **options: Any) -> Any:
    options.setdefault("messages", QUESTION)
    return client(pair, timeout).chat.completions.create(model="lab", **options)


def text(pair: Pair, **options: Any) -> str:
    return str(ask(pair, max_tokens=24, **options).choices[0].message.content)


def get(url: str, key: str | None = None) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=5) as reply:
        return reply.read().decode()


def slow(folder: Path, milliseconds: int) -> Path:
    (folder / "fault-engine-slow").write_text(str(milliseconds))
    return folder


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_chat_models_health_and_metrics(make_pair: PairFactory) -> None:
    pair = make_pair().up()
    model = client(pair).models.list().data[0]
    assert (model.id, model.owned_by) == ("lab", "tensorfold")
    first, second = ask(pair), ask(pair)
    answer = first.choices[0].message.content
    assert answer == second.choices[0].message.content
    assert len(set(answer.split())) > 5
    assert first.choices[0].finish_reason in ("stop", "length")
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    assert first.model_extra["tensorfold"]["token_sha"] == second.model_extra["tensorfold"]["token_sha"]
    health = json.loads(get(f"{pair.url}/health"))
    recorded = {
        "ok", "backend", "busy", "requests_running", "requests_total", "prompt_tokens_total",
        "completion_tokens_total", "prefill_seconds_total", "decode_seconds_total", "cached_tokens_total",
        "rounds_total", "drafted_total", "accepted_total", "context_length",
    }  # fmt: skip
    assert recorded <= set(health)
    assert (health["requests_total"], health["context_length"]) == (2, 8192)
    assert 'tensorfold_requests_total{model="lab"} 2\n' in get(f"{pair.url}/metrics")
    assert health["completion_tokens_total"] == 2 * first.usage.completion_tokens


def test_stream_gives_the_same_text(make_pair: PairFactory) -> None:
    pair = make_pair(head_args=["--thinking"]).up()
    whole = ask(pair, max_tokens=60)
    message = whole.choices[0].message
    chunks = list(ask(pair, max_tokens=60, stream=True, stream_options={"include_usage": True}))
    parts = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(part.content or "" for part in parts) == message.content
    reasoning = "".join((part.model_extra or {}).get("reasoning_content") or "" for part in parts)
    assert reasoning == message.model_extra["reasoning_content"]
    assert chunks[-1].usage == whole.usage
    short = ask(pair, max_tokens=8).choices[0]
    assert (short.message.content, short.finish_reason) == ("", "length")
    plain = ask(pair, max_tokens=8, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert plain.choices[0].message.content


def test_seed_tools_and_images(make_pair: PairFactory) -> None:
    pair = make_pair().up()
    assert text(pair, temperature=1.0, seed=1) != text(pair, temperature=1.0, seed=2)
    assert text(pair, temperature=1.0, seed=1) == text(pair, temperature=1.0, seed=1)
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    called = ask(pair, tools=[tool], tool_choice="required", max_tokens=20).choices[0]
    assert called.finish_reason == "tool_calls"
    assert set(json.loads(called.message.tool_calls[0].function.arguments)) == {"city", "days"}

    def image(data: str) -> list[dict[str, Any]]:
        url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, url]}]

    assert text(pair, messages=image("AAAA")) != text(pair, messages=image("AAAB"))
    with pytest.raises(openai.BadRequestError):
        text(pair, messages=image("not base64"))


def test_both_rails_are_used(make_pair: PairFactory) -> None:
    pair = make_pair().up()
    for rail in (0, 1):
        assert f"RDMA rank 0 peer 1 rail {rail}: gid_index=3 path_mtu=4096" in pair.log(0)
        assert f"RDMA rank 1 peer 0 rail {rail}: gid_index=3 path_mtu=4096" in pair.log(1)
    ready = json.loads(next(line for line in pair.log(1).splitlines() if line.startswith("{")))
    assert list(ready) == ["rank", "loaded_s", "pool", "drafts", "arena_used"]
    assert (ready["rank"], ready["pool"], ready["drafts"]) == (1, 8192, True)
    assert "CUDA sm_121 device 0 (" in pair.log(0)


def test_answers_do_not_depend_on_rails_or_drafts(make_pair: PairFactory) -> None:
    reference = text(make_pair().up())
    assert text(make_pair(rdma=False).up()) == reference
    serial = make_pair(head_args=["--no-drafts"], worker_args=["--drafts", "0"]).up()
    assert text(serial) == reference
    assert json.loads(get(f"{serial.url}/health"))["drafted_total"] == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_byte_in_a_rank_file_changes_the_text(
    make_pair: PairFactory, copied: Inputs, rank: int
) -> None:
    reference = text(make_pair().up())
    path = next(copied.rank_files[rank].iterdir())
    flip(path, path.stat().st_size // 2)
    assert text(make_pair(inputs=copied).up()) != reference


def test_engram_rows_and_rope_rows_reach_the_text(make_pair: PairFactory, copied: Inputs) -> None:
    reference = text(make_pair().up())
    shard = copied.engram / "model-00048-of-00048.safetensors"
    with shard.open("r+b") as file:
        head = int.from_bytes(file.read(8), "little")
        file.seek(8 + head)
        file.write(bytes(200_000))  # the scales of every row
    assert text(make_pair(inputs=copied).up()) != reference


def test_stall_when_rank_1_is_gone(make_pair: PairFactory) -> None:
    pair = make_pair().up()
    text(pair)
    os.kill(pair.processes[1].pid, signal.SIGKILL)
    pair.exit_code(1)
    with pytest.raises(openai.APITimeoutError):
        ask(pair, timeout=1.5)
    health = json.loads(get(f"{pair.url}/health"))
    assert health["ok"] and health["requests_running"] == 1
    pair.processes[0].send_signal(signal.SIGTERM)
    assert pair.exit_code(0) == 0


def test_stall_when_rank_0_is_killed_and_leave_when_it_is_stopped(make_pair: PairFactory) -> None:
    killed = make_pair().up()
    os.kill(killed.processes[0].pid, signal.SIGKILL)
    killed.exit_code(0)
    stopped = make_pair().up()
    stopped.processes[0].send_signal(signal.SIGTERM)
    assert (stopped.exit_code(0), stopped.exit_code(1)) == (0, 0)
    assert killed.alive(1)
    killed.processes[1].send_signal(signal.SIGTERM)
    assert killed.exit_code(1) == 143


@pytest.mark.parametrize(
    "options",
    [
        {"worker_args": ["--pool", "4096"]},
        {"worker_args": ["--graphs", "0"]},
        {"head_env": {"TF_DS_HC_SIDE": "1"}},
        {"head_args": ["--no-drafts"]},
    ],
    ids=["pool", "graphs", "side", "drafts"],
)
def test_switches_that_differ_hang_before_the_server_opens(
    make_pair: PairFactory, options: dict[str, Any]
) -> None:
    pair = make_pair(**options)
    pair.start(1)
    pair.start(0)
    assert pair.linked()
    assert not pair.ready(1)
    assert pair.alive(0) and pair.alive(1)


@pytest.mark.parametrize("switch", ["TF_DS_IDX_SPLIT", "TF_DS_REPLAY_FLOOR", "PREFILL_INTERLEAVE_MS"])
def test_switches_that_differ_hang_at_the_first_request(make_pair: PairFactory, switch: str) -> None:
    pair = make_pair(head_env={switch: "7"}).up()
    with pytest.raises(openai.APITimeoutError):
        ask(pair, timeout=1)
    assert json.loads(get(f"{pair.url}/health"))["ok"]
    assert pair.alive(1)


def test_device_counts_must_match(make_pair: PairFactory) -> None:
    pair = make_pair(head_env={"TF_RDMA_DEVICES": "rocep1s0f0"})
    pair.start(1)
    pair.start(0)
    assert (pair.exit_code(0), pair.exit_code(1)) == (1, 1)
    assert pair.log(0).splitlines()[-1] == pair.log(1).splitlines()[-1] == "error: BadInfo"


def test_rails_paired_with_the_wrong_twin_do_not_connect(make_pair: PairFactory) -> None:
    pair = make_pair()
    set_gid(pair.roots[1], "roceP2p1s0f0", 3, mapped("192.0.2.7"), "RoCE v2")
    pair.start(1)
    pair.start(0)
    assert (pair.exit_code(1), pair.exit_code(0)) == (1, 1)
    assert "vendor_err 0x81" in pair.log(1)
    assert "error: VerbsFailed" in pair.log(0)


def test_worker_waits_for_the_head_and_ignores_port_probes(make_pair: PairFactory) -> None:
    import socket

    pair = make_pair()
    pair.start(0)
    end = time.monotonic() + 40
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", pair.rendezvous), timeout=1).close()
            break
        except OSError:
            time.sleep(0.05)
    assert not pair.ready(0.3)
    pair.start(1)
    assert pair.ready()


def test_api_key_file(make_pair: PairFactory, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("canary-1\n")
    path.chmod(0o644)
    refused = make_pair(head_args=["--api-key-file", str(path)])
    refused.start(0)
    assert refused.exit_code(0) == 1
    assert "0600" in refused.log(0) and "canary-1" not in refused.log(0)
    path.chmod(0o600)
    pair = make_pair(head_args=["--api-key-file", str(path)]).up()
    with pytest.raises(openai.AuthenticationError):
        ask(pair)
    assert client(pair, key="canary-1").chat.completions.create(model="lab", messages=QUESTION, max_tokens=2)  # type: ignore[arg-type]
    assert json.loads(get(f"{pair.url}/health")) == {"ok": True}
    with pytest.raises(urllib.error.HTTPError):
        get(f"{pair.url}/metrics")
    assert "tensorfold_uptime_seconds" in get(f"{pair.url}/metrics", "canary-1")
    assert "canary-1" not in pair.log(0)


def test_pool_is_shared(make_pair: PairFactory, tmp_path: Path) -> None:
    pair = make_pair(head_env={"LAB_MEMORY_DIR": str(slow(tmp_path, 20))}).up()
    with pytest.raises(openai.BadRequestError) as refused:
        ask(pair, max_tokens=8192)
    assert refused.value.code == "context_length_exceeded"
    long = threading.Thread(
        target=lambda: ask(pair, max_tokens=6000, extra_body={"ignore_eos": True}, timeout=2)
    )
    threading.excepthook = lambda *_: None
    long.start()
    time.sleep(0.4)
    with pytest.raises(openai.InternalServerError) as full:
        ask(pair, max_tokens=6000)
    assert full.value.code == "ContextFull"
    assert text(pair)
    long.join(10)


def test_more_requests_than_streams(make_pair: PairFactory, tmp_path: Path) -> None:
    pair = make_pair(
        head_env={"TF_DS_STREAMS": "1", "LAB_MEMORY_DIR": str(slow(tmp_path, 30))},
        head_args=["--parallel", "2"],
        worker_args=["--streams", "1"],
        context=8192,
    ).up()
    first = threading.Thread(target=lambda: ask(pair, max_tokens=40, extra_body={"ignore_eos": True}))
    first.start()
    time.sleep(0.3)
    with pytest.raises(openai.InternalServerError) as refused:
        ask(pair, max_tokens=4)
    assert refused.value.code == "NoFreeSlot"
    first.join(10)


def test_long_prompts_keep_their_prefix(make_pair: PairFactory) -> None:
    pair = make_pair().up()
    long = [{"role": "user", "content": "rail " * 900}]
    first, second = ask(pair, messages=long, max_tokens=4), ask(pair, messages=long, max_tokens=4)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 4096
    assert first.choices[0].message.content == second.choices[0].message.content


def test_fault_switches(make_pair: PairFactory, tmp_path: Path) -> None:
    env = {"LAB_MEMORY_DIR": str(tmp_path), "NCCL_DEBUG": "INFO"}
    (tmp_path / "fault-engine-nccl").touch()
    pair = make_pair(head_env=env)
    pair.start(1)
    pair.start(0)
    assert pair.exit_code(0) == 1
    assert "NCCL error 2" in pair.log(0)
    (tmp_path / "fault-engine-socket").touch()
    pair.start(0)
    assert pair.ready()
    assert "NET/Socket" in pair.log(0) and "NET/IB" not in pair.log(0)
    (tmp_path / "fault-engine-collapsed").touch()
    assert set(text(pair)) == {"!"}
    (tmp_path / "fault-engine-silent").touch()
    assert text(pair) == ""
    (tmp_path / "fault-engine-crash").write_text("token")
    with pytest.raises(openai.APIConnectionError):
        text(pair)
    assert pair.exit_code(0) == 137
    (tmp_path / "fault-engine-crash").write_text("load")
    pair.start(0)
    assert pair.exit_code(0) == 137
    assert pair.alive(1)


def test_four_ranks(inputs: Inputs, make_pair: PairFactory, tmp_path: Path) -> None:
    folders = [tmp_path / f"rank{rank}" for rank in range(4)]
    for rank, folder in enumerate(folders):
        assert tool("tf-dsv41-rank-cache", inputs.model, folder, rank, 4, "--parity").returncode == 0
    files = Inputs(inputs.model, inputs.engram, inputs.kit, folders, inputs.token_map)
    pairs = [make_pair(inputs=files, rdma=False, head_env={"TF_TP_WORLD": "4"}) for _ in range(3)]
    head = pairs[0]
    for rank, pair in enumerate(pairs, 1):
        pair.rendezvous = head.rendezvous
        pair.start(rank)
    head.start(0)
    assert head.ready()
    assert text(head) == text(head)
    os.kill(pairs[2].processes[3].pid, signal.SIGKILL)
    with pytest.raises(openai.APITimeoutError):
        ask(head, timeout=1)
