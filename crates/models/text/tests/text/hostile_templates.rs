//! Chat templates that try to stop the process: each ends with an error or a bounded text.

use std::thread;

use serde_json::{Map, Value, json};
use stolon_text::{ChatMessage, ChatOptions, ChatTemplate, ChatTemplateError};

/// Maximum size of a rendered text.
const MAX_OUTPUT: usize = 16 << 20;

fn render(source: &str, messages: &[ChatMessage]) -> Result<String, ChatTemplateError> {
    ChatTemplate::new([("default", source)], Map::new())?.render(messages, &ChatOptions::default())
}

/// Renders with a small conversation. Returns whether it was refused.
fn check(source: &str) -> bool {
    let shown: String = source.chars().take(80).collect();
    match render(source, &[ChatMessage::user("hello"), ChatMessage::assistant("there")]) {
        Ok(text) => {
            assert!(text.len() <= MAX_OUTPUT, "{shown}: {} bytes", text.len());
            false
        }
        Err(error) => {
            assert!(error.to_string().len() < 10_000, "{shown}: a long message");
            true
        }
    }
}

/// Templates that must be refused.
const REFUSED: [&str; 71] = [
    // Numbers that become memory.
    "{{ messages|tojson(indent=1000000000000) }}",
    "{{ messages|tojson(indent=-1) }}",
    "{{ 'a' * 1000000000000 }}",
    "{{ 1000000000000 * 'a' }}",
    "{{ ([1] * 1000000000000)|list }}",
    "{{ [1] * 18446744073709551615 }}",
    "{{ 'a' * 10 ** 8 }}",
    "{{ 'a' * 9999 * 9999 }}",
    "{{ 'a' * (1 + 1) * (1 + 1) * (1 + 1) * (1 + 1) * (1 + 1) * (1 + 1) * (1 + 1) * (1 + 1) * \
     (1 + 1) * (1 + 1) * (1 + 1) * (1 + 1) * (1 + 1) * (1 + 1) * (1 + 1) * (1 + 1) }}",
    "{% set n = 1000000000000 %}{{ 'a' * n }}",
    "{% set n = 1000000000000 %}{{ ([1] * n)|list }}",
    "{% set n = 1000000000000 %}{% for i in [1] * n %}{% endfor %}",
    "{{ [[1] * 100000000]|tojson }}",
    "{{ 'a'|indent(1000000000000) }}",
    "{{ 'a\\nb'|indent(width=1000000000000) }}",
    "{{ [1]|batch(1000000000000) }}",
    "{{ [1]|batch(1000000000000, 0) }}",
    "{{ [1]|slice(1000000000000) }}",
    "{{ '%1000000000000d'|format(1) }}",
    "{{ '%.1000000000000f'|format(1.0) }}",
    "{{ '%*d'|format(1000000000000, 1) }}",
    "{{ '{:>1000000000000}'.format('a') }}",
    "{{ range(1000000000000)|list }}",
    "{{ range(-9223372036854775807, 9223372036854775807) }}",
    "{{ 9223372036854775807 ** 9223372036854775807 }}",
    "{{ 1 // 0 }}",
    // Texts and lists that double.
    "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}\
     {{ n.s }}",
    "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}\
     {{ n.s }}",
    "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s %}{{ n.s }}{{ n.s }}\
     {% endset %}{% endfor %}",
    "{% set n = namespace(s='aa') %}{% for i in range(99) %}\
     {% set n.s = n.s.replace('a', n.s) %}{% endfor %}",
    "{% set n = namespace(s='aa') %}{% for i in range(99) %}\
     {% set n.s = n.s|replace('', n.s) %}{% endfor %}",
    "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s.join([n.s, n.s]) %}\
     {% endfor %}",
    "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = [n.s, n.s]|join(n.s) %}\
     {% endfor %}",
    "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = '{0}{0}'.format(n.s) %}\
     {% endfor %}",
    "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = '%s%s'|format(n.s, n.s) %}\
     {% endfor %}",
    "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = [n.s]|tojson ~ n.s %}\
     {% endfor %}",
    "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s|chain(n.s)|list %}\
     {% endfor %}{{ n.s }}",
    "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{{ 'a' * 1000 }}\
     {% endmacro %}{{ f(30) }}",
    // Values that contain themselves, or that are nested without an end.
    "{% set n = namespace() %}{% set n.a = n %}{{ n }}",
    "{% set n = namespace() %}{% set n.a = n %}{{ n|tojson }}",
    "{% set n = namespace() %}{% set n.a = n %}{{ n|string }}",
    "{% set n = namespace() %}{% set n.a = n %}{{ n|pprint }}",
    "{% set n = namespace() %}{% set n.a = [n] %}{{ n.a|join }}",
    "{% set n = namespace() %}{% set n.a = n %}{{ n ~ '' }}",
    "{% set n = namespace() %}{% set n.a = n %}{{ '%s'|format(n) }}",
    "{% set n = namespace() %}{% set n.a = n %}{{ [n, n]|unique }}",
    "{% set n = namespace() %}{% set n.a = n %}{{ n|upper }}",
    "{% set n = namespace() %}{% set n.a = n %}{{ raise_exception(n) }}",
    "{% set n = namespace() %}{% set n.a = n %}{{ {n: 1} }}",
    "{% set n = namespace() %}{% set n.a = n %}{{ {'a': 1}[n] }}",
    "{% set n = namespace() %}{% set n.a = n %}{{ {'a': 1}[n if n else 'a'] }}",
    "{% set n = namespace() %}{% set n.a = n %}{{ {'a': 1}.get(n) }}",
    "{% set n = namespace() %}{% set n.a = n %}{{ {'a': 1}|attr(n) }}",
    "{% set n = namespace() %}{% set n.a = n %}{{ strftime_now(n) }}",
    "{% set n = namespace() %}{% set n.a = n %}{% for i in [1, 2] %}{{ loop.changed([n]) }}{% endfor %}",
    // Few instructions whose operators do much work.
    "{% set t = 'a' * 1000000 %}{% for i in range(99999) %}{% for c in t %}{% break %}{% endfor %}\
     {% endfor %}",
    "{% set t = 'a' * 1000000 %}{% for i in range(99999) recursive %}{% if loop.depth0 %}{% break %}\
     {% endif %}{{ loop(t) }}{% endfor %}",
    "{% set t = 'a' * 1000000 %}{% for i in range(99999) recursive %}{% if loop.depth0 %}{% break %}\
     {% endif %}{% set again = loop %}{% set x = again(t) %}{% endfor %}",
    "{% set t = 'a' * 1000000 %}{% for i in range(99999) %}{% set x = t|length %}{% endfor %}",
    "{% set t = 'a' * 1000000 %}{% for i in range(99999) %}{% set x = {t: 1} %}{% endfor %}",
    "{% set t = 'a' * 1000000 %}{% for i in range(99999) %}{% set x = {'a': 1}.get(t) %}{% endfor %}",
    "{% set a = ('a,' * 100000).split(',') %}{% for i in range(99999) %}{% set x = (a + a)|last %}\
     {% endfor %}",
    // Arguments that are unpacked would be copied to the stack.
    "{% for i in [1] %}{{ loop.cycle(*[1]) }}{% endfor %}",
    "{% for i in [1] %}{{ dict(a=1, **{'b': 2}) }}{% endfor %}",
    // Recursion.
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{% include 'default' %}",
    "{% extends 'default' %}",
];

