//! Compares rendered chat templates with transformers. `fixtures/make_chat_fixtures.py` generates
//! the expected texts.

use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use serde_json::{Map, Value, json};
use stolon_text::{ChatMessage, ChatOptions, ChatTemplate, ChatTemplateError};

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat_templates")
}

fn messages(value: &Value) -> Vec<ChatMessage> {
    serde_json::from_value(value.clone()).expect("messages in OpenAI's format")
}

/// A single template with the name `default`, without special tokens.
fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new([("default", source)], Map::new()).expect("valid Jinja")
}

fn render(source: &str, messages: &[ChatMessage]) -> Result<String, ChatTemplateError> {
    template(source).render(messages, &ChatOptions::default())
}

/// Goal: every fixture is rendered byte for byte as by transformers. Where the template raises,
/// rendering fails with the same message, or the conversation gets a form in which all of it is
/// shown.
#[test]
fn renders_like_transformers() {
    let cases = std::fs::read_to_string(fixtures().join("cases.json")).expect("the fixtures");
    let document: Value = serde_json::from_str(&cases).expect("JSON");
    let now = UNIX_EPOCH + Duration::from_secs(document["now"].as_u64().expect("a time"));
    let cases = document["cases"].as_array().expect("a list");
    let object = |value: &Value| value.as_object().cloned().unwrap_or_default();
    for case in cases {
        let name = &case["name"];
        let path = fixtures().join(case["template"].as_str().expect("a file"));
        let source = std::fs::read_to_string(path).expect("the template");
        let special_tokens = object(&case["special_tokens"]);
        let template = ChatTemplate::new([("default", source)], special_tokens)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let options = ChatOptions {
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap_or(true),
            tools: case["tools"].as_array().cloned().unwrap_or_default(),
            variables: object(&case["kwargs"]),
            now: Some(now),
            ..ChatOptions::default()
        };
        let got = template.render(&messages(&case["messages"]), &options);
        let expected = match (case["text"].as_str(), case["error"].as_str()) {
            (Some(text), None) => Ok(text.to_owned()),
            (None, Some(message)) => Err(ChatTemplateError::Raised { message: message.to_owned() }),
            _ => panic!("{name}: expected a text or an error"),
        };
        match (&got, &expected) {
            (Ok(got), Ok(expected)) => assert_eq!(got, expected, "{name}"),
            (Ok(got), Err(_)) => {
                for message in case["messages"].as_array().expect("a list") {
                    let said = message["content"].as_str().unwrap_or_default().trim();
                    assert!(got.contains(said), "{name}: {got}");
                }
            }
            _ => assert_eq!(got, expected, "{name}"),
        }
    }
    assert!(cases.len() >= 25, "only {} cases", cases.len());
}

/// Goal: if a template supports only one form of content, content of the other form is converted.
#[test]
fn content_is_converted_to_the_form_the_template_supports() {
    let parts = messages(&json!([
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]));
    let text = [ChatMessage::user("a")];
    let strings = "{% for m in messages %}{{ m.content }}{% endfor %}";
    assert_eq!(render(strings, &parts).as_deref(), Ok("a\nb"));
    assert_eq!(render(strings, &text).as_deref(), Ok("a"));
    let joining = "{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}";
    assert_eq!(render(joining, &parts).as_deref(), Ok("<a\nb>"));
    let lists =
        "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}";
    assert_eq!(render(lists, &parts).as_deref(), Ok("a;b;"));
    assert_eq!(render(lists, &text).as_deref(), Ok("a;"));
    let image = messages(&json!([{"role": "user", "content": [{"type": "image_url"}]}]));
    let unsupported = ChatTemplateError::UnsupportedPart { got: "image_url".to_owned() };
    assert_eq!(render(strings, &image), Err(unsupported));
}

