"""Old beside new (C1, C2), and bytes that no service of ours has sent (A2)."""

import ast
import os
import pickle  # noqa: TID251 - to show that nobody loads what it makes
import subprocess
from pathlib import Path

import grpc
import pytest
from google import protobuf
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import rpc
from offbeat.config.service import RpcSettings
from offbeat.streams.base import Stream
from offbeat.streams.records import Malformed, decode, task_fields
from offbeat.v1 import (
    checkpoint_pb2,
    generator_pb2,
    learner_pb2,
    reward_pb2,
    reward_pb2_grpc,
    samples_pb2,
)
from tests.harness.streams import make_task

ROOT = Path(__file__).resolve().parents[2]
OTHER_PROTOBUF = ROOT / ".venv-protos" / "bin" / "python"
MODULES = (samples_pb2, checkpoint_pb2, generator_pb2, learner_pb2, reward_pb2)
MESSAGES = {
    message.full_name: message
    for module in MODULES
    for message in module.DESCRIPTOR.message_types_by_name.values()
}
NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: 7,
    FieldDescriptor.CPPTYPE_INT64: 2**40,
    FieldDescriptor.CPPTYPE_UINT32: 9,
    FieldDescriptor.CPPTYPE_UINT64: 2**50,
    FieldDescriptor.CPPTYPE_DOUBLE: -0.25,
    FieldDescriptor.CPPTYPE_FLOAT: 0.5,
    FieldDescriptor.CPPTYPE_BOOL: True,
}


def last_release() -> dict[str, Descriptor]:
    """The messages of the contracts that must not be broken, by name."""
    image = descriptor_pb2.FileDescriptorSet.FromString(
        (ROOT / "protos" / "baseline.binpb").read_bytes()
    )
    pool = DescriptorPool()
    for file in image.file:
        pool.Add(file)
    return {
        message.full_name: message
        for file in image.file
        for message in pool.FindFileByName(file.name).message_types_by_name.values()
        if message.full_name.startswith("offbeat.v1.")
    }


OLD = last_release()


def value(field: FieldDescriptor) -> object:
    """Something that is not the field's default."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return field.enum_type.values[-1].number
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return b"\x00bytes" if field.type == FieldDescriptor.TYPE_BYTES else "text ü"
    return NUMBERS[field.cpp_type]


def full(descriptor: Descriptor) -> Message:
    """A message with every field set, those of its parts too."""
    message = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        here = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, content = field.message_type.fields
            if content.message_type is not None:
                here[value(key)].CopyFrom(full(content.message_type))
            else:
                here[value(key)] = value(content)
        elif field.is_repeated:
            scalar = field.message_type is None
            here.extend([value(field) if scalar else full(field.message_type) for _ in range(2)])
        elif field.message_type is not None:
            here.CopyFrom(full(field.message_type))
        else:
            setattr(message, field.name, value(field))
    return message


def through(message: Message, other: Descriptor) -> Message:
    """What is left of a message that the other side has read and sent back."""
    read = message_factory.GetMessageClass(other).FromString(message.SerializeToString())
    return type(message).FromString(read.SerializeToString())


@pytest.mark.parametrize("name", OLD)
def test_old_and_new_lose_nothing_of_each_others_messages(name):
    """C1, in both directions: fields that only one of them knows come back as they were."""
    assert name in MESSAGES, "a message of the last release is gone"
    for mine, other in ((OLD[name], MESSAGES[name]), (MESSAGES[name], OLD[name])):
        message = full(mine)
        assert message.ByteSize() > 0 or not mine.fields
        assert through(message, other) == message


async def test_a_client_of_the_last_release_calls_this_server():
    class Servicer(reward_pb2_grpc.RewardServiceServicer):
        async def GetStatus(self, request, context):
            return full(reward_pb2.RewardServiceGetStatusResponse.DESCRIPTOR)

    name = "offbeat.v1.RewardService"
    server = rpc.RpcServer(
        RpcSettings(),
        name,
        lambda s: reward_pb2_grpc.add_RewardServiceServicer_to_server(Servicer(), s),
    )
    await server.start()
    answer = message_factory.GetMessageClass(OLD["offbeat.v1.RewardServiceGetStatusResponse"])
    async with rpc.connect(server.address) as channel:
        call = channel.unary_unary(
            f"/{name}/GetStatus",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        request = full(OLD["offbeat.v1.RewardServiceGetStatusRequest"])
        assert (await call(request, timeout=30)).reward_worker_id == "text ü"
    await server.stop(0)


def test_stubs_load_on_the_older_protobuf():
    """C2: the environment of the stub generator has protobuf 6.33; this one has 7."""
    if not OTHER_PROTOBUF.exists():
        pytest.skip("there is no second environment: run `make setup`")
    code = """
