//! Conversations that a chat template by itself would refuse, or whose parts it would lose. The
//! templates are small ones with the behavior of published ones.

use serde_json::{Map, Value, json};
use stolon_text::{ChatMessage, ChatOptions, ChatTemplate, ChatTemplateError};

/// System messages are an error anywhere but in front, as with Qwen 3.5.
const SYSTEM_IN_FRONT: &str = "\
    {%- for m in messages -%}\
      {%- if m.role == 'system' and not loop.first -%}{{ raise_exception('in front') }}{%- endif -%}\
      <{{ m.role }}>{{ m.content }}\
      {%- for c in m.tool_calls %}[{{ c.function.name }}\
        {%- for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}]{% endfor -%}\
    {%- endfor -%}";

/// System messages in the middle are lost, as with SmolLM3 and gpt-oss.
const SYSTEM_LOST: &str = "\
    {%- for m in messages -%}\
      {%- if m.role != 'system' or loop.first -%}<{{ m.role }}>{{ m.content }}{%- endif -%}\
      {%- for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]\
      {%- endfor -%}\
    {%- endfor -%}";

/// All system messages are moved to the front, as with DeepSeek's templates.
const SYSTEM_MOVED: &str = "\
    {%- for m in messages if m.role == 'system' -%}<system>{{ m.content }}{%- endfor -%}\
    {%- for m in messages if m.role != 'system' -%}<{{ m.role }}>{{ m.content }}\
      {%- for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]\
      {%- endfor -%}\
    {%- endfor -%}";

/// User and assistant take turns, calls have short ids, and no system message is known: Mistral's
/// and Gemma 2's rules.
const ALTERNATING: &str = "\
    {%- set ns = namespace(n=0) -%}\
    {%- for m in messages -%}\
      {%- if m.role == 'system' -%}{{ raise_exception('no system') }}{%- endif -%}\
      {%- if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) -%}\
        {%- if (m.role == 'user') != (ns.n % 2 == 0) -%}{{ raise_exception('turns') }}{%- endif -%}\
        {%- set ns.n = ns.n + 1 -%}\
      {%- endif -%}\
      {%- if m.role == 'assistant' and m.tool_calls is not defined and not m.content -%}\
        {{ raise_exception('empty') }}\
      {%- endif -%}\
      {%- for c in m.tool_calls -%}\
        {%- if c.id | length != 9 -%}{{ raise_exception('id') }}{%- endif -%}\
      {%- endfor -%}\
      <{{ m.role }}>{{ m.content or '' }}\
      {%- for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]\
      {%- endfor -%}\
    {%- endfor -%}";

/// One call at a time, whose arguments are JSON as a string; the content is searched without a
/// check that there is any: Llama 3's, DeepSeek's and Qwen 3's rules.
const ONE_CALL: &str = "\
    {%- for m in messages -%}\
      {%- if m.tool_calls -%}\
        {%- if m.tool_calls | length != 1 -%}{{ raise_exception('one call') }}{%- endif -%}\
        <call>{{ m.tool_calls[0].function.name + ' ' + m.tool_calls[0].function.arguments }}\
      {%- endif -%}\
      {%- if '</think>' in m.content -%}{%- endif -%}<{{ m.role }}>{{ m.content }}\
    {%- endfor -%}";

/// Calls and results are not known at all.
const PLAIN: &str = "\
    {%- for m in messages -%}\
      {%- if m.role not in ['user', 'assistant'] -%}{{ raise_exception('role') }}{%- endif -%}\
      <{{ m.role }}>{{ m.content }}\
    {%- endfor -%}";

/// The list of tools is read without a check that there is one: Hermes 3's rule.
const TOOLS_ONLY: &str = "\
    {%- for t in tools -%}({{ t.function.name }}){%- endfor -%}\
    {%- for m in messages -%}<{{ m.role }}>{{ m.content }}{%- endfor -%}";

fn render(source: &str, messages: &Value) -> Result<String, ChatTemplateError> {
    let template = ChatTemplate::new([("default", source)], Map::new()).expect("valid Jinja");
    let messages: Vec<ChatMessage> = serde_json::from_value(messages.clone()).expect("messages");
    template.render(&messages, &ChatOptions::default())
}

fn check(source: &str, messages: &Value, expected: &str) {
    assert_eq!(render(source, messages).as_deref(), Ok(expected), "{source}");
}

fn say(role: &str, text: &str) -> Value {
    json!({"role": role, "content": text})
}

fn calls(calls: &[(&str, Value)]) -> Value {
    let calls = calls.iter().map(|(id, arguments)| {
        let function = json!({"name": "f", "arguments": arguments});
        json!({"id": id, "type": "function", "function": function})
    });
    let calls: Vec<Value> = calls.collect();
    json!({"role": "assistant", "content": null, "tool_calls": calls})
}