/// Goal: all parts of a text are shown, also by a template that reads the first part only of some
/// roles, or prints their list; also if messages of the system are merged.
#[test]
fn no_part_of_a_text_is_lost() {
    let source = "{%- for m in messages %}[{{ m.role }}]\
        {%- if m.role == 'system' and not loop.first %}{{ raise_exception('one') }}{%- endif %}\
        {%- if m.content is string or m.role == 'tool' %}{{ m.content }}\
        {%- elif m.role == 'system' %}{{ m.content[0].text }}\
        {%- else %}{%- for p in m.content %}{{ p.text if p.type == 'text' else '(picture)' }}\
        {%- endfor %}{%- endif %}{%- endfor %}";
    let part = |text: &str| json!({"type": "text", "text": text});
    let conversation = messages(&json!([
        {"role": "system", "content": [part("a"), part("b")]},
        {"role": "system", "content": [part("c"), part("d")]},
        {"role": "user", "content": [part("e"), {"type": "image"}, part("f")]},
        {"role": "assistant", "content": [part("g"), part("h")]},
        {"role": "tool", "tool_call_id": "1", "content": [part("i"), part("j")]},
        {"role": "assistant", "content": "k"},
    ]));
    let expected = "[system]a\nb\n\nc\nd[user]e(picture)f[assistant]gh[tool]i\nj[assistant]k";
    assert_eq!(render(source, &conversation).as_deref(), Ok(expected));
}

/// Goal: a template reads the arguments of a call as an object, whether the request has them as an
/// object or as a string of JSON.
#[test]
fn arguments_of_calls_are_parsed_to_objects() {
    let source = "{% for m in messages %}{% if m.tool_calls %}\
                  {{ m.tool_calls[0].function.arguments | tojson }}{% endif %}{% endfor %}";
    for arguments in [json!({"b": 1, "a": 2}), json!("{\"b\": 1, \"a\": 2}")] {
        let call = json!({"type": "function", "function": {"name": "f", "arguments": arguments}});
        let conversation = messages(&json!([{"role": "assistant", "tool_calls": [call]}]));
        assert_eq!(render(source, &conversation).as_deref(), Ok("{\"b\": 1, \"a\": 2}"));
    }
}

/// Goal: a template that reads the results of calls in the message with the calls gets them there,
/// with the names of their functions; one that knows the role `tool` gets messages.
#[test]
fn results_are_where_the_template_reads_them() {
    let source = "{%- macro shown(value) -%}{%- if value is mapping -%}(\
        {%- for key, inner in value | dictsort %}{{ key }}:{{ shown(inner) }}{% endfor %})\
        {%- elif value is string -%}'{{ value }}'{%- else -%}{{ value }}{%- endif -%}\
        {%- endmacro -%}\
        {%- for m in messages -%}[{{ m.role }}\
        {%- for c in m.tool_calls %} {{ c.function.name }}{{ shown(c.function.arguments) }}\
        {%- endfor %}\
        {%- for r in m.tool_responses %} {{ r.name }}={{ shown(r.response) }}{% endfor %}\
        {%- if m.content is string %} {{ m.content.split('|')[0] }}{% endif %}]{%- endfor -%}";
    let call =
        |id: &str, name: &str| json!({"id": id, "function": {"name": name, "arguments": "{}"}});
    let result =
        |id: &str, content: &str| json!({"role": "tool", "tool_call_id": id, "content": content});
    let conversation = messages(&json!([
        {"role": "user", "content": "a|b"},
        {"role": "assistant", "content": null, "tool_calls": [call("1", "f"), call("2", "g")]},
        result("2", "{\"x\": {\"y\": 1}}"),
        result("1", "sunny"),
        {"role": "assistant", "content": "c"},
        result("3", "lost"),
    ]));
    let expected = "[user a][assistant f() g() g=(x:(y:1)) f='sunny'][assistant c]\
                    [tool lost]";
    assert_eq!(render(source, &conversation).as_deref(), Ok(expected));
    let knows = format!("{{% if messages[0].role == 'tool' %}}{{% endif %}}{source}");
    let expected = "[user a][assistant f() g()][tool {\"x\": {\"y\": 1}}][tool sunny]\
                    [assistant c][tool lost]";
    assert_eq!(render(&knows, &conversation).as_deref(), Ok(expected));
}

/// Goal: a macro may call itself, with named arguments, and macros that follow it.
#[test]
fn macros_call_each_other() {
    let source = "{%- macro list(items) -%}{%- for item in items -%}{{ one(item, end=';') }}\
        {%- endfor -%}{%- endmacro -%}\
        {%- macro one(item, end='.') -%}{%- if item is string -%}{{ item | upper }}{{ end }}\
        {%- else -%}({{ list(item) }}){%- endif -%}{%- endmacro -%}\
        {{- list(['a', ['b', ['c']]]) -}}";
    assert_eq!(render(source, &[ChatMessage::user("x")]).as_deref(), Ok("A;(B;(C;))"));
}