import google.protobuf
from offbeat.v1 import samples_pb2 as s, checkpoint_pb2, generator_pb2, learner_pb2, reward_pb2
from offbeat.v1 import checkpoint_pb2_grpc, generator_pb2_grpc, learner_pb2_grpc, reward_pb2_grpc
task = s.PromptTask(ordinal=3, prompt_text='ü', seeds=[1, 2])
assert s.PromptTask.FromString(task.SerializeToString()) == task
print(google.protobuf.__version__)
"""
    done = subprocess.run(
        [OTHER_PROTOBUF, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(".")[0] != protobuf.__version__.split(".")[0]


# --- A2


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("stream", Stream)
def test_a_pickle_is_not_loaded(stream, tmp_path):
    bomb = pickle.dumps(Bomb(tmp_path / "run"))
    for fields in ({b"p": bomb}, {b"p": bomb, b"s": bomb}, {b"s": bomb}):
        if stream is Stream.DEAD:
            decode(stream, fields)
        else:
            with pytest.raises(Malformed):
                decode(stream, fields)
    assert not (tmp_path / "run").exists()


def test_no_module_imports_what_loads_pickles():
    """Nothing is ever pickled; what is imported is all that could."""
    unsafe = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    found = []
    for file in [*(ROOT / "offbeat").rglob("*.py"), *(ROOT / "services").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            found += [(file, name) for name in names if name.split(".")[0] in unsafe]
    assert not found


NAMES = st.sampled_from([b"p", b"s", b"o", b"a", b"k", b"e", b"v", b"from", b"n", b"at", b"reason"])
TASK = make_task(3).SerializeToString()
VALUES = st.one_of(
    st.binary(max_size=40),
    st.integers(-(10**30), 10**30).map(lambda number: b"%d" % number),
    # Bytes that are nearly a task: one of them is another.
    st.tuples(st.integers(0, len(TASK) - 1), st.integers(0, 255)).map(
        lambda at: TASK[: at[0]] + bytes([at[1]]) + TASK[at[0] + 1 :]
    ),
)


@settings(max_examples=200, deadline=None)
@given(stream=st.sampled_from(list(Stream)), fields=st.dictionaries(NAMES, VALUES, max_size=6))
def test_any_bytes_are_a_record_or_malformed(stream, fields):
    """Unknown enums, negative and huge numbers, torn protobuf: the reader is told, and nothing else happens."""
    try:
        record = decode(stream, fields)
    except Malformed:
        return
    assert type(record).FromString(record.SerializeToString()) == record


def test_the_task_that_is_spoilt_above_is_a_good_one():
    assert decode(Stream.PROMPTS, task_fields(make_task(3))) == make_task(3)


async def test_bytes_that_are_no_message_end_their_call_alone():
    server = rpc.RpcServer(
        RpcSettings(),
        "offbeat.v1.RewardService",
        lambda s: reward_pb2_grpc.add_RewardServiceServicer_to_server(
            reward_pb2_grpc.RewardServiceServicer(), s
        ),
    )
    await server.start()
    async with rpc.connect(server.address) as channel:
        for method in ("Score", "GetStatus", "Drain", "Nothing"):
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(f"/offbeat.v1.RewardService/{method}")(
                    b"\xff\xfe\x80", timeout=30
                )
    await server.stop(0)