/// Templates that may return a text.
const ANY: [&str; 31] = [
    "{% set n = namespace(s='\n') %}{% for i in range(99) %}{% set n.s = n.s|indent(999, true, true) \
     %}{% endfor %}",
    "{{ 'a'.count('') }}",
    "{{ ''.count('') }}",
    "{{ 'a'.split('') }}",
    "{{ 'a'|split('') }}",
    "{{ 'a'.replace('', 'b') }}",
    "{{ 'a'.splitlines(true) }}",
    "{{ 'aé'[1:] }}{{ 'é'[-1:] }}{{ 'é'[::-1] }}",
    "{{ [1, 2, 3][5:1:-1] }}{{ [][::-1] }}{{ ''[::-1] }}{{ [1][0:0:-1] }}",
    "{{ [1, 2, 3][9223372036854775807:-9223372036854775807:-9223372036854775808] }}",
    "{{ 'abc'[2:100:-1] }}{{ 'abc'[0:2:-1] }}",
    "{{ 1.5|round(400) }}{{ 1.5|round(-400) }}{{ 1e308 * 10 }}",
    "{{ '9' * 5000 }}{{ ('9' * 5000)|int }}{{ ('9' * 5000)|float }}",
    "{{ -9223372036854775808 // -1 }}{{ -9223372036854775807 % -1 }}",
    "{{ 'x'|abs }}{{ none + 1 }}",
    "{% for i in range(100000) %}{{ i }}{% endfor %}",
    "{% for i in range(3) %}{% for j in range(3) %}{{ loop.index }}{% endfor %}{% endfor %}",
    "{% for a in messages recursive %}{{ loop }}{% endfor %}",
    "{{ loop }}{{ self }}{{ super() }}",
    "{{ caller() }}",
    "{{ debug() }}",
    "{{ strftime_now('%9999999999d %Q %:::z %') }}",
    "{{ strftime_now('%c' * 100000)|length }}",
    "{{ messages|groupby('role') }}{{ messages|map(attribute='content')|list }}",
    "{{ messages|sort(attribute='role')|first }}{{ [1, 'a', none, []]|sort }}",
    "{{ ('a,' * 100000).split(',')|length }}",
    "{{ ('ab' * 100000).strip('abcdefgh' * 1000)|length }}",
    "{{ messages|tojson(indent='\\t', separators=['a', 'b', 'c']) }}",
    "{% set n = namespace(s=[]) %}{% for i in range(20000) %}{% set n.s = [n.s] %}{% endfor %}",
    "{% set n = namespace(s=[]) %}{% for i in range(9000) %}{% set n.s = n.s[0:] %}{% endfor %}",
    "{% set n = namespace(s=[]) %}{% for i in range(9000) %}{% set n.s = n.s|reverse %}{% endfor %}",
];

