"""What one service writes, another reads as the same value."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace.common.v1 import chat_pb2, error_pb2, grammar_pb2, output_pb2, sampling_pb2
from millrace.engine.v1 import engine_pb2

from contract.chat import (
    ChoiceFormat,
    Conversation,
    EbnfFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    LarkFormat,
    Message,
    RegexFormat,
    ResponseFormat,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
    ToolChoiceMode,
)
from contract.engines import BlocksEvicted, BlocksStored, EngineLoad, KvEvent
from contract.errors import MillraceError, Reason, RequestFailure
from contract.grammar import EnforcementReport, GrammarSpec, KeywordStatus, Verdict
from contract.outputs import ChoiceStatistics, EngineTime, FinishReason, FirstToken, TokenLogprobs
from contract.proto import chat, engine, grammar
from contract.proto.engine import sampling_fields, sampling_given, sampling_options
from contract.proto.status import from_detail, to_detail
from contract.sampling import RANGES, SamplingParams

FULL = Conversation(
    messages=(
        Message(role=Role.SYSTEM, content="s"),
        Message(
            role=Role.ASSISTANT,
            content="a",
            name="n",
            tool_calls=(ToolCall("i", "f", '{"x": 1}'),),
            reasoning="r",
        ),
        Message(role=Role.TOOL, content="t", tool_call_id="i"),
    ),
    tools=(Tool(name="f", description="d", parameters_json="{}", strict=True), Tool(name="g")),
    tool_choice=ToolChoice(ToolChoiceMode.NAMED, "f"),
    parallel_tool_calls=False,
    template_options={"thinking": True, "depth": 5, "share": 0.5, "none": None},
    documents=({"title": "x", "lines": [1, 2]},),
    template_name="tools",
    continue_final_message=True,
)


@pytest.mark.parametrize("conversation", [FULL, Conversation(messages=(Message(role=Role.USER),))])
def test_conversations(conversation: Conversation) -> None:
    assert chat.conversation(chat_pb2.Conversation(**chat.conversation_fields(conversation))) == conversation


def test_a_message_without_what_may_be_left_out_means_the_defaults() -> None:
    read = chat.conversation(chat_pb2.Conversation(messages=[chat_pb2.Message(role=chat_pb2.ROLE_USER)]))
    assert read == Conversation(messages=(Message(role=Role.USER),))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (chat_pb2.Conversation(messages=[chat_pb2.Message()]), "at.messages[0].role"),
        (chat_pb2.Conversation(tool_choice=chat_pb2.ToolChoice(mode=9)), "at.tool_choice.mode"),  # type: ignore[arg-type]
        (chat_pb2.Conversation(tool_choice=chat_pb2.ToolChoice(name="f")), "at.tool_choice.name"),
    ],
)
def test_what_a_conversation_cannot_mean_is_refused_by_its_path(
    message: chat_pb2.Conversation, field: str
) -> None:
    with pytest.raises(MillraceError) as refused:
        chat.conversation(message, "at.")
    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    "form",
    [
        JsonObjectFormat(),
        JsonSchemaFormat("{}", "name", strict=False),
        JsonSchemaFormat("{}"),
        RegexFormat("a"),
        ChoiceFormat(("a", "b")),
        LarkFormat("start: A"),
        EbnfFormat("root ::= a"),
    ],
)
def test_response_formats(form: ResponseFormat) -> None:
    assert chat.response_format(chat_pb2.ResponseFormat(**chat.format_fields(form))) == form


def test_no_format_is_none() -> None:
    assert chat.response_format(chat_pb2.ResponseFormat()) is None


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_sampling_options(data: st.DataObject) -> None:
    asked = SamplingParams(
        logit_bias={7: 1.5},
        allowed_token_ids=(1, 2),
        stop_token_ids=(3,),
        ignore_eos=True,
        **{
            # Numbers of up to seven digits, as the wire holds them. top_p may not be 0.
            name: data.draw(st.integers(1, 100), label=name) / 100 if isinstance(neutral, float) else 1
            for name, neutral in ((name, getattr(SamplingParams(), name)) for name in RANGES)
        },
    )
    message = sampling_pb2.SamplingOptions(**sampling_fields(asked))
    assert SamplingParams(**sampling_given(message)) == asked
    assert sampling_options(message).given() == {
        name: getattr(asked, name) for name in (*RANGES, "ignore_eos")
    }


def test_options_that_a_client_leaves_out_stay_unset() -> None:
    read = sampling_options(sampling_pb2.SamplingOptions(temperature=0.1, seed=0, stop=["x"]))
    assert read.given() == {"temperature": 0.1, "seed": 0}
    assert read.stop == ("x",)


def test_grammars_reports_and_verdicts() -> None:
    spec = GrammarSpec(digest="d", payload=b"\0", backend="b")
    assert grammar.grammar(grammar_pb2.GrammarArtifact(**grammar.grammar_fields(spec))) == spec
    report = EnforcementReport((KeywordStatus("type", "/type"),), (), (KeywordStatus("not", "/not", "why"),))
    assert grammar.report(grammar.report_message(report)) == report
    verdict = Verdict(False, "type", "/type", "/a", "m")
    assert grammar.verdict(grammar.verdict_message(verdict)) == verdict


def test_what_an_engine_reports() -> None:
    tops = (TokenLogprobs(1, -0.5, (2, 3), (-1.0, -2.0)), TokenLogprobs(4, -0.25))
    fields = engine.logprobs_fields(tops)
    assert engine.logprobs([output_pb2.TokenLogprob(**each) for each in fields]) == tops
    first = FirstToken(0.1, 0.2, 0.3, 4, 5)
    assert engine.first_token(engine_pb2.FirstTokenTimings(**engine.first_token_fields(first))) == first
    took = ChoiceStatistics(
        1, 2, 3, 4, 5, 0.5, 0.25, 6, 7.5, EngineTime(1.0, 2.0, 3.0, 4.0), {"kv_pressure": 0.125}
    )
    assert engine.statistics(engine_pb2.ChoiceStatistics(**engine.statistics_fields(took))) == took
    load = EngineLoad(1, 2, 3, 4, 5, 6.0, 7.0, 8.0)
    message = engine_pb2.EngineLoad(**engine.load_fields(load, draining=True))
    assert engine.load(message) == EngineLoad(1, 2, 3, 4, 5, 6.0, 7.0, 8.0, draining=True)


@pytest.mark.parametrize("event", [BlocksStored((1, 2), 3), BlocksEvicted((4,))])
def test_changes_of_the_prefix_cache(event: KvEvent) -> None:
    assert engine.kv_event(engine.kv_event_message(event)) == event


def test_a_failure_in_plain_data_is_the_error_that_it_was_made_of() -> None:
    error = MillraceError(Reason.NEVER_FITS, "m", field="f", metadata={"a": "1"}, retry_after_s=2.0)
    detail = to_detail(RequestFailure.of(error))
    assert detail == to_detail(error)
    back = from_detail(error_pb2.ErrorDetail.FromString(detail.SerializeToString()))
    assert (back.reason, back.message, back.field) == (error.reason, error.message, error.field)
    assert (back.metadata, back.retry_after_s) == (error.metadata, error.retry_after_s)


def test_what_choices_took_adds_up_and_the_causes_are_no_ones_else() -> None:
    one = ChoiceStatistics(
        num_steps=2,
        drafted_tokens=4,
        lost_tokens=0.25,
        engine_time=EngineTime(decode_s=1.0),
        delayed_by_s={"a": 1.0},
    )
    other = ChoiceStatistics(
        num_steps=3,
        decode_s=0.5,
        lost_tokens=0.5,
        engine_time=EngineTime(0.5, 0.25),
        delayed_by_s={"a": 1.0, "b": 2.0},
    )
    one.add(other)
    assert one == ChoiceStatistics(
        5, 0, 0, 4, 0, 0.5, 0.0, 0, 0.75, EngineTime(0.5, 1.25), {"a": 2.0, "b": 2.0}
    )
    assert other.delayed_by_s == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize("reason", FinishReason)
def test_finish_reasons_have_the_numbers_of_the_wire(reason: FinishReason) -> None:
    assert output_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") == reason