fn result(id: &str, text: &str) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": text})
}

/// Goal: a system message in the middle is shown in its place, with every template.
#[test]
fn instructions_in_the_middle_become_a_part_of_the_message_before() {
    let conversation = json!([
        say("system", "A"),
        say("user", "b"),
        say("system", "C"),
        say("assistant", "d"),
        say("system", "E"),
        say("user", "f"),
    ]);
    let merged = "<user>b\n\n<system>\nC\n</system><assistant>d<user><system>\nE\n</system>";
    check(SYSTEM_IN_FRONT, &conversation, &format!("<system>A{merged}<user>f"));
    check(SYSTEM_LOST, &conversation, &format!("<system>A{merged}<user>f"));
    check(SYSTEM_MOVED, &conversation, &format!("<system>A{merged}<user>f"));
    let merged = merged.replacen("<user>b", "<user>A\n\nb", 1);
    check(ALTERNATING, &conversation, &format!("{merged}\n\nf"));
    check(PLAIN, &conversation, &format!("{merged}<user>f"));
    check(TOOLS_ONLY, &conversation, "<system>A<user>b<system>C<assistant>d<system>E<user>f");
    let in_front = json!([say("system", "A"), say("system", "B"), say("user", "c")]);
    check(SYSTEM_IN_FRONT, &in_front, "<system>A\n\nB<user>c");
    check(SYSTEM_MOVED, &in_front, "<system>A<system>B<user>c");
    check(PLAIN, &in_front, "<user>A\n\nB\n\nc");
    check(PLAIN, &json!([say("system", "A")]), "<user>A");
}

/// Goal: roles alternate where the template wants it, and stay as they are elsewhere.
#[test]
fn roles_alternate_where_they_have_to() {
    let runs = json!([
        say("assistant", "a"),
        say("user", "b"),
        say("user", "c"),
        say("assistant", "d"),
        say("assistant", ""),
        say("assistant", "e"),
        say("user", "f"),
    ]);
    let expected = "<user>(The conversation continues.)<assistant>a<user>b\n\nc\
                    <assistant>d\n\n(no text)\n\ne<user>f";
    check(ALTERNATING, &runs, expected);
    check(PLAIN, &runs, "<assistant>a<user>b<user>c<assistant>d<assistant><assistant>e<user>f");
}

/// Goal: a call without a text is shown, whatever the template needs as its content.
#[test]
fn calls_need_no_text() {
    let of = |content: &Value| {
        let mut call = calls(&[("abcdefghi", json!("{\"a\": 1}"))]);
        call["content"] = content.clone();
        json!([say("user", "b"), call, result("abcdefghi", "c")])
    };
    for content in [Value::Null, json!(""), json!([])] {
        check(ONE_CALL, &of(&content), "<user>b<call>f {\"a\": 1}<assistant><tool>c");
        check(SYSTEM_IN_FRONT, &of(&content), "<user>b<assistant>[f a=1]<tool>c");
    }
    check(PLAIN, &json!([say("user", "b"), {"role": "assistant"}]), "<user>b<assistant>");
}

/// Goal: arguments that are not an object are shown in some form.
#[test]
fn arguments_of_any_form_are_shown() {
    for (arguments, shown) in [
        (json!(""), ""),
        (Value::Null, ""),
        (json!("null"), ""),
        (json!({"a": 1}), " a=1"),
        (json!("{\"a\": 1}"), " a=1"),
        (json!("{\"a\": \"\\ud83d\"}"), " a=\u{fffd}"),
        (json!("{\"a\": \"The mi"), " arguments={\"a\": \"The mi"),
        (json!("[1]"), " arguments=[1]"),
        (json!([1]), " arguments=[1]"),
        (json!("3"), " arguments=3"),
    ] {
        let conversation = json!([say("user", "b"), calls(&[("1", arguments)]), result("1", "c")]);
        check(SYSTEM_IN_FRONT, &conversation, &format!("<user>b<assistant>[f{shown}]<tool>c"));
    }
}