/// Goal: a template that asks for too much is refused.
#[test]
fn templates_that_ask_for_too_much_are_refused() {
    // Some take as long as a template may.
    thread::scope(|scope| {
        for start in 0..4 {
            let sources = REFUSED.into_iter().skip(start).step_by(4);
            scope.spawn(|| sources.for_each(|source| assert!(check(source), "{source}")));
        }
    });
}

/// Goal: unusual templates end with an error or a bounded text.
#[test]
fn unusual_templates_end() {
    for source in ANY {
        check(source);
    }
}

/// Goal: no syntax exhausts the stack of the compiler, however long or nested it is.
#[test]
fn long_and_nested_syntax_ends() {
    let nested = |open: &str, inner: &str, close: &str, count: usize| {
        format!("{}{inner}{}", open.repeat(count), close.repeat(count))
    };
    for count in [100, 2000, 20_000, 120_000, 1_000_000] {
        let sources = [
            format!("{{{{ 1{} }}}}", "+1".repeat(count)),
            format!("{{{{ 'a'{} }}}}", "~'a'".repeat(count)),
            format!("{{{{ 1{} }}}}", "<2".repeat(count)),
            format!("{{{{ {}1 }}}}", "-".repeat(count)),
            format!("{{{{ {}1 }}}}", "not ".repeat(count)),
            format!("{{{{ a{} }}}}", ".a".repeat(count)),
            format!("{{{{ a{} }}}}", "[0]".repeat(count)),
            format!("{{{{ a{} }}}}", "()".repeat(count)),
            format!("{{{{ a{} }}}}", "|upper".repeat(count)),
            format!("{{{{ 1{} }}}}", " if 1 else 1".repeat(count)),
            format!("{{{{ 1{} }}}}", " and 1".repeat(count)),
            format!("{{{{ 2{} }}}}", "**1".repeat(count)),
            format!("{{{{ 1 is defined{} }}}}", " is defined".repeat(count)),
            format!("{{{{ {} }}}}", nested("(", "1", ")", count)),
            format!("{{{{ {} }}}}", nested("[", "1", "]", count)),
            format!("{{{{ {} }}}}", nested("{1:", "1", "}", count)),
            format!("{{{{ {} }}}}", nested("f(", "1", ")", count)),
            format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(count)),
            nested("{% if 1 %}", "a", "{% endif %}", count),
            nested("{% for a in [1] %}", "a", "{% endfor %}", count),
            nested("{% set a %}", "a", "{% endset %}", count),
            nested("{% filter upper %}", "a", "{% endfilter %}", count),
            nested("{% macro f() %}", "a", "{% endmacro %}", count),
            nested("{% generation %}", "a", "{% endgeneration %}", count),
            "{% set x = [x] %}".repeat(count),
            "{{ 1 }}".repeat(count),
            "{%".repeat(count),
            "{#".repeat(count),
            "{% raw %}".repeat(count),
            "\n".repeat(count),
        ];
        for source in sources {
            check(&source);
        }
    }
}