/// Goal: a conversation that is to be continued ends with the text of its last message, which has
/// to be the assistant's.
#[test]
fn the_last_message_can_be_continued() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}\
                  {% if add_generation_prompt %}<assistant>{% endif %}";
    let options = ChatOptions {
        add_generation_prompt: false,
        continue_final_message: true,
        ..ChatOptions::default()
    };
    let mut conversation = vec![ChatMessage::user("a"), ChatMessage::assistant(" b </s> c ")];
    let render = |messages: &[ChatMessage]| template(source).render(messages, &options);
    assert_eq!(render(&conversation).as_deref(), Ok("<user>a</s><assistant>b </s> c "));
    conversation.push(ChatMessage::user("d"));
    for messages in [&conversation[..], &[]] {
        assert!(matches!(render(messages), Err(ChatTemplateError::Failed { .. })));
    }
}

/// Goal: a template is chosen as in transformers: the one that the request names, else `tool_use`
/// if there are tools, else `default`.
#[test]
fn templates_are_chosen_like_in_transformers() {
    let chat = ChatTemplate::new(
        [("default", "plain"), ("tool_use", "tools"), ("rag", "documents")],
        Map::new(),
    )
    .expect("valid Jinja");
    let render = |options: ChatOptions| chat.render(&[ChatMessage::user("x")], &options);
    assert_eq!(render(ChatOptions::default()).as_deref(), Ok("plain"));
    let tools = ChatOptions { tools: vec![json!({})], ..ChatOptions::default() };
    assert_eq!(render(tools).as_deref(), Ok("tools"));
    let named = |name: &str| ChatOptions { template: Some(name.to_owned()), ..Default::default() };
    assert_eq!(render(named("rag")).as_deref(), Ok("documents"));
    let error = render(named("other")).expect_err("there is no such template");
    let expected = "expected one of the chat templates default, tool_use, rag, got `other`";
    assert_eq!(error.to_string(), expected);
}

/// Goal: each kind of failure has its own error variant.
#[test]
fn each_failure_has_its_own_error() {
    let none: [(&str, &str); 0] = [];
    let missing = ChatTemplate::new(none, Map::new()).expect_err("no template");
    assert_eq!(missing, ChatTemplateError::Missing);
    let malformed =
        ChatTemplate::new([("default", "{% if %}")], Map::new()).expect_err("not valid Jinja");
    assert!(matches!(malformed, ChatTemplateError::Malformed { .. }), "{malformed}");
    let failed = render("{{ messages[0].content.nothing.more }}", &[ChatMessage::user("x")]);
    assert!(matches!(failed, Err(ChatTemplateError::Failed { .. })), "{failed:?}");
    let nested = "{% macro m() %}{{ raise_exception('no ' ~ 1) }}{% endmacro %}{{ m() }}";
    let raised = render(nested, &[ChatMessage::user("x")]);
    assert_eq!(raised, Err(ChatTemplateError::Raised { message: "no 1".to_owned() }));
}

/// Goal: the reasoning of an earlier answer has the name that the template reads, and a message with
/// calls and text has none in a template such as gpt-oss's, which refuses both.
#[test]
fn reasoning_has_the_name_that_the_template_reads() {
    let shown = |member: &str, content: &str| {
        let source = format!(
            "{{% for m in messages %}}{{% if m.{member} %}}[{{{{ m.{member} }}}}]{{% endif %}}\
             {{{{ m.content }}}}{{% if m.tool_calls %}}{{{{ m.tool_calls | tojson }}}}{{% endif %}}\
             {{% endfor %}}"
        );
        let call = json!({"id": "c", "type": "function",
                          "function": {"name": "f", "arguments": "{}"}});
        let messages = messages(&json!([
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": content, "reasoning_content": "Why?",
             "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "Result."},
        ]));
        render(&source, &messages).expect("a text")
    };
    for member in ["reasoning_content", "reasoning", "thinking"] {
        assert!(shown(member, "").contains("[Why?]"), "{member}");
        assert_eq!(shown(member, "So.").contains("[Why?]"), member != "thinking", "{member}");
    }
    assert!(!shown("other", "").contains("Why?"));
}

/// Goal: variables of a template are told apart from members of messages.
#[test]
fn variables_of_a_template_are_known() {
    let template = template("{{ messages[0].thinking }}{% if enable_thinking %}x{% endif %}");
    let reads = |name: &str| template.reads_variable(&ChatOptions::default(), name);
    assert_eq!(reads("enable_thinking"), Ok(true));
    assert_eq!(reads("thinking"), Ok(false));
}