/// Goal: calls and results that a template refuses get a form that it takes.
#[test]
fn calls_get_the_form_that_the_template_takes() {
    let two = json!([
        say("user", "b"),
        calls(&[("call_1", json!({"x": 1})), ("call_2", json!({"x": 2}))]),
        result("call_2", "two"),
        result("call_1", "one"),
        say("user", "c"),
        result("call_9", "lost"),
    ]);
    let split = "<user>b<call>f {\"x\":1}<assistant><tool>one<call>f {\"x\":2}<assistant><tool>two";
    check(ONE_CALL, &two, &format!("{split}<user>c<tool>lost"));
    let texts = "<assistant><tool_call>\n{\"name\":\"f\",\"arguments\":{\"x\":1}}\n</tool_call>\n\
                 <tool_call>\n{\"name\":\"f\",\"arguments\":{\"x\":2}}\n</tool_call>\
                 <user><tool_response>\ntwo\n</tool_response>\n\n\
                 <tool_response>\none\n</tool_response>\n\nc";
    let lost = "\n\n<tool_response>\nlost\n</tool_response>";
    check(PLAIN, &two, &format!("<user>b{texts}{lost}"));
    let between = json!([
        say("user", "b"),
        calls(&[("call_1", json!({}))]),
        say("user", "stop"),
        calls(&[("call_2", json!({}))]),
        result("call_2", "two"),
        say("system", "S"),
        say("user", "c"),
    ]);
    let expected = "<user>b<assistant>[f {}]<tool>(no result)<assistant>(no text)<user>stop\
                    <assistant>[f {}]<tool>two\n\n<system>\nS\n</system><assistant>(no text)<user>c";
    check(ALTERNATING, &between, expected);
}

/// Goal: a template that only reads tools gets an empty list if there are none.
#[test]
fn templates_for_tools_render_conversations_without() {
    check(TOOLS_ONLY, &json!([say("user", "b")]), "<user>b");
}

/// Goal: the prompt of each turn is the beginning of the next one's, whatever is added, so that the
/// prefix cache finds it.
#[test]
fn old_messages_keep_their_text_when_a_turn_is_added() {
    let turns = [
        vec![calls(&[("call_1", json!({"x": 1}))]), result("call_1", "one")],
        vec![
            calls(&[("call_2", json!("{\"x")), ("call_3", json!(""))]),
            result("call_2", "two"),
            result("call_3", "three"),
            say("system", "900 left"),
        ],
        vec![say("assistant", ""), say("user", "c"), say("system", "800 left")],
        vec![json!({"role": "assistant"}), say("user", "d"), say("user", "e")],
        vec![calls(&[("call_4", json!({}))]), say("user", "stop")],
        vec![say("assistant", "f"), result("call_9", "lost"), say("user", "g")],
    ];
    for source in
        [SYSTEM_IN_FRONT, SYSTEM_LOST, SYSTEM_MOVED, ALTERNATING, ONE_CALL, PLAIN, TOOLS_ONLY]
    {
        let mut conversation = vec![say("system", "A"), say("user", "b")];
        let mut before = render(source, &json!(conversation)).expect("the first turn");
        for turn in &turns {
            conversation.extend(turn.iter().cloned());
            let text = render(source, &json!(conversation)).expect("a later turn");
            assert!(text.starts_with(&before), "{before:?} becomes {text:?} with {source}");
            before = text;
        }
    }
}

/// Goal: a template may change its own lists, as Kimi K2's does, but not the lists of the
/// conversation.
#[test]
fn templates_change_their_own_lists() {
    let user = json!([say("user", "b")]);
    let source = "{%- set ns = namespace(ids=[], n=0) -%}\
        {%- set _ = ns.ids.append('a') -%}{%- set _ = ns.ids.append(['b']) -%}\
        {%- set other = ns.ids -%}{%- set _ = other.extend([1, 2]) -%}\
        {%- set _ = other.insert(0, 'z') -%}\
        {{ ns.ids }}|{{ ns.ids.pop(0) }}|{{ ns.ids.pop() }}|{{ other | length }}|{{ other + [9] }}\
        |{{ 'a' in other }}|{{ other | tojson }}|{{ other[-1] }}|{{ other[1:] }}|{{ other == ns.ids }}";
    let expected = "['z', 'a', ['b'], 1, 2]|z|2|3|['a', ['b'], 1, 9]|True|[\"a\", [\"b\"], 1]|1\
                    |[['b'], 1]|True";
    check(source, &user, expected);
    for source in [
        "{{ messages.append(1) }}",
        "{% set a = [] %}{% set _ = a.append(a) %}",
        "{% set a = [] %}{% set b = [a] %}{% set _ = a.append({'b': [b]}) %}",
        "{% set a = [] %}{{ a.pop() }}",
        "{% set a = [1] %}{{ a.pop(1) }}",
        "{% set a = [1] %}{% for i in range(100000) %}{% set _ = a.extend(a) %}{% endfor %}",
    ] {
        let failed = render(source, &user);
        assert!(matches!(failed, Err(ChatTemplateError::Failed { .. })), "{source}: {failed:?}");
    }
}