/// Goal: a template that runs for a very long time is stopped by the count of its instructions, and
/// rendering with a benign template of the same process is not affected.
#[test]
fn endless_templates_run_out_of_instructions() {
    let loops = "{% for i in range(100000) %}".repeat(8) + &"{% endfor %}".repeat(8);
    let error = render(&loops, &[]).expect_err("it never ends");
    assert!(error.to_string().contains("instructions"), "{error}");
    assert_eq!(render("{{ 1 }}", &[]).as_deref(), Ok("1"));
}

/// Goal: nothing of a template is executed when it is loaded.
#[test]
fn templates_are_not_executed_when_they_are_loaded() {
    let loops = "{% for i in range(100000) %}".repeat(8) + &"{% endfor %}".repeat(8);
    ChatTemplate::new([("default", loops)], Map::new()).expect("the syntax is valid");
}

/// Goal: a conversation that is too large is refused before any work is done on it.
#[test]
fn conversations_that_are_too_large_are_refused() {
    let simple = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools|tojson }}";
    let chat = ChatTemplate::new([("default", simple)], Map::new()).expect("valid");
    let nested = |depth: usize| (0..depth).fold(json!(1), |inner, _| json!([inner]));
    let with_tools = |tool: Value| {
        let options = ChatOptions { tools: vec![tool], ..ChatOptions::default() };
        chat.render(&[ChatMessage::user("x")], &options)
    };
    assert!(with_tools(nested(90)).is_ok());
    let depth = ChatTemplateError::TooLarge { what: "levels of nested values", limit: 100 };
    assert_eq!(with_tools(nested(200)), Err(depth));
    let values = ChatTemplateError::TooLarge { what: "values", limit: 500_000 };
    assert_eq!(with_tools(json!(vec![0; 600_000])), Err(values.clone()));
    let many = vec![ChatMessage::user("x"); 300_000];
    assert_eq!(chat.render(&many, &ChatOptions::default()), Err(values));
    let bytes = ChatTemplateError::TooLarge { what: "bytes of text", limit: 16 << 20 };
    let long = [ChatMessage::user("x".repeat(17 << 20))];
    assert_eq!(chat.render(&long, &ChatOptions::default()), Err(bytes));
}

/// Goal: long conversations are rendered, also by templates that look at all messages repeatedly.
#[test]
fn long_conversations_are_rendered() {
    let source = "{% set n = namespace(last=0, all=[]) %}{% for m in messages %}\
                  {% set n.all = n.all + [m] %}{% if m.role == 'user' %}\
                  {% set n.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}\
                  {% if loop.index0 == messages|length - 1 %}!{% endif %}{{ '<' + m['role'] + '>' \
                  ~ m.content.split('</think>')[-1]|trim + '\\n' }}{% endfor %}{{ n.last }}";
    let messages: Vec<ChatMessage> =
        (0..10_000).map(|index| ChatMessage::user("word ".repeat(index % 100))).collect();
    let text = render(source, &messages).expect("renders");
    assert!(text.ends_with("\n9999") && text.len() > 2_000_000);
}

/// Goal: messages of a client cannot make a plain template fail in another way than with an error.
#[test]
fn hostile_messages_are_bounded() {
    let source = "{% for m in messages %}{{ m.content }}{{ m.tool_calls|tojson }}{% endfor %}";
    let arguments = [
        "[".repeat(100_000),
        "{\"a\":".repeat(100_000),
        format!("{{\"a\": [{}1]}}", "1,".repeat(1_000_000)),
    ];
    for arguments in arguments {
        let message: ChatMessage = serde_json::from_value(json!({
            "role": "assistant",
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }))
        .expect("a message");
        let text = render(source, &[message]);
        assert!(text.is_ok_and(|text| text.len() <= MAX_OUTPUT));
    }
}
